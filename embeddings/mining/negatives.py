"""Which candidates of a query become its negatives: pure rules on rows, scores and hashes."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import text_hash
from embeddings.common.random import derive_seed, mix_bits
from embeddings.data.records import NUM_LEVELS
from embeddings.mining.pair_index import BLOCK, KnownPositives, PairIndex, concatenated_ranges

Choice = Literal["top", "random"]

REASONS = ("own_positive", "own_text", "duplicate_text", "outside_ranks", "margin", "absolute_margin")

Floats = npt.NDArray[np.float32]
Int8s = npt.NDArray[np.int8]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NegativeRules:
    """What makes a candidate a negative.

    Args:
        num_negatives: Maximum negatives of a query; NV-Retriever trains with 4, NV-Embed with 7. With levels a multiple
            of 4. None for 7, and with levels 4, one of each level.
        margin: Share of the positive's score that a negative stays below, or None: `s < p - |p| (1 - margin)`.
            NV-Retriever's TopK-PercPos uses 0.95.
        absolute_margin: Distance by which a negative stays below the positive, or None: `s < p - absolute_margin`.
        first_rank: Rank of the first candidate considered, from 1, the query's own texts not counted.
        last_rank: Rank of the last one.
        choice: `top` takes the hardest of those left, `random` draws from them.
        seed: Seed of the draw, and of the lists of an approximate search.

    Raises:
        OptionError: If a value is impossible.
    """

    num_negatives: int | None = None
    margin: float | None = 0.95
    absolute_margin: float | None = None
    first_rank: int = 1
    last_rank: int = 100
    choice: Choice = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError("num_negatives", self.count, "must be >= 1", "NV-Embed uses 7")
        if self.margin is not None and not 0 < self.margin <= 1:
            raise OptionError("margin", self.margin, "must lie in (0, 1]", "NV-Retriever uses 0.95; null for none")
        if self.absolute_margin is not None and not (math.isfinite(self.absolute_margin) and self.absolute_margin >= 0):
            rule = "must be finite and >= 0"
            raise OptionError("absolute_margin", self.absolute_margin, rule, "leave it out for none")
        if self.first_rank < 1:
            raise OptionError("first_rank", self.first_rank, "must be >= 1", "1 is the hardest candidate")
        if self.num_negatives is not None and self.last_rank - self.first_rank + 1 < self.count:
            rule = f"must leave {self.count} ranks from first_rank {self.first_rank}"
            raise OptionError("last_rank", self.last_rank, rule, "raise it, or ask for fewer negatives")
        if self.choice not in get_args(Choice):
            raise OptionError("choice", self.choice, "must be top or random", "top takes the hardest")

    @property
    def count(self) -> int:
        return 7 if self.num_negatives is None else self.num_negatives


class ScoredCandidates(NamedTuple):
    """The documents that a search found for each query, in any order; row -1 where there is none.

    `drawn_QC` are those drawn from all documents, for which no rank is too low. `level_QC` is the level of those judged
    less relevant than the positive, which neither ranks nor margins remove; 0 of the others.
    """

    row_QC: Int64s
    hash_QC: Int64s
    score_TQC: Floats
    drawn_QC: Mask | None = None
    level_QC: Int8s | None = None


class MinedQueries(NamedTuple):
    """What is known of the queries: row, text hash and group of each, and the known positives of the groups.

    `positive_score_TQ` is the lowest score of the record's own positives by each teacher.
    """

    number_Q: Int64s
    hash_Q: Int64s
    group_Q: Int64s
    known_group_P: Int64s
    known_row_P: Int64s
    known_hash_P: Int64s
    positive_score_TQ: Floats


class Negatives(NamedTuple):
    """The negatives of each query, hardest first.

    Attributes:
        row_QN: Documents; -1 where fewer are left.
        score_QN: Mean of the teachers' scores; -inf where the row is -1.
        removed: Number of candidates that each rule removed, by `REASONS`; a candidate counts for the first of them.
        num_left: Number of candidates that no rule removed, chosen or not.
        level_N: The level of each column, ascending; None for negatives without levels.
    """

    row_QN: Int64s
    score_QN: Floats
    removed: dict[str, int]
    num_left: int
    level_N: Int8s | None = None


class Remaining(NamedTuple):
    """The candidates of each query, hardest first, and what the rules leave of them.

    `order_QC` is the place of each in the order that it was given in; ranks are from 1, among those that neither answer
    the query nor repeat a text.
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
    """Up to `rules.count` negatives of each query: the hardest of what remains of its candidates, or a random choice.

    1. A candidate that is known to answer the query (by row or by text) goes, and one that is the query's own text, and
       all but the first of equal texts.
    2. The others are ranked by the mean of the teachers' scores as they are, of equal ones the lower row first. Ranks
       outside of `first_rank` … `last_rank` go; they do not depend on the margins.
    3. A candidate goes that any teacher scores too near to the positive, by its own score of the positive, so that
       scales do not mix. Of several positives the lowest counts.

    Precision: means and thresholds in float64 from float32 scores.
    Determinism: a random choice is a function of (seed, query, document): neither the order of the candidates nor the
        other queries matter.
    Source: Moreira et al. 2024 (NV-Retriever), arXiv:2407.15831, section 4.1. Differs: `p - |p| (1 - margin)` in place
        of `p margin`, which for a negative p would allow negatives above the positive.
    """
    found = remaining(candidates, queries, rules)
    row_QN, score_QN = take(found, found.left_QC, rules.count, queries.number_Q, rules)
    return Negatives(row_QN, score_QN, found.removed, found.num_left)


