"""Negatives of four levels out of mined candidates: by quantiles of the teacher's similarity, or by people's grades."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.randomness import derive_seed
from embeddings.data.records import NUM_LEVELS
from embeddings.data.samplers.permutation import mix_bits
from embeddings.mining.judgments import IRRELEVANT_LEVEL, DocumentJudgments, JudgedTexts
from embeddings.mining.negatives import (
    Candidates,
    Int8s,
    Int64s,
    Mask,
    NegativeRules,
    Negatives,
    QueryFacts,
    Remaining,
    remaining,
    take,
)
from embeddings.mining.pair_index import PairIndex

LevelKind = Literal["quantiles", "grades"]


@dataclass(frozen=True)
class LevelRules:
    """What gives a mined negative its level.

    Args:
        kind: `quantiles` of the teachers' similarity, or people's `grades` (see `choose_levels`).
        judged: The judgments of `grades`; None for quantiles.
        judged_in: Where they come from, for messages.

    Raises:
        OptionError: If the kind is unknown, or judgments are missing or cannot take effect.
    """

    kind: LevelKind
    judged: JudgedTexts | None = None
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
        """What decides the levels, for manifests."""
        judged = {} if self.judged is None else {"judgments_sha256": self.judged.sha256()}
        return {"kind": self.kind, **judged}

    def judgments_of(self, index: PairIndex) -> DocumentJudgments | None:
        """The judgments of a source's queries, for grades.

        Raises:
            InputError: If none of them is judged.
        """
        return None if self.judged is None else DocumentJudgments(self.judged, index, self.judged_in)


class LeveledPlaces(NamedTuple):
    """What is known of the candidates beside their scores, for `Candidates`.

    Attributes:
        drawn_QC: Which were drawn, (Q, C).
        level_QC: The level that people's grades give, 0 for none, (Q, C) int8.
    """

    drawn_QC: Mask
    level_QC: Int8s


def require_even_levels(rules: NegativeRules) -> None:
    """Check that all levels can have the same number of negatives.

    Raises:
        OptionError: If the number of negatives is no multiple of the number of levels.
    """
    if rules.num_negatives % NUM_LEVELS:
        rule = f"must be a multiple of {NUM_LEVELS} with levels, the same number of each"
        raise OptionError("num_negatives", rules.num_negatives, rule, f"{NUM_LEVELS} gives one of each, as in MGH")


def draw_documents(number_Q: Int64s, num_documents: int, rules: NegativeRules) -> Int64s:
    """Documents drawn for each query from all there are, as many as ranks are considered, (Q, R) int64.

    A document may be drawn twice for a query, and counts once then.

    Determinism: a function of (seed, row of the query in the source, number of documents).
    """
    num_drawn = min(rules.last_rank - rules.first_rank + 1, num_documents)
    key_Q = mix_bits(number_Q.astype(np.uint64) ^ np.uint64(derive_seed(rules.seed, "level draws")))
    number_QR: npt.NDArray[np.uint64] = key_Q[:, None] ^ np.arange(num_drawn, dtype=np.uint64)
    drawn_QR: Int64s = (mix_bits(number_QR) % np.uint64(num_documents)).astype(np.int64)
    return drawn_QR


def choose_levels(
    candidates: Candidates,
    queries: QueryFacts,
    rules: NegativeRules,
    kind: LevelKind,
    judged_Q: npt.NDArray[np.bool_] | None = None,
) -> Negatives:
    """Up to `rules.num_negatives` / 4 negatives of each level, 1 (hardest) to 4, for each query.

    The candidates are the rank window's and as many documents drawn from all there are. MGH asks its language model for
    similarities over a broad spectrum (Figure 2), from a document that serves the query almost as well as the positive
    down to one that misses what is asked; the nearest documents of a search are all near, and none of theirs is easy.
    All that a plain mining takes away goes here too; only that no rank is too low for a drawn document, and neither
    ranks nor margins take away what people judged.

    `quantiles`: what is left of a query's candidates, hardest first, is cut into four parts of one size, of equal
    scores the lower document first: level 1 is the nearest quarter, level 4 the farthest. Where margins take nothing,
    levels 1 and 2 are about the two halves of the window, 3 and 4 those of the draw. Parts are of each query's own
    scores and not of all queries': MGH's levels are an order of one query's negatives (Section 2.1), a teacher's scores
    of two queries need no common scale, and so each record has all levels that the sampler asks for. What it costs is
    that a level's scores differ from query to query; the report gives their range. Parts are cut after the margin, so
    that a record has four levels wherever four candidates are left; of fewer, the hardest levels stay empty: what a
    margin leaves is the far end. Where parts cannot be of one size, the easier ones are larger by one.

    `grades`: a document that people judged has the level of its grade (`DocumentJudgments`): 1 for one step below the
    positive, as MGH's prompt asks of a hard negative, some useful information but less than the positive has (Appendix
    A.1); 2 for further below and relevant still; 3 for irrelevant. What nobody judged is taken for irrelevant, as usual
    in evaluation: one of the window has level 3 and is taken where too few judged ones are left, a drawn one has level
    4. Where nobody judged anything for a query, nothing is known of what is irrelevant to it: it has no negatives.

    Args:
        candidates: Documents of the window, the draw and the judgments, with their scores.
        queries: As for `choose_negatives`; with grades the known positives hold what was judged as good as these.
        rules: The rules. `top` takes the hardest of a level, `random` draws from it.
        kind: What gives the levels.
        judged_Q: With grades, which queries were judged, (Q,).

    Returns:
        Level by level and hardest first within a level; `removed` also counts `query_not_judged` with grades.

    Determinism: as `choose_negatives`, which gives negatives without levels.
    Source: MGH, Sections 2.1 and 5.1. Differs: the paper's levels are written by a language model. Its mean
        similarities to the query, by an unbiased judge, are .881, .857, .845 and .793 for levels 1 to 4 (Table 4).
    """
    require_even_levels(rules)
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
    return _of_each_level(found, left_QC, level_QC, queries, rules, later_QC)


def _of_each_level(
    found: Remaining,
    left_QC: npt.NDArray[np.bool_],
    level_QC: npt.NDArray[np.int8],
    queries: QueryFacts,
    rules: NegativeRules,
    later_QC: npt.NDArray[np.bool_] | None,
) -> Negatives:
    """Equally many negatives of each level, from what is left; those of `later_QC` only where others are too few."""
    each = rules.num_negatives // NUM_LEVELS
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
) -> LeveledPlaces:
    """Which candidates of each query were drawn, and the levels of those that were judged.

    Args:
        row_QC: The candidates, (Q, C) int64; -1 where there is none.
        num_documents: Documents in all.
        drawn_QR: Those drawn for each query, (Q, R) int64.
        query_L: The query of each judged document, from 0, (L,) int64.
        row_L: The document, (L,) int64.
        level_L: Its level, (L,) int8.
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
    return LeveledPlaces(drawn_QC, level_QC)


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
