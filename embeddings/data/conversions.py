"""Rows as a person wrote them become rows as the cache stores them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from embeddings.common.errors import InputError
from embeddings.common.fileio import text_hash
from embeddings.data.readers import Row
from embeddings.data.records import Record, look_alikes, parse_labelled_text, parse_record, parse_scored_pair
from embeddings.data.sources import Conversion, SourceConfig
from embeddings.data.table import StoredRow

DEFAULT_MIN_SCORE = 4.0
_NOTED_ROWS = 100


@dataclass
class Facts:
    """What a conversion learns on its way; it grows with the number of classes, not of rows.

    Attributes:
        labels: Code of each class, by its text, in order of appearance.
        lone_text: For each class whose texts were all the same so far, that text's hash.
        first_row: File and row where a class appeared first.
        suspects: Number of suspect rows of each kind (`Record.suspicion`), kept or left out.
        longest_instruction: File and row of the longest instruction of a record's own, and that, or None.
        columns: Columns of the first rows that hold something, in order of appearance.
    """

    labels: dict[str, int] = field(default_factory=dict)
    lone_text: dict[int, int] = field(default_factory=dict)
    first_row: dict[int, str] = field(default_factory=dict)
    suspects: Counter[str] = field(default_factory=Counter)
    longest_instruction: tuple[str, str] | None = None
    columns: dict[str, None] = field(default_factory=dict)

    def code(self, label: str | None, where: str) -> int:
        """The code of a class, a new one for a new class; -1 for none."""
        if label is None:
            return -1
        code = self.labels.setdefault(label, len(self.labels))
        self.first_row.setdefault(code, where)
        return code

    @property
    def lone_class(self) -> list[str] | None:
        """The first class whose texts are all the same, with the file and row where it appeared, or None."""
        if not self.lone_text:
            return None
        code = min(self.lone_text)
        return [list(self.labels)[code], self.first_row[code]]

    def noting_columns(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows; the columns of the first ones are noted."""
        for number, row in enumerate(rows):
            if number < _NOTED_ROWS:
                self.columns |= dict.fromkeys(str(name) for name, value in row.fields.items() if value is not None)
            yield row

    def unused_columns(self, config: SourceConfig) -> dict[str, str]:
        """Columns that look like a field of a record and are not used, each with the field; "" for a score."""
        if config.conversion != "pairs":
            return {}
        mapped = config.columns.values()
        found = look_alikes([name for name in self.columns if name not in mapped], config.fields)
        return found | ({"score": ""} if config.columns.get("score", "score") in self.columns else {})


def layout(conversion: Conversion) -> str:
    """What is stored for a conversion; conversions with one layout share a converted source."""
    return {"pairs": "records", "sts": "scored"}.get(conversion, "labelled")


def required_fields(config: SourceConfig) -> tuple[str, ...]:
    """The fields that every row must have."""
    return ("query", "positive") if config.conversion == "pairs" else config.fields


def min_score(config: SourceConfig) -> float:
    """The least score of a positive pair."""
    return DEFAULT_MIN_SCORE if config.min_score is None else config.min_score


def convert_rows(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[StoredRow]:
    """The rows to store, in the order of the source.

    Args:
        config: Decides the conversion and the columns.
        rows: The source's rows.
        facts: Filled in on the way.

    Raises:
        InputError: At the first row that cannot be used, or if no row at all makes an example.
    """
    converters: dict[str, Callable[[SourceConfig, Iterable[Row], Facts], Iterator[StoredRow]]] = {
        "records": _convert_records,
        "labelled": _convert_labelled,
        "scored": _convert_records,
    }
    return converters[layout(config.conversion)](config, rows, facts)


def usable_records(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[tuple[str, Record]]:
    """The records of a source of pairs that are to be used, each with file and row, in the order of the source.

    A pair of `sts` with a high enough score is two records, one in each direction.

    Args:
        config: Decides conversion and columns, and what becomes of suspect records or which score is high enough.
        rows: The source's rows.
        facts: Counts the suspect records.

    Raises:
        InputError: At the first row that cannot be used, or if no record is left.
    """
    if config.conversion == "sts":
        yield from _scored_records(config, rows)
        return
    found = False
    for where, fields in rows:
        record = parse_record(fields, config.columns, where)
        if suspicion := record.suspicion:
            if config.suspect_rows == "refuse":
                raise InputError(where, suspicion, "mend the row, or set suspect_rows: leave_out (or keep)")
            facts.suspects[suspicion] += 1
            if config.suspect_rows == "leave_out":
                continue
        found = True
        yield where, record
    if not found:
        raise InputError(f"source {config.name!r}", "every row is suspect and left out", "set suspect_rows: keep")


def _convert_records(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[StoredRow]:
    for where, record in usable_records(config, rows, facts):
        texts = tuple(negative.text for negative in record.negatives)
        levels = tuple(negative.level for negative in record.negatives)
        code = facts.code(record.label, where)
        if record.instruction and len(record.instruction) > len((facts.longest_instruction or ("", ""))[1]):
            facts.longest_instruction = (where, record.instruction)
        yield StoredRow(record.query, record.positives, texts, levels, code, record.instruction or "")


def _convert_labelled(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[StoredRow]:
    for where, fields in rows:
        text, label = parse_labelled_text(fields, config.columns, where)
        is_new = label not in facts.labels
        code = facts.code(label, where)
        if is_new:
            facts.lone_text[code] = text_hash(text)
        elif code in facts.lone_text and facts.lone_text[code] != text_hash(text):
            del facts.lone_text[code]
        yield StoredRow(text, label=code)


def _scored_records(config: SourceConfig, rows: Iterable[Row]) -> Iterator[tuple[str, Record]]:
    threshold, highest, kept = min_score(config), float("-inf"), False
    for where, fields in rows:
        first, second, score = parse_scored_pair(fields, config.columns, where)
        highest = max(highest, score)
        if score >= threshold:
            kept = True
            yield where, Record(first, (second,))
            yield where, Record(second, (first,))
    if not kept:
        raise InputError(
            f"source {config.name!r}",
            f"no pair reaches the score {threshold:g} (the highest is {highest:g})",
            "set min_score to the source's own scale",
        )
