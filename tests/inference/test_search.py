"""Search is exact for any size of tiles."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference import search
from embeddings.inference.encoder import Encoder
from embeddings.inference.search import CorpusSearch, TopK, search_signs, search_top_k
from embeddings.inference.vector_folder import encode_corpus, float_rows, stored_rows
from tests.data.cluster_folders import unit_vectors
from tests.helpers.refusals import refused
from tests.inference.models import counted_encodings, some_texts, tiny_embedder, write_corpus
from tests.inference.test_vectors import formatted_shards


def integer_vectors(rows, width=4, seed=0, largest=3):
    """Vectors whose inner products are exact in float32, with many ties."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, (rows, width)).astype(np.float32)


def by_hand(query_QD, document_ND, top_k):
    """The reference: every inner product, sorted by score, then by row."""
    found = []
    for query in query_QD:
        scores = [(-float(np.dot(query, document)), row) for row, document in enumerate(document_ND)]
        found.append(sorted(scores)[:top_k])
    return [[-score for score, _ in row] for row in found], [[row for _, row in best] for best in found]


@pytest.mark.parametrize("tile", [1, 3, 50, 1000])
@pytest.mark.parametrize("top_k", [1, 2, 7, 50, 60])
def test_every_tile_and_k_gives_the_sorted_list_with_ties_by_row(tile, top_k, monkeypatch):
    monkeypatch.setattr(search, "DOCUMENT_TILE", tile)
    monkeypatch.setattr(search, "QUERY_TILE", max(1, tile // 2))
    query_QD, document_ND = integer_vectors(9), integer_vectors(50, seed=1)
    pieces = [document_ND[:7], document_ND[7:7], document_ND[7:8], document_ND[8:]]
    found, whole = search_top_k(query_QD, iter(pieces), top_k), search_top_k(query_QD, document_ND, top_k)
    scores, rows = by_hand(query_QD, document_ND, top_k)
    assert (whole.index_QK.tolist(), whole.score_QK.tolist()) == (rows, scores)
    assert found.score_QK.dtype == np.float32
    assert found.index_QK.dtype == np.int64
    assert found.index_QK.tolist() == rows
    assert found.score_QK.tolist() == scores


def test_a_score_of_minus_infinity_is_no_document_in_any_order_of_ties():
    documents = np.array([[1.0], [-np.inf], [2.0]], np.float32)
    for order_N in (None, np.array([2, 1, 0])):
        found = search_top_k(np.ones((1, 1), np.float32), documents, 3, tie_order_N=order_N)
        assert found.index_QK.tolist() == [[2, 0, -1]]


def search_by_hand(query, documents, top_k, multiplier):
    """The reference: documents by number of differing signs, then by row; the nearest of them by score, then by row."""
    keys = [(sum((a > 0) != (b > 0) for a, b in zip(query, row, strict=True)), n) for n, row in enumerate(documents)]
    scored = []
    for _, row in sorted(keys)[: top_k * multiplier]:
        dot = sum(float(number) * (1 if other > 0 else -1) for number, other in zip(query, documents[row], strict=True))
        scored.append((-float(np.float32(dot / len(query) ** 0.5)), row))
    best = sorted(scored)[:top_k]
    return [-score for score, _ in best], [row for _, row in best]


@pytest.mark.parametrize("width", [8, 24, 136])
@pytest.mark.parametrize(("shard_size", "tile"), [(1, 1), (7, 3), (7, 50), (100, 3), (100, 1000)])
@pytest.mark.parametrize(("top_k", "multiplier"), [(1, 1), (5, 1), (5, 4), (3, 100), (60, 4)])
def test_signs_scores_and_ties_equal_a_loop_by_hand(width, shard_size, tile, top_k, multiplier, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "DOCUMENT_TILE", tile)
    monkeypatch.setattr(search, "_QUERIES", 4)
    queries, documents = unit_vectors(6, width, 1), unit_vectors(40, width)
    documents[[30, 20]] = documents[10]
    found = search_signs(queries, formatted_shards(tmp_path, documents, "binary", shard_size), top_k, multiplier)
    assert (found.score_QK.dtype, found.index_QK.dtype) == (np.float32, np.int64)
    assert found.index_QK.shape == (6, min(top_k, 40))
    for query, scores, rows in zip(queries, found.score_QK.tolist(), found.index_QK.tolist(), strict=True):
        by_hand = search_by_hand(query, documents, top_k, multiplier)
        assert rows == by_hand[1]
        np.testing.assert_allclose(scores, by_hand[0], rtol=1e-6)


def test_one_document_no_query_no_document_and_a_zero_query(tmp_path):
    one = formatted_shards(tmp_path, unit_vectors(1), "binary")
    assert search_signs(unit_vectors(2), one, 10).index_QK.tolist() == [[0], [0]]
    assert search_signs(unit_vectors(0), one, 10).score_QK.shape == (0, 1)
    none = formatted_shards(tmp_path, unit_vectors(0), "binary")
    assert search_signs(unit_vectors(3), none, 10).index_QK.shape == (3, 0)
    documents = formatted_shards(tmp_path, -np.abs(unit_vectors(9)), "binary", shard_size=7)
    zeros = search_signs(np.zeros((1, 8), np.float32), documents, 3)
    assert (zeros.score_QK.tolist(), zeros.index_QK.tolist()) == ([[0, 0, 0]], [[0, 1, 2]])


def test_numbers_that_are_not_positive_are_refused(tmp_path):
    documents = formatted_shards(tmp_path, unit_vectors(9), "binary", shard_size=7)
    refused(OptionError, r"top_k must be >= 1, got -1", search_signs, unit_vectors(1), documents, -1)
    refused(OptionError, "rescore_multiplier must be >= 1, got 0", search_signs, unit_vectors(1), documents, 1, 0)


QUERIES = [some_texts(11)[3], "quick fox"]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(prompts={"query": "the "}), precision="float32")


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", some_texts(11))


@pytest.mark.parametrize("is_folder", [False, True])
def test_work_that_does_not_depend_on_the_query_is_done_once(is_folder, corpus, encoder, tmp_path, monkeypatch):
    place = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4).path if is_folder else corpus
    expected = [CorpusSearch(encoder, place).search([query], 3)[0] for query in QUERIES]
    searched = CorpusSearch(encoder, place)
    counts = counted_encodings(monkeypatch)
    monkeypatch.setattr("embeddings.inference.search.read_corpus", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr("embeddings.inference.search.embedder_sha256", lambda *_: pytest.fail("hashed again"))
    found = [searched.search([query], 3)[0] for query in QUERIES]
    assert counts == [1, 1]
    assert found == expected
    assert [len(hits) for hits in found] == [3, 3]


def test_an_index_gets_unit_vectors_and_may_return_fewer_rows(corpus, tmp_path):
    encoder = Encoder(tiny_embedder(normalize=False), precision="float32")
    calls = []

    def nearest(query_QD, top_k):
        calls.append((query_QD, top_k))
        return TopK(np.array([[0.9, 0.5, -np.inf]], np.float32), np.array([[7, 2, -1]]))

    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4).path
    (hits,) = CorpusSearch(encoder, folder, nearest=nearest).search(["quick fox"], 3)
    assert [hit.document_id for hit in hits] == ["d7", "d2"]
    assert [hit.text for hit in hits] == [some_texts(11)[row] for row in (7, 2)]
    assert [round(hit.score, 3) for hit in hits] == [0.9, 0.5]
    assert calls[0][1] == 3
    refused(OptionError, "nearest needs an encoded folder", CorpusSearch, encoder, corpus, nearest=nearest)
    refused(OptionError, "top_k must be >= 1, got 0", CorpusSearch(encoder, corpus).search, ["a"], 0)
    np.testing.assert_allclose(np.linalg.norm(calls[0][0], axis=1), 1, rtol=1e-5)


