"""What was mined for some records: in a shard's file, counted level by level, and joined with the records."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.data.record_files import record_schema, record_table
from embeddings.data.records import Record
from embeddings.mining.negatives import NegativeRules, Negatives
from embeddings.mining.pair_index import PairIndex
from embeddings.mining.shard_negatives import MinedShard

# What the report says of a level, by the level's number as text.
ByLevel = dict[str, dict[str, Any]]


def mined_schema(graded: bool) -> pa.Schema:
    """What mining finds out about a record, in the columns of a shard's file; negatives with levels or without."""
    return pa.schema(
        [
            record_schema(graded).field("negatives"),
            ("negative_scores", pa.list_(pa.float32())),
            ("positive_scores", pa.list_(pa.float32())),
        ]
    )


def output_schema(graded: bool) -> pa.Schema:
    """The columns of the file of mined records: those of a source of pairs, and the scores."""
    schema = record_schema(graded)
    for name in ("negative_scores", "positive_scores"):
        schema = schema.append(mined_schema(graded).field(name))
    return schema


def write_shard(mined: MinedShard, index: PairIndex, rules: NegativeRules, path: Path) -> None:
    """Write what was mined for the records of a shard as Parquet, with its share of the report in the metadata."""
    negatives = mined.negatives
    schema = mined_schema(graded=negatives.level_N is not None)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    source, num_replaced = index.source, 0
    row_QN, score_QN = negatives.row_QN, negatives.score_QN
    offsets = (
        index.positive_offsets[mined.queries.start : mined.queries.stop + 1]
        - index.positive_offsets[mined.queries.start]
    )
    for place, row in enumerate(mined.queries):
        found = row_QN[place] >= 0
        texts: list[Any] = [index.document_text(document) for document in row_QN[place][found].tolist()]
        if negatives.level_N is not None:
            levels = negatives.level_N[found].tolist()
            texts = [{"text": text, "level": level} for text, level in zip(texts, levels, strict=True)]
        columns["negatives"].append(texts)
        columns["negative_scores"].append(score_QN[place][found])
        columns["positive_scores"].append(mined.positive_score_P[offsets[place] : offsets[place + 1]])
        num_replaced += bool(source.table.negatives(row))
    count_Q = np.count_nonzero(row_QN >= 0, axis=1)
    counts = {
        "num_candidates": mined.num_candidates,
        **{f"removed {reason}": count for reason, count in negatives.removed.items()},
        "num_left": negatives.num_left,
        "num_negatives": int(count_Q.sum()),
        "num_short": int(np.count_nonzero(count_Q < rules.num_negatives)),
        "num_empty": int(np.count_nonzero(count_Q == 0)),
        "num_replaced": num_replaced,
    }
    metadata = {"counts": json.dumps(counts), "levels": json.dumps(_shard_levels(negatives))}
    pq.write_table(pa.table(columns, schema=schema).replace_schema_metadata(metadata), path)


def read_shard(path: Path) -> pa.Table:
    """The file of a shard.

    Raises:
        InputError: If it is missing or damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowException, OSError):
        raise InputError(str(path), "the shard is missing or damaged", "delete its folder and run again") from None


def shard_counts(mined: pa.Table) -> tuple[dict[str, int], dict[str, dict[str, float]] | None]:
    """A shard's share of the report: its counts, and what there is of each level, or None without levels."""
    metadata = mined.schema.metadata
    # Shards of before there were levels do not say that they have none.
    return json.loads(metadata[b"counts"]), json.loads(metadata.get(b"levels", b"null"))


def with_mined(records: Sequence[Record], mined: pa.Table, graded: bool) -> pa.Table:
    """The records with what was mined for them."""
    own = record_table([replace(record, negatives=()) for record in records], graded)
    schema = output_schema(graded)
    return pa.table([(mined if name in mined.schema.names else own)[name] for name in schema.names], schema=schema)


def report_levels(shards: Iterable[Mapping[str, Mapping[str, float]] | None]) -> ByLevel | None:
    """What all shards have of each level, for the report.

    Args:
        shards: The levels of `shard_counts`, shard by shard.

    Returns:
        For each level its `num_negatives`, the number of records that lack it (`num_lacking`), and `lowest_score`,
        `mean_score` and `highest_score`, None where no record has it; None without levels.

    Precision: means in float64.
    """
    found = [shard for shard in shards if shard is not None]
    if not found:
        return None
    report: ByLevel = {}
    for level in found[0]:
        total: Counter[str] = Counter()
        for shard in found:
            total.update({name: shard[level][name] for name in ("num_negatives", "num_lacking", "sum")})
        count = int(total["num_negatives"])
        present = [shard[level] for shard in found if shard[level]["num_negatives"]]
        report[level] = {
            "num_negatives": count,
            "num_lacking": int(total["num_lacking"]),
            "lowest_score": min((part["lowest_score"] for part in present), default=None),
            "mean_score": total["sum"] / count if count else None,
            "highest_score": max((part["highest_score"] for part in present), default=None),
        }
    return report


def _shard_levels(negatives: Negatives) -> dict[str, dict[str, float]] | None:
    """The negatives of each level: their number, how many records lack them, and the range and sum of the scores."""
    if negatives.level_N is None:
        return None
    found = {}
    for level in np.unique(negatives.level_N).tolist():
        own_N = negatives.level_N == level
        has_QN = negatives.row_QN[:, own_N] >= 0
        score_n = negatives.score_QN[:, own_N][has_QN].astype(np.float64)
        found[str(level)] = {
            "num_negatives": int(np.count_nonzero(has_QN)),
            "num_lacking": int(np.count_nonzero(~has_QN.any(axis=1))),
            "lowest_score": float(score_n.min()) if len(score_n) else 0.0,
            "highest_score": float(score_n.max()) if len(score_n) else 0.0,
            "sum": float(score_n.sum()),
        }
    return found
