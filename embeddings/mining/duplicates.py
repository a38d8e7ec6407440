"""Copies and near-copies of training records, over a whole source."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from embeddings.common.errors import OptionError
from embeddings.common.io import text_hash
from embeddings.common.jobs import ArrayTask, ShardedJob, load_shard, save_array, shard_rows, write_array
from embeddings.common.progress import progress_bar, tracked
from embeddings.common.text import canonical
from embeddings.data.near_duplicates import KEY_BYTES, NearDuplicates, Shingle
from embeddings.data.store import CachedSource, StoredRow, Table
from embeddings.inference.bm25 import BM25, word_tokens

COPY, NEAR_COPY = 1, 2
# A record that no rule removes; the rules' codes start at 1.
KEPT = 0
# The results, and the first results of a comparison that has not finished.
_REASONS, _COMPARED = "verdicts.npy", "compared.npy"
SHARD_ROWS = 65_536
# Records whose keys are computed at once: a few megabytes.
_BLOCK = 512


def find_duplicates(
    source: CachedSource,
    folder: str | os.PathLike[str],
    *,
    near_duplicates: float | None = None,
    shingle: Shingle = "word",
    shard_size: int = SHARD_ROWS,
    task: ArrayTask | None = None,
) -> npt.NDArray[np.uint8]:
    """For each record, whether it is a copy or near-copy of an earlier record that is retained.

    Copies have the same query and positives, or the same text and class, ignoring outer white space. Near-copies have
    similar queries *and* similar positives, ignoring case: two questions about one document are two records. Their full
    texts are compared; 1 in 4,000 near-copies exactly at the threshold may be missed, and a few per cent among
    thousands of records of one pattern. Memory: some 200 bytes per record at 0.8.

    Args:
        source: A converted source of pairs, or of labelled texts.
        folder: Working folder.
        near_duplicates: Minimum Jaccard similarity of near-copies, 0.5 to 1; None for copies only.
        shingle: Unit in which near-copies are compared: sequences of 3 words, or of 5 characters.
        shard_size: Records per shard.
        task: Shards that this process computes; None for all.

    Returns:
        `KEPT`, `COPY` or `NEAR_COPY` for each record, (rows,) uint8, memory-mapped.
    """
    rule = None if near_duplicates is None else NearDuplicates(near_duplicates, num_parts=2, shingle=shingle)
    table = source.table
    fields = {
        "kind": "duplicates",
        "source_key": source.key,
        "num_rows": len(table),
        "near_duplicates": near_duplicates,
        "shingle": None if rule is None else shingle,
        "shard_size": shard_size,
    }
    job = ShardedJob(folder, fields, -(-len(table) // shard_size), stem="keys")
    rows = partial(shard_rows, shard_size=shard_size, num_rows=len(table))
    job.run(lambda shard, path: _write_keys(table, rule, rows(shard), path), task, take_over=True, rows=rows)
    job.finish(lambda: _compare(job, table, rule))
    return np.asarray(load_shard(Path(folder) / _REASONS, mapped=True))


def _write_keys(table: Table, rule: NearDuplicates | None, rows: range, path: Path) -> None:
    """Write the hashes and signatures of records, (n, 8 + 4 * num_keys) uint8."""
    key_NB = np.empty((len(rows), 8 + (KEY_BYTES * rule.num_keys if rule else 0)), dtype=np.uint8)
    for start in progress_bar(None, "reading texts", "block", iterable=range(0, len(rows), _BLOCK)):
        records = table.rows(rows[start : start + _BLOCK])
        block = slice(start, start + len(records))
        # Texts contain no NUL characters.
        hashes = [text_hash("\0".join(_record_texts(record))) for record in records]
        key_NB[block, :8] = np.array(hashes, np.int64)[:, None].view(np.uint8)
        if rule is not None:
            signatures = rule.signatures([_compared_texts(record) for record in records])
            key_NB[block, 8:] = signatures.reshape(len(records), -1)
    save_array(path, key_NB)


def _compare(job: ShardedJob, table: Table, rule: NearDuplicates | None) -> Mapping[str, Any]:
    shards = [load_shard(job.path(shard), mapped=True) for shard in range(job.num_shards)]
    hash_N = np.concatenate([shard[:, :8] for shard in shards]).view(np.int64)[:, 0]
    reason_N = np.full(len(table), COPY, dtype=np.uint8)
    row_n = np.unique(hash_N, return_index=True)[1]
    reason_N[row_n] = KEPT
    if rule is not None:
        row_n.sort()
        kept = np.split(reason_N == KEPT, np.cumsum([len(shard) for shard in shards])[:-1])
        signature_nB = np.concatenate([shard[is_kept, 8:] for shard, is_kept in zip(shards, kept, strict=True)])

        def texts(numbers: Sequence[int]) -> list[tuple[str, str]]:
            return [_compared_texts(record) for record in table.rows(row_n[numbers])]

        progress = job.folder / _COMPARED
        is_copy_n = rule.mark_copies(
            signature_nB.reshape(len(row_n), -1, KEY_BYTES),
            texts,
            decided=load_shard(progress) if progress.exists() else (),
            save=partial(write_array, progress),
        )
        reason_N[row_n[is_copy_n]] = NEAR_COPY
        progress.unlink(missing_ok=True)
    write_array(job.folder / _REASONS, reason_N)
    return {"copies": int((reason_N == COPY).sum()), "near_copies": int((reason_N == NEAR_COPY).sum())}


def _record_texts(record: StoredRow) -> list[str]:
    """The texts by which records are copies: query and positives, or a labelled text and its class."""
    if not record.positives:
        return [canonical(record.query), f"class {record.label}"]
    return [canonical(record.query), *map(canonical, record.positives)]


def _compared_texts(record: StoredRow) -> tuple[str, str]:
    return canonical(record.query).casefold(), canonical("\n".join(record.positives)).casefold()


EQUAL, SIMILAR = 1, 2
# Evaluation texts with fewer distinct tokens are covered by many unrelated texts.
MIN_TOKENS = 4
# Maximum rounding error of a sum of float32 shares that should be 1.
_ROUNDING = 1e-5

_CHECK_BLOCK = 1024
# Keeps vowel signs, and the signs in names of programming languages (c#, c++); drops white space and other punctuation.
_WORD = regex.compile(r"[\w\p{M}+#]+")


class EvaluationTexts(NamedTuple):
    """The texts that a model will be evaluated on.

    Attributes:
        queries: Queries; put texts of tasks without queries here and in `documents`.
        documents: Documents. Empty if training and evaluation share one corpus by design, as in BEIR.
    """

    queries: Sequence[str]
    documents: Sequence[str]

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for texts in self:
            digest.update(f"{len(texts)}\n".encode())
            for text in texts:
                content = text.encode("utf-8", "surrogatepass")
                digest.update(f"{len(content)}\n".encode() + content)
        return digest.hexdigest()


class Decontaminator:
    """Finds training records that resemble evaluation texts.

    `EQUAL`: the query or a positive equals an evaluation query or document, ignoring case, white space and punctuation.

    `SIMILAR`: the share of the BM25 weight of an evaluation query that is in the query, or of an evaluation document
    that is in a positive, reaches the threshold (`BM25.coverage`). Positives are not compared with evaluation queries,
    because a document covers every question that it answers. Evaluation texts with fewer than `MIN_TOKENS` distinct
    tokens (`word_tokens`, for any language) are only compared for equality. Negatives are not checked. A labelled
    text counts as a query.

    Args:
        evaluation: The evaluation texts.
        bm25_threshold: Minimum coverage of a similar text, > 0 and <= 1; None to check equality only.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, section 4.2 (a BM25 threshold; value and scale are not
        stated). Differs: the score is divided by the evaluation text's score for itself; exact matches go first.
    """

    def __init__(self, evaluation: EvaluationTexts, bm25_threshold: float | None = None) -> None:
        if not any(evaluation):
            raise OptionError("decontaminate", 0, "must have at least one text", "name a folder of evaluation data")
        if bm25_threshold is not None and not 0 < bm25_threshold <= 1:
            rule = "must be > 0 and <= 1"
            raise OptionError("bm25_threshold", bm25_threshold, rule, "leave it out to remove equal texts only")
        self.evaluation, self.bm25_threshold = evaluation, bm25_threshold

    @cached_property
    def fields(self) -> dict[str, Any]:
        return {"sha256": self.evaluation.sha256(), "bm25_threshold": self.bm25_threshold}

    def prepare(self) -> None:
        """Index the evaluation texts, which the first call of `reasons` would do."""
        _ = self._hashes, self.bm25_threshold is None or self._indexes

    def reasons(self, records: Sequence[StoredRow]) -> npt.NDArray[np.uint8]:
        """`KEPT`, `EQUAL` or `SIMILAR` for each record, (n,) uint8."""
        reason_N = np.full(len(records), KEPT, dtype=np.uint8)
        row_N = np.arange(len(records))
        positives = [text for record in records for text in record.positives]
        owner_P = np.repeat(row_N, [len(record.positives) for record in records])
        sides = ((row_N, [record.query for record in records]), (owner_P, positives))
        if self.bm25_threshold is not None:
            for (owner_P, texts), index in zip(sides, self._indexes, strict=True):
                if index is not None and texts:
                    is_similar_P = index.coverage(texts) >= self.bm25_threshold - _ROUNDING
                    reason_N[owner_P[is_similar_P]] = SIMILAR
        for owner_P, texts in sides:
            reason_N[owner_P[np.isin(_hashes(texts), self._hashes)]] = EQUAL
        return reason_N

    @cached_property
    def _hashes(self) -> npt.NDArray[np.int64]:
        return np.unique(_hashes(text for texts in self.evaluation for text in texts))

    @cached_property
    def _indexes(self) -> list[BM25 | None]:
        indexes: list[BM25 | None] = []
        total = sum(map(len, self.evaluation))
        with progress_bar(total, "indexing evaluation texts", "text") as bar:
            for side in self.evaluation:
                texts = []
                with bar.item(len(side)):
                    tokens = map(word_tokens, side)
                    sized = tracked(zip(side, tokens, strict=True), len(side), "", "text", lambda _: 1, share=0.5)
                    texts = [text for text, words in sized if len(set(words)) >= MIN_TOKENS]
                    indexes.append(BM25(texts, word_tokens) if texts else None)
        return indexes


def find_contaminated(
    source: CachedSource,
    folder: str | os.PathLike[str],
    rule: Decontaminator,
    *,
    shard_size: int = SHARD_ROWS,
    task: ArrayTask | None = None,
) -> npt.NDArray[np.uint8]:
    """`KEPT`, `EQUAL` or `SIMILAR` for each record (see `Decontaminator`), (rows,) uint8; see `find_duplicates`."""
    table = source.table
    fields = {
        "kind": "decontamination",
        "source_key": source.key,
        "num_rows": len(table),
        "evaluation": rule.fields,
        "shard_size": shard_size,
    }
    job = ShardedJob(folder, fields, -(-len(table) // shard_size))
    if job.missing():
        rule.prepare()
    rows = partial(shard_rows, shard_size=shard_size, num_rows=len(table))
    job.run(lambda shard, path: _write_reasons(table, rule, rows(shard), path), task, take_over=True, rows=rows)

    def join() -> dict[str, Any]:
        reason_N = np.concatenate([load_shard(job.path(shard)) for shard in range(job.num_shards)])
        write_array(job.folder / _REASONS, reason_N)
        return {"equal": int((reason_N == EQUAL).sum()), "similar": int((reason_N == SIMILAR).sum())}

    job.finish(join)
    return np.asarray(load_shard(Path(folder) / _REASONS, mapped=True))


def _write_reasons(table: Table, rule: Decontaminator, rows: range, path: Path) -> None:
    starts = progress_bar(None, "comparing texts", "block", iterable=range(0, len(rows), _CHECK_BLOCK))
    blocks = (rows[start : start + _CHECK_BLOCK] for start in starts)
    save_array(path, np.concatenate([rule.reasons(table.rows(block)) for block in blocks]))


def _hashes(texts: Iterable[str]) -> npt.NDArray[np.int64]:
    """A hash of each text that ignores case, white space and punctuation; a text without words is hashed whole."""
    keys = (" ".join(_WORD.findall(canonical(text).casefold())) or text for text in texts)
    return np.fromiter(map(text_hash, keys), np.int64)
