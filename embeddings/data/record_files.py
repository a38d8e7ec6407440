"""Training records, or texts with their classes, written to a Parquet file that is a source again."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.data.records import LABELLED_FIELDS, LabelledText, Record
from embeddings.data.table import Table

# Records of a row group: as many are in memory at once.
GROUP_ROWS = 4096

_PLAIN = pa.string()
_GRADED = pa.struct([("text", pa.string()), ("level", pa.int8())])


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

    Determinism: the same records give the same bytes with one version of pyarrow.

    Args:
        path: The file, which is written in place: give the path that `atomic_path` gives.
        records: What to write; `GROUP_ROWS` of them are in memory at a time.
        graded: Whether the negatives have levels (`has_levels`).
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
    return pa.schema(
        [
            ("query", pa.string()),
            ("positive", pa.list_(pa.string())),
            ("negatives", pa.list_(_GRADED if graded else _PLAIN)),
            ("instruction", pa.string()),
            ("label", pa.string()),
            ("score", pa.float64()),
            ("id", pa.string()),
            ("language", pa.string()),
        ]
    )


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
