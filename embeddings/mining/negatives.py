"""Selection of a query's negatives from its candidates: pure rules on rows, scores and hashes."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, OptionError, require_minimum
from embeddings.common.io import text_hash
from embeddings.common.random import derive_seed, mix_bits
from embeddings.data.near_duplicates import concatenated_ranges
from embeddings.data.records import NUM_LEVELS
from embeddings.mining.pair_index import Int64s, KnownPositives, PairIndex, find
from embeddings.mining.search import Floats

Choice = Literal["top", "random"]

REASONS = ("own_positive", "own_text", "duplicate_text", "outside_ranks", "margin", "absolute_margin")

Int8s = npt.NDArray[np.int8]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NegativeRules:
    """The rules by which candidates become negatives.

    Args:
        num_negatives: Maximum negatives per query; NV-Retriever trains with 4, NV-Embed with 7. With levels a multiple
            of 4. None for 7, and with levels 4, one of each level.
        margin: Upper bound on a negative's score, relative to the positive's, or None: `s < p - |p| (1 - margin)`.
            NV-Retriever's TopK-PercPos uses 0.95.
        absolute_margin: Minimum distance of a negative below the positive's score, or None: `s < p - absolute_margin`.
        first_rank: Rank of the first candidate considered, from 1, not counting the query's own texts.
        last_rank: Rank of the last candidate considered.
        choice: `top` takes the hardest remaining candidates, `random` draws from them.
        seed: Seed of the random choice, and of the lists of an approximate search.
    """

    num_negatives: int | None = None
    margin: float | None = 0.95
    absolute_margin: float | None = None
    first_rank: int = 1
    last_rank: int = 100
    choice: Choice = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        require_minimum("num_negatives", self.count, 1, "NV-Embed uses 7")
        if self.margin is not None and not 0 < self.margin <= 1:
            hint = "NV-Retriever uses 0.95; null switches it off"
            raise OptionError("margin", self.margin, "must be > 0 and <= 1", hint)
        if self.absolute_margin is not None and not (math.isfinite(self.absolute_margin) and self.absolute_margin >= 0):
            rule = "must be finite and >= 0"
            raise OptionError("absolute_margin", self.absolute_margin, rule, "leave it out to switch it off")
        require_minimum("first_rank", self.first_rank, 1, "1 is the hardest candidate")
        if self.num_negatives is not None and self.last_rank - self.first_rank + 1 < self.count:
            rule = f"must leave at least {self.count} ranks from first_rank {self.first_rank}"
            raise OptionError("last_rank", self.last_rank, rule, "raise it, or lower num_negatives")

    @property
    def count(self) -> int:
        return 7 if self.num_negatives is None else self.num_negatives


class ScoredCandidates(NamedTuple):
    """The documents that a search found for each query, in any order; row -1 for none.

    `drawn_QC` marks those drawn from all documents, which `last_rank` does not remove. `level_QC` is the level of
    documents judged less relevant than the positive, which neither ranks nor margins remove; 0 for the others.
    """

    row_QC: Int64s
    hash_QC: Int64s
    score_TQC: Floats
    drawn_QC: Mask | None = None
    level_QC: Int8s | None = None


class MinedQueries(NamedTuple):
    """Row and text hash of each query, the known positives and their hashes.

    `positive_score_TQ` is each teacher's lowest score of the record's positives.
    """

    number_Q: Int64s
    hash_Q: Int64s
    known: KnownPositives
    known_hash_P: Int64s
    positive_score_TQ: Floats


class Negatives(NamedTuple):
    """The negatives of each query, hardest first, and their mean scores; row -1 and score -inf if there are fewer.

    `removed` counts the candidates by the first rule that applied (`REASONS`), `num_left` those that no rule removed.
    `level_N` is the level of each column, or None.
    """

    row_QN: Int64s
    score_QN: Floats
    removed: dict[str, int]
    num_left: int
    level_N: Int8s | None = None


class Remaining(NamedTuple):
    """The candidates of each query, hardest first, and which of them the rules leave.

    `order_QC` is the index of each in the original order. Ranks start at 1 and do not count answers and repeated texts.
    """

    order_QC: Int64s
    row_QC: Int64s
    mean_QC: Floats
    rank_QC: Int64s
    left_QC: Mask
    removed: dict[str, int]

    @property
    def num_left(self) -> int:
        return int(np.count_nonzero(self.left_QC))


def choose_negatives(candidates: ScoredCandidates, queries: MinedQueries, rules: NegativeRules) -> Negatives:
    """Up to `rules.count` negatives of each query: the hardest of its remaining candidates, or a random choice.

    1. Known positives (by row or by text), the query's own text, and all but the first of equal texts are removed.
    2. The others are ranked by the mean of the teachers' raw scores, ties by row. Ranks outside of `first_rank` …
       `last_rank` are removed; ranks do not depend on the margins.
    3. Candidates that any teacher scores too close to the positive are removed. Each teacher's score is compared with
       its own score of the positive, because scales differ. With several positives the lowest score counts.

    Source: Moreira et al. 2024 (NV-Retriever), arXiv:2407.15831, section 4.1. Differs: `p - |p| (1 - margin)` in place
        of `p margin`, which for a negative p would allow negatives above the positive.
    """
    left = remaining(candidates, queries, rules)
    row_QN, score_QN = take(left, left.left_QC, rules.count, queries.number_Q, rules)
    return Negatives(row_QN, score_QN, left.removed, left.num_left)


def remaining(candidates: ScoredCandidates, queries: MinedQueries, rules: NegativeRules) -> Remaining:
    """The candidates that pass the rules, by falling mean score over the teachers, then by row."""
    mean_QC: Floats = candidates.score_TQC.mean(axis=0, dtype=np.float64).astype(np.float32)
    mean_QC[candidates.row_QC < 0] = -np.inf
    order_QC: Int64s = np.lexsort((candidates.row_QC, -mean_QC), axis=1)
    row_QC: Int64s = np.take_along_axis(candidates.row_QC, order_QC, axis=1)
    hash_QC: Int64s = np.take_along_axis(candidates.hash_QC, order_QC, axis=1)
    mean_QC = np.take_along_axis(mean_QC, order_QC, axis=1)
    left_QC = row_QC >= 0
    removed: dict[str, int] = {}

    def remove(reason: str, is_removed_QC: Mask) -> None:
        removed[reason] = int(np.count_nonzero(left_QC & is_removed_QC))
        np.logical_and(left_QC, ~is_removed_QC, out=left_QC)

    is_known_QC = _is_known(row_QC, queries.known.row_P, queries.known)
    remove("own_positive", is_known_QC | _is_known(hash_QC, queries.known_hash_P, queries.known))
    remove("own_text", hash_QC == queries.hash_Q[:, None])
    remove("duplicate_text", _repeats(hash_QC, left_QC))
    rank_QC: Int64s = np.cumsum(left_QC, axis=1, dtype=np.int64)
    judged_QC, drawn_QC = np.zeros_like(left_QC), np.zeros_like(left_QC)
    if candidates.level_QC is not None:
        judged_QC = np.take_along_axis(candidates.level_QC > 0, order_QC, axis=1)
    if candidates.drawn_QC is not None:
        drawn_QC = np.take_along_axis(candidates.drawn_QC, order_QC, axis=1)
    outside_QC = (rank_QC < rules.first_rank) | ((rank_QC > rules.last_rank) & ~drawn_QC)
    remove("outside_ranks", outside_QC & ~judged_QC)
    positive_TQ = queries.positive_score_TQ.astype(np.float64)
    bounds = {reason: np.full_like(positive_TQ, np.inf) for reason in ("margin", "absolute_margin")}
    if rules.margin is not None:
        bounds["margin"] = positive_TQ - np.abs(positive_TQ) * (1 - rules.margin)
    if rules.absolute_margin is not None:
        bounds["absolute_margin"] = positive_TQ - rules.absolute_margin
    for reason, bound_TQ in bounds.items():
        too_close_QC = (candidates.score_TQC >= bound_TQ[:, :, None]).any(axis=0)
        remove(reason, np.take_along_axis(too_close_QC, order_QC, axis=1) & ~judged_QC)
    return Remaining(order_QC, row_QC, mean_QC, rank_QC, left_QC, removed)


def take(
    ranked: Remaining, left_QC: Mask, count: int, number_Q: Int64s, rules: NegativeRules, last_QC: Mask | None = None
) -> tuple[Int64s, Floats]:
    """Up to `count` candidates of each query, the hardest or a draw, by score: documents and mean scores, (Q, N) each.

    Candidates are taken from `left_QC`, those in `last_QC` last. Missing documents are -1 with score -inf.
    """
    num_candidates, key_QC = left_QC.shape[1], np.zeros(left_QC.shape, np.uint64)
    if rules.choice == "random":
        key = np.uint64(derive_seed(rules.seed, "negatives"))
        key_QC = mix_bits(mix_bits(number_Q.astype(np.uint64) ^ key)[:, None] ^ ranked.row_QC.astype(np.uint64))
    # Remaining candidates first, then by random key; the sort is stable, so that equal keys leave the hardest first.
    keys = (key_QC, ~left_QC) if last_QC is None else (key_QC, last_QC, ~left_QC)
    order_QN = np.lexsort(keys, axis=1)[:, :count]
    is_removed_QN = ~np.take_along_axis(left_QC, order_QN, axis=1)
    index_QN = np.sort(order_QN + num_candidates * is_removed_QN, axis=1) % num_candidates
    # If there are fewer candidates than negatives, the last index fills the row and is masked below.
    index_QN = np.pad(index_QN, ((0, 0), (0, count - index_QN.shape[1])), mode="edge")
    taken_QN = np.take_along_axis(left_QC, index_QN, axis=1) & (np.arange(count) < num_candidates)
    return (
        np.where(taken_QN, np.take_along_axis(ranked.row_QC, index_QN, axis=1), -1),
        np.where(taken_QN, np.take_along_axis(ranked.mean_QC, index_QN, axis=1), np.float32(-np.inf)),
    )


# Known values of a query up to which each is compared; more are searched by sorting.
_FEW_KNOWN = 8


def _is_known(value_QC: Int64s, known_P: Int64s, known: KnownPositives) -> Mask:
    """Which values are among those of their query's known positives, `known_P`."""
    known_QC: Mask = np.zeros(value_QC.shape, np.bool_)
    if not len(known_P):
        return known_QC
    count_G = np.bincount(known.group_P, minlength=int(known.group_Q.max()) + 1)
    start_Q, count_Q = (count_G.cumsum() - count_G)[known.group_Q], count_G[known.group_Q]
    if count_G.max() <= _FEW_KNOWN:
        for number in range(int(count_G.max())):
            known_Q = known_P[np.minimum(start_Q + number, len(known_P) - 1)]
            known_QC |= (value_QC == known_Q[:, None]) & (number < count_Q)[:, None]
        return known_QC
    # Values are numbered, so that each pair (group, value) has one integer key.
    values, number_P = np.unique(known_P, return_inverse=True)
    number_QC = np.minimum(np.searchsorted(values, value_QC), len(values) - 1)
    key_QC = known.group_Q[:, None] * len(values) + number_QC
    key_P = known.group_P * len(values) + number_P
    known_QC = np.isin(key_QC, key_P)
    known_QC &= values[number_QC] == value_QC
    return known_QC


