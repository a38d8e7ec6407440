"""Training records: parsing and validation of rows, examples made from records, and files of records."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from string import digits
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import lists_of
from embeddings.common.text import canonical, shorten

NUM_LEVELS = 4
RECORD_FIELDS = ("query", "positive", "negatives", "instruction", "label", "score", "id", "language", "scores")
LABELLED_FIELDS = ("text", "label")
SCORED_FIELDS = ("sentence1", "sentence2", "score")
# The fields of a pair for which columns with other names may stand in.
PAIR_FIELDS = ("query", "positive", "negatives", "instruction", "scores")
_IN_BRACKETS = re.compile(r"\s*\[.*\]\s*", re.DOTALL)
_GIVE_TEXT = "give it a text, or leave the row out"
_MAX_SCORE = float(np.finfo(np.float32).max)
# Column names of other libraries for each field, as regular expressions.
_LOOK_ALIKES = {
    "query": r"query|anchor|question|sentence_?1",
    "positive": r"positives?|pos|passage|answer|document|sentence_?2",
    "negatives": r"(hard_?)?(neg|negative)s?(_passages|_?\d+)?",
    "instruction": r"prompt",
    "scores": r"(pos|neg)_scores",
    "text": r"sentence|content|document",
    "label": r"labels|class|category",
    "sentence1": r"sentence_1|text1|anchor",
    "sentence2": r"sentence_2|text2|positive",
    "score": r"similarity|label",
}


# The column of a field, by field; None leaves an optional field out.
Columns = Mapping[str, str | None]


class Cell(str):
    """A cell of a CSV or TSV table: always text, even where it contains a number."""

    __slots__ = ()


class Negative(NamedTuple):
    """A hard negative. `level` is 1 (hardest) to 4 (easiest), or 0 without a level."""

    text: str
    level: int = 0


class Record(NamedTuple):
    """One training record.

    `negatives` are hardest first, `label` is the class of query and positives, `instruction` replaces that of the
    source. `scores` are a teacher's for the positives, then the negatives; NaN: missing, empty: the record has none.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    label: str | None = None
    score: float | None = None
    id: str | None = None
    instruction: str | None = None
    language: str | None = None
    scores: tuple[float, ...] = ()

    @property
    def suspicion(self) -> str | None:
        """Why the record is suspect (one text in two roles), or None."""
        query, positives = canonical(self.query), set(map(canonical, self.positives))
        negatives = {canonical(negative.text) for negative in self.negatives}
        if not positives.isdisjoint(negatives):
            return "a negative is also a positive"
        if query in negatives:
            return "a negative is the query itself"
        if query in positives:
            return "a positive is the query itself"
        return None


class LabelledText(NamedTuple):
    """A text and its class, as text (see `label_key`)."""

    text: str
    label: str


class ScoredPair(NamedTuple):
    """Two texts and their similarity score, in the unit of the source."""

    sentence1: str
    sentence2: str
    score: float


def parse_record(fields: Mapping[str, Any], columns: Columns, where: str) -> Record:
    """Parse a row into a record. Other columns are ignored.

    Without `columns`, columns with the usual names of other libraries stand in for missing fields. Fields other than
    `query` and `positive` may be missing or null. Negatives with levels are sorted hardest first, with their scores. Of
    equal positives or negatives the first is kept.

    Args:
        fields: Values by column name.
        columns: Column name of each field whose column has a different name; None leaves the field out.
        where: File and row, for messages.
    """
    row = _Row(fields, columns, where, PAIR_FIELDS)
    row.refuse_scores()
    query, positives = row.required("query", row.text), row.required("positive", row.positives)
    negatives = row.optional("negatives", row.negatives) or ()
    scores = row.all_scores(len(positives), len(negatives))
    hardest_first = sorted(range(len(negatives)), key=lambda position: negatives[position].level)
    kept = _distinct(positives, range(len(positives)))
    kept_negatives = _distinct([negative.text for negative in negatives], hardest_first)
    if scores:
        scores = tuple(scores[position] for position in (*kept, *(len(positives) + each for each in kept_negatives)))
    return Record(
        query=query,
        positives=tuple(positives[position] for position in kept),
        negatives=tuple(negatives[position] for position in kept_negatives),
        scores=scores,
        label=row.optional("label", row.label),
        score=row.optional("score", row.number),
        id=row.optional("id", row.identifier),
        instruction=row.optional("instruction", row.text),
        language=row.optional("language", row.identifier),
    )


