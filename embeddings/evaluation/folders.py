"""Evaluation folders, whose kind is recognised by their files and fields, and retrieval metrics.

The metrics are those of trec_eval, which mteb and BEIR use. nDCG has a linear gain: gain = relevance, discount =
log2(1 + rank). A query whose documents were all judged not relevant has the value 0; one without a judgment is skipped.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from embeddings.common.errors import InputError, shown
from embeddings.common.packed_texts import PackedTexts
from embeddings.common.text import shorten
from embeddings.data.readers import open_reader
from embeddings.data.records import LABELLED_FIELDS, SCORED_FIELDS, parse_labelled_text, parse_record, parse_scored_pair
from embeddings.inference.vector_folder import identifier_field, read_corpus, text_field

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Qrels:
    """Relevance judgments of J pairs of query and document. Pairs that are not listed are not relevant.

    `query_J` and `document_J` are rows, (J,) int64, in unique pairs; `relevance_J` are grades, (J,) float64, 0 or below
    for not relevant. There are `num_queries` Q queries and `num_documents` documents.
    """

    query_J: Ints
    document_J: Ints
    relevance_J: Floats
    num_queries: int
    num_documents: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int, float]], num_queries: int, num_documents: int) -> Self:
        """The judgments of one or more pairs: query row, document row and grade."""
        query_J, document_J, relevance_J = zip(*pairs, strict=True)
        rows = np.array(query_J, dtype=np.int64), np.array(document_J, dtype=np.int64)
        return cls(*rows, np.array(relevance_J, dtype=np.float64), num_queries, num_documents)

    def gain(self, ranked_QK: Ints) -> Floats:
        """The grade of each ranked document, (Q, K); 0 if it is not relevant, or if the row is -1 (no document)."""
        if not len(self.query_J):
            return np.zeros(ranked_QK.shape)
        key_J = self.query_J * self.num_documents + self.document_J
        order_J = np.argsort(key_J)
        key_QK = np.arange(self.num_queries)[:, None] * self.num_documents + ranked_QK
        index_QK = np.minimum(np.searchsorted(key_J[order_J], key_QK), len(key_J) - 1)
        is_judged_QK = (key_J[order_J][index_QK] == key_QK) & (ranked_QK >= 0)
        return np.where(is_judged_QK, np.maximum(self.relevance_J[order_J][index_QK], 0.0), 0.0)

    def ideal_gain(self, cutoff: int) -> Floats:
        """The grades in the ideal ranking of each query, (Q, cutoff), padded with 0."""
        relevant_J = self.relevance_J > 0
        query_J, relevance_J = self.query_J[relevant_J], self.relevance_J[relevant_J]
        order_J = np.lexsort((-relevance_J, query_J))
        query_J, relevance_J = query_J[order_J], relevance_J[order_J]
        rank_J = np.arange(len(query_J)) - np.searchsorted(query_J, query_J)
        kept_J = rank_J < cutoff
        ideal_QK = np.zeros((self.num_queries, cutoff))
        ideal_QK[query_J[kept_J], rank_J[kept_J]] = relevance_J[kept_J]
        return ideal_QK

    def num_relevant(self) -> Ints:
        """The number of relevant documents of each query, (Q,)."""
        return np.bincount(self.query_J[self.relevance_J > 0], minlength=self.num_queries).astype(np.int64)


def retrieval_metrics(ranked_QK: Ints, qrels: Qrels, cutoffs: Sequence[int] = (10, 100)) -> dict[str, float]:
    """The means of `query_metrics` over the queries, by name; empty if no query has a judgment."""
    values = query_metrics(ranked_QK, qrels, cutoffs)
    return {name: float(value_Q.mean()) for name, value_Q in values.items() if len(value_Q)}


def query_ndcg(ranked_QK: Ints, qrels: Qrels) -> Floats:
    """nDCG@10 of each query with a judgment, in the order of the queries, (Q,)."""
    return query_metrics(ranked_QK, qrels, (10,))["ndcg_at_10"]


def query_metrics(ranked_QK: Ints, qrels: Qrels, cutoffs: Sequence[int] = (10, 100)) -> dict[str, Floats]:
    """nDCG, MRR, recall and MAP of each query with a judgment, (Q,) each, at each cutoff, by names like `ndcg_at_10`.

    `ranked_QK` has the rows of documents, best first, with -1 for no document. A cutoff may be larger than K. A query
    without a relevant document has the value 0.
    """
    gain_QK, num_relevant_Q = qrels.gain(ranked_QK), qrels.num_relevant()
    counted_Q = np.bincount(qrels.query_J, minlength=qrels.num_queries) > 0
    metrics = dict[str, Floats]()
    for cutoff in cutoffs:
        best_QK = gain_QK[:, :cutoff]
        relevant_QK, rank_K = best_QK > 0, np.arange(best_QK.shape[1]) + 1.0
        precision_QK = relevant_QK.cumsum(axis=1) / rank_K
        metrics[f"ndcg_at_{cutoff}"] = _ratio(dcg(best_QK), dcg(qrels.ideal_gain(cutoff)))
        # One over the rank of the first relevant document.
        metrics[f"mrr_at_{cutoff}"] = np.max(relevant_QK / rank_K, axis=1, initial=0.0)
        metrics[f"recall_at_{cutoff}"] = _ratio(relevant_QK.sum(axis=1), num_relevant_Q)
        # Documents beyond the cutoff count in the denominator, as in trec_eval's `map_cut`.
        metrics[f"map_at_{cutoff}"] = _ratio((precision_QK * relevant_QK).sum(axis=1), num_relevant_Q)
    return {name: value_Q[counted_Q] for name, value_Q in metrics.items()}


def dcg(gain_QK: Floats) -> Floats:
    """Discounted cumulative gain of each query, (Q,)."""
    value_Q: Floats = gain_QK @ (1.0 / np.log2(np.arange(gain_QK.shape[1]) + 2.0))
    return value_Q


def spearman(first_N: Floats, second_N: Floats) -> float:
    """Spearman's rank correlation, with average ranks for ties; 0 if either side is constant."""
    from scipy.stats import spearmanr

    if np.ptp(first_N) == 0 or np.ptp(second_N) == 0:
        return 0.0
    return float(spearmanr(first_N, second_N).statistic)


