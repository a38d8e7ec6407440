import json
import pickle

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.io import text_hash
from embeddings.data import EmbeddingDataModule, Mixture, PlanEntry, SourceConfig, SourceDataset
from embeddings.data.samplers.base import LevelRule
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.data.tokenize import ContrastiveCollator, TextSettings, TextTokenizer
from tests.data.rows import dataset, pairs
from tests.data.surrogates import number_of, write_surrogates
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.refusals import refused
from tests.helpers.tiny import wordpiece_tokenizer

ROWS = [
    {"query": f"query {row}", "positive": [f"positive {row}", f"positive {row // 2}"], "negatives": ["none"]}
    for row in range(8)
]


@pytest.fixture
def plain(tmp_path):
    return dataset(tmp_path, ROWS, suspect_rows="keep")


def with_vectors(plain, folder):
    config = SourceConfig(plain.config.name, plain.config.path, suspect_rows="keep", surrogate_vectors=str(folder))
    return SourceDataset(config, plain.cached)


def documents_of(plain):
    return list(dict.fromkeys(text for row in range(8) for text in plain.cached.table.row(row).positives))


def test_every_row_has_the_vectors_of_its_query_and_positives(plain, tmp_path):
    vectors = SurrogateVectors(write_surrogates(tmp_path / "s", plain.cached), plain.cached.key)
    documents = documents_of(plain)
    assert vectors.width == 4
    for each in (vectors, pickle.loads(pickle.dumps(vectors))):
        for row in range(8):
            assert number_of(each.query(row)) == row + 0.25
            expected = [documents.index(text) for text in plain.cached.table.row(row).positives]
            assert number_of(each.positives(row)).tolist() == expected


def test_the_vectors_that_the_jobs_write_are_read(plain, tmp_path):
    from embeddings.inference import Encoder
    from embeddings.mining.pair_vectors import encode_pairs
    from tests.inference.models import tiny_embedder

    encoder = Encoder(tiny_embedder(), precision="float32")
    written = encode_pairs(encoder, plain.cached, tmp_path / "s", shard_size=3, negatives=True)
    vectors = SurrogateVectors(tmp_path / "s", plain.cached.key)
    assert vectors.width == written.query_shards.embedding_dim
    queries, documents = (np.concatenate(list(shards)) for shards in (written.query_shards, written.document_shards))
    for row in range(8):
        np.testing.assert_array_equal(vectors.query(row), queries[row])
        np.testing.assert_array_equal(vectors.positives(row), documents[written.index.positives(row)])
    assert vectors.negatives(3, [0], 5).shape == (1, vectors.width)


def test_hard_negatives_have_the_vectors_of_their_texts_as_many_as_are_drawn(tmp_path):
    rows = [pair | {"negatives": [f"n {row + k}" for k in range(row % 4)]} for row, pair in enumerate(pairs(8))]
    plain = dataset(tmp_path, rows)
    source = with_vectors(plain, write_surrogates(tmp_path / "s", plain.cached, negatives=True))
    # Documents: eight positives, then the negatives by first appearance.
    number = {text: 8 + place for place, text in enumerate(dict.fromkeys(n for row in rows for n in row["negatives"]))}
    assert len(number) == 9
    for num_negatives in (0, 1, 2, 5):
        collate = ContrastiveCollator(TextTokenizer(wordpiece_tokenizer(), TextSettings()), num_negatives, 4)
        chosen = (3, 0, 6)
        batch = collate([source[PlanEntry(row, 0)] for row in chosen])
        drawn = [text for row in chosen for text in rows[row]["negatives"][:num_negatives]]
        assert number_of(batch.surrogate_candidate_CS).tolist() == [*chosen, *(number[text] for text in drawn)]
        assert batch.candidate_hash_C[3:].tolist() == [text_hash(text) for text in drawn]
    assert source[PlanEntry(0, 0)].surrogate_negatives(7).shape == (0, 4)


def test_the_negatives_of_a_level_have_their_own_vectors(tmp_path):
    negatives = [{"text": f"n {level}{name}", "level": level} for level in (1, 2, 3) for name in "ab"]
    plain = dataset(tmp_path, [{"query": "query", "positive": "positive", "negatives": negatives}])
    source = with_vectors(plain, write_surrogates(tmp_path / "s", plain.cached, negatives=True))
    # Documents: the positive, then the negatives in their order.
    number = {negative["text"]: 1 + place for place, negative in enumerate(negatives)}
    for draw in range(5):
        for cumulative in (False, True):
            example = source[PlanEntry(0, draw, LevelRule(2, cumulative))]
            texts = [negative.text for negative in example.negatives]
            assert len(texts) == (4 if cumulative else 2)
            for count in (1, 2, 4):
                found = number_of(example.surrogate_negatives(count)).tolist()
                assert found == [number[text] for text in texts[:count]]


