"""How the rows of a public data set become ours: a handful of layouts, each a function from a row to our columns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from embeddings.common.errors import InputError
from embeddings.data.records import (
    LABELLED_FIELDS,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    record_schema,
)

Row = Mapping[str, Any]
# A column, or several whose texts become one (of `negatives`: whose texts are one list).
Columns = Mapping[str, str | list[str]]


@dataclass(frozen=True)
class Kind:
    """A layout of rows: the fields whose columns a source names, and how its rows become those of the file.

    `check` raises an `InputError` where the reader of that file would refuse our row.
    """

    fields: tuple[str, ...]
    schema: pa.Schema
    convert: Callable[[Row, Columns], dict[str, Any]]
    check: Callable[[Row, Mapping[str, str], str], object]
    optional: tuple[str, ...] = ()


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a cell: one, those of a list, or passages of `title` and `text`; what is empty is left out."""
    if isinstance(value, str):
        # The reader refuses these, and no tokenizer reads them.
        text = value.replace("\x00", " ").strip()
        if text:
            yield text
    elif isinstance(value, Mapping):
        passage = " ".join(part for name in ("title", "text") for part in texts_of(value.get(name)))
        yield from texts_of(passage)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def cells(row: Row, names: str | list[str]) -> list[Any]:
    """The cells of one column or of several."""
    return [row[name] for name in ([names] if isinstance(names, str) else names)]


def one_text(row: Row, names: str | list[str]) -> str:
    """The text of one column, or those of several with a space between."""
    return " ".join(texts_of(cells(row, names)))


def _pair(row: Row, columns: Columns) -> dict[str, Any]:
    """`query`, `positive`, and `negatives` where the set brings any."""
    positive = columns["positive"]
    many = isinstance(positive, str) and isinstance(row[positive], list)
    positives = list(texts_of(row[positive])) if many else [one_text(row, positive)]  # type: ignore[index]
    negatives = list(texts_of(cells(row, columns["negatives"]))) if "negatives" in columns else []
    # A set's own lists may name a positive, or the query, among the negatives.
    query = one_text(row, columns["query"])
    negatives = [text for text in negatives if text != query and text not in positives]
    return {"query": query, "positive": positives, "negatives": negatives or None}


def _first_line(row: Row, columns: Columns) -> dict[str, Any]:
    """A text's first line as the query of the rest, as where a corpus has no column of titles."""
    title, _, body = one_text(row, columns["text"]).partition("\n")
    return {"query": title.strip(), "positive": [body.strip()]}


def _labelled(row: Row, columns: Columns) -> dict[str, Any]:
    """`text` and `label`: of several labels the first."""
    (label,) = cells(row, columns["label"])
    if isinstance(label, list):
        label = label[0] if label else None
    return {"text": one_text(row, columns["text"]), "label": label if label is None else str(label)}


def _first_word(row: Row, columns: Columns) -> dict[str, Any]:
    """The same where the label is a list in one text, its parts separated by spaces."""
    labelled = _labelled(row, columns)
    return {**labelled, "label": next(iter((labelled["label"] or "").split()), None)}


def _scored(row: Row, columns: Columns) -> dict[str, Any]:
    """`sentence1`, `sentence2` and `score`, in the set's own unit."""
    (score,) = cells(row, columns["score"])
    first, second = (one_text(row, columns[name]) for name in ("sentence1", "sentence2"))
    return {"sentence1": first, "sentence2": second, "score": None if score is None else float(score)}


def _document(row: Row, _columns: Columns) -> dict[str, Any]:
    """A document of a corpus, in the layout of BEIR."""
    return {
        "_id": str(row["_id"]),
        "title": one_text(row, "title") if "title" in row else "",
        "text": one_text(row, "text"),
    }


def _check_document(row: Row, _columns: Mapping[str, str], where: str) -> None:
    if not row["title"] and not row["text"]:
        raise InputError(where, "the document has no text", "leave the row out")


_LABELLED = pa.schema([(name, pa.string()) for name in LABELLED_FIELDS])
_SCORED = pa.schema([("sentence1", pa.string()), ("sentence2", pa.string()), ("score", pa.float64())])

# `beir` is three of a set's tables, which `fetch` joins: its pairs come from there.
KINDS = {
    "pairs": Kind(
        ("query", "positive", "negatives"), record_schema(False), _pair, parse_record, optional=("negatives",)
    ),
    "first_line": Kind(("text",), record_schema(False), _first_line, parse_record),
    "labelled": Kind(LABELLED_FIELDS, _LABELLED, _labelled, parse_labelled_text),
    "first_label": Kind(LABELLED_FIELDS, _LABELLED, _first_word, parse_labelled_text),
    "scored": Kind(("sentence1", "sentence2", "score"), _SCORED, _scored, parse_scored_pair),
    "beir": Kind(("query", "positive"), record_schema(False), _pair, parse_record, optional=("query", "positive")),
}
CORPUS = Kind((), pa.schema([(name, pa.string()) for name in ("_id", "title", "text")]), _document, _check_document)
