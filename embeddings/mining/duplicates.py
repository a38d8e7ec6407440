"""Copies and near-copies of training records, over a whole source."""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.fileio import atomic_path, text_hash
from embeddings.data.cache import CachedSource
from embeddings.data.near_duplicates import NearDuplicates, Shingle, mark_copies
from embeddings.data.table import StoredRow, Table
from embeddings.mining.jobs import ArrayTask, ShardedJob, load_shard
from embeddings.mining.verdicts import KEPT, SHARD_ROWS, open_verdicts, save_array, shard_rows

COPY, NEAR_COPY = 1, 2
VERDICTS = "verdicts.npy"
# Records whose keys are made at once: some megabytes.
_BLOCK = 512
# Records whose shingles are kept while pairs are compared: 8 bytes a word of each.
_REMEMBERED = 4096


def find_duplicates(
    source: CachedSource,
    folder: str | os.PathLike[str],
    *,
    near_duplicates: float | None = None,
    shingle: Shingle = "word",
    shard_size: int = SHARD_ROWS,
    task: ArrayTask | None = None,
) -> npt.NDArray[np.uint8]:
    """For each record of a source, whether it is a copy (or a near-copy) of an earlier one that stays.

    A copy has the query and the positives of the other, but for outer white space; its negatives do not matter. Of
    labelled texts, a copy has the other's text and class, and near-copies are not looked for. A
    near-copy has a query near the other's *and* positives near the other's: two questions about one document are two
    records. Case does not matter to near-copies. Every candidate is checked on its whole text, so nothing goes that is
    not a copy by this rule; of the near-copies that lie at the threshold itself 1 in 4,000 may stay.

    Keys are made shard by shard and kept in `folder`; the comparison that follows is one process's.

    Args:
        source: A converted source of pairs, or of labelled texts.
        folder: The folder to work in.
        near_duplicates: Least Jaccard similarity of near-copies, 0.5 to 1; None for copies alone.
        shingle: What near-copies are compared by: runs of 3 words, or of 5 characters.
        shard_size: Records of a shard.
        task: Which shards are this process's; None for all.

    Returns:
        `KEPT`, `COPY` or `NEAR_COPY` for each record, (rows,) uint8, memory-mapped.

    Memory: on disk 4 bytes a record and key: 4 for copies, 64 more for near-copies at 0.8 (16 keys), 28 at 0.9, 424 at
        0.5. In memory 40 bytes a record while keys are compared, and 36 for each key shared with another record.

    Raises:
        OptionError: If the threshold is out of its range.
        InputError: If the folder holds something else, or was made with other options.
    """
    rule = None if near_duplicates is None else NearDuplicates(near_duplicates, num_parts=2, shingle=shingle)
    table = source.table
    fields = {
        "kind": "duplicates",
        "source_key": source.folder.name,
        "num_rows": len(table),
        "near_duplicates": near_duplicates,
        "shingle": None if rule is None else shingle,
        "shard_size": shard_size,
    }
    job = ShardedJob(folder, fields, -(-len(table) // shard_size), stem="keys")
    job.run(partial(_write_keys, table, rule, shard_size), task, take_over=True)
    job.finish(lambda: _compare(job, table, rule))
    return open_verdicts(Path(folder) / VERDICTS)


def _write_keys(table: Table, rule: NearDuplicates | None, shard_size: int, shard: int, path: Path) -> None:
    """Write the keys of a shard's records, (1 + keys, n) uint32: the pair's hash first."""
    rows = shard_rows(shard, shard_size, len(table))
    key_KN = np.empty((1 + (rule.num_keys if rule else 0), len(rows)), dtype=np.uint32)
    for start in range(0, len(rows), _BLOCK):
        records = table.rows(rows[start : start + _BLOCK])
        block = slice(start, start + len(records))
        # Texts hold no NUL characters.
        key_KN[0, block] = [text_hash("\0".join(_pair(record))) % 2**32 for record in records]
        if rule is not None:
            key_KN[1:, block] = rule.keys([_parts(record) for record in records]).T
    save_array(path, key_KN)


def _compare(job: ShardedJob, table: Table, rule: NearDuplicates | None) -> Mapping[str, Any]:
    """Write the verdicts; returns how many records each rule takes out."""

    def same_pair(earlier: int, later: int) -> bool:
        return _pair(table.row(earlier)) == _pair(table.row(later))

    verdict_N = np.full(len(table), KEPT, dtype=np.uint8)
    verdict_N[mark_copies([_column(job, 0)], len(table), same_pair)] = COPY
    if rule is not None:
        row_n = np.flatnonzero(verdict_N == KEPT).astype(np.uint32)

        @lru_cache(maxsize=_REMEMBERED)
        def sets(row: int) -> Sequence[npt.NDArray[np.uint64]]:
            assert rule is not None
            return rule.sets(_parts(table.row(row)))

        def near_pair(earlier: int, later: int) -> bool:
            assert rule is not None
            return rule.alike(sets(int(row_n[earlier])), sets(int(row_n[later])))

        columns = (_column(job, 1 + key)[row_n] for key in range(rule.num_keys))
        verdict_N[row_n[mark_copies(columns, len(row_n), near_pair)]] = NEAR_COPY
    with atomic_path(job.folder / VERDICTS) as temporary:
        save_array(temporary, verdict_N)
    return {"copies": int((verdict_N == COPY).sum()), "near_copies": int((verdict_N == NEAR_COPY).sum())}


def _column(job: ShardedJob, key: int) -> npt.NDArray[np.uint32]:
    """One key of all records, (rows,)."""
    shards = [load_shard(job.path(shard), mapped=True)[key] for shard in range(job.num_shards)]
    return np.concatenate(shards)


def _pair(record: StoredRow) -> list[str]:
    """The texts that make two records copies: query and positives, or a labelled text and its class."""
    if not record.positives:
        return [record.query.strip(), f"class {record.label}"]
    return [record.query.strip(), *(text.strip() for text in record.positives)]


def _parts(record: StoredRow) -> tuple[str, str]:
    """The two texts that near-copies are compared by."""
    return record.query.casefold(), "\n".join(record.positives).casefold()