@pytest.mark.parametrize(("has_vectors", "num_negatives"), [(False, 1), (False, 0), (True, 1)])
def test_hard_negatives_without_vectors_are_warned_of(has_vectors, num_negatives, plain, tmp_path, caplog):
    folder = write_surrogates(tmp_path / "s", plain.cached, negatives=has_vectors)
    config = SourceConfig(plain.config.name, plain.config.path, suspect_rows="keep", surrogate_vectors=str(folder))
    module = EmbeddingDataModule([config], batch_size=2, num_negatives=num_negatives, cache_dir=str(tmp_path / "cache"))
    module.prepare_data()
    assert ("cluster --negatives true" in caplog.text) == (num_negatives > 0 and not has_vectors)


def test_a_batch_has_the_vectors_of_queries_and_drawn_positives(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("VECTORS", str(write_surrogates(tmp_path / "s", plain.cached)))
    other = dataset(tmp_path, pairs(3, "other "), name="other")
    mixture = Mixture([with_vectors(plain, "$VECTORS"), other])
    assert mixture.surrogate_width == 4
    collate = ContrastiveCollator(TextTokenizer(wordpiece_tokenizer(), TextSettings()), 1, mixture.surrogate_width)
    documents, drawn = documents_of(plain), set()
    for draw in range(10):
        examples = [mixture[PlanEntry(row, draw + row)] for row in (5, 9, 2)]
        batch = collate(examples)
        assert number_of(batch.surrogate_query_BS).nan_to_num(-1).tolist() == [5.25, -1, 2.25]
        assert batch.surrogate_candidate_CS.shape == (5, 4)
        found = number_of(batch.surrogate_candidate_CS).nan_to_num(-1).tolist()
        for row, example in ((0, examples[0]), (2, examples[2])):
            text = documents[int(found[row])]
            drawn.add(text)
            assert batch.candidate_hash_C[row] == text_hash(text)
            assert text in example.positives
        assert found[1] == found[3] == found[4] == -1
    assert drawn == {"positive 5", "positive 2", "positive 1"}


def test_vectors_of_another_source_incomplete_or_of_another_width_are_refused(plain, tmp_path):
    other = dataset(tmp_path, pairs(8), name="other")
    refused(InputError, "'source_key' differs", with_vectors, plain, write_surrogates(tmp_path / "o", other.cached))
    folder = write_surrogates(tmp_path / "s", plain.cached)
    narrow = with_vectors(plain, folder)
    config = SourceConfig("other", other.config.path, surrogate_vectors=str(tmp_path / "wide"))
    write_surrogates(tmp_path / "wide", other.cached, width=5)
    says = r"must have the same width in all sources, got \[4, 5\]"
    refused(OptionError, says, Mixture, [narrow, SourceDataset(config, other.cached)])
    manifest = folder / "documents" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "complete": False}))
    refused(InputError, "field 'complete' is False", with_vectors, plain, folder)


def test_vectors_by_different_models_are_warned_of(plain, tmp_path, caplog):
    folders = [write_surrogates(tmp_path / name, plain.cached) for name in ("a", "b")]
    sources = [
        SourceConfig(each.name, plain.config.path, suspect_rows="keep", surrogate_vectors=str(each)) for each in folders
    ]
    for model, expected in (("one", 0), ("two", 1)):
        for folder, name in zip(folders, ("one", model), strict=True):
            for role in ("queries", "documents"):
                rewrite_manifest(folder / role / "manifest.json", model_sha256=name)
        caplog.clear()
        EmbeddingDataModule(sources, batch_size=2, cache_dir=str(tmp_path / "cache")).prepare_data()
        assert caplog.text.count("by different models") == expected


@pytest.mark.parametrize("role", ["queries", "documents"])
@pytest.mark.parametrize("damage", ["wider", "short", "float64", "no rows", "cut", "empty", "text"])
def test_a_damaged_shard_is_named_at_the_start(role, damage, plain, tmp_path):
    path = write_surrogates(tmp_path / "s", plain.cached) / role / "vectors-00002.npy"
    vectors = np.load(path)
    contents = {"cut": path.read_bytes()[:-4], "empty": b"", "text": b"vectors"}
    if damage in contents:
        path.write_bytes(contents[damage])
    else:
        damaged = {"wider": np.pad(vectors, ((0, 0), (0, 1))), "short": vectors[1:], "no rows": vectors[:0]}
        np.save(path, damaged.get(damage, vectors.astype(np.float64)))
    rewrite_manifest(path.with_name("manifest.json"))
    says = rf"{role}/vectors-00002\.npy: (contains|is missing, empty or damaged)"
    refused(InputError, says, with_vectors, plain, tmp_path / "s")


@pytest.mark.parametrize("role", ["queries", "documents"])
@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (1, "of length 2")])
def test_an_invalid_vector_is_named_by_shard_and_row_when_it_is_drawn(role, value, kind, plain, tmp_path):
    path = write_surrogates(tmp_path / "s", plain.cached) / role / "vectors-00001.npy"
    vectors = np.load(path)
    vectors[2] = value
    np.save(path, vectors)
    rewrite_manifest(path.with_name("manifest.json"))
    opened = SurrogateVectors(tmp_path / "s", plain.cached.key)
    assert (opened.query(0) @ opened.query(0), opened.positives(1).shape) == (pytest.approx(1), (2, 4))
    with pytest.raises(InputError, match=rf"{role}/vectors-00001\.npy:2: the vector is {kind}; check its text"):
        [(opened.query(row), opened.positives(row)) for row in range(8)]
