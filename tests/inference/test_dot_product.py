"""A model of dot products keeps its similarity and is scored by it everywhere, or refused where only cosines work."""

import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from embeddings.common import InputError, OptionError
from embeddings.evaluation.mteb_tasks import TaskEncoder
from embeddings.evaluation.runner import evaluate_folder
from embeddings.inference import CorpusSearch, Encoder
from embeddings.inference.encoder import embedder_sha256
from embeddings.inference.vector_folder import encode_corpus
from embeddings.interop.released.importer import import_released
from embeddings.mining.ivf import build_index
from embeddings.mining.pair_vectors import encode_pairs
from embeddings.models import Embedder, load_embedder
from embeddings.modules.distillation import VectorTeacher
from tests.evaluation.data import write_reranking
from tests.helpers.runs import component, fit, run_config
from tests.inference.models import some_texts, tiny_embedder, write_corpus
from tests.models.contextual_models import tiny_contextual

TEXTS = some_texts(30)
QUERIES = ["the quick brown fox", "one length", "dog"]


def dot_embedder(similarity="dot", normalize=False):
    embedder = tiny_embedder(normalize=normalize)
    embedder.similarity = similarity
    return embedder


def ranked(scores_QN):
    return np.argsort(-scores_QN, axis=1, kind="stable").tolist()


@pytest.fixture
def encoder():
    return Encoder(dot_embedder(), precision="float32")


@pytest.mark.parametrize("stored", ["file", "float32", "float16"])
def test_a_search_ranks_by_inner_products(encoder, tmp_path, stored):
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    if stored != "file":
        corpus = encode_corpus(encoder, corpus, tmp_path / "vectors", vector_format=stored, shard_size=7).path
    scores_QN = encoder.encode(QUERIES, role="query") @ encoder.encode(TEXTS).T
    assert np.allclose(encoder.similarity(encoder.encode(QUERIES, role="query"), encoder.encode(TEXTS)), scores_QN)
    cosine = Encoder(dot_embedder("cosine"), precision="float32")
    cosines_QN = cosine.similarity(cosine.encode(QUERIES, role="query"), cosine.encode(TEXTS))
    assert ranked(cosines_QN) != ranked(scores_QN)
    hits = CorpusSearch(encoder, corpus).search(QUERIES, 30)
    if stored != "float16":
        assert [[int(hit.document_id[1:]) for hit in row] for row in hits] == ranked(scores_QN)
    found = [[hit.score for hit in row] for row in hits]
    assert np.allclose(found, -np.sort(-scores_QN, axis=1), rtol=1e-3 if stored == "float16" else 1e-5)


def test_what_needs_cosines_refuses_the_model_in_one_line(encoder, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    binary = encode_corpus(encoder, corpus, tmp_path / "binary", vector_format="binary")
    with pytest.raises(OptionError, match=r"corpus compares vectors by their inner products, of any length; a search"):
        CorpusSearch(encoder, binary.path)
    folder = encode_corpus(encoder, corpus, tmp_path / "vectors")
    with pytest.raises(InputError, match="an index needs cosines"):
        build_index(folder)
    with pytest.raises(OptionError, match="an index needs cosines"):
        CorpusSearch(encoder, folder.path, nearest=lambda *_: None)
    with pytest.raises(OptionError, match=r"^model compares vectors by .*; mining needs cosines, got .*; use a model"):
        encode_pairs(encoder, None, tmp_path / "pairs")
    with pytest.raises(OptionError, match="a teacher needs cosines, got 'mine'"):
        VectorTeacher("mine", dot_embedder())
    # Inner products of unit vectors are cosines.
    VectorTeacher("mine", dot_embedder(normalize=True))


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_mteb_compares_vectors_as_sentence_transformers_does(similarity, tmp_path):
    encoder = Encoder(dot_embedder(similarity), precision="float32")
    encoder.embedder.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    task_encoder, vectors = TaskEncoder(encoder, None), encoder.encode(TEXTS)
    assert np.allclose(task_encoder.similarity(vectors, vectors), theirs.similarity(vectors, vectors), atol=1e-5)
    pairwise = theirs.similarity_pairwise(vectors[1:], vectors[:-1])
    assert np.allclose(task_encoder.similarity_pairwise(vectors[1:], vectors[:-1]), pairwise, atol=1e-5)
    metrics = evaluate_folder(encoder, write_reranking(tmp_path / "folder")).metrics
    assert 0 < next(iter(metrics.values())) <= 1


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize("make", [dot_embedder, tiny_contextual])
def test_a_directory_keeps_the_similarity(make, tmp_path):
    embedder = make()
    embedder.similarity, embedder.normalize = "dot", False
    embedder.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    assert theirs.similarity_fn_name == "dot"
    loaded = load_embedder(tmp_path / "model")
    assert loaded.compares_lengths
    ours, vectors = Encoder(loaded, precision="float32"), Encoder(loaded, precision="float32").encode(TEXTS)
    assert np.allclose(ours.similarity(vectors, vectors), theirs.similarity(vectors, vectors), rtol=1e-4)
    loaded.similarity = "cosine"
    assert embedder_sha256(ours) != embedder_sha256(Encoder(embedder, precision="float32"))
    if isinstance(loaded, Embedder) and make is dot_embedder:
        import_released(str(tmp_path / "model"), tmp_path / "copy")
        assert load_embedder(tmp_path / "copy").similarity == "dot"
        assert "of any length, compared by inner product" in (tmp_path / "copy" / "README.md").read_text()
    path = tmp_path / "model" / "config_sentence_transformers.json"
    (tmp_path / "model" / "manifest.json").unlink()
    path.write_text(json.dumps({**json.loads(path.read_text()), "similarity_fn_name": "euclidean"}))
    with pytest.raises(InputError, match="has similarity_fn_name 'euclidean', supported are cosine, dot"):
        load_embedder(tmp_path / "model")


def test_training_with_dot_products_exports_them(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["max_steps"] = 1
    config["model"]["init_args"] |= {"normalize": False, "schedule": {"warmup_steps": 0, "decay": "constant"}}
    config["model"]["init_args"]["loss"] = component("embeddings.losses.InfoNCE", similarity="dot")
    config["trainer"]["callbacks"] = [component("ExportModel", output=str(tmp_path / "model"))]
    fit(tmp_path, config)
    assert Embedder.from_pretrained(tmp_path / "model").compares_lengths