def _repeats(hash_QC: Int64s, counted_QC: Mask) -> Mask:
    """Which of the counted texts repeat an earlier one in their row."""
    # Sorted by (not counted, hash, index): equal texts are adjacent, in their original order.
    order_QC = np.lexsort((hash_QC, ~counted_QC), axis=1)
    sorted_QC = np.take_along_axis(hash_QC, order_QC, axis=1)
    is_repeat_QC = np.zeros(hash_QC.shape, np.bool_)
    is_repeat_QC[:, 1:] = sorted_QC[:, 1:] == sorted_QC[:, :-1]
    repeats_QC = np.empty_like(is_repeat_QC)
    np.put_along_axis(repeats_QC, order_QC, is_repeat_QC, axis=1)
    return repeats_QC & counted_QC


# The level of documents judged irrelevant (grade 0 or below).
IRRELEVANT_LEVEL = 3


class TextQrels(NamedTuple):
    """Relevance judgments of pairs of a query and a document, by the hashes of their texts, each pair once.

    They are sorted by query, then by document; a grade of 0 or below is irrelevant.
    """

    query_hash_J: Int64s
    document_hash_J: Int64s
    grade_J: npt.NDArray[np.float64]

    @classmethod
    def of(cls, judged: Iterable[tuple[str, str, float]], where: str) -> Self:
        """Judgments from (query, document, grade); if a pair is judged twice, the higher grade counts."""
        grade_of: dict[tuple[int, int], float] = {}
        for query, document, grade in judged:
            pair = (text_hash(query), text_hash(document))
            grade_of[pair] = max(grade, grade_of.get(pair, grade))
        grades = set(grade_of.values())
        if not grades or max(grades) <= 0:
            raise InputError(where, "no document is relevant to any query", "set a score above 0 for at least one row")
        if len(grades) == 1:
            what = f"every judged document has the score {grades.pop():g}, so none is below the positives"
            raise InputError(where, what, "use --levels quantiles")
        rows = sorted((*pair, grade) for pair, grade in grade_of.items())
        query_J, document_J, grade_J = zip(*rows, strict=True)
        return cls(np.array(query_J, np.int64), np.array(document_J, np.int64), np.array(grade_J, np.float64))

    def sha256(self) -> str:
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in self)).hexdigest()


