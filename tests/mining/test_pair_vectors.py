"""Pairs have the vectors of their texts with any number of tasks, and vectors that `encode` wrote are reused."""

import json

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.io import text_hash
from embeddings.common.jobs import ArrayTask, save_array
from embeddings.inference import Encoder, encode_corpus
from embeddings.inference.encoder import embedder_sha256
from embeddings.inference.vector_folder import SHARD_SIZE
from embeddings.mining.pair_vectors import EncodedFolder, EncodedTexts, encode_pairs
from tests.data.rows import write_jsonl
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused
from tests.inference.models import encode_nothing_more, some_texts, tiny_embedder
from tests.mining.pair_sources import content, source
from tests.mining.teachers import unit

TEXTS = some_texts(12)
ROWS = [{"query": TEXTS[row], "positive": [TEXTS[6 + row // 2], TEXTS[6 + row]]} for row in range(6)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(normalize=False, prompts={"query": "the ", "other": "a dog "}), precision="float32")


@pytest.mark.parametrize("shard_size", [1, 4, SHARD_SIZE])
def test_vectors_are_those_of_the_texts_at_unit_length(shard_size, encoder, tmp_path):
    vectors = encode_pairs(encoder, source(tmp_path, ROWS), tmp_path / "out", shard_size=shard_size)
    documents = list(dict.fromkeys(text for row in ROWS for text in row["positive"]))
    index = vectors.index
    assert (index.num_queries, index.num_documents, vectors.query_shards.embedding_dim) == (6, len(documents), 32)
    queries = encoder.encode([row["query"] for row in ROWS], role="query")
    np.testing.assert_allclose(np.concatenate(list(vectors.query_shards)), unit(queries), atol=1e-5)
    found = np.concatenate(list(vectors.document_shards))
    np.testing.assert_allclose(found, unit(encoder.encode(documents)), atol=1e-5)
    for row, record in enumerate(ROWS):
        assert [documents[document] for document in index.positives(row)] == list(dict.fromkeys(record["positive"]))


def test_two_processes_write_the_same_bytes_as_one(tmp_path, monkeypatch):
    tiny_embedder(normalize=False, prompts={"query": "the "}).save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32")
    write_jsonl(tmp_path / "some.jsonl", [{"text": text} for text in TEXTS[6:9]])
    encoded = EncodedTexts(documents=encode_corpus(encoder, tmp_path / "some.jsonl", tmp_path / "some").path)
    options = {"source": source(tmp_path, ROWS), "shard_size": 1, "encoded": encoded}
    encode_pairs(encoder, folder=tmp_path / "whole", **options)
    # One task's shards, then the shards that are still missing.
    encode_pairs(encoder, folder=tmp_path / "task", devices=("cpu", "cpu"), task=ArrayTask(1, 2), **options)
    # All texts are encoded in the other processes.
    encode_nothing_more(monkeypatch)
    encode_pairs(encoder, folder=tmp_path / "shared", devices=("cpu", "cpu"), **options)
    assert content(tmp_path / "shared") == content(tmp_path / "task") == content(tmp_path / "whole")
    assert encoder.embedder.device.type == "cpu"


def test_a_run_resumed_with_another_budget_keeps_the_mini_batches_of_the_first(encoder, tmp_path, monkeypatch):
    pairs = source(tmp_path, ROWS)
    encode, seen = Encoder.encode, []

    def killed(self, texts, *args, **options):
        if any(texts):
            seen.append(self.mini_batch_tokens)
            if len(seen) == 2:
                raise KeyboardInterrupt
        return encode(self, texts, *args, **options)

    small, large = encoder.with_mini_batch_tokens(40), encoder.with_mini_batch_tokens(4000)
    assert encoder.mini_batch_tokens not in (40, 4000)
    encode_pairs(small, pairs, tmp_path / "whole", shard_size=2)
    monkeypatch.setattr(Encoder, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        encode_pairs(small, pairs, tmp_path / "parts", shard_size=2)
    encode_pairs(large, pairs, tmp_path / "parts", shard_size=2)
    assert len(seen) > 5
    assert set(seen) == {40}
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_prompts_are_chosen_by_name_and_a_wrong_one_writes_nothing(encoder, tmp_path):
    pairs = source(tmp_path, ROWS)
    with pytest.raises(OptionError, match="prompt_name must name a prompt"):
        encode_pairs(encoder, pairs, tmp_path / "out", document_prompt_name="nope")
    refused(OptionError, "shard_size must be >= 1", encode_pairs, encoder, pairs, tmp_path / "out", shard_size=0)
    assert not (tmp_path / "out").exists()
    vectors = encode_pairs(encoder, pairs, tmp_path / "out", document_prompt_name="other")
    expected = unit(encoder.encode([ROWS[0]["positive"][0]], "other", role="document"))
    np.testing.assert_allclose(vectors.document_shards.load(0)[:1], expected, atol=1e-5)


def test_each_rows_instruction_is_in_the_prompt_of_its_query(encoder, tmp_path):
    tasks = ["find the dog", "jumps", "find the dog", "one length"]
    rows = [{"query": f"fox {row}", "positive": f"dog {row}", "instruction": task} for row, task in enumerate(tasks)]
    prompt = {"text": "Instruct: {instruction}\nQuery: "}
    vectors = encode_pairs(
        encoder, source(tmp_path, rows), tmp_path / "out", query_prompt_name=prompt, document_prompt_name={"text": ""}
    )
    for row, (record, task) in enumerate(zip(rows, tasks, strict=True)):
        query = encoder.encode([record["query"]], role="query", prompt=f"Instruct: {task}\nQuery: ")
        np.testing.assert_allclose(vectors.query_shards.take(np.array([row])), unit(query), atol=1e-5)
        document = encoder.encode([record["positive"]], role="document", prompt="")
        np.testing.assert_allclose(vectors.document_shards.take(np.array([row])), unit(document), atol=1e-5)
    manifest = json.loads((tmp_path / "out" / "queries" / "manifest.json").read_text())
    assert manifest["prompt_name"] == prompt
    with pytest.raises(InputError, match=r"field 'prompt_name\.text' is"):
        encode_pairs(encoder, source(tmp_path, rows), tmp_path / "out", query_prompt_name={"text": "query: "})


def test_a_missing_instruction_or_one_for_documents_is_refused(encoder, tmp_path):
    rows = [{"query": "fox", "positive": "dog", "instruction": "find"}, {"query": "lazy", "positive": "over"}]
    pairs = source(tmp_path, rows)
    with pytest.raises(InputError, match=r"^row 1: has no instruction .* in the query prompt; add one to each record"):
        encode_pairs(encoder, pairs, tmp_path / "out", query_prompt_name={"text": "{instruction}: "})
    with pytest.raises(OptionError, match=r"may contain \{instruction\} only for the queries"):
        encode_pairs(encoder, pairs, tmp_path / "out", document_prompt_name={"text": "{instruction}: "})
    assert not (tmp_path / "out").exists()


@pytest.fixture
def folders(encoder, tmp_path):
    """Output of `encode` for the queries and for some documents, one of them not a positive."""
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"question": row["query"]} for row in ROWS[::-1]])
    texts = [TEXTS[7], "a stranger", TEXTS[11], f" {TEXTS[9]} "]
    documents = write_jsonl(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    encode_corpus(encoder, queries, tmp_path / "q", role="query", columns={"text": "question"}, shard_size=4)
    encode_corpus(encoder, documents, tmp_path / "d", shard_size=3)
    return EncodedTexts(tmp_path / "q", tmp_path / "d")


def test_vectors_that_encode_wrote_are_reused(folders, encoder, tmp_path, monkeypatch):
    pairs = source(tmp_path, ROWS)
    plain = encode_pairs(encoder, pairs, tmp_path / "plain", shard_size=4)
    encode, seen = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda self, *a, **o: (seen.extend(a[0]), encode(self, *a, **o))[1])
    made = encode_pairs(encoder, pairs, tmp_path / "made", shard_size=4, encoded=folders)
    assert sorted(text for text in seen if text) == sorted([TEXTS[6], TEXTS[8], TEXTS[10]])
    for found, expected in ((made.query_shards, plain.query_shards), (made.document_shards, plain.document_shards)):
        np.testing.assert_allclose(np.concatenate(list(found)), np.concatenate(list(expected)), atol=1e-6)
    last = np.load(tmp_path / "q" / "vectors-00001.npy")[1:]
    np.testing.assert_array_equal(made.query_shards.load(0)[:1], unit(last))


def test_tasks_and_a_kill_change_no_byte_with_reused_vectors(folders, encoder, tmp_path, monkeypatch):
    pairs = source(tmp_path, ROWS)
    encode_pairs(encoder, pairs, tmp_path / "whole", shard_size=2, encoded=folders)
    with monkeypatch.context() as patch:
        patch.setattr("embeddings.mining.pair_vectors.save_array", interrupted_at(save_array, 5))
        with pytest.raises(KeyboardInterrupt):
            encode_pairs(encoder, pairs, tmp_path / "parts", shard_size=2, encoded=folders, task=ArrayTask(1, 2))
    refused(InputError, "field 'encoded' is", encode_pairs, encoder, pairs, tmp_path / "parts", shard_size=2)
    for index in (1, 0):
        encode_pairs(encoder, pairs, tmp_path / "parts", shard_size=2, encoded=folders, task=ArrayTask(index, 2))
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    # Complete vectors do not need the folders any more.
    encode_pairs(encoder, pairs, tmp_path / "parts", shard_size=2)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


CORPUS = [*TEXTS[:9], TEXTS[2], " "]


@pytest.fixture(scope="module")
def encoded(encoder, tmp_path_factory):
    """A function that encodes the corpus, with one repeated text, and returns the folder."""
    folder = tmp_path_factory.mktemp("encoded")
    corpus = write_jsonl(folder / "corpus.jsonl", [{"text": text} for text in CORPUS])

    def encode(name="vectors", encoder=encoder, **options):
        return encode_corpus(encoder, corpus, folder / name, shard_size=4, **options).path

    return encode


def opened(folder, encoder, role="document", prompt_name=None, **change):
    """The folder, opened for a job with this role, prompt and model."""
    model = {"model_sha256": embedder_sha256(encoder), "precision": "float32", "embedding_dim": 32}
    return EncodedFolder.open(folder, role, prompt_name, model | change)


def test_each_text_finds_the_first_of_its_vectors(encoder, encoded, tmp_path):
    asked = ["nobody's", TEXTS[2], f"  {TEXTS[7]}\n", TEXTS[0], TEXTS[2], TEXTS[8]]
    found = opened(encoded(), encoder).find(np.array([text_hash(text) for text in asked]), tmp_path / "rows.npy")
    assert found.tolist() == [-1, 2, 7, 0, 2, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_a_folder_of_other_texts_is_refused_and_leaves_no_files(encoder, encoded, tmp_path):
    with pytest.raises(InputError, match=r"vectors: contains none of the 2 texts; name a folder of these"):
        opened(encoded(), encoder).find(np.array([1, 2]), tmp_path / "rows.npy")
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_sha256": "another"}, "field 'model_sha256' is"),
        ({"precision": "bfloat16"}, "field 'precision' is 'float32', expected 'bfloat16'"),
        ({"embedding_dim": 64}, "field 'embedding_dim' is 32, expected 64"),
        ({"role": "query"}, "field 'role' is 'document', expected 'query'"),
        ({"prompt_name": "other"}, "field 'prompt_name' is None, expected 'other'"),
    ],
)
def test_a_folder_with_other_options_is_refused_by_name(change, says, encoder, encoded):
    refused(InputError, f"manifest.json: {says}", opened, encoded(), encoder, **change)


def test_no_prompt_name_means_the_prompt_named_like_the_role(encoder, encoded):
    for made in (None, "query"):
        folder = encoded(f"by {made}", role="query", prompt_name=made)
        for prompt in (None, "query"):
            opened(folder, encoder, "query", prompt)
    folder = encoded("by other", role="query", prompt_name="other")
    refused(InputError, "field 'prompt_name' is 'other', expected None", opened, folder, encoder, "query")
