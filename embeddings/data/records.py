"""Training records: what a row of a file means, how bad rows are refused, examples made of records, Parquet files."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.data.table import Table

NUM_LEVELS = 4
RECORD_FIELDS = ("query", "positive", "negatives", "instruction", "label", "score", "id", "language")
LABELLED_FIELDS = ("text", "label")
SCORED_FIELDS = ("sentence1", "sentence2", "score")
# Columns that other libraries' files have in place of a field.
_LOOK_ALIKES = {
    "query": r"anchor|question|sentence_?1",
    "positive": r"pos|positives|passage|answer|sentence_?2",
    "negatives": r"(hard_?)?(neg|negative)s?(_passages|_?\d+)?",
    "text": r"sentence|content|document",
    "label": r"labels|class|category",
    "sentence1": r"sentence_1|text1|anchor",
    "sentence2": r"sentence_2|text2|positive",
    "score": r"similarity|label",
}


class Negative(NamedTuple):
    """A hard negative. `level` is 1 (hardest) to 4 (easiest), or 0 where the source gives none."""

    text: str
    level: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One training record as a person wrote it.

    Attributes:
        query: Query text.
        positives: Texts relevant to it, at least one.
        negatives: Texts that are not, hardest first.
        label: Class of query and positives, as `label_key` writes it, or None.
        score: How relevant the positive is, in the source's own unit, or None.
        id: The source's own name of the record, or None.
        instruction: What this query is for, in place of the source's instruction, or None.
        language: What language its texts are in, as the source calls it, or None.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    label: str | None = None
    score: float | None = None
    id: str | None = None
    instruction: str | None = None
    language: str | None = None

    @property
    def suspicion(self) -> str | None:
        """What the record's texts say against each other, or None: nearly always a slip in how it was made."""
        query, positives = self.query.strip(), {text.strip() for text in self.positives}
        negatives = {negative.text.strip() for negative in self.negatives}
        if not positives.isdisjoint(negatives):
            return "a negative is also a positive"
        if query in negatives:
            return "a negative is the query itself"
        if query in positives:
            return "a positive is the query itself"
        return None


class LabelledText(NamedTuple):
    """A text and its class, as `label_key` writes it."""

    text: str
    label: str


class ScoredPair(NamedTuple):
    """Two texts and how similar people found them, in the source's own unit."""

    sentence1: str
    sentence2: str
    score: float