class QueryQrels(NamedTuple):
    """The judgments of some queries: known positives with the documents judged as relevant, whether any is judged.

    Each document judged less relevant has the index of its query (ascending), its row, and its level, 1 to 3.
    """

    known: KnownPositives
    is_judged_Q: Mask
    query_L: Int64s
    row_L: Int64s
    level_L: Int8s


class DocumentQrels:
    """Judgments of a source's queries, by the rows of its documents.

    The level of a document is how far below the positives it was judged: 1 for the next lower grade, 2 for lower grades
    that are still relevant, 3 for irrelevant. The steps are the grades that occur anywhere in the judgments, from the
    lowest grade of the query's positives. A positive that was not judged, or was judged irrelevant, counts as having
    the lowest relevant grade, so that no relevant document becomes a negative. Documents judged as relevant as the
    positives are positives too.
    """

    def __init__(self, judged: TextQrels, index: PairIndex, where: str) -> None:
        self._num_documents = index.num_documents
        self._scale = np.unique(judged.grade_J[judged.grade_J > 0])
        row_J = find(judged.document_hash_J, index.document_hashes)
        is_found_J = row_J >= 0
        self._query_hash_J, self._row_J = judged.query_hash_J[is_found_J], row_J[is_found_J]
        self._grade_J = judged.grade_J[is_found_J]
        if not np.isin(index.query_hashes, self._query_hash_J).any():
            hint = "use the same query and document texts in the records as in the judgments' files"
            raise InputError(where, "has no judgment of a document for a query of the source", hint)

    def of_queries(self, hash_Q: Int64s, known: KnownPositives) -> QueryQrels:
        """The judgments of queries: as relevant as a positive makes a positive, each grade below it a level."""
        start_Q = np.searchsorted(self._query_hash_J, hash_Q, side="left")
        stop_Q = np.searchsorted(self._query_hash_J, hash_Q, side="right")
        index_j = concatenated_ranges(start_Q, stop_Q - start_Q)
        query_j = np.repeat(np.arange(len(hash_Q)), stop_Q - start_Q)
        row_j, grade_j = self._row_J[index_j], self._grade_J[index_j]
        key_P = known.group_P * self._num_documents + known.row_P
        key_j = known.group_Q[query_j] * self._num_documents + row_j
        is_known_j = np.isin(key_j, key_P)
        lowest_Q = np.full(len(hash_Q), np.inf)
        np.minimum.at(lowest_Q, query_j[is_known_j], grade_j[is_known_j])
        has_unjudged_Q = np.isin(known.group_Q, known.group_P[~np.isin(key_P, key_j)])
        lowest_Q = np.where(has_unjudged_Q, self._scale[0], np.maximum(lowest_Q, self._scale[0]))
        is_lower_j = ~is_known_j & (grade_j < lowest_Q[query_j])
        steps_j = np.searchsorted(self._scale, lowest_Q[query_j]) - np.searchsorted(self._scale, grade_j)
        level_j = np.where(grade_j <= 0, IRRELEVANT_LEVEL, np.minimum(steps_j, IRRELEVANT_LEVEL - 1)).astype(np.int8)
        known_P = np.divmod(np.union1d(key_P, key_j[~is_lower_j]), self._num_documents)
        known = KnownPositives(known.group_Q, *known_P)
        return QueryQrels(known, start_Q < stop_Q, query_j[is_lower_j], row_j[is_lower_j], level_j[is_lower_j])


