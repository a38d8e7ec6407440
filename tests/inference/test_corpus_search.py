"""A corpus that is opened once answers as one that is opened for each query."""

import json

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference.encoder import Encoder
from embeddings.inference.search import CorpusSearch, TopK, search_corpus
from embeddings.inference.vector_folder import encode_corpus
from embeddings.inference.vectors import float_rows, stored_rows
from tests.inference.models import counted_encodings, some_texts, tiny_embedder

QUERIES = [some_texts(11)[3], "quick fox"]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(prompts={"query": "the "}), precision="float32")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"_id": f"d{row}", "text": text}) + "\n" for row, text in enumerate(some_texts(11)))
    )
    return path


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_does_not_depend_on_the_query_is_done_once(is_folder, corpus, encoder, tmp_path, monkeypatch):
    place = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4).path if is_folder else corpus
    expected = [search_corpus(encoder, place, [query], top_k=3)[0] for query in QUERIES]
    searched = CorpusSearch(encoder, place)
    counts = counted_encodings(monkeypatch)
    monkeypatch.setattr("embeddings.inference.search.read_corpus", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr("embeddings.inference.search.embedder_sha256", lambda *_: pytest.fail("hashed again"))
    found = [searched.search([query], 3)[0] for query in QUERIES]
    assert counts == [1, 1]
    assert found == expected
    assert [len(hits) for hits in found] == [3, 3]


def test_an_index_is_asked_for_unit_vectors_and_may_find_fewer(corpus, tmp_path):
    encoder = Encoder(tiny_embedder(normalize=False), precision="float32")
    asked = []

    def nearest(query_QD, top_k):
        asked.append((query_QD, top_k))
        return TopK(np.array([[0.9, 0.5, -np.inf]], np.float32), np.array([[7, 2, -1]]))

    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4).path
    (hits,) = CorpusSearch(encoder, folder, nearest=nearest).search(["quick fox"], 3)
    assert [hit.document_id for hit in hits] == ["d7", "d2"]
    assert [hit.text for hit in hits] == [some_texts(11)[row] for row in (7, 2)]
    assert [round(hit.score, 3) for hit in hits] == [0.9, 0.5]
    assert asked[0][1] == 3
    np.testing.assert_allclose(np.linalg.norm(asked[0][0], axis=1), 1, rtol=1e-5)


def test_a_folder_of_another_model_is_refused_before_a_query(corpus, encoder, tmp_path):
    encode_corpus(encoder, corpus, tmp_path / "out")
    with pytest.raises(InputError, match="field 'model_sha256'"):
        CorpusSearch(Encoder(tiny_embedder(query_max_length=9)), tmp_path / "out")


def test_an_index_beside_a_corpus_file_is_refused(corpus, encoder):
    with pytest.raises(OptionError, match="nearest needs an encoded folder, got 'an index'"):
        CorpusSearch(encoder, corpus, nearest=lambda *_: pytest.fail("asked"))


def test_no_document_is_asked_for_in_vain(corpus, encoder):
    with pytest.raises(OptionError, match="top_k must be >= 1"):
        CorpusSearch(encoder, corpus).search(["a"], 0)


@pytest.mark.parametrize("vector_format", ["float16", "int8", "binary"])
@pytest.mark.parametrize("top_k", [3, 11, 30])
def test_vectors_of_every_format_are_ranked_by_the_cosines_of_what_is_kept(
    vector_format, top_k, corpus, encoder, tmp_path
):
    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4, vector_format=vector_format)
    exact = encoder.encode(some_texts(11))
    kept = float_rows(stored_rows(exact, vector_format, "here"), vector_format).astype(np.float64)
    multiplier = {"rescore_multiplier": 4} if vector_format == "binary" else {}
    found = CorpusSearch(encoder, folder.path, **multiplier).search(QUERIES, top_k)
    for query, hits in zip(encoder.encode(QUERIES, role="query"), found, strict=True):
        cosine = [float(row @ query / np.sqrt(row @ row)) for row in kept]
        # Of 11 documents all are candidates, even for 3 x 4.
        best = sorted(range(11), key=lambda row: -cosine[row])[:top_k]
        assert [hit.document_id for hit in hits] == [f"d{row}" for row in best]
        np.testing.assert_allclose([hit.score for hit in hits], [cosine[row] for row in best], atol=1e-6)
        assert np.abs(exact[best[0]] @ query - cosine[best[0]]) > 1e-7


def test_more_candidates_are_scored_again_where_that_is_asked_for(corpus, encoder, tmp_path):
    place = encode_corpus(encoder, corpus, tmp_path / "out", vector_format="binary").path
    usual, all_of_them = CorpusSearch(encoder, place), CorpusSearch(encoder, place, rescore_multiplier=11)
    few = CorpusSearch(encoder, place, rescore_multiplier=1)
    best = [searched.search(QUERIES, 1) for searched in (usual, all_of_them, few)]
    scores = [[hits[0].score for hits in found] for found in best]
    assert all(one <= more for one, more in zip(scores[2], scores[1], strict=True))
    assert usual.search(QUERIES, 3) == all_of_them.search(QUERIES, 3)
    with pytest.raises(OptionError, match="rescore_multiplier must be >= 1, got 0"):
        CorpusSearch(encoder, place, rescore_multiplier=0)


@pytest.mark.parametrize("vector_format", [None, "float32", "int8"])
def test_a_multiplier_is_refused_where_nothing_is_scored_again(vector_format, corpus, encoder, tmp_path, monkeypatch):
    place = corpus
    if vector_format is not None:
        place = encode_corpus(encoder, corpus, tmp_path / "out", vector_format=vector_format).path
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded before it was refused"))
    with pytest.raises(OptionError, match="rescore_multiplier has no effect but on a folder of binary vectors, got 4"):
        CorpusSearch(encoder, place, rescore_multiplier=4)
