"""From vectors to negatives: candidates of a shard of queries, scored by every teacher, and what the rules leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.directions import require_directions
from embeddings.mining.judgments import DocumentJudgments, QueryJudgments
from embeddings.mining.knn import DocumentSearch, pair_scores
from embeddings.mining.levels import LevelKind, choose_levels, draw_documents, mark
from embeddings.mining.negatives import Candidates, NegativeRules, Negatives, QueryFacts, choose_negatives
from embeddings.mining.pair_index import KnownPositives, PairIndex, concatenated_ranges
from embeddings.mining.pair_vectors import PairVectors
from embeddings.mining.scans import Floats, Rows

# Candidates beyond the last rank that make up for the query's own texts. A query with more known positives than this,
# all of them among its nearest documents, is left with fewer ranks.
MOST_OWN_TEXTS = 256


class MinedShard(NamedTuple):
    """What was found for a shard of queries.

    Attributes:
        queries: Their rows.
        negatives: Their negatives, and what was removed.
        positive_score_P: Mean of the teachers' scores of each positive, query after query, (P,) float32.
        num_candidates: Candidates that the search brought, and with levels those drawn or judged beside them.
    """

    queries: range
    negatives: Negatives
    positive_score_P: Floats
    num_candidates: int


@dataclass(frozen=True)
class ShardMiner:
    """Finds the negatives of a shard of queries.

    Memory: vectors of one shard of queries and one tile of documents, and the candidates of the shard; it does not grow
    with the source.

    Attributes:
        index: The source's queries and documents.
        vectors: The vectors by each teacher, all in shards of one size.
        searches: The search over each teacher's documents.
        rules: What makes a candidate a negative.
        levels: What gives the negatives their levels; None for negatives without.
        judgments: What people judged, for levels by grades; else None.
    """

    index: PairIndex
    vectors: Sequence[PairVectors]
    searches: Sequence[DocumentSearch]
    rules: NegativeRules
    levels: LevelKind | None = None
    judgments: DocumentJudgments | None = None

    def mine(self, shard: int) -> MinedShard:
        """The negatives of the queries in a shard of the query vectors.

        Raises:
            InputError: If a vector is zero, not finite or not of unit length, or a shard is damaged.
        """
        queries = self.vectors[0].query_shards.rows(shard)
        query_TQD = [np.array(vectors.query_shards.load(shard)) for vectors in self.vectors]
        for vectors, query_QD in zip(self.vectors, query_TQD, strict=True):
            require_directions(query_QD, str(vectors.query_shards.path(shard)), unit=True)
        row_Q = np.arange(queries.start, queries.stop)
        hash_Q = np.asarray(self.index.query_hashes[queries.start : queries.stop])
        known = self.index.known_positives(row_Q)
        judged = None if self.judgments is None else self.judgments.of_queries(hash_Q, known)
        if judged is not None:
            known = _with_judged(known, judged)
        most_known = int(np.bincount(known.group_P).max())
        top_k = min(self.rules.last_rank + 1 + min(most_known, MOST_OWN_TEXTS), self.index.num_documents)
        found = [search.search(query_QD, top_k) for search, query_QD in zip(self.searches, query_TQD, strict=True)]
        offsets = self.index.positive_offsets[queries.start : queries.stop + 1]
        positive_TP = self._positive_scores(query_TQD, offsets)
        facts = QueryFacts(
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
            judged_Q = None if judged is None else judged.is_judged_G[known.group_Q]
            negatives = choose_levels(candidates, facts, self.rules, self.levels, judged_Q)
        else:
            if len(found) == 1:
                row_QC, score_TQC = found[0].index_QK, found[0].score_QK[None]
            else:
                row_QC = _union([top.index_QK for top in found])
                score_TQC = self._scores(query_TQD, row_QC)
            candidates = Candidates(row_QC, self.index.document_hashes[row_QC], score_TQC)
            negatives = choose_negatives(candidates, facts, self.rules)
        return MinedShard(
            queries,
            negatives,
            positive_TP.mean(axis=0, dtype=np.float64).astype(np.float32),
            int(np.count_nonzero(candidates.row_QC >= 0)),
        )

    def _leveled(
        self, query_TQD: Sequence[Floats], rows: Sequence[Rows], facts: QueryFacts, judged: QueryJudgments | None
    ) -> Candidates:
        """The documents that were found, drawn or judged to be less relevant than the positives."""
        drawn_QR = draw_documents(facts.number_Q, self.index.num_documents, self.rules)
        query_L, row_L, level_L = _of_queries(judged, facts.group_Q)
        row_QC = _union([*rows, drawn_QR, _padded(query_L, row_L, len(facts.number_Q))])
        marked = mark(row_QC, self.index.num_documents, drawn_QR, query_L, row_L, level_L)
        return Candidates(row_QC, self.index.document_hashes[row_QC], self._scores(query_TQD, row_QC), *marked)

    def _positive_scores(self, query_TQD: Sequence[Floats], offsets: Rows) -> Floats:
        """Each teacher's scores of the records' own positives, (T, P)."""
        row_P = self.index.positive_rows[offsets[0] : offsets[-1]].astype(np.int64)
        query_P = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        return np.stack(
            [
                pair_scores(query_QD, query_P, row_P, vectors.document_shards)
                for vectors, query_QD in zip(self.vectors, query_TQD, strict=True)
            ]
        )

    def _scores(self, query_TQD: Sequence[Floats], row_QC: Rows) -> Floats:
        """Each teacher's scores of all candidates, whichever teacher found them, (T, Q, C)."""
        score_TQC = np.full((len(query_TQD), *row_QC.shape), -np.inf, np.float32)
        query_P, place_P = np.nonzero(row_QC >= 0)
        for teacher, (vectors, query_QD) in enumerate(zip(self.vectors, query_TQD, strict=True)):
            scores = pair_scores(query_QD, query_P, row_QC[query_P, place_P], vectors.document_shards)
            score_TQC[teacher, query_P, place_P] = scores
        return score_TQC