LevelKind = Literal["quantiles", "grades"]


@dataclass(frozen=True)
class LevelRules:
    """How the levels of mined negatives are determined.

    Args:
        kind: `quantiles` of the teachers' similarity, or human `grades` (see `choose_levels`).
        judged: The judgments for `grades`; None for quantiles.
        judged_in: Origin of the judgments, for messages.
    """

    kind: LevelKind
    judged: TextQrels | None = None
    judged_in: str = "judgments"

    def __post_init__(self) -> None:
        if self.kind == "grades" and self.judged is None:
            raise OptionError("levels", self.kind, "needs judgments", "name their qrels file with --judgments")

    @property
    def fields(self) -> dict[str, str]:
        return {"kind": self.kind} | ({} if self.judged is None else {"judgments_sha256": self.judged.sha256()})


def draw_documents(number_Q: Int64s, num_documents: int, rules: NegativeRules) -> Int64s:
    """Random documents, one for each rank considered, (Q, R): a function of the seed and the query's row."""
    num_drawn = min(rules.last_rank - rules.first_rank + 1, num_documents)
    key_Q = mix_bits(number_Q.astype(np.uint64) ^ np.uint64(derive_seed(rules.seed, "level draws")))
    number_QR: npt.NDArray[np.uint64] = key_Q[:, None] ^ np.arange(num_drawn, dtype=np.uint64)
    drawn_QR: Int64s = (mix_bits(number_QR) % np.uint64(num_documents)).astype(np.int64)
    return drawn_QR


