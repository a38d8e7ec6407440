"""A corpus file: one document a line, with an id and a text."""

from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

from embeddings.common.errors import InputError
from embeddings.data.readers import read_jsonl


class Document(NamedTuple):
    """One document.

    Attributes:
        document_id: Its id, unique in the corpus.
        text: What is encoded: title and text, with a space between where there are both.
    """

    document_id: str
    text: str


def read_corpus(path: str | PathLike[str]) -> Iterator[Document]:
    """The documents of a JSONL file, gzipped or not.

    A line is `{"_id", "title", "text"}` as in BEIR, or anything with a `text`: a missing id is the row's number from 0,
    a missing title is none.

    Raises:
        InputError: If the file or a row cannot be used, or an id occurs twice; the message names file and row.
    """
    seen: set[str] = set()
    for number, (where, fields) in enumerate(read_jsonl(path)):
        document = Document(_document_id(where, fields, number), _document_text(where, fields))
        if document.document_id in seen:
            raise InputError(where, f"the id {document.document_id!r} occurs a second time", "give each document its own")
        seen.add(document.document_id)
        yield document


def _document_id(where: str, fields: dict[str, Any], number: int) -> str:
    value = fields.get("_id", number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(where, f"field '_id' must be a text or a whole number, got {value!r}", "write it as a text")
    return str(value)


def _document_text(where: str, fields: dict[str, Any]) -> str:
    parts = [string_field(where, {"title": "", **fields}, "title"), string_field(where, fields, "text")]
    return " ".join(part for part in parts if part)


def string_field(where: str, fields: dict[str, Any], name: str) -> str:
    """The text in a field of a row.

    Raises:
        InputError: If the field is missing or no text.
    """
    if name not in fields:
        raise InputError(where, f"field {name!r} is missing (found: {', '.join(sorted(fields)) or 'none'})", "add it")
    value = fields[name]
    if not isinstance(value, str):
        raise InputError(where, f"field {name!r} must be a text, got {value!r}", "write it between quotes")
    return value
