"""Queries that people asked: logs, pairs and labelled folders, and the file that asks for judgements."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.adaptation.candidates import Passage, key_of, read_passages
from embeddings.common.errors import InputError, OptionError, shown
from embeddings.common.io import lists_of, write_json_lines
from embeddings.common.text import canonical
from embeddings.data.readers import Block, JsonlReader, LineReader, Reader, Row, open_reader
from embeddings.evaluation.folders import read_retrieval_folder
from embeddings.inference.bm25 import word_tokens

# The kind of a query that a person wrote, and that names none.
REAL = "real"
# The names of each field; the first one that a row has is used.
_NAMES = {
    "query": ("query", "question", "text"),
    "passage": ("passage", "passage_id", "document", "file"),
    "answer": ("answer", "positive"),
    "relevant": ("relevant",),
}
_HINT = "write query and, if known, passage, document or answer"
_GRADES = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0, "0": 0.0, "1": 1.0, "2": 2.0, "3": 3.0}
# Queries that are read of a log, the most frequent first, and answers that are looked for in the passages.
MAX_QUERIES, MAX_ANSWERS = 10_000, 5_000
# An answer is in a passage, or a passage in an answer, that has this share of its words, and so many different words.
_CONTAINED, _LEAST_ANSWER, _LEAST_PASSAGE = 0.9, 4, 20
_BLOCK_PASSAGES = 512


class Label(NamedTuple):
    """A judgement of a query (its row): a grade, and the name of a passage, document or file, or an answer's text."""

    query: int
    grade: float
    name: str
    answer: str


class QueryLog(NamedTuple):
    """Different queries, and their judgements, if there are any; `num_unjudged` rows have `relevant: null`."""

    queries: list[str]
    labels: list[Label]
    num_unjudged: int = 0


class _TextReader(LineReader):
    """Lines of text as rows with the field `query`."""

    def _blocks(self) -> Iterator[Block]:
        for first, lines in self._chunks():
            try:
                texts = [line.decode() for line in lines]
            except UnicodeDecodeError:
                raise InputError(f"{self.path}:{first}", "is not valid UTF-8", "save the file as UTF-8") from None
            numbers = [number for number, text in enumerate(texts, first) if text.strip()]
            if numbers:
                yield Block(str(self.path), numbers, [{"query": text.strip()} for text in texts if text.strip()])


def read_log(path: Path, columns: Mapping[str, str] | None = None) -> QueryLog:
    """The queries of a log (JSON lines, CSV, TSV, Parquet, or text with one a line) or a retrieval folder.

    A row has `query` (or `question`, `text`). A judgement is the name of its `passage`, `document` or `file`, or the
    text of an `answer` (or `positive`, also a list), and perhaps `relevant`: true, false, a grade from 0 to 3, or null
    for a row that is not judged yet. Rows with one query are one query. `columns` names the columns that differ.
    """
    if unknown := next((name for name in columns or {} if name not in _NAMES), None):
        raise OptionError("query_columns", unknown, f"must map {', '.join(_NAMES)}", "write {query: COLUMN}")
    if path.is_dir():
        return _read_folder(path)
    names = {**_NAMES, **{name: (column,) for name, column in (columns or {}).items()}}
    # The different queries, the row of each by its key, and how often it was asked.
    queries, row_of, count = list[str](), dict[str, int](), Counter[int]()
    labels, num_unjudged = list[Label](), 0
    for where, fields in _open(path, [name for each in names.values() for name in each]):
        found = {field: next((fields[name] for name in each if fields.get(name) is not None), None)
                 for field, each in names.items()}  # fmt: skip
        query = found["query"]
        if not isinstance(query, str) or not query.strip():
            raise InputError(where, f"has no query (found: {shown(', '.join(map(str, fields)))})", _HINT)
        row = row_of.setdefault(key_of(query), len(queries))
        if row == len(queries):
            queries.append(" ".join(query.split()))
        count[row] += 1
        is_judged = any(fields.get(name) is not None for name in names["relevant"])
        if not is_judged and any(name in fields for name in names["relevant"]):
            num_unjudged += 1
        else:
            grade = _grade(where, found["relevant"]) if is_judged else 1.0
            labels += [Label(row, grade, *label) for label in _labels(where, found)]
    if not labels:
        queries = [queries[row] for row, _ in count.most_common(MAX_QUERIES)]
    return QueryLog(queries, labels, num_unjudged)