def remaining(candidates: ScoredCandidates, queries: MinedQueries, rules: NegativeRules) -> Remaining:
    """The candidates of each query by mean score, and what the rules of `choose_negatives` leave of them."""
    mean_QC: Floats = candidates.score_TQC.mean(axis=0, dtype=np.float64).astype(np.float32)
    mean_QC[candidates.row_QC < 0] = -np.inf
    order_QC: Int64s = np.lexsort((candidates.row_QC, -mean_QC), axis=1)
    row_QC: Int64s = np.take_along_axis(candidates.row_QC, order_QC, axis=1)
    hash_QC: Int64s = np.take_along_axis(candidates.hash_QC, order_QC, axis=1)
    mean_QC = np.take_along_axis(mean_QC, order_QC, axis=1)
    left_QC = row_QC >= 0
    removed: dict[str, int] = {}

    def remove(reason: str, gone_QC: Mask) -> None:
        removed[reason] = int(np.count_nonzero(left_QC & gone_QC))
        np.logical_and(left_QC, ~gone_QC, out=left_QC)

    own_QC = _is_known(row_QC, queries.known_row_P, queries)
    remove("own_positive", own_QC | _is_known(hash_QC, queries.known_hash_P, queries))
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
        too_near_QC = (candidates.score_TQC >= bound_TQ[:, :, None]).any(axis=0)
        remove(reason, np.take_along_axis(too_near_QC, order_QC, axis=1) & ~judged_QC)
    return Remaining(order_QC, row_QC, mean_QC, rank_QC, left_QC, removed)


def take(
    found: Remaining, left_QC: Mask, count: int, number_Q: Int64s, rules: NegativeRules, later_QC: Mask | None = None
) -> tuple[Int64s, Floats]:
    """Up to `count` candidates of each query, the hardest or a draw, by score: documents and mean scores, (Q, N) each.

    Those of `left_QC` may be taken, those of `later_QC` only where the others are too few. Where fewer may be taken,
    the document is -1 and the score -inf.
    """
    num_places, key_QC = left_QC.shape[1], np.zeros(left_QC.shape, np.uint64)
    if rules.choice == "random":
        key = np.uint64(derive_seed(rules.seed, "negatives"))
        key_QC = mix_bits(mix_bits(number_Q.astype(np.uint64) ^ key)[:, None] ^ found.row_QC.astype(np.uint64))
    # By whether it is left, then by the draw; the sort is stable, so that without a draw the hardest come first.
    keys = (key_QC, ~left_QC) if later_QC is None else (key_QC, later_QC, ~left_QC)
    order_QN = np.lexsort(keys, axis=1)[:, :count]
    place_QN = np.sort(order_QN + num_places * ~np.take_along_axis(left_QC, order_QN, axis=1), axis=1) % num_places
    # Fewer candidates than negatives: the last place stands in for those that are not there.
    place_QN = np.pad(place_QN, ((0, 0), (0, count - place_QN.shape[1])), mode="edge")
    taken_QN = np.take_along_axis(left_QC, place_QN, axis=1) & (np.arange(count) < num_places)
    return (
        np.where(taken_QN, np.take_along_axis(found.row_QC, place_QN, axis=1), -1),
        np.where(taken_QN, np.take_along_axis(found.mean_QC, place_QN, axis=1), np.float32(-np.inf)),
    )