def _union(rows: Sequence[Rows]) -> Rows:
    """The documents that any teacher found for each query, each once, (Q, C); -1 in place of repeats."""
    row_QC = np.sort(np.concatenate(rows, axis=1), axis=1)
    row_QC[:, 1:][row_QC[:, 1:] == row_QC[:, :-1]] = -1
    return row_QC


def _with_judged(known: KnownPositives, judged: QueryJudgments) -> KnownPositives:
    """The known positives and what was judged as relevant as these."""
    return known._replace(
        group_P=np.append(known.group_P, judged.positive_group_P), row_P=np.append(known.row_P, judged.positive_row_P)
    )


def _of_queries(judged: QueryJudgments | None, group_Q: Rows) -> tuple[Rows, Rows, npt.NDArray[np.int8]]:
    """The query, document and level of each document judged less relevant, (L,) each, query after query."""
    if judged is None:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8)
    start_Q = np.searchsorted(judged.lower_group_L, group_Q, side="left")
    stop_Q = np.searchsorted(judged.lower_group_L, group_Q, side="right")
    place_L = concatenated_ranges(start_Q, stop_Q)
    return (
        np.repeat(np.arange(len(group_Q)), stop_Q - start_Q),
        judged.lower_row_L[place_L],
        judged.lower_level_L[place_L],
    )


def _padded(query_L: Rows, row_L: Rows, num_queries: int) -> Rows:
    """Documents that are listed query after query as a row for each query, (Q, most of any); -1 fills up."""
    count_Q = np.bincount(query_L, minlength=num_queries)
    row_QJ = np.full((num_queries, int(count_Q.max())), -1, np.int64)
    row_QJ[np.arange(row_QJ.shape[1]) < count_Q[:, None]] = row_L
    return row_QJ
