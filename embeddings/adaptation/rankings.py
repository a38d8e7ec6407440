"""The rankings of test queries by each variant: BM25, models, their fusion, and a whitened model."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from embeddings.adaptation.whitening import Whitening
from embeddings.common import InputError
from embeddings.common.io import file_hash
from embeddings.common.packed_texts import PackedTexts
from embeddings.common.text import GivenPrompt, TextRole
from embeddings.data.readers import open_reader
from embeddings.evaluation.folders import (
    Qrels,
    RetrievalFiles,
    RetrievalFolder,
    TaskFolder,
    query_metrics,
    read_evaluation_folder,
    retrieval_files,
)
from embeddings.evaluation.mteb_library import task_prompt
from embeddings.evaluation.runner import CUTOFFS, named_folders
from embeddings.inference import BM25, Encoder, FusionRule, TopK, VectorFolder, encode_corpus, sample_context
from embeddings.inference.encoder import Context, embedder_sha256, unit_rows
from embeddings.inference.hybrid import fused_top_k
from embeddings.inference.search import search_top_k
from embeddings.inference.vector_folder import identifier_field, read_corpus, text_field

# The kind of a query that names none: one that a person wrote.
REAL = "real"
# The folder of the vectors, in a folder of a comparison.
VECTORS = "vectors"

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RetrievalSet:
    """A retrieval folder with its name in tables, its files and the kind of each query."""

    name: str
    files: RetrievalFiles
    folder: RetrievalFolder
    kinds: npt.NDArray[np.str_]

    @classmethod
    def read(cls, name: str, path: Path) -> Self:
        folder = read_evaluation_folder(path)
        if not isinstance(folder, RetrievalFolder) or folder.kind != "retrieval":
            hint = "name a folder with corpus.jsonl, queries.jsonl and qrels.tsv"
            raise InputError(str(path), f"has {folder.kind} data, not retrieval data", hint)
        files = retrieval_files(path)
        kinds = dict(_kinds(files.queries))
        return cls(name, files, folder, np.array([kinds[query] for query in folder.query_ids]))

    @classmethod
    def unlabelled(cls, corpus: Path, queries: Mapping[str, str]) -> Self:
        """A corpus with queries without judgments, which can be ranked but not scored."""
        ids, documents = PackedTexts(), PackedTexts()
        for document in read_corpus(corpus, show_progress=True):
            ids.append(document.document_id)
            documents.append(document.text)
        none = np.empty(0, np.int64)
        qrels = Qrels(none, none, np.empty(0), len(queries), len(documents))
        folder = RetrievalFolder(documents, ids, list(queries.values()), list(queries), qrels)
        files = RetrievalFiles(corpus, corpus, corpus)
        return cls(corpus.resolve().parent.name, files, folder, np.full(len(queries), REAL))

    def ids_of(self, rows: Iterable[Rows]) -> dict[int, str]:
        """The ids of the documents at rows of any shape, by row, in one pass: an access reads a block of ids."""
        wanted = set().union(*(np.unique(each).tolist() for each in rows))
        return {row: name for row, name in enumerate(self.folder.document_ids) if row in wanted}

    @property
    def is_real_Q(self) -> npt.NDArray[np.bool_]:
        """Which queries a person wrote, (Q,)."""
        return np.array(self.kinds == REAL)


@dataclass(frozen=True)
class SimilaritySet:
    """Pairs of sentences with human scores, and their name in tables."""

    name: str
    texts: Sequence[str]
    score_N: Floats


def _kinds(path: Path) -> Iterator[tuple[str, str]]:
    """The id and the kind of each query; a query that a person wrote needs none."""
    for where, fields in open_reader(path, ("_id", "kind"), ("_id",)):
        is_named = fields.get("kind") is not None
        yield identifier_field(where, fields, "_id"), text_field(where, fields, "kind") if is_named else REAL


def read_test_sets(roots: Iterable[str | PathLike[str]]) -> list[RetrievalSet]:
    """Every retrieval folder at or below `roots`, in order."""
    return [RetrievalSet.read(name, path) for name, path in _unique_names(roots)]


def read_general_sets(roots: Iterable[str | PathLike[str]]) -> list[RetrievalSet | SimilaritySet]:
    """Every folder of retrieval or similarity data at or below `roots`, in order."""
    sets: list[RetrievalSet | SimilaritySet] = []
    for name, path in _unique_names(roots):
        folder = read_evaluation_folder(path)
        if isinstance(folder, TaskFolder) and folder.kind == "sts":
            score_N = np.array(folder.splits["test"]["score"], np.float64)
            sets.append(SimilaritySet(name, folder.context_texts, score_N))
        elif folder.kind == "retrieval":
            sets.append(RetrievalSet.read(name, path))
        else:
            hint = "name a folder of retrieval data, or of sentence pairs with scores"
            raise InputError(str(path), f"has {folder.kind} data", hint)
    return sets


def _unique_names(roots: Iterable[str | PathLike[str]]) -> list[tuple[str, Path]]:
    found = list(dict.fromkeys(named_folders(roots)))
    names = [name for name, _ in found]
    return [(name if names.count(name) == 1 else str(path), path) for name, path in found]


@dataclass(frozen=True)
class Encoded:
    """A set as a model encoded it: the queries, (Q, D), and the documents, or both sides of all pairs."""

    query_QD: Vectors
    documents: VectorFolder | None
    compares_lengths: bool
    device: torch.device

    def comparable(self, vector_ND: Vectors) -> Vectors:
        """Vectors whose inner products are the model's scores."""
        return vector_ND if self.compares_lengths else unit_rows(vector_ND)

    def tiles(self, whitening: Whitening | None = None) -> Iterator[Vectors]:
        """The vectors of all documents in blocks, ready for inner products."""
        assert self.documents is not None
        return map(self.comparable if whitening is None else whitening, self.documents.tiles())


