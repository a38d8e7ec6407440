"""From vectors to negatives: candidates of a shard of queries, scored by every teacher, and what the rules leave."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.common.io import check_vectors
from embeddings.data.records import Record, record_schema, record_table
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

# Candidates beyond the last rank that make up for the query's own texts. A query with more known positives than this,
# all of them among its nearest documents, is left with fewer ranks.
MAX_OWN_TEXTS = 256


class MinedShard(NamedTuple):
    """The negatives of a shard of queries, and the teachers' mean score of each positive, (P,), query after query."""

    queries: range
    negatives: Negatives
    positive_score_P: Floats
    num_candidates: int


@dataclass(frozen=True)
class ShardMiner:
    """Finds the negatives of a shard of queries, by one or several teachers, whose vectors all have shards of one size.

    Memory: the shard's query vectors and candidates, and one tile of documents.
    """

    index: PairIndex
    vectors: Sequence[PairVectors]
    searches: Sequence[DocumentSearch]
    rules: NegativeRules
    levels: LevelKind | None = None
    qrels: DocumentQrels | None = None

    def mine(self, shard: int) -> MinedShard:
        """The negatives of a shard of the query vectors; an `InputError` where a vector is not of unit length."""
        queries = self.vectors[0].query_shards.rows(shard)
        query_TQD = [np.array(vectors.query_shards.load(shard)) for vectors in self.vectors]
        for vectors, query_QD in zip(self.vectors, query_TQD, strict=True):
            check_vectors(query_QD, str(vectors.query_shards.path(shard)), unit=True)
        row_Q = np.arange(queries.start, queries.stop)
        hash_Q = np.asarray(self.index.query_hashes[queries.start : queries.stop])
        known = self.index.known_positives(row_Q)
        judged = None if self.qrels is None else self.qrels.of_queries(hash_Q, known)
        known = known if judged is None else judged.known
        most_known = int(np.bincount(known.group_P).max())
        top_k = min(self.rules.last_rank + 1 + min(most_known, MAX_OWN_TEXTS), self.index.num_documents)
        found = [search.search(query_QD, top_k) for search, query_QD in zip(self.searches, query_TQD, strict=True)]
        offsets = self.index.positive_offsets[queries.start : queries.stop + 1]
        row_P = self.index.positive_rows[offsets[0] : offsets[-1]].astype(np.int64)
        positive_TP = self._scores(query_TQD, np.repeat(np.arange(len(row_Q)), np.diff(offsets)), row_P)
        facts = MinedQueries(
            number_Q=row_Q,
            hash_Q=hash_Q,
            group_Q=known.group_Q,
            known_group_P=known.group_P,
            known_row_P=known.row_P,
            known_hash_P=self.index.document_hashes[known.row_P],
            positive_score_TQ=np.minimum.reduceat(positive_TP, offsets[:-1] - offsets[0], axis=1),
        )
        if self.levels is not None:
            candidates = self._leveled(query_TQD, [top.index_QK for top in found], facts, judged)
            is_judged_Q = None if judged is None else judged.is_judged_Q
            negatives = choose_levels(candidates, facts, self.rules, self.levels, is_judged_Q)
        else:
            if len(found) == 1:
                row_QC, score_TQC = found[0].index_QK, found[0].score_QK[None]
            else:
                row_QC = _union([top.index_QK for top in found])
                score_TQC = self._candidate_scores(query_TQD, row_QC)
            candidates = ScoredCandidates(row_QC, self.index.document_hashes[row_QC], score_TQC)
            negatives = choose_negatives(candidates, facts, self.rules)
        return MinedShard(
            queries,
            negatives,
            positive_TP.mean(axis=0, dtype=np.float64).astype(np.float32),
            int(np.count_nonzero(candidates.row_QC >= 0)),
        )

    def _leveled(
        self, query_TQD: Sequence[Floats], rows: Sequence[Rows], facts: MinedQueries, judged: QueryQrels | None
    ) -> ScoredCandidates:
        """The documents that were found, drawn or judged to be less relevant than the positives."""
        drawn_QR = draw_documents(facts.number_Q, self.index.num_documents, self.rules)
        none = np.empty(0, np.int64)
        lower = (none, none, none.astype(np.int8)) if judged is None else (judged.query_L, judged.row_L, judged.level_L)
        row_QC = _union([*rows, drawn_QR, _padded(*lower[:2], len(facts.number_Q))])
        marked = mark(row_QC, self.index.num_documents, drawn_QR, *lower)
        score_TQC = self._candidate_scores(query_TQD, row_QC)
        return ScoredCandidates(row_QC, self.index.document_hashes[row_QC], score_TQC, *marked)

    def _candidate_scores(self, query_TQD: Sequence[Floats], row_QC: Rows) -> Floats:
        score_TQC = np.full((len(query_TQD), *row_QC.shape), -np.inf, np.float32)
        query_P, place_P = np.nonzero(row_QC >= 0)
        score_TQC[:, query_P, place_P] = self._scores(query_TQD, query_P, row_QC[query_P, place_P])
        return score_TQC

    def _scores(self, query_TQD: Sequence[Floats], query_P: Rows, row_P: Rows) -> Floats:
        """Each teacher's scores of pairs of a query and a document, (T, P)."""
        sides = zip(query_TQD, self.vectors, strict=True)
        return np.stack([pair_scores(query_QD, query_P, row_P, made.document_shards) for query_QD, made in sides])