def test_a_folder_of_another_model_is_refused_before_a_query(corpus, encoder, tmp_path):
    encode_corpus(encoder, corpus, tmp_path / "out")
    refused(InputError, "model_sha256", CorpusSearch, Encoder(tiny_embedder(query_max_length=9)), tmp_path / "out")


@pytest.mark.parametrize("vector_format", [None, "float32", "float16", "int8", "binary"])
@pytest.mark.parametrize("top_k", [3, 30])
def test_a_file_and_folders_of_every_format_are_ranked_by_cosines(vector_format, top_k, corpus, tmp_path):
    encoder = Encoder(tiny_embedder(normalize=False, prompts={"query": "the "}), precision="float32")
    kept = exact = encoder.encode(some_texts(11))
    place = corpus
    if vector_format is not None:
        place = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4, vector_format=vector_format).path
        kept = float_rows(stored_rows(exact, vector_format, "here"), vector_format).astype(np.float64)
    multiplier = {"rescore_multiplier": 4} if vector_format == "binary" else {}
    found = CorpusSearch(encoder, place, **multiplier).search(QUERIES, top_k)
    for query, hits in zip(encoder.encode(QUERIES, role="query"), found, strict=True):
        assert abs(np.linalg.norm(query) - 1.0) > 0.1
        cosine = [float(row @ query / np.linalg.norm(row) / np.linalg.norm(query)) for row in kept]
        # All 11 documents are candidates, even for 3 x 4.
        best = sorted(range(11), key=lambda row: -cosine[row])[:top_k]
        assert [hit.document_id for hit in hits] == [f"d{row}" for row in best]
        np.testing.assert_allclose([hit.score for hit in hits], [cosine[row] for row in best], atol=1e-6)
        if vector_format in ("float16", "int8", "binary"):
            by_exact = float(exact[best[0]] @ query / np.linalg.norm(exact[best[0]]) / np.linalg.norm(query))
            assert abs(by_exact - cosine[best[0]]) > 1e-7


def test_a_multiplier_is_refused_where_nothing_is_rescored(corpus, encoder, tmp_path, monkeypatch):
    folder = encode_corpus(encoder, corpus, tmp_path / "out", vector_format="int8").path
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded before it was refused"))
    for place in (corpus, folder):
        says = "rescore_multiplier has an effect only on a folder of binary vectors, got 4"
        refused(OptionError, says, CorpusSearch, encoder, place, rescore_multiplier=4)