def _ratio(part_Q: Floats | Ints, whole_Q: Floats | Ints) -> Floats:
    whole = np.asarray(whole_Q, dtype=np.float64)
    ratio_Q: Floats = np.divide(part_Q, whole, out=np.zeros_like(whole), where=whole > 0)
    return ratio_Q


PAIR_FIELDS = ("sentence1", "sentence2", "label")
RERANKING_FIELDS = ("query", "positive", "negatives")
SUMMARY_FIELDS = ("human_summaries", "machine_summaries", "relevance")
_ROW_FIELDS = (*SCORED_FIELDS, *LABELLED_FIELDS, *PAIR_FIELDS, *RERANKING_FIELDS, *SUMMARY_FIELDS)
_ROWS = "sentence1, sentence2, score or text, label, or the fields of another kind"
_LAYOUTS = f"write corpus.jsonl, queries.jsonl and qrels.tsv, or test.jsonl with {_ROWS}"
_QRELS_HEADER = ("query-id", "corpus-id", "score")


@dataclass(frozen=True, eq=False)
class RetrievalFolder:
    """Documents (title and text), queries with a judgment, the qrels by row, and the number of other queries.

    For reranking, `candidates` are the rows of each query's documents, the relevant ones first.
    """

    documents: Sequence[str]
    document_ids: Sequence[str]
    queries: list[str]
    query_ids: list[str]
    qrels: Qrels
    num_skipped: int = 0
    candidates: list[list[int]] | None = None

    @property
    def kind(self) -> str:
        return "retrieval" if self.candidates is None else "reranking"

    @property
    def context_texts(self) -> Sequence[str]:
        return self.documents

    @property
    def counts(self) -> dict[str, int]:
        return {"num_queries": len(self.queries), "num_documents": len(self.documents)}

    @cached_property
    def tie_order_N(self) -> Ints:
        """The rows of the documents by descending id, as trec_eval ranks equal scores, (N,)."""
        ids = self.document_ids if isinstance(self.document_ids, PackedTexts) else PackedTexts(self.document_ids)
        # Arrow compares UTF-8, whose order is that of the code points.
        order_N: Ints = pc.array_sort_indices(ids.to_arrow(), order="descending").to_numpy().view(np.int64)
        return order_N


