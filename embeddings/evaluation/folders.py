"""Evaluation folders of every kind, told apart by what lies in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, shown
from embeddings.data.records import (
    LABELLED_FIELDS,
    SCORED_FIELDS,
    LabelledText,
    ScoredPair,
    parse_labelled_text,
    parse_scored_pair,
    shortened,
)
from embeddings.data.sources import open_reader
from embeddings.evaluation.fields import filled_text
from embeddings.evaluation.metrics import Judgments
from embeddings.evaluation.pair_classification import PAIR_FIELDS, PairClassificationFolder, read_pair_classification
from embeddings.evaluation.qrels import read_qrels
from embeddings.evaluation.reranking import RERANKING_FIELDS, RerankingFolder, read_reranking
from embeddings.evaluation.summarisation import SUMMARY_FIELDS, SummarisationFolder, read_summarisation
from embeddings.inference.corpus import identifier_field, read_corpus

_ROWS = "sentence1, sentence2, score or text, label, or the fields of another kind"
_ROW_FIELDS = (*SCORED_FIELDS, *LABELLED_FIELDS, *PAIR_FIELDS, *RERANKING_FIELDS, *SUMMARY_FIELDS)
_LAYOUTS = f"write corpus.jsonl, queries.jsonl and qrels.tsv, or test.jsonl with {_ROWS}"


@dataclass(frozen=True, eq=False)
class RetrievalFolder:
    """A corpus, queries, and which documents are relevant to which.

    Attributes:
        documents: Title and text of each document.
        document_ids: Their ids.
        queries: Texts of the queries that have a relevant document.
        query_ids: Their ids.
        judgments: Relevance by row.
        num_skipped: Queries left out because no document is relevant to them.
    """

    kind: ClassVar[str] = "retrieval"
    documents: list[str]
    document_ids: list[str]
    queries: list[str]
    query_ids: list[str]
    judgments: Judgments
    num_skipped: int


class RetrievalFiles(NamedTuple):
    """The files of retrieval data: documents, queries, and judgments of pairs of them."""

    corpus: Path
    queries: Path
    qrels: Path


@dataclass(frozen=True, eq=False)
class SimilarityFolder:
    """Pairs of sentences, (N) each, and how alike people found them, (N,) float64."""

    kind: ClassVar[str] = "sts"
    first: list[str]
    second: list[str]
    score_N: npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClassificationFolder:
    """Texts and labels to train a classifier on, and others to test it on."""

    kind: ClassVar[str] = "classification"
    train_texts: list[str]
    train_labels: list[str]
    test_texts: list[str]
    test_labels: list[str]


@dataclass(frozen=True, eq=False)
class ClusteringFolder:
    """Texts and the label that clusters should agree with."""

    kind: ClassVar[str] = "clustering"
    texts: list[str]
    labels: list[str]


EvaluationFolder = (
    RetrievalFolder
    | SimilarityFolder
    | PairClassificationFolder
    | ClassificationFolder
    | ClusteringFolder
    | RerankingFolder
    | SummarisationFolder
)


def read_evaluation_folder(path: str | PathLike[str]) -> EvaluationFolder:
    """The evaluation data in a folder, checked whole.

    Retrieval is BEIR's layout: `corpus.jsonl` {"_id", "title", "text"}, `queries.jsonl` {"_id", "text"}, `qrels.tsv`
    (or `qrels/test.tsv`) query-id, corpus-id, score. Classification is `train.jsonl` and `test.jsonl` {"text",
    "label"}. The other kinds are a `test.jsonl` alone: clustering {"text", "label"}, similarity {"sentence1",
    "sentence2", "score"}, pair classification {"sentence1", "sentence2", "label"} with labels 0 and 1, reranking
    {"query", "positive", "negatives"}, summarisation {"human_summaries", "machine_summaries", "relevance"}. Every JSONL
    file may be gzipped as `.jsonl.gz`. Fields that are not named here are left alone.

    Raises:
        InputError: If the folder has none of these layouts, or a row cannot be used; one line names file and row.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(str(folder), "is no folder", _LAYOUTS)
    if _find(folder, "corpus") or _find(folder, "queries") or _find_qrels(folder):
        return _read_retrieval(folder)
    test = _find(folder, "test")
    if test is None:
        raise InputError(str(folder), "holds no evaluation data", _LAYOUTS)
    return _read_rows(folder, test)


def _read_rows(folder: Path, test: Path) -> EvaluationFolder:
    """What a test file holds, of the kind that its first row's fields say."""
    where, first = next(iter(open_reader(test, _ROW_FIELDS, ())))
    if "sentence1" in first:
        has_labels = "label" in first and "score" not in first
        return read_pair_classification(test) if has_labels else _similarity(test)
    if "machine_summaries" in first:
        return read_summarisation(test)
    if "query" in first and "positive" in first and "text" not in first:
        return read_reranking(test)
    if "label" not in first:
        found = shortened(", ".join(map(str, first)), 50) or "none"
        raise InputError(where, f"is a row of no kind of set (found: {found})", f"write {_ROWS}")
    tested, train = _labelled(test), _find(folder, "train")
    if train is None:
        _check_labels(test, tested)
        return ClusteringFolder([row.text for row in tested], [row.label for row in tested])
    trained = _labelled(train)
    _check_labels(train, trained)
    return ClassificationFolder(
        [row.text for row in trained],
        [row.label for row in trained],
        [row.text for row in tested],
        [row.label for row in tested],
    )


