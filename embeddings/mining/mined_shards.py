"""The mining of one shard of queries: candidates, teachers' scores, negatives, and the shard's file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.common.progress import progress_bar
from embeddings.data.records import NUM_LEVELS, Record, record_schema, record_table
from embeddings.mining.negatives import (
    DocumentQrels,
    LevelKind,
    MinedQueries,
    NegativeRules,
    Negatives,
    QueryQrels,
    ScoredCandidates,
    choose_levels,
    choose_negatives,
    draw_documents,
    mark,
)
from embeddings.mining.pair_index import PairIndex
from embeddings.mining.pair_vectors import PairVectors
from embeddings.mining.search import DocumentSearch, Floats, Rows, pair_scores

# Maximum candidates beyond the last rank that replace the query's own texts. A query with more known positives, all
# among its nearest documents, has fewer ranks.
MAX_OWN_TEXTS = 256


class MinedShard(NamedTuple):
    queries: range
    negatives: Negatives
    positive_score_P: Floats
    num_candidates: int


@dataclass(frozen=True)
class ShardMiner:
    """Finds the negatives of queries with one or several teachers."""

    index: PairIndex
    vectors: Sequence[PairVectors]
    searches: Sequence[DocumentSearch]
    rules: NegativeRules
    levels: LevelKind | None = None
    qrels: DocumentQrels | None = None

    def mine(self, queries: range) -> MinedShard:
        """The negatives of consecutive queries."""
        row_Q = np.arange(queries.start, queries.stop)
        query_TQD = [vectors.query_shards.take(row_Q) for vectors in self.vectors]
        hash_Q = np.asarray(self.index.query_hashes[queries.start : queries.stop])
        known = self.index.known_positives(row_Q)
        judged = None if self.qrels is None else self.qrels.of_queries(hash_Q, known)
        known = known if judged is None else judged.known
        max_known = int(np.bincount(known.group_P).max())
        top_k = min(self.rules.last_rank + 1 + min(max_known, MAX_OWN_TEXTS), self.index.num_documents)
        teachers = progress_bar(None, "search", "teacher", iterable=range(len(self.searches)))
        nearest = [self.searches[teacher].search(query_TQD[teacher], top_k) for teacher in teachers]
        offsets = self.index.positive_offsets[queries.start : queries.stop + 1]
        row_P = self.index.positive_rows[offsets[0] : offsets[-1]].astype(np.int64)
        positive_TP = self._scores(query_TQD, np.repeat(np.arange(len(row_Q)), np.diff(offsets)), row_P)
        mined_queries = MinedQueries(
            number_Q=row_Q,
            hash_Q=hash_Q,
            known=known,
            known_hash_P=self.index.document_hashes[known.row_P],
            positive_score_TQ=np.minimum.reduceat(positive_TP, offsets[:-1] - offsets[0], axis=1),
        )
        if self.levels is not None:
            candidates = self._leveled(query_TQD, [top.index_QK for top in nearest], mined_queries, judged)
            is_judged_Q = None if judged is None else judged.is_judged_Q
            negatives = choose_levels(candidates, mined_queries, self.rules, self.levels, is_judged_Q)
        else:
            if len(nearest) == 1:
                row_QC, score_TQC = nearest[0].index_QK, nearest[0].score_QK[None]
            else:
                row_QC = _union([top.index_QK for top in nearest])
                score_TQC = self._candidate_scores(query_TQD, row_QC)
            candidates = ScoredCandidates(row_QC, self.index.document_hashes[row_QC], score_TQC)
            negatives = choose_negatives(candidates, mined_queries, self.rules)
        return MinedShard(
            queries,
            negatives,
            positive_TP.mean(axis=0, dtype=np.float64).astype(np.float32),
            int(np.count_nonzero(candidates.row_QC >= 0)),
        )

    def _leveled(
        self, query_TQD: Sequence[Floats], rows: Sequence[Rows], queries: MinedQueries, judged: QueryQrels | None
    ) -> ScoredCandidates:
        """The documents that were found, drawn, or judged less relevant than the positives."""
        drawn_QR = draw_documents(queries.number_Q, self.index.num_documents, self.rules)
        none = np.empty(0, np.int64)
        lower = (none, none, none.astype(np.int8)) if judged is None else (judged.query_L, judged.row_L, judged.level_L)
        row_QC = _union([*rows, drawn_QR, _padded(*lower[:2], len(queries.number_Q))])
        marked = mark(row_QC, self.index.num_documents, drawn_QR, *lower)
        score_TQC = self._candidate_scores(query_TQD, row_QC)
        return ScoredCandidates(row_QC, self.index.document_hashes[row_QC], score_TQC, *marked)

    def _candidate_scores(self, query_TQD: Sequence[Floats], row_QC: Rows) -> Floats:
        score_TQC = np.full((len(query_TQD), *row_QC.shape), -np.inf, np.float32)
        query_P, column_P = np.nonzero(row_QC >= 0)
        score_TQC[:, query_P, column_P] = self._scores(query_TQD, query_P, row_QC[query_P, column_P])
        return score_TQC

    def _scores(self, query_TQD: Sequence[Floats], query_P: Rows, row_P: Rows) -> Floats:
        """Each teacher's scores of pairs of a query and a document, (T, P)."""
        sides = zip(query_TQD, self.vectors, strict=True)
        return np.stack([pair_scores(query_QD, query_P, row_P, vectors.document_shards) for query_QD, vectors in sides])


