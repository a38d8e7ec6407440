"""A corpus that is opened once answers as one that is opened for each query."""

import json

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference.corpus_search import CorpusSearch, search_corpus
from embeddings.inference.encoder import Encoder
from embeddings.inference.search import TopK
from embeddings.inference.vector_folder import encode_corpus
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
    monkeypatch.setattr("embeddings.inference.corpus_search.read_corpus", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr("embeddings.inference.corpus_search.embedder_sha256", lambda *_: pytest.fail("hashed again"))
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


def test_no_document_is_no_answer(corpus, encoder):
    with pytest.raises(OptionError, match="top_k must be >= 1"):
        CorpusSearch(encoder, corpus).search(["a"], 0)
