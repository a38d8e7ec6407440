"""Conversion of rows to those of the store: usual rows column by column, all others one by one."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from embeddings.common.errors import InputError
from embeddings.common.text import canonical
from embeddings.data.readers import Block
from embeddings.data.records import (
    PAIR_FIELDS,
    Negative,
    Record,
    UsualPairs,
    look_alikes,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    substitute_columns,
    usual_pairs,
)
from embeddings.data.sources import SourceConfig

# Rows that are checked together; if one is unusual, all are parsed one by one.
GROUP_ROWS = 64
_NUM_COLUMN_ROWS, _MAX_NAMED_SUSPECTS = 100, 3


@dataclass
class Suspects:
    """The number of suspect rows of a source (`Record.suspicion`), and the first ones with the reason."""

    count: int = 0
    first: list[list[str]] = field(default_factory=list)

    def note(self, where: str, suspicion: str) -> None:
        self.count += 1
        if len(self.first) < _MAX_NAMED_SUSPECTS:
            self.first.append([where, suspicion])

    def __str__(self) -> str:
        named = ", ".join(f"{where} ({suspicion})" for where, suspicion in self.first)
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        what = "suspect row" if self.count == 1 else "suspect rows"
        return f"{self.count} {what}: {named}{more}"


@dataclass
class Facts:
    """Facts about the rows, collected during a conversion. Memory grows with the number of classes, not of rows.

    Attributes:
        labels: Code of each class, by its text, in order of appearance.
        lone_text: Canonical text of each class whose texts are all equal so far.
        first_row: File and row of the first row of each class.
        longest_instruction: File and row, and the instruction.
        columns: Non-null columns of the first rows.
        substitutes: Columns that stand in for a field of another name, each with the field.
    """

    labels: dict[str, int] = field(default_factory=dict)
    lone_text: dict[int, str] = field(default_factory=dict)
    first_row: dict[int, str] = field(default_factory=dict)
    suspects: Suspects = field(default_factory=Suspects)
    longest_instruction: tuple[str, str] | None = None
    highest_score: float = -math.inf
    columns: dict[str, None] = field(default_factory=dict)
    substitutes: dict[str, str] = field(default_factory=dict)

    def code(self, label: str | None, where: str, text: str | None = None) -> int:
        """The code of a class, assigned at its first row; -1 without a class. `text` is a labelled text."""
        if label is None:
            return -1
        code = self.labels.setdefault(label, len(self.labels))
        if code not in self.first_row:
            self.first_row[code] = where
            if text is not None:
                self.lone_text[code] = canonical(text)
        elif text is not None and self.lone_text.get(code) != canonical(text):
            self.lone_text.pop(code, None)
        return code

    def instruction(self, instruction: str | None, where: str) -> str:
        """The instruction of a record, "" for none; notes the longest."""
        if instruction and (self.longest_instruction is None or len(instruction) > len(self.longest_instruction[1])):
            self.longest_instruction = (where, instruction)
        return instruction or ""

    @property
    def lone_class(self) -> list[str] | None:
        """The first class whose texts are all equal, with the file and row of its first row, or None."""
        if not self.lone_text:
            return None
        code = min(self.lone_text)
        return [list(self.labels)[code], self.first_row[code]]

    def noting_columns(self, config: SourceConfig, blocks: Iterable[Block]) -> Iterator[Block]:
        """The same blocks; notes the columns of the first rows."""
        wanted, num_left = PAIR_FIELDS if config.conversion == "pairs" else config.fields, _NUM_COLUMN_ROWS
        for block in blocks:
            for row in block.fields[:num_left]:
                self.columns |= dict.fromkeys(str(name) for name, value in row.items() if value is not None)
                substitutes = {} if any(config.columns.values()) else substitute_columns(row, wanted)
                self.substitutes |= {name: field for field, names in substitutes.items() for name in names}
            num_left = max(0, num_left - len(block.fields))
            yield block

    def unused_columns(self, config: SourceConfig) -> dict[str, str]:
        """Unused columns whose names resemble a field of a record, each with the field; "" for a score."""
        if config.conversion != "pairs":
            return {}
        mapped = {*config.columns.values(), *self.substitutes}
        unused = look_alikes([name for name in self.columns if name not in mapped], config.fields)
        return unused | ({"score": ""} if config.columns.get("score", "score") in self.columns else {})


def convert(config: SourceConfig, blocks: Iterable[Block], facts: Facts) -> Iterator[Iterable[Sequence[Any]]]:
    """The rows to store, as columns of `StoredRow`; adds to `facts`."""
    for group in groups_of(blocks):
        usual = usual_pairs(group.fields, config.columns) if config.conversion == "pairs" else None
        if usual is not None:
            yield _usual_columns(group, usual, facts)
        elif rows := list(_stored_rows(config, group, facts)):
            yield zip(*rows, strict=True)
    if config.conversion == "sts" and facts.highest_score < config.score_threshold:
        what = f"no pair reaches the score {config.score_threshold:g} (the highest is {facts.highest_score:g})"
        raise InputError(f"source {config.name!r}", what, "set min_score to the scale of the source")


def groups_of(blocks: Iterable[Block]) -> Iterator[Block]:
    """The same rows in blocks of at most `GROUP_ROWS`."""
    for name, numbers, fields in blocks:
        for start in range(0, len(fields), GROUP_ROWS):
            part = slice(start, start + GROUP_ROWS)
            yield Block(name, numbers[part], fields[part])


def _usual_columns(group: Block, pairs: UsualPairs, facts: Facts) -> Sequence[Sequence[Any]]:
    count = len(pairs.query)
    labels, instructions = [-1] * count, [""] * count
    if any(pairs.label) or any(pairs.instruction):
        places = [where for where, _ in group.rows]
        labels = list(map(facts.code, pairs.label, places))
        instructions = list(map(facts.instruction, pairs.instruction, places))
    levels = [(0,) * len(negatives) for negatives in pairs.negatives]
    return pairs.query, pairs.positives, pairs.negatives, levels, labels, instructions, [()] * count


def _stored_rows(config: SourceConfig, group: Block, facts: Facts) -> Iterator[tuple[Any, ...]]:
    if config.conversion not in ("pairs", "sts"):
        for where, fields in group.rows:
            text, label = parse_labelled_text(fields, config.columns, where)
            yield text, (), (), (), facts.code(label, where, text), "", ()
        return
    for where, record in _parsed_records(config, group, facts):
        texts, levels = zip(*record.negatives, strict=True) if record.negatives else ((), ())
        code, instruction = facts.code(record.label, where), facts.instruction(record.instruction, where)
        yield record.query, record.positives, texts, levels, code, instruction, record.scores


def _parsed_records(config: SourceConfig, group: Block, facts: Facts) -> Iterator[tuple[str, Record]]:
    """The records that training uses, each with its file and row.

    A pair of `sts` with a high enough score becomes two records, one in each direction. Suspect records are used only
    under `suspect_rows: keep`.
    """
    for where, fields in group.rows:
        if config.conversion == "sts":
            first, second, score = parse_scored_pair(fields, config.columns, where)
            facts.highest_score = max(facts.highest_score, score)
            if score >= config.score_threshold:
                yield where, Record(first, (second,))
                yield where, Record(second, (first,))
            continue
        record = parse_record(fields, config.columns, where)
        if suspicion := record.suspicion:
            facts.suspects.note(where, suspicion)
        if not suspicion or config.suspect_rows == "keep":
            yield where, record


def usable_records(config: SourceConfig, group: Block) -> Iterable[tuple[str, Record]]:
    """The complete records of a group that training uses, each with its file and row."""
    usual = usual_pairs(group.fields, config.columns) if config.conversion == "pairs" else None
    if usual is None:
        return _parsed_records(config, group, Facts())
    query, positives, texts, *others = usual
    records = map(Record, query, positives, (tuple(map(Negative, each)) for each in texts), *others)
    return zip([where for where, _ in group.rows], records, strict=True)
