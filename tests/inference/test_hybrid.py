"""Fused scores equal loops written out by hand in float64; files, folders and indexes give the same documents."""

import json
import math
import mmap
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference import BM25, CorpusSearch, Encoder, HybridSearch, TopK, encode_corpus, search_top_k
from embeddings.inference import hybrid as module
from embeddings.inference.hybrid import FusionRule, fuse_lists, fused_top_k, index_words, open_words
from tests.helpers.refusals import refused
from tests.inference.models import some_texts, tiny_embedder, write_corpus
from tests.inference.test_bm25 import loop_scores
from tests.inference.test_search import integer_vectors

DIM, NUM_DOCUMENTS = 8, 40
QUERIES = ["1 fox fox", "lazy dog 7", "the", "unknown", ""]


@pytest.fixture(scope="module")
def world():
    """Vectors with exact inner products and copies among them, and texts with the same copies."""
    texts = some_texts(NUM_DOCUMENTS)
    document_ND = integer_vectors(NUM_DOCUMENTS, DIM)
    for copy, row in ((31, 4), (32, 4), (9, 20)):
        document_ND[copy], texts[copy] = document_ND[row], texts[row]
    return integer_vectors(len(QUERIES), DIM, seed=1), document_ND, texts


def fused(world, rule, top_k, texts=None, order_N=None):
    query_QD, document_ND, own = world
    words = BM25(own if texts is None else texts, str.split)

    def nearest(query_QD, top_k):
        return search_top_k(query_QD, document_ND, top_k, tie_order_N=order_N)

    # Tiles of uneven length.
    pieces = [document_ND[:7], document_ND[7:8], document_ND[8:]]
    readings = []

    def tiles():
        readings[-1] += 1
        return iter(pieces)

    def ranked(rules):
        readings.append(0)
        return fused_top_k(QUERIES, query_QD, words, top_k, rules, tiles=tiles, nearest=nearest, tie_order_N=order_N)

    # Of several weights each has the result that it has alone, and the documents are read as often.
    others = [replace(rule, weight=weight) for weight in (0.05, 0.95)]
    found = [ranked([rule]), ranked([others[0], rule, others[1]])]
    assert readings[0] == readings[1]
    assert len(found[1]) == 3
    for one, of_several in zip(found[0][0], found[1][1], strict=True):
        np.testing.assert_array_equal(one, of_several)
    return found[0][0]


def standardised(scores):
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return [(score - mean) / deviation if deviation > 1e-9 else 0.0 for score in scores]


def by_hand(world, query, weight):
    """The fused z-score of every document, in float64."""
    query_QD, document_ND, texts = world
    dense = [math.fsum(float(a) * float(b) for a, b in zip(query_QD[query], row, strict=True)) for row in document_ND]
    words = loop_scores(texts, QUERIES[query], 1.5, 0.75)
    sides = zip(standardised(dense), standardised(words), strict=True)
    return [(1 - weight) * dense_z + weight * words_z for dense_z, words_z in sides]


@pytest.mark.parametrize("max_scores", [1, 3 * NUM_DOCUMENTS, 1 << 24])
@pytest.mark.parametrize("top_k", [1, 7, NUM_DOCUMENTS, 100])
@pytest.mark.parametrize("weight", [0.2, 0.5, 0.9])
def test_z_scores_equal_a_loop_written_out_with_ties_by_row(weight, top_k, max_scores, world, monkeypatch):
    monkeypatch.setattr(module, "_MAX_SCORES", max_scores)
    found = fused(world, FusionRule(weight=weight), top_k)
    assert found.index_QK.shape == found.score_QK.shape == (len(QUERIES), min(top_k, NUM_DOCUMENTS))
    assert (found.index_QK.dtype, found.score_QK.dtype) == (np.int64, np.float32)
    for query, (rows, scores) in enumerate(zip(found.index_QK.tolist(), found.score_QK.tolist(), strict=True)):
        expected = by_hand(world, query, weight)
        np.testing.assert_allclose(scores, [expected[row] for row in rows], atol=1e-5)
        np.testing.assert_allclose(scores, sorted(expected, reverse=True)[:top_k], atol=1e-5)
        places = {row: place for place, row in enumerate(rows)}
        pairs = [(4, 31), (31, 32), (9, 20)]
        assert all(places[first] < places[second] for first, second in pairs if second in places)
        assert {first for first, second in pairs if second in places} <= places.keys()