def parse_labelled_text(fields: Mapping[str, Any], columns: Columns, where: str) -> LabelledText:
    """Parse a row with `text` and `label`; arguments and errors as in `parse_record`."""
    row = _Row(fields, columns, where, LABELLED_FIELDS)
    return LabelledText(row.required("text", row.text), row.required("label", row.label))


def parse_scored_pair(fields: Mapping[str, Any], columns: Columns, where: str) -> ScoredPair:
    """Parse a row with `sentence1`, `sentence2` and `score`; arguments and errors as in `parse_record`."""
    row = _Row(fields, columns, where, SCORED_FIELDS)
    first, second = row.required("sentence1", row.text), row.required("sentence2", row.text)
    return ScoredPair(first, second, row.required("score", row.number))


def look_alikes(names: Iterable[str], fields: Sequence[str]) -> dict[str, str]:
    """Columns whose names are usual alternatives for one of `fields`, each mapped to its field."""
    return {
        name: field
        for name in names
        for field in fields
        if name not in fields and field in _LOOK_ALIKES and re.fullmatch(_LOOK_ALIKES[field], name, re.IGNORECASE)
    }


def substitute_columns(row: Mapping[str, Any], fields: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """For each of `fields` without a column of that name, the non-null columns of the row that stand in for it."""
    return _substitutes(tuple(str(name) for name, value in row.items() if value is not None), fields)


@lru_cache(maxsize=1024)
def _substitutes(names: tuple[str, ...], fields: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    columns: dict[str, list[str]] = {}
    for name, field_ in look_alikes(names, fields).items():
        if field_ not in names:
            columns.setdefault(field_, []).append(name)
    columns.get("negatives", []).sort(key=lambda name: int(name[len(name.rstrip(digits)) :] or 0))
    return {field_: tuple(names) for field_, names in columns.items()}


class UsualPairs(NamedTuple):
    """Several records without scores and levels: a list for each field of `Record`."""

    query: list[str]
    positives: list[tuple[str, ...]]
    negatives: list[tuple[str, ...]]
    label: list[str | None]
    score: list[float | None]
    id: list[str | None]
    instruction: list[str | None]
    language: list[str | None]


def usual_pairs(rows: Sequence[Mapping[str, Any]], columns: Columns) -> UsualPairs | None:
    """What `parse_record` returns for the rows, checked column by column in a tenth of the time; None if one needs it.

    That is a row which is invalid or suspect, with scores, levels, a text twice, a list as text or ambiguous columns.
    """
    values = _usual_values(rows, columns)
    if values is None or values["scores"].count(None) < len(rows):
        return None
    queries, instructions, scores = values["query"], values["instruction"], values["score"]
    positives, negatives = _as_tuples(values["positive"]), _as_tuples(values["negatives"])
    texts = [(query, *one, *other) for query, one, other in zip(queries, positives, negatives, strict=True)]
    keys = _usual_texts(chain.from_iterable(texts))
    if keys is None or not all(positives) or "[" in [key[0] for key in keys]:
        return None
    names = [name for field in ("label", "id", "language") for name in values[field] if type(name) is not int]
    if _usual_texts(text for text in (*names, *instructions) if text is not None) is None:
        return None
    if not all(score is None or _is_usual_number(score) for score in scores):
        return None
    if len(set(keys)) < len(keys):
        remaining = iter(keys)
        if any(len(set(islice(remaining, len(row)))) < len(row) for row in texts):
            return None
    labels = [None if label is None else label_key(label) for label in values["label"]]
    ids, languages = ([None if name is None else str(name) for name in values[field]] for field in ("id", "language"))
    numbers = [None if score is None else float(score) for score in scores]
    return UsualPairs(queries, positives, negatives, labels, numbers, ids, instructions, languages)


def _usual_values(rows: Sequence[Mapping[str, Any]], columns: Columns) -> dict[str, list[Any]] | None:
    """The values of each field, None where a row has none; None if its column may differ between the rows."""
    names = frozenset(chain.from_iterable(rows))
    used = _usual_columns(names, tuple(columns.items()))
    mapped = [name for name in columns.values() if name is not None]
    if used is None or not all(name in row for name in mapped for row in rows):
        return None
    empty = [None] * len(rows)
    return {
        field: [row.get(name) for row in rows] if name is not None and name in names else empty
        for field, name in used.items()
    }


@lru_cache(maxsize=1024)
def _usual_columns(names: frozenset[str], columns: tuple[tuple[str, str | None], ...]) -> dict[str, str | None] | None:
    """The column of each field in rows with columns `names`, or None if it may differ between the rows."""
    mapping = dict(columns)
    used = {field: mapping.get(field, field) for field in RECORD_FIELDS}
    if any(mapping.values()):
        taken = set(mapping.values()) - mapping.keys()
        return {field: None if field in taken else name for field, name in used.items()}
    marks = {name for name in ("score", "label", "similarity") if mapping.get(name, name) in names}
    for name, alike in look_alikes(names, PAIR_FIELDS).items():
        if used[alike] in names or (marks and alike in ("query", "positive")):
            return None
        used[alike] = None if alike in mapping else name
    return used


def _usual_texts(values: Iterable[Any]) -> list[str] | None:
    """The canonical forms of texts, or None if one is no valid text."""
    texts = list(values)
    if not set(map(type, texts)) <= {str, Cell}:
        return None
    joined = "".join(texts)
    try:
        joined.encode()
    except UnicodeEncodeError:
        return None
    keys = list(map(str.strip if joined.isascii() else canonical, texts))
    return keys if all(keys) and "\x00" not in joined else None


def _is_usual_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_SCORE


def _as_tuples(values: list[Any]) -> list[tuple[Any, ...]]:
    """The texts of each value, which is one text, a list of texts or null."""
    if set(map(type, values)) <= {str, Cell}:
        return list(zip(values, strict=True))
    return [tuple(value) if type(value) is list else () if value is None else (value,) for value in values]


def _distinct(texts: Sequence[str], order: Iterable[int]) -> list[int]:
    """The positions in `order`, without those of texts that equal an earlier one."""
    first: dict[str, int] = {}
    for position in order:
        first.setdefault(canonical(texts[position]), position)
    return list(first.values())


def label_key(value: str | int) -> str:
    """A class label as text in canonical form: Booleans become `true` and `false`, as in JSON."""
    return canonical(str(value).lower() if isinstance(value, bool) else str(value))


# (field name, raw value) → parsed value.
T = TypeVar("T")
Read = Callable[[str, Any], T]


class _Row:
    def __init__(self, fields: Mapping[str, Any], columns: Columns, where: str, wanted: tuple[str, ...]) -> None:
        self.fields, self.columns, self.where = fields, columns, where
        is_mapped = any(columns.values())
        self.substitutes: Mapping[str, tuple[str, ...]] = {} if is_mapped else substitute_columns(fields, wanted)

    def required(self, field: str, read: Read[T]) -> T:
        return read(field, self._value(field))

    def optional(self, field: str, read: Read[T]) -> T | None:
        """The parsed value of a field, or None if it is missing or null; a field in `columns` must be present."""
        if field in self.columns:
            value = None if self.columns[field] is None else self._value(field)
        elif field in self.substitutes:
            value = self._joined(self.substitutes[field])
            value = None if field == "instruction" and value == "" else value
        else:
            value = None if field in self.columns.values() else self.fields.get(field)
        return None if value is None else read(field, value)

    def _value(self, field: str) -> Any:
        column = self.columns.get(field)
        column = self._only_column(field) if column is None else column
        if column not in self.fields:
            alike = next(iter(look_alikes(map(str, self.fields), (field,))), "YOUR_COLUMN")
            if alike in self.fields and all(self.fields[name] is None for name in look_alikes(self.fields, (field,))):
                raise self.fault(f"{field} is null (column {alike!r})", _GIVE_TEXT)
            names = shorten(", ".join(map(str, self.fields)), 80)
            what = f"field {field!r}: no column {column!r} among {names}"
            fix = f"map it with columns: {{{field}: {alike}}}"
            labelled = {*self.fields, *substitute_columns(self.fields, LABELLED_FIELDS)}.issuperset(LABELLED_FIELDS)
            if labelled and not self.columns:
                fix = f"for texts with classes set conversion: class_by_example, or {fix}"
            raise self.fault(what, fix)
        return self.fields[column]

    def _only_column(self, field: str) -> str:
        """The only column that stands in for a field, or the name of the field."""
        columns = self.substitutes.get(field, (field,))
        if len(columns) > 1:
            what = f"field {field!r}: several columns match ({', '.join(columns)})"
            mapping = ", ".join(f"{field}: {names[0]}" for field, names in self.substitutes.items())
            raise self.fault(what, f"choose one: columns: {{{mapping}}}")
        return columns[0]

    def refuse_scores(self) -> None:
        """Refuse a pair with a similarity score or label beside guessed columns: it may be a negative pair."""
        pair = [name for field in ("query", "positive") for name in self.substitutes.get(field, ())]
        names = [name for name in ("score", "label", "similarity") if self.columns.get(name, name) is not None]
        scores = pair and [name for name in names if self.fields.get(name) is not None]
        if scores:
            what = f"{scores[0]!r} beside {' and '.join(pair)} may mark which pairs match"
            first = {field: self.substitutes.get(field, (field,))[0] for field in ("query", "positive")}
            first |= {"label": "null"} if scores[0] == "label" else {}
            mapped = ", ".join(f"{field}: {name}" for field, name in first.items())
            fix = f"set conversion: sts for scored pairs, or, if all pairs match, columns: {{{mapped}}}"
            raise self.fault(what, fix)

    def _joined(self, names: Sequence[str]) -> Any:
        """The value of one column, or the values of several numbered columns as one list."""
        if len({re.sub(r"_?\d+$", "", name) for name in names}) > 1:
            self._only_column("negatives")
        if len(names) == 1:
            return self.fields[names[0]]
        values = [self._unpacked(name, self.fields[name]) for name in names]
        return [item for value in values for item in (value if isinstance(value, list) else [value])]

    def text(self, name: str, value: Any) -> str:
        text = valid_text(self.where, name, value)
        if not text.strip():
            kind = "white space" if text else "an empty text"
            raise self.fault(f"{name} is {kind}", _GIVE_TEXT)
        if "\x00" in text:
            raise self.fault(f"{name} contains a NUL character", "remove the character")
        return text

    def positives(self, name: str, value: Any) -> tuple[str, ...]:
        """One text, or a list of at least one."""
        value = self._unpacked(name, value)
        if value == []:
            raise self.fault(f"{name} is an empty list", "give at least one text, or leave the row out")
        return self._texts(name, value)

    def negatives(self, name: str, value: Any) -> tuple[Negative, ...]:
        """One text, a list of texts, or a list of texts with levels."""
        value = self._unpacked(name, value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return tuple(self._graded(f"{name}[{i}]", item) for i, item in enumerate(value))
        return tuple(map(Negative, self._texts(name, value)))

    def _unpacked(self, name: str, value: Any) -> Any:
        """The JSON list in a cell of a table, or the value; elsewhere negatives that are a list as text are refused."""
        is_cell = isinstance(value, Cell)
        if not (is_cell or name == "negatives") or not isinstance(value, str) or not _IN_BRACKETS.fullmatch(value):
            return value
        with suppress(ValueError, RecursionError):
            items = json.loads(value)
            if not all(isinstance(item, str | dict) for item in items):
                return value
            if is_cell:
                return items
        fix = 'write it as a JSON list, such as ["a", "b"]; one such text is a list of one'
        raise self.fault(f"{name} is a list as text", fix)

    def _texts(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return (self.text(name, value),)
        if not isinstance(value, list):
            fix = _GIVE_TEXT if value is None else "write it as a list of texts"
            raise self.fault(f"{name} is {kind_of(value)}, expected text or a list", fix)
        return tuple(self.text(f"{name}[{i}]", text) for i, text in enumerate(value))

    def _graded(self, name: str, item: Any) -> Negative:
        if not isinstance(item, dict):
            what = f"{name} is {kind_of(item)} where negatives[0] is an object"
            raise self.fault(what, "give every negative a level, or none of them")
        level = item.get("level")
        if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= NUM_LEVELS:
            what = f"{name}.level is {level!r}, expected an integer from 1 (hardest) to {NUM_LEVELS}"
            raise self.fault(what, "correct the level, or write the negatives as plain texts")
        return Negative(self.text(f"{name}.text", item.get("text")), level)

    def label(self, name: str, value: Any) -> str:
        """A class: a text or an integer, in canonical form."""
        if not isinstance(value, str | int):
            what = f"{name} is {kind_of(value)}, expected text or an integer"
            raise self.fault(what, "give it a label, or leave the row out")
        return label_key(self.text(name, value) if isinstance(value, str) else value)

    def number(self, name: str, value: Any) -> float:
        """A finite number; CSV cells contain it as text."""
        if isinstance(value, Cell):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = value if isinstance(value, float) else kind_of(value)
            raise self.fault(f"{name} is {shown}, expected a finite number", "give it a number, or leave the row out")
        return float(value)

    def all_scores(self, num_positives: int, num_negatives: int) -> tuple[float, ...]:
        """The teacher scores of the positives, then of the negatives, from one column or one for each side."""
        if "scores" in self.columns or "scores" not in self.substitutes:
            return self.optional("scores", partial(self.scores, num_positives, num_negatives)) or ()
        found: list[float] = []
        for name, counts in (("pos_scores", (num_positives, 0)), ("neg_scores", (0, num_negatives))):
            value = self.fields.get(name)
            found += [math.nan] * sum(counts) if value is None else self.scores(*counts, name, value)
        return tuple(found)

    def scores(self, num_positives: int, num_negatives: int, name: str, value: Any) -> tuple[float, ...]:
        """A number or null for each positive, then for each negative; null becomes NaN."""
        total = num_positives + num_negatives
        if isinstance(value, Cell):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, list) or len(value) != total:
            actual = f"has {len(value)}" if isinstance(value, list) else f"is {kind_of(value)}"
            texts = f"positives ({num_positives}) and negatives ({num_negatives})"
            what = f"{name} {actual}, expected a list of {total} numbers, one for each of the {texts}"
            raise self.fault(what, "give each text a number or null, or rename the column")
        for index, item in enumerate(value):
            # NaN is a missing score.
            if not (item is None or item != item or _is_usual_number(item)):
                shown = item if isinstance(item, float) else kind_of(item)
                what = f"{name}[{index}] is {shown}, expected a finite float32 number, or null"
                raise self.fault(what, "give it a number, or null if it is unknown")
        return tuple(math.nan if item is None else float(item) for item in value)

    def identifier(self, name: str, value: Any) -> str:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(name, value)

    def fault(self, what: str, fix: str) -> InputError:
        return InputError(self.where, what, fix)


def valid_text(where: str, name: str, value: Any) -> str:
    """A value that must be text, which may be empty."""
    if not isinstance(value, str):
        raise InputError(where, f"{name} is {kind_of(value)}, expected text", _GIVE_TEXT)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            what = f"{name} contains half of a character (a lone surrogate)"
            raise InputError(where, what, "rewrite the file as UTF-8") from None
    return str(value)


def kind_of(value: Any) -> str:
    """The JSON type of a value, for messages."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", bytes: "bytes"}
    kind = str if isinstance(value, str) else type(value)
    return names.get(kind, "a list" if isinstance(value, list) else "an object")


@dataclass(frozen=True, slots=True)
class Example:
    """One query with its texts, before the collator makes its random choices.

    Attributes:
        row, source: Row in the mixture, and index of its source.
        draw: Seed of the random choices (see `PlanEntry`).
        negatives: Hardest first (in random order in a cumulative curriculum).
        label, negative_labels: Classes within the source, -1 or empty without.
        query_prompt, document_prompt: "" for none, None for the prompt of the text settings.
        in_batch_negatives: Whether other queries' candidates may serve as negatives.
        surrogate_query, surrogate_positives: Vectors by another model, (S,) and (P, S) float32, or None.
        surrogate_negatives: Returns the vectors of the first n negatives, (n, S) float32; None without vectors.
        level: Level of hard negatives at this step of a curriculum, 0 without one.
        scores: As in `Record`.
    """

    row: int
    draw: int
    source: int
    query: str
    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    label: int = -1
    negative_labels: tuple[int, ...] = ()
    query_prompt: str | None = None
    document_prompt: str | None = None
    in_batch_negatives: bool = True
    surrogate_query: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    surrogate_positives: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    surrogate_negatives: Callable[[int], npt.NDArray[np.float32]] | None = field(default=None, compare=False)
    level: int = 0
    scores: tuple[float, ...] = ()


GROUP_ROWS = 4096


def is_json_lines(output: Path) -> bool:
    """Whether an output file of records is JSON lines, by its name; otherwise it is Parquet."""
    if output.suffix.lower() in (".csv", ".tsv", ".json", ".gz", ".txt", ".arrow"):
        raise OptionError("output", str(output), "must end in .parquet or .jsonl", "rename it")
    return output.suffix.lower() in (".jsonl", ".ndjson")


@contextmanager
def table_writer(path: Path, schema: pa.Schema, json_lines: bool = False) -> Iterator[Callable[[pa.Table], None]]:
    """Yields a function that appends a table to the file; JSON lines omit null values."""
    if not json_lines:
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            yield writer.write_table
        return
    with open(path, "w", encoding="utf-8") as file:

        def write(table: pa.Table) -> None:
            for row in table.to_pylist():
                non_null = {name: value for name, value in row.items() if value is not None}
                file.write(json.dumps(non_null, ensure_ascii=False) + "\n")

        yield write


def write_records(
    path: Path, records: Iterable[Record], graded: bool, json_lines: bool = False, scored: bool = False
) -> int:
    """Write records with the columns of `record_schema` to a Parquet file, or as JSON lines; returns their number."""
    return _write_rows(path, (_fields(record, graded) for record in records), record_schema(graded, scored), json_lines)


def write_labelled_texts(path: Path, texts: Iterable[LabelledText], json_lines: bool = False) -> int:
    """Write labelled texts with the columns `text` and `label`; see `write_records`."""
    schema = pa.schema([(name, pa.string()) for name in LABELLED_FIELDS])
    return _write_rows(path, (text._asdict() for text in texts), schema, json_lines)


def _write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema, json_lines: bool) -> int:
    count = 0
    with table_writer(path, schema, json_lines) as write:
        for group in lists_of(rows, GROUP_ROWS):
            write(pa.Table.from_pylist(group, schema))
            count += len(group)
    return count


def record_schema(graded: bool, scored: bool = False) -> pa.Schema:
    """Schema of a file of records: negatives with levels if `graded`, the column `scores` if `scored`."""
    negative = pa.struct([("text", pa.string()), ("level", pa.int8())]) if graded else pa.string()
    types = dict.fromkeys(RECORD_FIELDS if scored else RECORD_FIELDS[:-1], pa.string())
    types |= {"positive": pa.list_(pa.string()), "negatives": pa.list_(negative), "score": pa.float64()}
    return pa.schema(types | ({"scores": pa.list_(pa.float64())} if scored else {}))


def record_table(records: Sequence[Record], graded: bool) -> pa.Table:
    return pa.Table.from_pylist([_fields(record, graded) for record in records], record_schema(graded))


def _fields(record: Record, graded: bool) -> dict[str, Any]:
    negatives: list[Any] = [item._asdict() if graded else item.text for item in record.negatives]
    scores = [None if math.isnan(score) else score for score in record.scores]
    fields = record._asdict() | {"negatives": negatives or None, "scores": scores or None}
    return {"positive": list(fields.pop("positives")), **fields}