def _union(rows: Sequence[Rows]) -> Rows:
    """The distinct documents of each query, (Q, C), with -1 for repeats."""
    row_QC = np.sort(np.concatenate(rows, axis=1), axis=1)
    row_QC[:, 1:][row_QC[:, 1:] == row_QC[:, :-1]] = -1
    return row_QC


def _padded(query_L: Rows, row_L: Rows, num_queries: int) -> Rows:
    """Documents in query order as one row per query, (Q, maximum count), padded with -1."""
    count_Q = np.bincount(query_L, minlength=num_queries)
    row_QJ = np.full((num_queries, int(count_Q.max())), -1, np.int64)
    row_QJ[np.arange(row_QJ.shape[1]) < count_Q[:, None]] = row_L
    return row_QJ


# The report's statistics of each level, by the level as text.
ByLevel = dict[str, dict[str, Any]]


def mined_schema(graded: bool) -> pa.Schema:
    scores = [(name, pa.list_(pa.float32())) for name in ("negative_scores", "positive_scores")]
    return pa.schema([record_schema(graded).field("negatives"), *scores])


def output_schema(graded: bool, reranked: bool = False) -> pa.Schema:
    schema = pa.unify_schemas([record_schema(graded), mined_schema(graded)])
    return schema.append(pa.field("scores", pa.list_(pa.float32()))) if reranked else schema


def write_shard(mined: MinedShard, index: PairIndex, rules: NegativeRules, path: Path) -> None:
    """Write the results of a shard as Parquet, with its share of the report in the metadata."""
    negatives = mined.negatives
    schema = mined_schema(graded=negatives.level_N is not None)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    is_found_QN = negatives.row_QN >= 0
    all_texts = iter(index.document_texts(negatives.row_QN[is_found_QN]))
    offsets = index.positive_offsets[mined.queries.start : mined.queries.stop + 1]
    offsets = offsets - offsets[0]
    for query, is_found_N in enumerate(is_found_QN):
        texts: list[Any] = list(islice(all_texts, int(is_found_N.sum())))
        if negatives.level_N is not None:
            levels = negatives.level_N[is_found_N].tolist()
            texts = [{"text": text, "level": level} for text, level in zip(texts, levels, strict=True)]
        columns["negatives"].append(texts)
        columns["negative_scores"].append(negatives.score_QN[query][is_found_N])
        columns["positive_scores"].append(mined.positive_score_P[offsets[query] : offsets[query + 1]])
    count_Q = np.count_nonzero(is_found_QN, axis=1)
    counts = {
        "num_candidates": mined.num_candidates,
        **{f"removed {reason}": count for reason, count in negatives.removed.items()},
        "num_left": negatives.num_left,
        "num_negatives": int(count_Q.sum()),
        "num_short": int(np.count_nonzero(count_Q < rules.count)),
        "num_empty": int(np.count_nonzero(count_Q == 0)),
        "num_replaced": sum(map(bool, index.source.table.levels(mined.queries))),
    }
    table = pa.table(columns, schema=schema).replace_schema_metadata({"counts": json.dumps(counts)})
    pq.write_table(table, path)


def read_shard(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowException, OSError):
        raise InputError(str(path), "the shard is missing or damaged", "delete its folder and run again") from None


def shard_counts(mined: pa.Table) -> dict[str, int]:
    """A shard's share of the report."""
    counts: dict[str, int] = json.loads(mined.schema.metadata[b"counts"])
    return counts


def with_mined(records: Sequence[Record], mined: pa.Table, graded: bool, scores: pa.Array | None = None) -> pa.Table:
    originals = record_table([record._replace(negatives=(), scores=()) for record in records], graded)
    schema = output_schema(graded)
    columns = [(mined if name in mined.schema.names else originals)[name] for name in schema.names]
    table = pa.table(columns, schema=schema)
    return table if scores is None else table.append_column("scores", scores)


def add_levels(report: ByLevel, mined: pa.Table) -> None:
    """Add a shard to the statistics of each level: its negatives, records without any, and the range of scores."""
    negatives = mined["negatives"].combine_chunks()
    level_n = pc.list_flatten(negatives).field("level").to_numpy()
    row_n = pc.list_parent_indices(negatives).to_numpy()
    score_n = pc.list_flatten(mined["negative_scores"]).to_numpy().astype(np.float64)
    for level in range(1, NUM_LEVELS + 1):
        part = report.setdefault(str(level), {"num_negatives": 0, "num_lacking": 0})
        own_n = score_n[level_n == level]
        part["num_lacking"] += len(mined) - len(np.unique(row_n[level_n == level]))
        if len(own_n):
            total = part.get("mean_score", 0.0) * part["num_negatives"] + float(own_n.sum())
            part["num_negatives"] += len(own_n)
            part["mean_score"] = total / part["num_negatives"]
            part["lowest_score"] = min(part.get("lowest_score", np.inf), float(own_n.min()))
            part["highest_score"] = max(part.get("highest_score", -np.inf), float(own_n.max()))