def _is_known(value_QC: Int64s, known_P: Int64s, queries: MinedQueries) -> Mask:
    """Which values are among those known of their own query."""
    if not len(known_P):
        return np.zeros(value_QC.shape, np.bool_)
    # One number for each different value, so that (group, value) is one number too.
    values, number_P = np.unique(known_P, return_inverse=True)
    number_QC = np.minimum(np.searchsorted(values, value_QC), len(values) - 1)
    key_QC = queries.group_Q[:, None] * len(values) + number_QC
    key_P = queries.known_group_P * len(values) + number_P.reshape(-1)
    known_QC: Mask = np.isin(key_QC, key_P)
    known_QC &= values[number_QC] == value_QC
    return known_QC


def _repeats(hash_QC: Int64s, counted_QC: Mask) -> Mask:
    """Which of the counted texts have come before in their row."""
    # Sorted by (not counted, hash, place): equal texts are neighbours, the first of them first.
    order_QC = np.lexsort((hash_QC, ~counted_QC), axis=1)
    sorted_QC = np.take_along_axis(hash_QC, order_QC, axis=1)
    again_QC = np.zeros(hash_QC.shape, np.bool_)
    again_QC[:, 1:] = sorted_QC[:, 1:] == sorted_QC[:, :-1]
    repeats_QC = np.empty_like(again_QC)
    np.put_along_axis(repeats_QC, order_QC, again_QC, axis=1)
    return repeats_QC & counted_QC


# Judged and not relevant: the level of grade 0 and below.
IRRELEVANT_LEVEL = 3


class TextQrels(NamedTuple):
    """Judged pairs of a query and a document, by the hashes of their texts, each pair once.

    Attributes:
        query_hash_J: `text_hash` of the query, (J,) int64, ascending.
        document_hash_J: The same of the document, (J,) int64, ascending within a query.
        grade_J: How relevant the document is, 0 and below for not at all, (J,) float64.
    """

    query_hash_J: Int64s
    document_hash_J: Int64s
    grade_J: npt.NDArray[np.float64]

    @classmethod
    def of(cls, judged: Iterable[tuple[str, str, float]], where: str) -> Self:
        """Judgments as (query, document, grade); of a pair that is judged twice the higher grade counts.

        Raises:
            InputError: If no document is relevant, or all have one grade; it names `where`.
        """
        found: dict[tuple[int, int], float] = {}
        for query, document, grade in judged:
            pair = (text_hash(query), text_hash(document))
            found[pair] = max(grade, found.get(pair, grade))
        grades = set(found.values())
        if not grades or max(grades) <= 0:
            raise InputError(where, "no document is relevant to any query", "give at least one row a score above 0")
        if len(grades) == 1:
            what = f"every judged document has the score {grades.pop():g}, so that none lies below the positives"
            raise InputError(where, what, "use --levels quantiles")
        rows = sorted((*pair, grade) for pair, grade in found.items())
        query_J, document_J, grade_J = zip(*rows, strict=True)
        return cls(np.array(query_J, np.int64), np.array(document_J, np.int64), np.array(grade_J, np.float64))

    def sha256(self) -> str:
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in self)).hexdigest()


class QueryQrels(NamedTuple):
    """What is judged of some queries.

    Attributes:
        known: Their known positives and what was judged at least as relevant.
        is_judged_Q: Whether any document of the corpus is judged for a query.
        query_L: The query's place, for each document judged less relevant, ascending.
        row_L: The document.
        level_L: Its level, 1 to 3.
    """

    known: KnownPositives
    is_judged_Q: Mask
    query_L: Int64s
    row_L: Int64s
    level_L: Int8s


