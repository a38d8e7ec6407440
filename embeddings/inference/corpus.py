"""A corpus file: one document a line, with an id and a text."""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common.errors import InputError, OptionError, shown
from embeddings.common.text import shorten
from embeddings.data.readers import open_reader
from embeddings.data.records import kind_of

_FIELDS = ("_id", "title", "text")


class Document(NamedTuple):
    """One document: its id, unique in the corpus, and what is encoded, title and text with a space between."""

    document_id: str
    text: str


def read_corpus(path: str | PathLike[str], columns: Mapping[str, str] | None = None) -> Iterator[Document]:
    """The documents of a JSONL file, gzipped or not, or of a Parquet file.

    A row is `_id`, `title`, `text` as in BEIR, or anything with a `text`. `id` serves where there is no `_id`; without
    either the id is the number of the document from 0. `columns` gives the column of a field that has another name.

    Raises:
        InputError: If the file or a row cannot be used, or an id occurs twice; the message names file and row.
        OptionError: If a column is named for another field.
    """
    for name in columns or ():
        if name not in _FIELDS:
            raise OptionError("columns", name, "must be the column of _id, title or text", "write {text: COLUMN}")
    id_column, title_column, text_column = ((columns or {}).get(name, name) for name in _FIELDS)
    seen: set[str] = set()
    id_columns = (id_column,) if id_column != "_id" or "id" in (title_column, text_column) else ("_id", "id")
    reader = open_reader(Path(path), (*id_columns, title_column, text_column), (text_column,))
    for number, (where, fields) in enumerate(reader):
        named = next((name for name in id_columns if name in fields), id_column)
        document_id = identifier_field(where, {named: number, **fields}, named)
        title = text_field(where, {title_column: "", **fields}, title_column)
        text = text_field(where, fields, text_column)
        if document_id in seen:
            raise InputError(where, f"the id {shown(document_id)} occurs a second time", "give each document its own")
        seen.add(document_id)
        yield Document(document_id, " ".join(part for part in (title, text) if part))


def text_field(where: str, fields: Mapping[str, Any], name: str) -> str:
    """The text in a field of a row; it may be empty. An `InputError` where it is missing, no text, or no UTF-8."""
    if name not in fields:
        found = shorten(", ".join(map(str, fields)), 80) or "none"
        raise InputError(where, f"field {name!r} is missing (found: {found})", "add it")
    value = fields[name]
    if not isinstance(value, str):
        raise InputError(where, f"field {name!r} is {kind_of(value)}, expected text", "write it between quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(where, f"field {name!r} holds half of a character", "write the file again as UTF-8") from None
    return value


def identifier_field(where: str, fields: Mapping[str, Any], name: str) -> str:
    """The id in a field of a row, an integer as text; an `InputError` where it is missing, empty, or neither."""
    if isinstance(fields.get(name), int) and not isinstance(fields[name], bool):
        return str(fields[name])
    value = text_field(where, fields, name)
    if not value.strip():
        raise InputError(where, f"field {name!r} is empty", "give the row an id")
    return value