class RetrievalFiles(NamedTuple):
    """The files of retrieval data."""

    corpus: Path
    queries: Path
    qrels: Path


@dataclass(frozen=True, eq=False)
class TaskFolder:
    """Data of another kind: the columns of each split, under the names that the task class of mteb expects.

    A context is drawn from `context_texts`: never from texts to classify. `counts` are sizes for tables.
    """

    kind: str
    splits: dict[str, dict[str, list[Any]]]
    context_texts: list[str]
    counts: dict[str, int]


EvaluationFolder = RetrievalFolder | TaskFolder


def read_evaluation_folder(path: str | PathLike[str], show_progress: bool = False) -> EvaluationFolder:
    """Read the evaluation data in a folder, and check every row.

    Retrieval is BEIR's layout: `corpus.jsonl` {"_id", "title", "text"}, `queries.jsonl` {"_id", "text"}, `qrels.tsv`
    (or `qrels/test.tsv`) query-id, corpus-id, score. Classification is `train.jsonl` and `test.jsonl` {"text",
    "label"}. The other kinds are a single `test.jsonl`: clustering {"text", "label"}, similarity {"sentence1",
    "sentence2", "score"}, pair classification {"sentence1", "sentence2", "label"} with labels 0 and 1, reranking
    {"query", "positive", "negatives"}, summarisation {"human_summaries", "machine_summaries", "relevance"}. Every JSONL
    file may be gzipped as `.jsonl.gz`. Other fields are ignored. `show_progress` draws a bar while a corpus is read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(str(folder), "is not a folder", _LAYOUTS)
    if _find(folder, "corpus") or _find(folder, "queries") or _find_qrels(folder):
        return read_retrieval_files(retrieval_files(folder), show_progress)
    test = _find(folder, "test")
    if test is None:
        raise InputError(str(folder), "has no evaluation data", _LAYOUTS)
    where, first = next(iter(open_reader(test, _ROW_FIELDS, ())))
    if "sentence1" in first:
        return _read_pairs(test) if "label" in first and "score" not in first else _read_similarity(test)
    if "machine_summaries" in first:
        return _read_summarisation(test)
    if "query" in first and "positive" in first and "text" not in first:
        return _read_reranking(test)
    if "label" not in first:
        present = shorten(", ".join(map(str, first)), 50) or "none"
        raise InputError(where, f"has the fields of no known kind (found: {present})", f"write {_ROWS}")
    train = _find(folder, "train")
    test_rows = _read_labelled(test, needs_two_labels=train is None)
    return clustering(*test_rows) if train is None else _classification(_read_labelled(train, True), test_rows)


def read_retrieval_folder(path: str | PathLike[str]) -> RetrievalFolder:
    folder = read_evaluation_folder(path)
    if not isinstance(folder, RetrievalFolder) or folder.kind != "retrieval":
        hint = "name a folder with corpus.jsonl, queries.jsonl and qrels.tsv"
        raise InputError(str(path), f"has {folder.kind} data, not retrieval data", hint)
    return folder


def find_evaluation_folders(root: str | PathLike[str]) -> list[Path]:
    """The evaluation folders at or below `root`, sorted by path, not those inside others."""
    folders = list(_walk(Path(root)))
    if not folders:
        raise InputError(str(root), "has no evaluation data", _LAYOUTS)
    return folders


def retrieval_files_of(qrels: str | PathLike[str]) -> RetrievalFiles:
    """The retrieval files that belong to a qrels file, such as `FOLDER/qrels.tsv` or `FOLDER/qrels/train.tsv`."""
    path = Path(qrels)
    if not path.is_file():
        raise InputError(str(path), "no such file", "name a qrels file of a retrieval folder")
    return retrieval_files(path.parent.parent if path.parent.name == "qrels" else path.parent, path)


def retrieval_files(folder: Path, qrels: Path | None = None) -> RetrievalFiles:
    """The files of a retrieval folder; by default with the judgments of its test split."""
    corpus, queries, qrels = _find(folder, "corpus"), _find(folder, "queries"), qrels or _find_qrels(folder)
    if corpus is not None and queries is not None and qrels is not None:
        return RetrievalFiles(corpus, queries, qrels)
    missing = "corpus.jsonl" if corpus is None else "queries.jsonl" if queries is None else "qrels.tsv"
    raise InputError(str(folder), f"{missing} is missing", _LAYOUTS)


def read_retrieval_files(files: RetrievalFiles, show_progress: bool = False) -> RetrievalFolder:
    """The data of retrieval files: of the queries, which are often those of all splits, only the judged ones."""
    document_ids, documents = read_packed_corpus(files.corpus, show_progress)
    text_of_query = _read_queries(files.queries)
    relevance = read_qrels(files.qrels, text_of_query.keys(), document_ids)
    query_ids = [query for query in text_of_query if query in relevance]
    judged = set().union(*relevance.values())
    document_row = {document: row for row, document in enumerate(document_ids) if document in judged}
    pairs = [
        (query_row, document_row[document], grade)
        for query_row, query in enumerate(query_ids)
        for document, grade in relevance[query].items()
    ]
    qrels = Qrels.of(pairs, len(query_ids), len(documents))
    queries = [text_of_query[query] for query in query_ids]
    return RetrievalFolder(documents, document_ids, queries, query_ids, qrels, len(text_of_query) - len(query_ids))


def read_packed_corpus(corpus: Path, show_progress: bool) -> tuple[PackedTexts, PackedTexts]:
    document_ids, documents = PackedTexts(), PackedTexts()
    for document in read_corpus(corpus, show_progress=show_progress):
        document_ids.append(document.document_id)
        documents.append(document.text)
    return document_ids, documents


def read_qrels(
    path: str | PathLike[str], query_ids: Collection[str], document_ids: Iterable[str]
) -> dict[str, dict[str, float]]:
    """The grade of each judged document of each query; 0 or below means not relevant.

    Columns are query-id, corpus-id, score under that header (BEIR), or query, iteration, document, score without one
    (TREC, tabs or spaces). `document_ids` are gone through once.
    """
    relevance: dict[str, dict[str, float]] = {}
    place_of: dict[str, str] = {}
    for number, encoded in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        where = f"{path}:{number}"
        try:
            line = encoded.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise InputError(where, "is not valid UTF-8", "save the file as UTF-8") from None
        if not line.strip() or (number == 1 and tuple(line.strip().split("\t")) == _QRELS_HEADER):
            continue
        query, document, grade = _parse_qrel(where, line)
        if query not in query_ids:
            raise _unknown_id(where, "query", query)
        place_of.setdefault(document, where)
        first = relevance.setdefault(query, {}).setdefault(document, grade)
        if first != grade:
            what = f"{shown(query)} and {shown(document)} were judged {first:g} above, here {grade:g}"
            raise InputError(where, what, "keep one")
    known = {document for document in document_ids if document in place_of}
    for document, where in place_of.items():
        if document not in known:
            raise _unknown_id(where, "document", document)
    if not any(grade > 0 for grades in relevance.values() for grade in grades.values()):
        what = "no document is relevant to any query" if relevance else "has no relevance judgments"
        raise InputError(str(path), what, "give at least one row a score above 0")
    return relevance


def _unknown_id(where: str, name: str, value: str) -> InputError:
    return InputError(where, f"no {name} has the id {shown(value)}", f"add that {name}, or drop the row")


def _parse_qrel(where: str, line: str) -> tuple[str, str, float]:
    columns = [column.strip() for column in line.split("\t")]
    if len(columns) == 1:
        columns = line.split()
    if len(columns) == 4:
        del columns[1]
    if len(columns) != 3:
        raise InputError(where, f"has {len(columns)} columns", f"write {', '.join(_QRELS_HEADER)}, separated by tabs")
    try:
        grade = float(columns[2])
    except ValueError:
        grade = math.nan
    if not math.isfinite(grade):
        raise InputError(where, f"the score must be a number, got {shown(columns[2])}", "write 0, 1, 2, …")
    return columns[0], columns[1], grade


def _walk(folder: Path) -> Iterator[Path]:
    if _find(folder, "corpus") or _find(folder, "test") or _find_qrels(folder):
        yield folder
    elif folder.is_dir():
        for child in sorted(child for child in folder.iterdir() if child.is_dir()):
            yield from _walk(child)


def _find(folder: Path, name: str) -> Path | None:
    found = [path for path in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz") if path.is_file()]
    if len(found) > 1:
        raise InputError(str(folder), f"{found[0].name} and {found[1].name} are both there", "keep one of them")
    return found[0] if found else None


def _find_qrels(folder: Path) -> Path | None:
    return next((path for path in (folder / "qrels.tsv", folder / "qrels" / "test.tsv") if path.is_file()), None)


def _read_queries(path: Path) -> dict[str, str]:
    text_of_query: dict[str, str] = {}
    for where, fields in open_reader(path, ("_id", "text"), ("_id", "text")):
        query = identifier_field(where, fields, "_id")
        if query in text_of_query:
            raise InputError(where, f"the id {shown(query)} occurs a second time", "make the ids unique")
        text_of_query[query] = _filled_text(where, fields, "text")
    return text_of_query


def _read_similarity(path: Path) -> TaskFolder:
    reader = open_reader(path, SCORED_FIELDS, SCORED_FIELDS)
    pairs = [parse_scored_pair(fields, {}, where) for where, fields in reader]
    if len({pair.score for pair in pairs}) < 2:
        raise InputError(str(path), f"every score is {pairs[0].score}", "a rank correlation needs two different scores")
    first, second = [pair.sentence1 for pair in pairs], [pair.sentence2 for pair in pairs]
    return _pairs("sts", first, second, score=[float(pair.score) for pair in pairs])


def _pairs(kind: str, first: list[str], second: list[str], **marks: list[Any]) -> TaskFolder:
    columns = {"sentence1": first, "sentence2": second, **marks}
    return TaskFolder(kind, {"test": columns}, [*first, *second], {"num_pairs": len(first)})


def _read_pairs(path: Path) -> TaskFolder:
    first, second, labels = [], [], []
    for where, fields in open_reader(path, PAIR_FIELDS, PAIR_FIELDS):
        first.append(_filled_text(where, fields, "sentence1"))
        second.append(_filled_text(where, fields, "sentence2"))
        value = fields.get("label")
        if not isinstance(value, int) or value not in (0, 1):
            hint = "write 1 for a pair with the same meaning, else 0"
            raise InputError(where, f"label is {shown(str(value))}, expected 0 or 1", hint)
        labels.append(int(value))
    if len({*labels}) < 2:
        raise InputError(str(path), f"every label is {labels[0]}", "add pairs with the other label: 0 and 1 are needed")
    return _pairs("pair_classification", first, second, labels=labels)


def _read_reranking(path: Path) -> RetrievalFolder:
    """Read rows, which are training records (see `parse_record`); a text that a row repeats is one candidate."""
    queries: list[str] = []
    row_of: dict[str, int] = {}
    candidates, pairs = list[list[int]](), list[tuple[int, int, float]]()
    for where, fields in open_reader(path, RERANKING_FIELDS, RERANKING_FIELDS):
        record = parse_record({name: fields[name] for name in RERANKING_FIELDS if name in fields}, {}, where)
        relevant = dict.fromkeys(record.positives)
        others = dict.fromkeys(negative.text for negative in record.negatives)
        if not others:
            raise InputError(where, "the query has no negatives", "list texts that are not relevant as 'negatives'")
        if relevant.keys() & others.keys():
            raise InputError(where, "a text is both positive and negative", "keep it on one side")
        rows = [row_of.setdefault(text, len(row_of)) for text in chain(relevant, others)]
        pairs += [(len(queries), row, 1.0) for row in rows[: len(relevant)]]
        queries.append(record.query)
        candidates.append(rows)
    document_ids, query_ids = (list(map(str, range(len(texts)))) for texts in (row_of, queries))
    qrels = Qrels.of(pairs, len(queries), len(row_of))
    return RetrievalFolder(list(row_of), document_ids, queries, query_ids, qrels, candidates=candidates)


def _read_summarisation(path: Path) -> TaskFolder:
    columns: dict[str, list[Any]] = {name: [] for name in SUMMARY_FIELDS}
    for where, fields in open_reader(path, SUMMARY_FIELDS, SUMMARY_FIELDS):
        for name in SUMMARY_FIELDS[:2]:
            items = _items(where, fields, name)
            columns[name].append([_filled_text(where, {label: value}, label) for label, value in items])
        relevance = list[float]()
        for label, value in _items(where, fields, "relevance"):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(where, f"{label} is {shown(str(value))}, expected a finite number", "give it a number")
            relevance.append(float(value))
        if len(columns["machine_summaries"][-1]) != len(relevance):
            what = f"relevance has length {len(relevance)}, machine_summaries {len(columns['machine_summaries'][-1])}"
            raise InputError(where, what, "give each machine summary a number")
        columns["relevance"].append(relevance)
    if all(len({*relevance}) < 2 for relevance in columns["relevance"]):
        raise InputError(str(path), "no row has two different numbers in relevance", "rank correlation needs them")
    texts = [*chain.from_iterable(chain(columns["human_summaries"], columns["machine_summaries"]))]
    num_texts = len(columns["relevance"])
    # mteb requires the texts too, but does not use them.
    return TaskFolder("summarisation", {"test": {"text": [""] * num_texts, **columns}}, texts, {"num_texts": num_texts})


def clustering(texts: list[str], labels: list[str]) -> TaskFolder:
    counts = {"num_texts": len(texts), "num_labels": len(set(labels))}
    return TaskFolder("clustering", {"test": {"sentences": texts, "labels": labels}}, texts, counts)


def _classification(train: tuple[list[str], list[str]], test: tuple[list[str], list[str]]) -> TaskFolder:
    """Both splits with labels as numbers; mteb scores two labels as binary classification, where 1 is positive."""
    # The labels of the test split come first, so that two of them are 0 and 1 even if training has others.
    names = [*sorted({*test[1]}), *sorted({*train[1]} - {*test[1]})]
    number_of = {name: number for number, name in enumerate(names)}
    splits: dict[str, dict[str, list[Any]]] = {
        split: {"text": texts, "label": [number_of[label] for label in labels]}
        for split, (texts, labels) in {"train": train, "test": test}.items()
    }
    counts = {"num_train": len(train[0]), "num_test": len(test[0]), "num_labels": len(set(train[1]))}
    return TaskFolder("classification", splits, train[0], counts)


def _read_labelled(path: Path, needs_two_labels: bool) -> tuple[list[str], list[str]]:
    reader = open_reader(path, LABELLED_FIELDS, LABELLED_FIELDS)
    rows = [parse_labelled_text(fields, {}, where) for where, fields in reader]
    if needs_two_labels and len({row.label for row in rows}) < 2:
        raise InputError(str(path), f"every label is {shown(rows[0].label)}", "two different labels are needed")
    return [row.text for row in rows], [row.label for row in rows]


def _filled_text(where: str, fields: Mapping[str, Any], name: str) -> str:
    value = text_field(where, fields, name)
    if not value.strip():
        raise InputError(where, f"field {name!r} is empty", "write a text, or drop the row")
    return value


def _items(where: str, fields: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """The items of a non-empty list in a field, each with a label for messages."""
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        what = f"field {name!r} must be a list with an item, got {shown(str(value))}"
        raise InputError(where, what, "write a list, even for one item")
    return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