class DocumentQrels:
    """Judgments of a source's queries, by the rows of its documents.

    The level of a document says how far below the positives it was judged: 1 for the next lower grade, 2 for a lower
    one that is relevant still, 3 for not relevant at all. A step is from one grade used anywhere to the next. Steps
    count from the lowest grade of the query's positives; a positive that nobody judged, or that was judged irrelevant,
    counts as one of the lowest relevant grade, so that nothing relevant becomes a negative. Documents judged as
    relevant as the positives are positives too.

    Raises `InputError` if none of the source's queries is judged; `where` names the judgments.
    """

    def __init__(self, judged: TextQrels, index: PairIndex, where: str) -> None:
        self._num_documents = index.num_documents
        self._scale = np.unique(judged.grade_J[judged.grade_J > 0])
        hash_D, row_D = _rows_of(np.unique(judged.document_hash_J), index)
        place_J = np.minimum(np.searchsorted(hash_D, judged.document_hash_J), max(0, len(hash_D) - 1))
        is_there_J = hash_D[place_J] == judged.document_hash_J if len(hash_D) else np.zeros(len(place_J), np.bool_)
        self._query_hash_J = judged.query_hash_J[is_there_J]
        self._row_J, self._grade_J = row_D[place_J[is_there_J]], judged.grade_J[is_there_J]
        if not any(
            np.isin(index.query_hashes[start : start + BLOCK], self._query_hash_J).any()
            for start in range(0, index.num_queries, BLOCK)
        ):
            fix = "write queries and documents of the records as the judgments' files do"
            raise InputError(where, "judges no document for any query of the source", fix)

    def of_queries(self, hash_Q: Int64s, known: KnownPositives) -> QueryQrels:
        """What is judged of the queries with these text hashes and known positives."""
        start_Q = np.searchsorted(self._query_hash_J, hash_Q, side="left")
        stop_Q = np.searchsorted(self._query_hash_J, hash_Q, side="right")
        place_j = concatenated_ranges(start_Q, stop_Q)
        query_j = np.repeat(np.arange(len(hash_Q)), stop_Q - start_Q)
        row_j, grade_j = self._row_J[place_j], self._grade_J[place_j]
        key_P = known.group_P * self._num_documents + known.row_P
        key_j = known.group_Q[query_j] * self._num_documents + row_j
        is_known_j = np.isin(key_j, key_P)
        least_Q = np.full(len(hash_Q), np.inf)
        np.minimum.at(least_Q, query_j[is_known_j], grade_j[is_known_j])
        least_Q = np.where(np.isinf(least_Q), self._scale[0], np.maximum(least_Q, self._scale[0]))
        is_lower_j = ~is_known_j & (grade_j < least_Q[query_j])
        steps_j = np.searchsorted(self._scale, least_Q[query_j]) - np.searchsorted(self._scale, grade_j)
        level_j = np.where(grade_j <= 0, IRRELEVANT_LEVEL, np.minimum(steps_j, IRRELEVANT_LEVEL - 1)).astype(np.int8)
        known_P = np.divmod(np.union1d(key_P, key_j[~is_lower_j]), self._num_documents)
        known = KnownPositives(known.group_Q, *known_P)
        return QueryQrels(known, start_Q < stop_Q, query_j[is_lower_j], row_j[is_lower_j], level_j[is_lower_j])


def _rows_of(hash_n: Int64s, index: PairIndex) -> tuple[Int64s, Int64s]:
    """Which of some ascending hashes are documents', ascending, and the rows of these."""
    hashes, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, index.num_documents, BLOCK):
        hash_B = np.asarray(index.document_hashes[start : start + BLOCK])
        place_m = np.flatnonzero(np.isin(hash_B, hash_n))
        hashes.append(hash_B[place_m])
        rows.append(place_m + start)
    hash_D, row_D = np.concatenate(hashes), np.concatenate(rows)
    order_D = np.argsort(hash_D, kind="stable")
    return hash_D[order_D], row_D[order_D]


LevelKind = Literal["quantiles", "grades"]


@dataclass(frozen=True)
class LevelRules:
    """What gives a mined negative its level.

    Args:
        kind: `quantiles` of the teachers' similarity, or human `grades` (see `choose_levels`).
        judged: The judgments of `grades`; None for quantiles.
        judged_in: Where they come from, for messages.

    Raises:
        OptionError: If the kind is unknown, or judgments are missing or cannot take effect.
    """

    kind: LevelKind
    judged: TextQrels | None = None
    judged_in: str = "judgments"

    def __post_init__(self) -> None:
        if self.kind not in get_args(LevelKind):
            raise OptionError("levels", self.kind, "must be quantiles or grades", "quantiles needs no judgments")
        if self.kind == "grades" and self.judged is None:
            raise OptionError("levels", self.kind, "needs judgments", "name their qrels file with --judgments")
        if self.kind == "quantiles" and self.judged is not None:
            raise OptionError("judgments", self.judged_in, "have no effect on quantiles", "use --levels grades")

    @property
    def fields(self) -> dict[str, str]:
        return {"kind": self.kind} | ({} if self.judged is None else {"judgments_sha256": self.judged.sha256()})