def read_retrieval_folder(path: str | PathLike[str]) -> RetrievalFolder:
    """The corpus, queries and judgments of a retrieval folder.

    Raises:
        InputError: If it is not one, or a row cannot be used.
    """
    folder = read_evaluation_folder(path)
    if not isinstance(folder, RetrievalFolder):
        fix = "name a folder with corpus.jsonl, queries.jsonl and qrels.tsv"
        raise InputError(str(path), f"holds {folder.kind} data, not retrieval data", fix)
    return folder


def find_evaluation_folders(root: str | PathLike[str]) -> list[Path]:
    """The evaluation folders at or below `root`, by path; a folder inside one that was found is not looked into.

    Raises:
        InputError: If there is none.
    """
    found = list(_walk(Path(root)))
    if not found:
        raise InputError(str(root), "holds no evaluation data", _LAYOUTS)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    if _find(folder, "corpus") or _find(folder, "test"):
        yield folder
    elif folder.is_dir():
        for child in sorted(child for child in folder.iterdir() if child.is_dir()):
            yield from _walk(child)


def _find(folder: Path, name: str) -> Path | None:
    candidates = [folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"]
    found = [path for path in candidates if path.is_file()]
    if len(found) > 1:
        raise InputError(str(folder), f"{found[0].name} and {found[1].name} are both there", "keep one of them")
    return found[0] if found else None


def _find_qrels(folder: Path) -> Path | None:
    return next((path for path in (folder / "qrels.tsv", folder / "qrels" / "test.tsv") if path.is_file()), None)


def _read_retrieval(folder: Path) -> RetrievalFolder:
    return read_retrieval_files(_retrieval_files(folder, _find_qrels(folder)))


def retrieval_files_of(qrels: str | PathLike[str]) -> RetrievalFiles:
    """The files around a file of judgments, such as those of one split: `FOLDER/qrels.tsv`, `FOLDER/qrels/train.tsv`.

    Raises:
        InputError: If one of them is missing.
    """
    path = Path(qrels)
    if not path.is_file():
        raise InputError(str(path), "no such file", "name a qrels file of a retrieval folder")
    return _retrieval_files(path.parent.parent if path.parent.name == "qrels" else path.parent, path)


def _retrieval_files(folder: Path, qrels: Path | None) -> RetrievalFiles:
    corpus, queries = _find(folder, "corpus"), _find(folder, "queries")
    for path, name in ((corpus, "corpus.jsonl"), (queries, "queries.jsonl"), (qrels, "qrels.tsv")):
        if path is None:
            raise InputError(str(folder), f"{name} is missing", _LAYOUTS)
    assert corpus is not None
    assert queries is not None
    assert qrels is not None
    return RetrievalFiles(corpus, queries, qrels)


def read_retrieval_files(files: RetrievalFiles) -> RetrievalFolder:
    """The corpus, queries and judgments in some files.

    Memory: all texts of the corpus.

    Raises:
        InputError: If a row cannot be used.
    """
    corpus, queries, qrels = files
    documents = list(read_corpus(corpus))
    document_row = {document.document_id: row for row, document in enumerate(documents)}
    text_of_query = _read_queries(queries)
    relevance = read_qrels(qrels, text_of_query.keys(), document_row.keys())
    # A benchmark's queries file often holds the queries of all splits: only those judged here are encoded.
    query_ids = [query for query in text_of_query if any(grade > 0 for grade in relevance.get(query, {}).values())]
    pairs = [
        (query_row, document_row[document], grade)
        for query_row, query in enumerate(query_ids)
        for document, grade in relevance[query].items()
    ]
    query_J, document_J, relevance_J = zip(*pairs, strict=True)
    judgments = Judgments(
        np.array(query_J, dtype=np.int64),
        np.array(document_J, dtype=np.int64),
        np.array(relevance_J, dtype=np.float64),
        len(query_ids),
        len(documents),
    )
    return RetrievalFolder(
        [document.text for document in documents],
        list(document_row),
        [text_of_query[query] for query in query_ids],
        query_ids,
        judgments,
        len(text_of_query) - len(query_ids),
    )


def _read_queries(path: Path) -> dict[str, str]:
    text_of_query: dict[str, str] = {}
    for where, fields in open_reader(path, ("_id", "text"), ("_id", "text")):
        query = identifier_field(where, fields, "_id")
        if query in text_of_query:
            raise InputError(where, f"the id {shown(query)} occurs a second time", "give each query its own")
        text_of_query[query] = filled_text(where, fields, "text", "write the query, or drop the row")
    return text_of_query


def _similarity(path: Path) -> SimilarityFolder:
    reader = open_reader(path, SCORED_FIELDS, SCORED_FIELDS)
    pairs: list[ScoredPair] = [parse_scored_pair(fields, {}, where) for where, fields in reader]
    if len({pair.score for pair in pairs}) < 2:
        raise InputError(str(path), f"every score is {pairs[0].score}", "a rank correlation needs two different scores")
    scores = np.array([pair.score for pair in pairs], dtype=np.float64)
    return SimilarityFolder([pair.sentence1 for pair in pairs], [pair.sentence2 for pair in pairs], scores)


def _labelled(path: Path) -> list[LabelledText]:
    reader = open_reader(path, LABELLED_FIELDS, LABELLED_FIELDS)
    return [parse_labelled_text(fields, {}, where) for where, fields in reader]


def _check_labels(path: Path, rows: list[LabelledText]) -> None:
    if len({row.label for row in rows}) < 2:
        raise InputError(str(path), f"every label is {shown(rows[0].label)}", "two different labels are needed")