def parse_record(fields: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Record:
    """The record that a row holds. Columns that are not asked for are ignored.

    A missing or null `negatives`, `instruction`, `label`, `score`, `id` or `language` means that there is none, unless
    `columns` maps the field: a mapping that finds no column is refused, and a column that another field is mapped to is
    that field's alone. Negatives with levels come out hardest first, in the row's order within a level.

    Args:
        fields: The row by column name.
        columns: Column of a field, for the fields whose column has another name.
        where: File and row, for messages.

    Raises:
        InputError: If a field is missing, of a wrong type, null, empty, white space, not finite, or not text that can
            be written as UTF-8; the message names file, row and field.
    """
    row = _Row(fields, columns, where)
    return Record(
        query=row.text("query", row.required("query")),
        positives=row.positives(row.required("positive")),
        negatives=row.negatives(row.optional("negatives")),
        label=None if (label := row.optional("label")) is None else row.label(label),
        score=None if (score := row.optional("score")) is None else row.number("score", score),
        id=None if (name := row.optional("id")) is None else row.identifier("id", name),
        instruction=None if (text := row.optional("instruction")) is None else row.text("instruction", text),
        language=None if (name := row.optional("language")) is None else row.identifier("language", name),
    )


def parse_labelled_text(fields: Mapping[str, Any], columns: Mapping[str, str], where: str) -> LabelledText:
    """The text and class that a row holds (`text`, `label`); arguments and errors as in `parse_record`."""
    row = _Row(fields, columns, where)
    return LabelledText(row.text("text", row.required("text")), row.label(row.required("label")))


def parse_scored_pair(fields: Mapping[str, Any], columns: Mapping[str, str], where: str) -> ScoredPair:
    """The pair that a row holds (`sentence1`, `sentence2`, `score`); arguments and errors as in `parse_record`."""
    row = _Row(fields, columns, where)
    return ScoredPair(
        row.text("sentence1", row.required("sentence1")),
        row.text("sentence2", row.required("sentence2")),
        row.number("score", row.required("score")),
    )


def look_alikes(names: Iterable[str], fields: Sequence[str]) -> dict[str, str]:
    """The columns that look like one of some fields under another name, each with its field."""
    return {
        name: field
        for name in names
        for field in fields
        if name not in fields and field in _LOOK_ALIKES and re.fullmatch(_LOOK_ALIKES[field], name, re.IGNORECASE)
    }


def label_key(value: str | int) -> str:
    """A class as text: a Boolean as JSON writes it, a whole number in decimals, a text as it is."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Row:
    """One row with what messages about it need."""

    def __init__(self, fields: Mapping[str, Any], columns: Mapping[str, str], where: str) -> None:
        self.fields, self.columns, self.where = fields, columns, where

    def required(self, field: str) -> Any:
        """The value of a field that must be there."""
        column = self.columns.get(field, field)
        if column not in self.fields:
            alike = next(iter(look_alikes(map(str, self.fields), (field,))), "YOUR_COLUMN")
            names = shortened(", ".join(map(str, self.fields)), 80)
            what = f"field {field!r}: no column {column!r} among {names}"
            raise self.fault(what, f"map it with columns: {{{field}: {alike}}}")
        return self.fields[column]

    def optional(self, field: str) -> Any:
        """The value of a field that may be missing, or None; a field that `columns` maps must be there."""
        if field in self.columns:
            return self.required(field)
        return None if field in self.columns.values() else self.fields.get(field)

    def text(self, name: str, value: Any) -> str:
        """A text with something in it."""
        if not isinstance(value, str):
            raise self.fault(f"{name} is {kind_of(value)}, expected text", "give it a text, or leave the row out")
        if not value.strip():
            kind = "white space" if value else "an empty text"
            raise self.fault(f"{name} is {kind}", "give it a text, or leave the row out")
        if "\x00" in value:
            raise self.fault(f"{name} holds a NUL character", "take the character out")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                what = f"{name} holds half of a character (a lone surrogate)"
                raise self.fault(what, "write the file again as UTF-8") from None
        return value

    def positives(self, value: Any) -> tuple[str, ...]:
        """One text, or a list of one or more."""
        if isinstance(value, str):
            return (self.text("positive", value),)
        if not isinstance(value, list):
            raise self.fault(f"positive is {kind_of(value)}, expected text or a list of texts", "give it a text")
        if not value:
            raise self.fault("positive is an empty list", "give at least one text, or leave the row out")
        return tuple(self.text(f"positive[{i}]", text) for i, text in enumerate(value))

    def negatives(self, value: Any) -> tuple[Negative, ...]:
        """One text, or a list of texts, or of texts with levels; all of one kind."""
        if value is None:
            return ()
        if isinstance(value, str):
            return (Negative(self.text("negatives", value)),)
        if not isinstance(value, list):
            raise self.fault(f"negatives is {kind_of(value)}, expected text or a list", "write it as a list of texts")
        if not value or not isinstance(value[0], dict):
            return tuple(Negative(self.text(f"negatives[{i}]", text)) for i, text in enumerate(value))
        return tuple(sorted((self._graded(i, item) for i, item in enumerate(value)), key=lambda item: item.level))

    def _graded(self, index: int, item: Any) -> Negative:
        name = f"negatives[{index}]"
        if not isinstance(item, dict):
            what = f"{name} is {kind_of(item)} where negatives[0] is an object"
            raise self.fault(what, "give every negative a level, or none")
        level = item.get("level")
        if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= NUM_LEVELS:
            what = f"{name}.level is {level!r}, expected a whole number from 1 (hardest) to {NUM_LEVELS}"
            raise self.fault(what, "correct the level, or write the negatives as plain texts")
        return Negative(self.text(f"{name}.text", item.get("text")), level)

    def label(self, value: Any) -> str:
        """A class: a text or a whole number."""
        if not isinstance(value, str | int):
            what = f"label is {kind_of(value)}, expected text or a whole number"
            raise self.fault(what, "give it a label, or leave the row out")
        return self.text("label", label_key(value))

    def number(self, name: str, value: Any) -> float:
        """A finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = value if isinstance(value, float) else kind_of(value)
            raise self.fault(f"{name} is {shown}, expected a finite number", "give it a number, or leave the row out")
        return float(value)

    def identifier(self, name: str, value: Any) -> str:
        """A text, or a whole number as text."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name, value)

    def fault(self, what: str, fix: str) -> InputError:
        """The error of this row."""
        return InputError(self.where, what, fix)


def kind_of(value: Any) -> str:
    """What a value is, as JSON's author would call it."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", bytes: "bytes"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def shortened(text: str, length: int) -> str:
    """A text of at most `length` characters: the rest is an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True, slots=True)
class Example:
    """One query with its relevant and irrelevant texts, its random choices still open.

    Attributes:
        row: Row in the mixture.
        draw: Key of the random choices (see `PlanEntry`).
        source: Index of the source in the mixture.
        query: Query text without its prompt.
        positives: Texts relevant to it, at least one.
        negatives: Texts that are not, hardest first (in random order where a curriculum adds levels up).
        label: Class within the source, -1 where it has none; the positives have the same.
        negative_labels: Class of each negative, as long as `negatives`, or empty where the source has none.
        query_prompt: Text put before the query, "" for none.
        document_prompt: Text put before positives and negatives, "" for none (NV-Embed: set on symmetric tasks only).
        in_batch_negatives: Whether other queries' candidates may serve as negatives.
        surrogate_query: Vector of the query by another model, (S,) float32, or None where the source has none.
        surrogate_positives: The same of each positive, (P, S) float32.
        surrogate_negatives: Gives the same of the first n negatives, (n, S) float32; None where they have none.
        level: Level of hard negatives that the step asks for, 0 where it asks for none.
    """

    row: int
    draw: int
    source: int
    query: str
    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    label: int = -1
    negative_labels: tuple[int, ...] = ()
    query_prompt: str = ""
    document_prompt: str = ""
    in_batch_negatives: bool = True
    surrogate_query: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    surrogate_positives: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    surrogate_negatives: Callable[[int], npt.NDArray[np.float32]] | None = field(default=None, compare=False)
    level: int = 0


# Records of a row group: as many are in memory at once.
GROUP_ROWS = 4096


def has_levels(table: Table, where: str) -> bool:
    """Whether the negatives of a converted source have levels.

    Raises:
        InputError: If some have and others have not: one column of a Parquet file holds texts, or texts with levels.
    """
    found = [(int(levels.min()), int(levels.max())) for levels in table.negative_levels() if levels.size]
    is_graded = any(most > 0 for _, most in found)
    if is_graded and any(least == 0 for least, _ in found):
        raise InputError(where, "some negatives have a level and others have none", "give all of them one, or none")
    return is_graded


def write_records(path: Path, records: Iterable[Record], graded: bool) -> int:
    """Write records to a Parquet file with the columns of a source of pairs; returns their number.

    `GROUP_ROWS` records are in memory at a time. The file is written in place: give the path that `atomic_path` gives.
    Determinism: the same records give the same bytes with one version of pyarrow.
    """
    return _write_rows(path, (_fields(record, graded) for record in records), record_schema(graded))


def write_labelled_texts(path: Path, texts: Iterable[LabelledText]) -> int:
    """Write texts and their classes, each as text, to a Parquet file (`text`, `label`); see `write_records`."""
    schema = pa.schema([(name, pa.string()) for name in LABELLED_FIELDS])
    return _write_rows(path, (text._asdict() for text in texts), schema)


def _write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> int:
    """Write rows with these columns; returns their number."""
    count, remaining = 0, iter(rows)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(islice(remaining, GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema))
            count += len(group)
    return count


def record_schema(graded: bool) -> pa.Schema:
    """The columns of a source of pairs, the negatives with levels (`graded`) or without."""
    negative = pa.struct([("text", pa.string()), ("level", pa.int8())]) if graded else pa.string()
    types = dict.fromkeys(RECORD_FIELDS, pa.string())
    types |= {"positive": pa.list_(pa.string()), "negatives": pa.list_(negative), "score": pa.float64()}
    return pa.schema(types)


def record_table(records: Sequence[Record], graded: bool) -> pa.Table:
    """The records as the columns of `record_schema`."""
    return pa.Table.from_pylist([_fields(record, graded) for record in records], record_schema(graded))


def _fields(record: Record, graded: bool) -> dict[str, Any]:
    """The record as a row."""
    negatives: list[Any] = [item._asdict() if graded else item.text for item in record.negatives]
    return {
        "query": record.query,
        "positive": list(record.positives),
        "negatives": negatives or None,
        "instruction": record.instruction,
        "label": record.label,
        "score": record.score,
        "id": record.id,
        "language": record.language,
    }