def _union(rows: Sequence[Rows]) -> Rows:
    """The documents that any teacher found for each query, each once, (Q, C); -1 in place of repeats."""
    row_QC = np.sort(np.concatenate(rows, axis=1), axis=1)
    row_QC[:, 1:][row_QC[:, 1:] == row_QC[:, :-1]] = -1
    return row_QC


def _padded(query_L: Rows, row_L: Rows, num_queries: int) -> Rows:
    """Documents listed query after query as a row for each query, (Q, most of any); -1 fills up."""
    count_Q = np.bincount(query_L, minlength=num_queries)
    row_QJ = np.full((num_queries, int(count_Q.max())), -1, np.int64)
    row_QJ[np.arange(row_QJ.shape[1]) < count_Q[:, None]] = row_L
    return row_QJ


# What the report says of a level, by the level's number as text.
ByLevel = dict[str, dict[str, Any]]


def mined_schema(graded: bool) -> pa.Schema:
    """What mining finds out about a record, in the columns of a shard's file; negatives with levels or without."""
    scores = [(name, pa.list_(pa.float32())) for name in ("negative_scores", "positive_scores")]
    return pa.schema([record_schema(graded).field("negatives"), *scores])


def output_schema(graded: bool, reranked: bool = False) -> pa.Schema:
    """The columns of the file of mined records: those of a source of pairs, the scores, and those of a reranker."""
    schema = pa.unify_schemas([record_schema(graded), mined_schema(graded)])
    return schema.append(pa.field("scores", pa.list_(pa.float32()))) if reranked else schema


def write_shard(mined: MinedShard, index: PairIndex, rules: NegativeRules, path: Path) -> None:
    """Write what was mined for the records of a shard as Parquet, with its share of the report in the metadata."""
    negatives = mined.negatives
    schema = mined_schema(graded=negatives.level_N is not None)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    is_found_QN = negatives.row_QN >= 0
    all_texts = iter(index.document_texts(negatives.row_QN[is_found_QN]))
    offsets = index.positive_offsets[mined.queries.start : mined.queries.stop + 1]
    offsets = offsets - offsets[0]
    for place, is_found_N in enumerate(is_found_QN):
        texts: list[Any] = list(islice(all_texts, int(is_found_N.sum())))
        if negatives.level_N is not None:
            levels = negatives.level_N[is_found_N].tolist()
            texts = [{"text": text, "level": level} for text, level in zip(texts, levels, strict=True)]
        columns["negatives"].append(texts)
        columns["negative_scores"].append(negatives.score_QN[place][is_found_N])
        columns["positive_scores"].append(mined.positive_score_P[offsets[place] : offsets[place + 1]])
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
    metadata = {"counts": json.dumps(counts), "levels": json.dumps(_shard_levels(negatives))}
    pq.write_table(pa.table(columns, schema=schema).replace_schema_metadata(metadata), path)


def read_shard(path: Path) -> pa.Table:
    """The file of a shard."""
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


def with_mined(records: Sequence[Record], mined: pa.Table, graded: bool, scores: pa.Array | None = None) -> pa.Table:
    own = record_table([replace(record, negatives=(), scores=()) for record in records], graded)
    schema = output_schema(graded)
    table = pa.table([(mined if name in mined.schema.names else own)[name] for name in schema.names], schema=schema)
    return table if scores is None else table.append_column("scores", scores)


def report_levels(shards: Iterable[Mapping[str, Mapping[str, float]] | None]) -> ByLevel | None:
    """What all shards have of each level (see `shard_counts`), for the report; None without levels.

    For each level its `num_negatives`, the number of records that lack it (`num_lacking`), and `lowest_score`,
    `mean_score` (in float64) and `highest_score`, None where no record has it.
    """
    found = [shard for shard in shards if shard is not None]
    if not found:
        return None
    report: ByLevel = {}
    for level in found[0]:
        parts = [shard[level] for shard in found]
        present = [part for part in parts if part["num_negatives"]]
        count = sum(part["num_negatives"] for part in parts)
        report[level] = {
            "num_negatives": count,
            "num_lacking": sum(part["num_lacking"] for part in parts),
            "lowest_score": min((part["lowest_score"] for part in present), default=None),
            "mean_score": sum(part["sum"] for part in parts) / count if count else None,
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