def choose_levels(
    candidates: ScoredCandidates,
    queries: MinedQueries,
    rules: NegativeRules,
    kind: LevelKind,
    judged_Q: Mask | None = None,
) -> Negatives:
    """Up to `rules.count` / 4 negatives of each level, 1 (hardest) to 4, for each query, hardest first in each level.

    The candidates are those in the rank window and as many random documents, because MGH's levels span a broad range of
    similarity (Figure 2) and the nearest documents are all hard. The rules of `choose_negatives` apply, except that
    `last_rank` does not remove random documents, and neither ranks nor margins remove judged documents.

    `quantiles`: the remaining candidates of a query, hardest first, are split into four equal parts, level 1 the
    nearest quarter. If the number is not divisible by 4, the easier parts are larger by one; with fewer than four
    candidates the hardest levels are empty.

    `grades`: a judged document has the level of its grade (`DocumentQrels`). Documents without a judgment count as
    irrelevant: those in the window have level 3 and fill up for judged ones, random ones have level 4.
    A query outside `judged_Q` has no negatives; `removed` counts `query_not_judged`.

    Source: MGH, Sections 2.1 and 5.1. Differs: the paper's levels are written by a language model. Its mean
        similarities to the query, by an unbiased judge, are .881, .857, .845 and .793 for levels 1 to 4 (Table 4).
    """
    ranked = remaining(candidates, queries, rules)
    left_QC = ranked.left_QC
    last_QC = None
    if kind == "quantiles":
        level_QC = _quarters(left_QC)
    else:
        assert judged_Q is not None
        assert candidates.level_QC is not None
        judged_level_QC = np.take_along_axis(candidates.level_QC, ranked.order_QC, axis=1)
        ranked.removed["query_not_judged"] = int(np.count_nonzero(left_QC & ~judged_Q[:, None]))
        left_QC &= judged_Q[:, None]
        unjudged_QC = np.where(ranked.rank_QC <= rules.last_rank, IRRELEVANT_LEVEL, NUM_LEVELS)
        level_QC = np.where(judged_level_QC > 0, judged_level_QC, unjudged_QC).astype(np.int8)
        last_QC = judged_level_QC == 0
    num_per_level = rules.count // NUM_LEVELS
    parts = [
        take(ranked, left_QC & (level_QC == level), num_per_level, queries.number_Q, rules, last_QC)
        for level in range(1, NUM_LEVELS + 1)
    ]
    return Negatives(
        np.concatenate([row_QN for row_QN, _ in parts], axis=1),
        np.concatenate([score_QN for _, score_QN in parts], axis=1),
        ranked.removed,
        ranked.num_left,
        np.repeat(np.arange(1, NUM_LEVELS + 1, dtype=np.int8), num_per_level),
    )


def mark(
    row_QC: Int64s, num_documents: int, drawn_QR: Int64s, query_L: Int64s, row_L: Int64s, level_L: Int8s
) -> tuple[Mask, Int8s]:
    """Which candidates were drawn, (Q, C), and the levels of judged ones, 0 for the others, (Q, C)."""
    query_Q1 = np.arange(len(row_QC))[:, None]
    key_QC = np.where(row_QC < 0, -1, query_Q1 * num_documents + row_QC)
    drawn_QC: Mask = np.isin(key_QC, query_Q1 * num_documents + drawn_QR)
    level_QC = np.zeros(row_QC.shape, np.int8)
    if len(row_L):
        place_QC = find(key_QC, query_L * num_documents + row_L)
        level_QC = np.where(place_QC < 0, np.int8(0), level_L[place_QC])
    return drawn_QC, level_QC


def _quarters(left_QC: Mask) -> Int8s:
    """The quarter of each remaining candidate, 1 to 4; later quarters are larger by up to one, (Q, C) int8."""
    index_QC = np.cumsum(left_QC, axis=1) - 1
    num_left_Q1 = np.count_nonzero(left_QC, axis=1)[:, None]
    level_QC = np.ones(left_QC.shape, np.int8)
    end_Q1 = np.zeros_like(num_left_Q1)
    for part in range(NUM_LEVELS - 1):
        end_Q1 = end_Q1 + (num_left_Q1 + part) // NUM_LEVELS
        level_QC += index_QC >= end_Q1
    return level_QC
