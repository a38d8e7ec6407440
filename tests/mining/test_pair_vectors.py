"""The vectors of pairs are those of their texts, in shards, whoever made them."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference import Encoder
from embeddings.inference.vector_folder import SHARD_SIZE
from embeddings.mining.jobs import ArrayTask
from embeddings.mining.pair_vectors import encode_pairs, open_pair_vectors
from tests.inference.models import some_texts, tiny_embedder
from tests.mining.test_pair_index import source

TEXTS = some_texts(12)
ROWS = [{"query": TEXTS[row], "positive": [TEXTS[6 + row // 2], TEXTS[6 + row]]} for row in range(6)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(normalize=False, prompts={"query": "the ", "other": "a dog "}), precision="float32")


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("shard_size", [1, 4, SHARD_SIZE])
def test_vectors_are_those_of_the_texts_at_unit_length(shard_size, encoder, tmp_path):
    vectors = encode_pairs(encoder, source(tmp_path, ROWS), tmp_path / "out", shard_size=shard_size)
    documents = list(dict.fromkeys(text for row in ROWS for text in row["positive"]))
    assert (vectors.num_queries, vectors.num_documents, vectors.embedding_dim) == (6, len(documents), 32)
    queries = encoder.encode([row["query"] for row in ROWS], role="query")
    np.testing.assert_allclose(np.concatenate(list(vectors.queries())), unit(queries), atol=1e-5)
    np.testing.assert_allclose(np.concatenate(list(vectors.documents())), unit(encoder.encode(documents)), atol=1e-5)
    for row, record in enumerate(ROWS):
        own = vectors.positive_rows[vectors.positive_offsets[row] : vectors.positive_offsets[row + 1]]
        assert [documents[document] for document in own] == record["positive"]
    opened = open_pair_vectors(tmp_path / "out", vectors.index)
    assert (opened.query_shards, opened.document_shards) == (vectors.query_shards, vectors.document_shards)


def test_tasks_and_a_resumed_run_give_the_bytes_of_one_process(encoder, tmp_path, monkeypatch):
    pairs = source(tmp_path, ROWS)
    encode_pairs(encoder, pairs, tmp_path / "whole", shard_size=2)
    encode, calls = Encoder.encode, []

    def killed(self, texts, *args, **options):
        calls.append(texts)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(self, texts, *args, **options)

    monkeypatch.setattr(Encoder, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        encode_pairs(encoder, pairs, tmp_path / "parts", shard_size=2, task=ArrayTask(1, 2))
    for index in (1, 0):
        encode_pairs(encoder, pairs, tmp_path / "parts", shard_size=2, task=ArrayTask(index, 2))
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_a_run_resumed_with_another_budget_keeps_the_mini_batches_of_the_first(encoder, tmp_path, monkeypatch):
    pairs = source(tmp_path, ROWS)
    encode, seen = Encoder.encode, []

    def killed(self, texts, *args, **options):
        seen.extend([self.mini_batch_tokens] * (texts != [""]))
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


def test_a_second_model_shares_the_index(encoder, tmp_path):
    pairs = source(tmp_path, ROWS)
    first = encode_pairs(encoder, pairs, tmp_path / "one")
    second = encode_pairs(Encoder(tiny_embedder(), precision="float32"), pairs, tmp_path / "two", index=first.index)
    assert second.index is first.index
    assert not (tmp_path / "two" / "index").exists()
    with pytest.raises(OptionError, match="corpus belongs to the index"):
        encode_pairs(encoder, pairs, tmp_path / "one", index=first.index, corpus="more.jsonl")


def test_prompts_are_chosen_by_name_and_a_wrong_one_writes_nothing(encoder, tmp_path):
    pairs = source(tmp_path, ROWS)
    with pytest.raises(OptionError, match="prompt_name must name a prompt"):
        encode_pairs(encoder, pairs, tmp_path / "out", document_prompt_name="nope")
    with pytest.raises(OptionError, match="shard_size must be >= 1"):
        encode_pairs(encoder, pairs, tmp_path / "out", shard_size=0)
    assert not (tmp_path / "out").exists()
    vectors = encode_pairs(encoder, pairs, tmp_path / "out", document_prompt_name="other")
    expected = unit(encoder.encode([ROWS[0]["positive"][0]], "other", role="document"))
    np.testing.assert_allclose(vectors.document_shards.load(0)[:1], expected, atol=1e-5)


def test_a_text_without_direction_is_named(encoder, tmp_path, monkeypatch):
    def zeros_at_three(self, texts, *args, **options):
        vectors = np.ones((len(texts), 32), np.float32)
        vectors[3:4] = 0
        return vectors

    monkeypatch.setattr(Encoder, "encode", zeros_at_three)
    with pytest.raises(InputError, match=r"queries of \w+:3: the vector is zero"):
        encode_pairs(encoder, source(tmp_path, ROWS), tmp_path / "out")


def test_unfinished_vectors_are_not_opened(encoder, tmp_path):
    vectors = encode_pairs(encoder, source(tmp_path, ROWS), tmp_path / "out")
    manifest = tmp_path / "out" / "documents" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    with pytest.raises(InputError, match="'complete' is False"):
        open_pair_vectors(tmp_path / "out", vectors.index)
