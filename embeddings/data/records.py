"""What one row of a training file means, and every way in which it can fail to mean it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from embeddings.common.errors import InputError
from embeddings.data.examples import Negative

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
            raise self.fault(
                f"field {field!r}: no column {column!r} among {shortened(', '.join(map(str, self.fields)), 80)}",
                f"map it with columns: {{{field}: {alike}}}",
            )
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
            raise self.fault(
                f"{name} is {'white space' if value else 'an empty text'}", "give it a text, or leave the row out"
            )
        if "\x00" in value:
            raise self.fault(f"{name} holds a NUL character", "take the character out")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise self.fault(
                    f"{name} holds half of a character (a lone surrogate)", "write the file again as UTF-8"
                ) from None
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
            raise self.fault(
                f"{name} is {kind_of(item)} where negatives[0] is an object", "give every negative a level, or none"
            )
        level = item.get("level")
        if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= NUM_LEVELS:
            raise self.fault(
                f"{name}.level is {level!r}, expected a whole number from 1 (hardest) to {NUM_LEVELS}",
                "correct the level, or write the negatives as plain texts",
            )
        return Negative(self.text(f"{name}.text", item.get("text")), level)

    def label(self, value: Any) -> str:
        """A class: a text or a whole number."""
        if not isinstance(value, str | int):
            raise self.fault(
                f"label is {kind_of(value)}, expected text or a whole number", "give it a label, or leave the row out"
            )
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