def _open(path: Path, fields: Sequence[str]) -> Iterable[Row]:
    """The rows of a file; one that is neither a table nor JSON is text with one query a line."""
    reader: Reader = open_reader(path, fields, fields[:1])
    if isinstance(reader, JsonlReader):
        lines = _TextReader(path, reader.gzipped)
        if lines.first_line().lstrip()[:1] != b"{":
            return lines
    return reader


def _labels(where: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    name, answer = found["passage"], found["answer"]
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise InputError(where, f"passage is {shown(name)}", "write its id, or the name of its document")
    name, texts = "" if name is None else str(name), list[str]()
    for text in answer if isinstance(answer, list) else [answer]:
        if not isinstance(text, str | None):
            raise InputError(where, f"answer is {shown(text)}", "write it as a text or a list of texts")
        texts += [text] if text and text.strip() else []
    # An answer is looked for if no passage has the name.
    return ((name, text) for text in texts or ([""] if name else []))


def _grade(where: str, value: Any) -> float:
    grade = _GRADES.get(str(value).strip().lower().removesuffix(".0"))
    if grade is None:
        raise InputError(where, f"relevant is {shown(value)}", "write true, false, a grade from 0 to 3, or null")
    return grade


def _read_folder(path: Path) -> QueryLog:
    folder = read_retrieval_folder(path)
    judged = (folder.qrels.query_J, folder.qrels.document_J, folder.qrels.relevance_J)
    labels = [
        Label(query, grade, folder.document_ids[document], folder.documents[document] if grade > 0 else "")
        for query, document, grade in zip(*(each.tolist() for each in judged), strict=True)
    ]
    return QueryLog(list(folder.queries), labels)


class Judgements:
    """The judged passages of each query, found while the passages are gone through once.

    `grades` are those of each judged passage, by the query's row; `documents` are those of its relevant passages.
    `shared` are names of documents that rows of several files have.
    """

    def __init__(self, log: QueryLog) -> None:
        self._log = log
        self._by_name: dict[str, list[Label]] = {}
        for label in log.labels:
            if label.name:
                self._by_name.setdefault(label.name, []).append(label)
        self._found, self._file_of, self.shared = set[str](), dict[str, str](), set[str]()
        self.grades: dict[int, dict[str, float]] = {}
        self.documents: dict[int, set[str]] = {}

    def add(self, passage: Passage) -> None:
        """Record each query's judgements that name a passage, or else its document or file."""
        judged = set[int]()
        for name in (passage.id, passage.document, passage.file):
            if name in self._by_name:
                self._found.add(name)
                if name == passage.document and self._file_of.setdefault(name, passage.file) != passage.file:
                    self.shared.add(name)
                labels = [label for label in self._by_name[name] if label.query not in judged]
                for label in labels:
                    self._record(label.query, passage, label.grade)
                judged.update(label.query for label in labels)

    def _record(self, query: int, passage: Passage, grade: float) -> None:
        grades = self.grades.setdefault(query, {})
        grades[passage.id] = max(grade, grades.get(passage.id, grade))
        if grade > 0:
            self.documents.setdefault(query, set()).add(passage.document)

    @property
    def missing(self) -> list[Label]:
        return [label for label in self._log.labels if label.name not in self._found]

    def find_answers(self, path: Path) -> None:
        """Find the passages that contain the answers of missing judgements, or that the answers contain."""
        from sklearn.feature_extraction.text import CountVectorizer  # slow to import

        known = ((label, {*word_tokens(label.answer)}) for label in self.missing if label.grade > 0)
        answers = [(label, words) for label, words in known if len(words) >= _LEAST_ANSWER][:MAX_ANSWERS]
        if not answers:
            return
        vectorizer = CountVectorizer(analyzer=set, dtype=np.int32)
        matrix_AV = vectorizer.fit_transform(words for _, words in answers)
        length_A = np.array([len(words) for _, words in answers])
        for block in lists_of(read_passages(path, "finding answers in"), _BLOCK_PASSAGES):
            words_of = [{*word_tokens(f"{passage.title} {passage.text}")} for passage in block]
            length_P = np.array([len(words) for words in words_of])
            shared_AP = (matrix_AV @ vectorizer.transform(words_of).T).tocoo()
            answer_K, passage_K = shared_AP.coords
            is_in_K = shared_AP.data >= _CONTAINED * length_A[answer_K]
            is_long_K = length_P[passage_K] >= _LEAST_PASSAGE
            is_in_K |= is_long_K & (shared_AP.data >= _CONTAINED * length_P[passage_K])
            for answer, passage in zip(answer_K[is_in_K].tolist(), passage_K[is_in_K].tolist(), strict=True):
                label, _ = answers[answer]
                self._record(label.query, block[passage], label.grade)


# Items of the label file for one query, and the ranks in which variants are compared.
_PER_QUERY, _DEPTH = 5, 10
Ints = npt.NDArray[np.int64]


def deciding_items(rankings: Mapping[str, Ints], limit: int = 100) -> list[tuple[int, int]]:
    """The queries and passages whose judgement decides most between variants, the most decisive first.

    A relevant passage adds 1 / log2(1 + rank) to the DCG@10 of a variant. An item decides as much as this addition
    varies between the variants (its standard deviation); items on which all agree are left out. Of one query at most
    five are chosen. `rankings` has the passages that each variant ranks, (Q, K) rows, best first, -1 for none.
    """
    if len(rankings) < 2 or len({len(ranked_QK) for ranked_QK in rankings.values()}) != 1:
        raise ValueError("two or more variants must rank the same queries")
    gain: dict[tuple[int, int], list[float]] = {}
    for number, ranked_QK in enumerate(rankings.values()):
        for query, passages in enumerate(ranked_QK[:, :_DEPTH].tolist()):
            for rank, passage in enumerate(passages, 1):
                if passage >= 0:
                    gain.setdefault((query, passage), [0.0] * len(rankings))[number] = 1 / np.log2(1 + rank)
    spread = {item: float(np.std(values)) for item, values in gain.items()}
    chosen, count = list[tuple[int, int]](), Counter[int]()
    for item in sorted(spread, key=lambda item: (-round(spread[item], 9), item)):
        if spread[item] > 1e-9 and count[item[0]] < _PER_QUERY:
            count[item[0]] += 1
            chosen.append(item)
    return chosen[:limit]


def write_label_file(path: Path, queries: Sequence[str], passages: Path, items: Sequence[tuple[int, int]]) -> int:
    """Write the items to judge as JSON lines with `relevant: null`, grouped by query; returns their number.

    The rows of `items` count all queries and the passages of a file. `read_log` reads the file back once `relevant` is
    true, false or a grade from 0 to 3 in some of the rows.
    """
    wanted = {passage for _, passage in items}
    rows = {row: passage for row, passage in enumerate(read_passages(passages)) if row in wanted}
    first = {query: number for number, (query, _) in reversed(list(enumerate(items)))}
    ordered = ((queries[query], rows[row]) for query, row in sorted(items, key=lambda item: first[item[0]]))
    write_json_lines(path, ({"query": canonical(query), "passage": each.id, "title": each.title, "text": each.text,
                             "relevant": None} for query, each in ordered))  # fmt: skip
    return len(items)
