"""Vectors that `encode` made serve a job for the texts that they are of, and for no others."""

import json

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.io import text_hash
from embeddings.inference import Encoder, choose_context, encode_corpus
from embeddings.inference.encoder import embedder_sha256
from embeddings.mining import pair_index
from embeddings.mining import pair_vectors as encoded_texts
from embeddings.mining.pair_vectors import EncodedFolder
from tests.data.rows import write_jsonl
from tests.inference.models import some_texts, tiny_embedder
from tests.models.contextual_models import tiny_contextual

TEXTS = [*some_texts(9), some_texts(9)[2], " "]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(normalize=False, prompts={"query": "the ", "other": "a "}), precision="float32")


@pytest.fixture(scope="module")
def encoded(encoder, tmp_path_factory):
    """A folder that `encode` wrote; one of its texts is there twice."""
    folder = tmp_path_factory.mktemp("encoded")
    corpus = write_jsonl(folder / "corpus.jsonl", [{"text": text} for text in TEXTS])
    return encode_corpus(encoder, corpus, folder / "vectors", shard_size=4)


def model(encoder):
    """What a manifest says of the model."""
    return {"model_sha256": embedder_sha256(encoder), "precision": "float32", "embedding_dim": 32}


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
@pytest.mark.parametrize("part", [1, 8, 1 << 22])
def test_each_text_finds_the_first_of_its_vectors(part, block, encoder, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(encoded_texts, "BLOCK", block)
    monkeypatch.setattr(pair_index.equal_hashes, "__defaults__", (part,))
    asked = ["nobody's", TEXTS[2], f"  {TEXTS[7]}\n", TEXTS[0], TEXTS[2], TEXTS[8]]
    folder = EncodedFolder.open(encoded.path, "document", None, model(encoder))
    found = folder.find(np.array([text_hash(text) for text in asked]), tmp_path / "rows.npy")
    assert found.tolist() == [-1, 2, 7, 0, 2, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_a_folder_of_other_texts_is_refused_and_leaves_nothing(encoder, encoded, tmp_path):
    folder = EncodedFolder.open(encoded.path, "document", None, model(encoder))
    with pytest.raises(InputError, match=r"vectors: holds none of the 2 texts .*; name a folder of these"):
        folder.find(np.array([1, 2]), tmp_path / "rows.npy")
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
def test_a_folder_that_was_made_in_another_way_is_refused_by_name(change, says, encoder, encoded):
    asked = {"role": "document", "prompt_name": None, **model(encoder), **change}
    way = [asked.pop("role"), asked.pop("prompt_name")]
    with pytest.raises(InputError, match=f"manifest.json: {says}") as raised:
        EncodedFolder.open(encoded.path, *way, asked)
    assert "\n" not in str(raised.value)


def test_the_prompt_of_the_roles_name_is_what_comes_of_none(encoder, tmp_path):
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"text": "the fox"}])
    for name, prompt in (("plain", None), ("named", "query"), ("other", "other")):
        encode_corpus(encoder, queries, tmp_path / name, role="query", prompt_name=prompt)
    for name in ("plain", "named"):
        for prompt in (None, "query"):
            EncodedFolder.open(tmp_path / name, "query", prompt, model(encoder))
    with pytest.raises(InputError, match="field 'prompt_name' is 'other', expected None"):
        EncodedFolder.open(tmp_path / "other", "query", None, model(encoder))


def test_vectors_made_in_a_context_or_not_finished_are_refused(tmp_path):
    contextual = Encoder(tiny_contextual(), precision="float32")
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS])
    encode_corpus(contextual, corpus, tmp_path / "in context", context=choose_context(contextual, corpus, 2))
    with pytest.raises(InputError, match="field 'context' is"):
        EncodedFolder.open(tmp_path / "in context", "document", None, model(contextual))
    encode_corpus(contextual, corpus, tmp_path / "vectors")
    manifest = tmp_path / "vectors" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "complete": False}))
    with pytest.raises(InputError, match="field 'complete' is False"):
        EncodedFolder.open(tmp_path / "vectors", "document", None, model(contextual))


@pytest.mark.parametrize("vector_format", ["float16", "int8", "binary"])
def test_vectors_that_are_not_kept_in_float32_are_refused_by_their_format(vector_format, encoder, tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS])
    encode_corpus(encoder, corpus, tmp_path / "vectors", vector_format=vector_format)
    says = f"holds {vector_format} vectors, and a job takes float32; encode .* with --vector-format float32"
    with pytest.raises(InputError, match=says) as raised:
        EncodedFolder.open(tmp_path / "vectors", "document", None, model(encoder))
    assert "\n" not in str(raised.value)