def encode_set(
    encoder: Encoder, test: RetrievalSet | SimilaritySet, output: Path, context_size: int | None = None
) -> Encoded:
    """Encode a set; the documents into a folder below `output`, which a later call with the same model reads.

    Prompts and contexts are those of `evaluate`.
    """
    is_pairs = isinstance(test, SimilaritySet)

    def prompt(role: TextRole | None) -> str:
        return task_prompt(encoder.embedder.text, test.name.replace("/", "."), "STS" if is_pairs else "Retrieval", role)

    context: Context | None = None
    if context_size is not None and encoder.num_context:
        texts = test.texts if isinstance(test, SimilaritySet) else test.folder.documents
        context = sample_context(encoder, texts, min(context_size, encoder.num_context))
    facts = partial(Encoded, compares_lengths=encoder.embedder.compares_lengths, device=encoder.device)
    if isinstance(test, SimilaritySet):
        vectors = encoder.encode(test.texts, context=context, role="document", prompt=prompt(None))
        return facts(vectors, None)
    given = prompt("document")
    key = json.dumps([
        *(embedder_sha256(encoder), str(encoder.dtype), given, file_hash(test.files.corpus)),
        None if context is None else context.summary(),
    ])  # fmt: skip
    folder = output / VECTORS / sha256(key.encode()).hexdigest()[:16]
    documents = encode_corpus(
        encoder, test.files.corpus, folder, prompt_name=GivenPrompt(text=given), context=context, role="document"
    )
    query_QD = encoder.encode(test.folder.queries, context=context, role="query", prompt=prompt("query"))
    return facts(query_QD, documents)


def dense_rows(test: RetrievalSet, encoded: Encoded, whitening: Whitening | None = None) -> Rows:
    """The best 100 documents of each query by a model's scores, (Q, K)."""
    query_QD = encoded.comparable(encoded.query_QD) if whitening is None else whitening(encoded.query_QD)
    return _nearest(test, encoded, query_QD, max(CUTOFFS), whitening).index_QK


def _nearest(
    test: RetrievalSet, encoded: Encoded, query_QD: Vectors, top_k: int, whitening: Whitening | None = None
) -> TopK:
    return search_top_k(query_QD, encoded.tiles(whitening), top_k, encoded.device, test.folder.tie_order_N)


def fused_rows(test: RetrievalSet, encoded: Encoded, words: BM25, rule: FusionRule) -> Rows:
    """The best 100 documents of each query by a model and BM25, (Q, K)."""
    query_QD = encoded.comparable(encoded.query_QD)
    best = fused_top_k(
        test.folder.queries,
        query_QD,
        words,
        max(CUTOFFS),
        rule,
        tiles=encoded.tiles,
        nearest=partial(_nearest, test, encoded),
        device=encoded.device,
        tie_order_N=test.folder.tie_order_N,
    )
    return best.index_QK


def words_rows(test: RetrievalSet, words: BM25) -> Rows:
    """The best 100 documents of each query by BM25, (Q, K)."""
    return words.search(test.folder.queries, max(CUTOFFS), test.folder.tie_order_N)[0]


@dataclass(frozen=True)
class Ranked:
    """What one variant found: the metrics of each query by name, (Q,) each, and its ten first documents, (Q, 10)."""

    metrics: Mapping[str, Floats]
    first_QK: Rows

    @classmethod
    def of(cls, test: RetrievalSet, row_QK: Rows) -> Self:
        values = query_metrics(row_QK, test.folder.qrels, CUTOFFS)
        return cls(values, row_QK[:, : min(CUTOFFS)].copy())


def pair_cosines(encoded: Encoded, whitening: Whitening | None = None) -> Floats:
    """The cosine of each pair of sentences, (N,) float64."""
    sides = np.split(encoded.query_QD, 2)
    first_ND, second_ND = (unit_rows(side) if whitening is None else whitening(side) for side in sides)
    cosine_N: Floats = np.einsum("nd,nd->n", first_ND, second_ND, dtype=np.float64)
    return cosine_N


def seen_passages(test: RetrievalSet, row: int, ranked: Ranked, count: int) -> list[dict[str, Any]]:
    """The first documents that a variant found for a query, with their texts and whether they are relevant."""
    qrels, found = test.folder.qrels, [int(each) for each in ranked.first_QK[row, :count] if each >= 0]
    judged = qrels.query_J == row
    grades = dict(zip(qrels.document_J[judged].tolist(), qrels.relevance_J[judged].tolist(), strict=True))
    return [
        {"id": test.folder.document_ids[each], "text": test.folder.documents[each], "relevant": grades.get(each, 0) > 0}
        for each in found
    ]


def relevant_passages(test: RetrievalSet, row: int) -> list[dict[str, Any]]:
    """The relevant documents of a query with their texts, the highest grade first."""
    qrels = test.folder.qrels
    found = np.flatnonzero((qrels.query_J == row) & (qrels.relevance_J > 0))
    rows = qrels.document_J[found[np.argsort(-qrels.relevance_J[found], kind="stable")]].tolist()
    return [{"id": test.folder.document_ids[each], "text": test.folder.documents[each]} for each in rows]