@pytest.mark.parametrize("name", ["zscore", "minmax"])
def test_equal_dense_scores_keep_the_order_of_bm25(name, world):
    same = np.repeat(world[1][:1], NUM_DOCUMENTS, axis=0)
    words, score_QK = BM25(world[2], str.split).search(QUERIES, NUM_DOCUMENTS)
    found = fused((world[0], same, world[2]), FusionRule(name), NUM_DOCUMENTS).index_QK
    assert found[:2].tolist() == words[:2].tolist()
    assert (score_QK[:2] > 0).any(axis=1).all()
    assert found[3].tolist() == list(range(NUM_DOCUMENTS))


def test_equal_scores_may_have_another_order_than_the_rows(world):
    order_N = np.arange(NUM_DOCUMENTS)[::-1].copy()
    for name in ("zscore", "minmax"):
        rows = fused(world, FusionRule(name), NUM_DOCUMENTS, order_N=order_N).index_QK[0].tolist()
        assert rows.index(32) < rows.index(31) < rows.index(4)
        assert rows.index(20) < rows.index(9)


DENSE = TopK(np.array([[0.9, 0.7, 0.5, -np.inf]], np.float32), np.array([[3, 1, 2, -1]]))
WORDS = TopK(np.array([[4.0, 2.0, 0.0]], np.float32), np.array([[2, 5, 0]]))


def test_lists_are_fused_by_ranges_and_by_reciprocal_ranks():
    best = fuse_lists(DENSE, WORDS, 5, FusionRule("minmax", 0.25))
    # Document 0 shares no token with the query, and is in no other list.
    assert best.index_QK.tolist() == [[3, 1, 2, 5, -1]]
    np.testing.assert_allclose(best.score_QK[0, :4], [0.75, 0.75 * 0.5, 0.25, 0.25 * 0.5], rtol=1e-6)
    best = fuse_lists(DENSE, WORDS, 3, FusionRule("rrf"))
    assert best.index_QK.tolist() == [[2, 3, 1]]
    np.testing.assert_allclose(best.score_QK[0], [1 / 63 + 1 / 61, 1 / 61, 1 / 62], rtol=1e-6)
    nothing = TopK(np.zeros((1, 0), np.float32), np.zeros((1, 0), np.int64))
    assert fuse_lists(nothing, nothing, 2, FusionRule("minmax")).index_QK.tolist() == [[-1, -1]]


def test_the_scores_of_a_block_of_queries_are_in_memory(monkeypatch):
    num_documents, queries = 20_000, ["a b"] * 64
    words = BM25(["a b", "b", "c", "a"] * (num_documents // 4), str.split)
    query_QD, document_ND = integer_vectors(64), integer_vectors(num_documents, seed=1)
    monkeypatch.setattr(module, "_MAX_SCORES", 3 * num_documents)
    tracemalloc.start()
    try:
        fused_top_k(queries, query_QD, words, 10, [FusionRule()], tiles=lambda: [document_ND], nearest=lambda *_: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(queries) * num_documents


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight": 1.5}, "hybrid_weight must be from 0 to 1, got 1.5"),
        ({"weight": -0.1}, "hybrid_weight must be from 0 to 1, got -0.1"),
        ({"weight": math.nan}, "hybrid_weight must be from 0 to 1, got nan"),
        ({"fusion": "rrf", "weight": 0.2}, "hybrid_weight has no effect on reciprocal ranks"),
        ({"fusion": "sum"}, "fusion must be one of zscore, minmax, rrf, got 'sum'"),
        ({"fusion": "zscore", "compares_all": False}, "fusion needs the scores of all documents"),
    ],
)
def test_impossible_rules_are_refused(options, says):
    refused(OptionError, says, FusionRule.of, **options)


def test_the_rule_follows_the_search():
    assert FusionRule.of() == FusionRule("zscore", 0.2)
    assert FusionRule.of(weight=0, compares_all=False) == FusionRule("minmax", 0)


SEARCHES = ["1 quick fox", "lazy dog", "zebra"]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(), precision="float32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", some_texts(23))