def draw_documents(number_Q: Int64s, num_documents: int, rules: NegativeRules) -> Int64s:
    """Documents drawn from all, one for each rank considered, (Q, R): a function of the seed and the query's row."""
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
    """Up to `rules.count` / 4 negatives of each level, 1 (hardest) to 4, for each query, hardest first within each.

    The candidates are the rank window's and as many documents drawn from all there are, since MGH's levels span a broad
    spectrum of similarity (Figure 2) and the nearest documents are all hard. The rules of `choose_negatives` hold, but
    no rank is too low for a drawn document, and neither ranks nor margins remove what people judged.

    `quantiles`: what is left of a query's candidates, hardest first, is cut into four parts of one size, level 1 the
    nearest quarter, since MGH's levels order one query's negatives (Section 2.1). Where parts cannot be of one size,
    the easier ones are larger by one; of fewer than four candidates the hardest levels stay empty.

    `grades`: a judged document has the level of its grade (`DocumentQrels`): 1 for one step below the positive, as
    MGH's prompt asks of a hard negative (Appendix A.1); 2 for further below and relevant still; 3 for irrelevant. What
    nobody judged is taken for irrelevant: one of the window has level 3 and is taken where too few judged ones are
    left, a drawn one has level 4. A query outside `judged_Q` has no negatives; `removed` counts `query_not_judged`.
    The known positives of `queries` hold what was judged as good as these.

    Source: MGH, Sections 2.1 and 5.1. Differs: the paper's levels are written by a language model. Its mean
        similarities to the query, by an unbiased judge, are .881, .857, .845 and .793 for levels 1 to 4 (Table 4).
    """
    found = remaining(candidates, queries, rules)
    left_QC = found.left_QC
    later_QC = None
    if kind == "quantiles":
        level_QC = _quarters(left_QC)
    else:
        assert judged_Q is not None
        assert candidates.level_QC is not None
        given_QC = np.take_along_axis(candidates.level_QC, found.order_QC, axis=1)
        found.removed["query_not_judged"] = int(np.count_nonzero(left_QC & ~judged_Q[:, None]))
        left_QC &= judged_Q[:, None]
        unjudged_QC = np.where(found.rank_QC <= rules.last_rank, IRRELEVANT_LEVEL, NUM_LEVELS)
        level_QC = np.where(given_QC > 0, given_QC, unjudged_QC).astype(np.int8)
        later_QC = given_QC == 0
    each = rules.count // NUM_LEVELS
    parts = [
        take(found, left_QC & (level_QC == level), each, queries.number_Q, rules, later_QC)
        for level in range(1, NUM_LEVELS + 1)
    ]
    return Negatives(
        np.concatenate([row_QN for row_QN, _ in parts], axis=1),
        np.concatenate([score_QN for _, score_QN in parts], axis=1),
        found.removed,
        found.num_left,
        np.repeat(np.arange(1, NUM_LEVELS + 1, dtype=np.int8), each),
    )


def mark(
    row_QC: Int64s, num_documents: int, drawn_QR: Int64s, query_L: Int64s, row_L: Int64s, level_L: Int8s
) -> tuple[Mask, Int8s]:
    """Which candidates were drawn, (Q, C), and the levels of those that were judged, 0 for none, (Q, C).

    A judged document is a query's place (`query_L`), a document (`row_L`) and its level (`level_L`).
    """
    query_Q1 = np.arange(len(row_QC))[:, None]
    key_QC = np.where(row_QC < 0, -1, query_Q1 * num_documents + row_QC)
    drawn_QC: Mask = np.isin(key_QC, query_Q1 * num_documents + drawn_QR)
    level_QC = np.zeros(row_QC.shape, np.int8)
    if len(row_L):
        key_L = query_L * num_documents + row_L
        order_L = np.argsort(key_L)
        place_QC = np.minimum(np.searchsorted(key_L[order_L], key_QC), len(key_L) - 1)
        is_judged_QC = key_L[order_L][place_QC] == key_QC
        level_QC[is_judged_QC] = level_L[order_L][place_QC[is_judged_QC]]
    return drawn_QC, level_QC


def _quarters(left_QC: Mask) -> Int8s:
    """The quarter of each place that is left, 1 to 4, the later ones the larger by up to one, (Q, C) int8."""
    place_QC = np.cumsum(left_QC, axis=1) - 1
    num_left_Q1 = np.count_nonzero(left_QC, axis=1)[:, None]
    level_QC = np.ones(left_QC.shape, np.int8)
    end_Q1 = np.zeros_like(num_left_Q1)
    for part in range(NUM_LEVELS - 1):
        end_Q1 = end_Q1 + (num_left_Q1 + part) // NUM_LEVELS
        level_QC += place_QC >= end_Q1
    return level_QC
