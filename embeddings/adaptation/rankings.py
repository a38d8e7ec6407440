"""The rankings of test queries by each variant: BM25, models, their fusion, and a whitened model."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import compress
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from embeddings.adaptation.real_queries import REAL
from embeddings.adaptation.weights import SHARES, WeightPath, Whitening, best_share
from embeddings.common import InputError
from embeddings.common.io import file_hash, write_json_lines
from embeddings.common.packed_texts import PackedTexts
from embeddings.common.text import GivenPrompt
from embeddings.data.readers import open_reader
from embeddings.evaluation.folders import (
    Qrels,
    RetrievalFiles,
    RetrievalFolder,
    TaskFolder,
    query_metrics,
    read_evaluation_folder,
    read_packed_corpus,
    read_retrieval_folder,
    retrieval_files,
)
from embeddings.evaluation.hybrid import FolderSearch
from embeddings.evaluation.runner import CUTOFFS, FolderEncoder, named_folders
from embeddings.inference import Encoder, Precision, VectorFolder, encode_corpus, sample_context
from embeddings.inference.encoder import Context, embedder_sha256, unit_rows
from embeddings.inference.vector_folder import identifier_field, text_field

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
    def read(
        cls, name: str, path: Path, folder: RetrievalFolder | None = None, others: Iterable["RetrievalSet"] = ()
    ) -> Self:
        """Read a folder; if its corpus is the file of one of `others`, both hold the same texts."""
        folder, files = folder or read_retrieval_folder(path), retrieval_files(path)
        for other in others:
            if files.corpus.samefile(other.files.corpus):
                texts, ids = other.folder.documents, other.folder.document_ids
                folder = replace(folder, documents=texts, document_ids=ids)
        kinds = dict(_kinds(files.queries))
        return cls(name, files, folder, np.array([kinds[query] for query in folder.query_ids]))

    @classmethod
    def unlabelled(cls, corpus: Path, queries: Mapping[str, str]) -> Self:
        """A corpus with queries without judgments, which can be ranked but not scored."""
        ids, documents = read_packed_corpus(corpus, show_progress=True)
        none = np.empty(0, np.int64)
        qrels = Qrels(none, none, np.empty(0), len(queries), len(documents))
        folder = RetrievalFolder(documents, ids, list(queries.values()), list(queries), qrels)
        files = RetrievalFiles(corpus, corpus, corpus)
        return cls(corpus.resolve().parent.name, files, folder, np.full(len(queries), REAL))

    def sampled(self, max_documents: int, output: Path) -> Self:
        """The queries over all judged documents and others at random, written to `output` as JSON Lines.

        The set itself if its corpus has no more than `max_documents`.
        """
        folder, qrels = self.folder, self.folder.qrels
        num_documents = len(folder.documents)
        if num_documents <= max_documents:
            return self
        is_in_N = np.zeros(num_documents, bool)
        is_in_N[qrels.document_J] = True
        others_N = np.flatnonzero(~is_in_N)
        num_others = max(0, max_documents - int(is_in_N.sum()))
        is_in_N[np.random.default_rng(0).choice(others_N, num_others, replace=False)] = True
        ids, documents = (PackedTexts(compress(each, is_in_N)) for each in (folder.document_ids, folder.documents))
        rows = ({"_id": name, "text": text} for name, text in zip(ids, documents, strict=True))
        write_json_lines(output, rows)
        document_J = np.cumsum(is_in_N)[qrels.document_J] - 1
        qrels = replace(qrels, document_J=document_J, num_documents=len(documents))
        sample = replace(folder, documents=documents, document_ids=ids, qrels=qrels)
        return replace(self, files=self.files._replace(corpus=output), folder=sample)

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
    sets: list[RetrievalSet] = []
    for name, path in named_folders(roots):
        sets.append(RetrievalSet.read(name, path, others=sets))
    return sets


def read_general_sets(roots: Iterable[str | PathLike[str]]) -> list[RetrievalSet | SimilaritySet]:
    """Every folder of retrieval or similarity data at or below `roots`, in order."""
    sets: list[RetrievalSet | SimilaritySet] = []
    for name, path in named_folders(roots):
        folder = read_evaluation_folder(path)
        if isinstance(folder, TaskFolder) and folder.kind == "sts":
            score_N = np.array(folder.splits["test"]["score"], np.float64)
            sets.append(SimilaritySet(name, folder.context_texts, score_N))
        elif isinstance(folder, RetrievalFolder) and folder.kind == "retrieval":
            sets.append(RetrievalSet.read(name, path, folder))
        else:
            hint = "name a folder of retrieval data, or of sentence pairs with scores"
            raise InputError(str(path), f"has {folder.kind} data", hint)
    return sets


@dataclass(frozen=True)
class Encoded:
    """A set as a model encoded it: the queries, (Q, D), and the documents, or both sides of all pairs."""

    query_QD: Vectors
    documents: VectorFolder | None
    compares_lengths: bool
    device: torch.device
    whitening: Whitening | None = None

    def comparable(self, vector_ND: Vectors) -> Vectors:
        """Vectors whose inner products are the scores of the model, or of the whitened one."""
        if self.whitening is not None:
            return self.whitening(vector_ND)
        return vector_ND if self.compares_lengths else unit_rows(vector_ND)

    def tiles(self) -> Iterator[Vectors]:
        """The vectors of all documents in blocks, ready for inner products."""
        assert self.documents is not None
        return map(self.comparable, self.documents.tiles())


def encode_set(
    encoder: Encoder, test: RetrievalSet | SimilaritySet, vectors: Path, context_size: int | None = None
) -> Encoded:
    """Encode a set; the documents into a folder below `vectors`, which a later call with the same model reads.

    Prompts and contexts are those of `evaluate`.
    """
    context: Context | None = None
    if context_size is not None and encoder.num_context:
        texts = test.texts if isinstance(test, SimilaritySet) else test.folder.documents
        context = sample_context(encoder, texts, min(context_size, encoder.num_context))
    facts = partial(Encoded, compares_lengths=encoder.embedder.compares_lengths, device=encoder.device)
    of_role = FolderEncoder(encoder, test.name, context=context).options
    if isinstance(test, SimilaritySet):
        return facts(encoder.encode(test.texts, **of_role("STS")), None)
    given, corpus = of_role("Retrieval", "document")["prompt"], test.files.corpus
    # As `encode` names it by default, so that its folder and this one are alike.
    is_default = given == encoder.embedder.text.prompt(None, "document")
    name = None if is_default else GivenPrompt(text=given)
    folder = vector_folder(encoder, corpus, vectors, [given] if context is None else [given, context.summary()])
    documents = encode_corpus(encoder, corpus, folder, prompt_name=name, context=context, role="document")
    return facts(encoder.encode(test.folder.queries, **of_role("Retrieval", "query")), documents)


def vector_folder(encoder: Encoder, corpus: Path, vectors: Path, options: Sequence[Any] = ()) -> Path:
    """The folder below `vectors` of a corpus as a model encodes it; by default with its prompt for documents."""
    options = options or [encoder.embedder.text.prompt(None, "document")]
    key = json.dumps([embedder_sha256(encoder), str(encoder.dtype), file_hash(corpus), *options])
    return vectors / sha256(key.encode()).hexdigest()[:16]


def path_scores(
    path: WeightPath, test: RetrievalSet, vectors: Path, shares: Iterable[float] = SHARES, precision: Precision = "auto"
) -> dict[float, float]:
    """nDCG@10 on validation queries of the models at places of a path, by their share of the trained weights.

    Args:
        path: The path.
        test: The validation queries, with their corpus.
        vectors: The folder of vectors (see `encode_set`), in which those of the start and of the best model stay.
        shares: The places.
        precision: Precision of matrix products.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores: dict[float, float] = {}
    folders = dict[float, Path]()
    for share in shares:
        encoder = Encoder.from_embedder(path.go(share).to(device), precision=precision, show_progress=True)
        encoded = encode_set(encoder, test, vectors)
        assert encoded.documents is not None
        folders[share] = encoded.documents.path
        scores[share] = float(Ranked.of(test, searched(test, encoded).dense()).metrics["ndcg_at_10"].mean())
    kept = {folders[share] for share in folders if share in (0.0, best_share(scores))}
    for folder in {*folders.values()} - kept:
        shutil.rmtree(folder)
    return scores


def searched(test: RetrievalSet, encoded: Encoded) -> FolderSearch:
    """A set that is searched by a model's vectors."""
    return FolderSearch(test.folder, encoded.comparable(encoded.query_QD), encoded.tiles, encoded.device)


@dataclass(frozen=True)
class Ranked:
    """The metrics of each query by name, (Q,) each, for one variant, and its ten first documents, (Q, 10)."""

    metrics: Mapping[str, Floats]
    first_QK: Rows

    @classmethod
    def of(cls, test: RetrievalSet, row_QK: Rows) -> Self:
        values = query_metrics(row_QK, test.folder.qrels, CUTOFFS)
        return cls(values, row_QK[:, : min(CUTOFFS)].copy())


def pair_cosines(encoded: Encoded) -> Floats:
    first_ND, second_ND = map(encoded.whitening or unit_rows, np.split(encoded.query_QD, 2))
    cosine_N: Floats = np.einsum("nd,nd->n", first_ND, second_ND, dtype=np.float64)
    return cosine_N