def is_mapped(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


@pytest.mark.parametrize("language", ["any", "german", "none"])
def test_a_file_and_a_folder_with_its_saved_index_have_the_same_hits(language, encoder, corpus, tmp_path):
    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=5)
    built = index_words(folder, language)
    opened = open_words(folder)
    np.testing.assert_array_equal(opened.scores(SEARCHES), built.scores(SEARCHES))
    assert all(is_mapped(getattr(opened._weight_VN, name)) for name in ("data", "indices", "indptr"))
    for fusion in ("zscore", "minmax", "rrf"):
        hits = [
            HybridSearch(CorpusSearch(encoder, place), fusion=fusion, language=language).search(SEARCHES, 6)
            for place in (corpus, folder.path)
        ]
        for of_file, of_folder in zip(*hits, strict=True):
            assert [(hit.document_id, hit.text) for hit in of_file] == [
                (hit.document_id, hit.text) for hit in of_folder
            ]
            np.testing.assert_allclose([hit.score for hit in of_file], [hit.score for hit in of_folder], atol=1e-4)
            assert len(of_file) == 6
    dense = [hit.document_id for hit in CorpusSearch(encoder, corpus).search(SEARCHES, 6)[0]]
    assert [hit.document_id for hit in hits[0][0]] != dense


def test_an_index_of_lists_and_binary_vectors_are_fused_over_their_best(encoder, corpus, tmp_path):
    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=5, vector_format="binary")
    index_words(folder)
    search = HybridSearch(CorpusSearch(encoder, folder.path))
    assert search.rule == FusionRule("minmax", 0.2)
    assert [len(hits) for hits in search.search(SEARCHES, 30)] == [23, 23, 23]
    refused(
        OptionError,
        "needs the scores of all documents",
        HybridSearch,
        CorpusSearch(encoder, folder.path),
        fusion="zscore",
    )


def test_a_missing_damaged_or_other_index_is_refused(encoder, corpus, tmp_path):
    folder = encode_corpus(encoder, corpus, tmp_path / "my out", shard_size=5)
    says = refused(InputError, "there is no BM25 index of these vectors", open_words, folder)
    assert f"index --hybrid --vectors '{folder.path}'" in says
    index_words(folder, "german")
    says = refused(InputError, "field 'language' is 'german', expected 'none'", open_words, folder, "none")
    assert "index --hybrid --language none --vectors" in says
    manifest = tmp_path / "my out" / "words" / "manifest.json"
    written = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(written) | {"vectors_xxh3_128": "0" * 32}))
    refused(InputError, "another vectors", open_words, folder)
    # An index of earlier rules for tokens.
    manifest.write_text(json.dumps({key: value for key, value in json.loads(written).items() if key != "token_rules"}))
    refused(InputError, "field 'token_rules' is", open_words, folder)
    manifest.write_text(written)
    for name in ("data.npy", "vocabulary.json"):
        path = tmp_path / "my out" / "words" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused(InputError, f"{name}: is damaged", open_words, folder)
        path.unlink()
        refused(InputError, f"{name}: is missing", open_words, folder)
        path.write_bytes(content)
    assert open_words(folder).num_texts == 23
    index_words(folder)
    assert open_words(folder, "any").scores(["1 fox"]).max() > 0
