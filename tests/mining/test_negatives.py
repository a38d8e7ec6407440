"""The rules equal a plain loop over candidates, with ties, negative scores, copies and several teachers."""

from collections import Counter

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.mining.negatives import REASONS, MinedQueries, NegativeRules, ScoredCandidates, choose_negatives

FREE = {"margin": None, "num_negatives": 3}


def survivors(candidates, facts, rules, q):
    """What no rule takes of a query: (mean, row, rank, given level), hardest first; and the removal counts."""
    own = facts.known_group_P == facts.group_Q[q]
    rows, texts = set(facts.known_row_P[own].tolist()), set(facts.known_hash_P[own].tolist())
    places = [c for c in range(candidates.row_QC.shape[1]) if candidates.row_QC[q, c] >= 0]
    means = {c: float(np.float32(np.mean(candidates.score_TQC[:, q, c].astype(float)))) for c in places}
    rank, seen, left, removed = 0, set(), [], Counter()
    for c in sorted(places, key=lambda c: (-means[c], candidates.row_QC[q, c])):
        row, text = int(candidates.row_QC[q, c]), int(candidates.hash_QC[q, c])
        level = 0 if candidates.level_QC is None else int(candidates.level_QC[q, c])
        is_drawn = candidates.drawn_QC is not None and candidates.drawn_QC[q, c]
        scores = [float(score) for score in candidates.score_TQC[:, q, c]]
        pairs = list(zip(scores, map(float, facts.positive_score_TQ[:, q]), strict=True))
        if row in rows or text in texts:
            removed["own_positive"] += 1
            continue
        if text == facts.hash_Q[q] or text in seen:
            removed["own_text" if text == facts.hash_Q[q] else "duplicate_text"] += 1
            continue
        seen.add(text)
        rank += 1
        if not level and (rank < rules.first_rank or (rank > rules.last_rank and not is_drawn)):
            removed["outside_ranks"] += 1
        elif not level and rules.margin is not None and any(s >= p - abs(p) * (1 - rules.margin) for s, p in pairs):
            removed["margin"] += 1
        elif not level and rules.absolute_margin is not None and any(s >= p - rules.absolute_margin for s, p in pairs):
            removed["absolute_margin"] += 1
        else:
            left.append((means[c], row, rank, level))
    return left, removed


def loop(candidates, facts, rules):
    """The survivors of each query in their order, with the removal counts, in plain Python."""
    found = [survivors(candidates, facts, rules, q) for q in range(len(candidates.row_QC))]
    removed = {reason: sum(counts[reason] for _, counts in found) for reason in REASONS}
    return [[(row, mean) for mean, row, *_ in left] for left, _ in found], removed


def world(seed, num_teachers=1, queries=6, width=12):
    """ScoredCandidates with many ties, scores of both signs, copies, the queries' own texts, and gaps."""
    generator = np.random.default_rng(seed)
    row = np.stack([generator.permutation(30)[:width] for _ in range(queries)])
    text = np.where(row % 7 == 0, 1000, row)
    row[generator.random(row.shape) < 0.1] = -1
    scores = (generator.integers(-4, 5, (num_teachers, queries, width)) / 4).astype(np.float32)
    group = np.sort(generator.integers(0, 3, queries))
    known_group = np.sort(generator.integers(0, 3, 8))
    known_row = generator.integers(0, 30, 8)
    positive = (generator.integers(-4, 5, (num_teachers, queries)) / 4).astype(np.float32)
    facts = MinedQueries(
        np.arange(queries) + 100, generator.integers(0, 30, queries), group, known_group, known_row,
        np.where(generator.random(8) < 0.5, known_row, 500), positive,
    )  # fmt: skip
    return ScoredCandidates(row, text, scores), facts


def pairs(negatives):
    return [
        [(int(row), float(score)) for row, score in zip(rows, scores, strict=True) if row >= 0]
        for rows, scores in zip(negatives.row_QN, negatives.score_QN, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin": None},
        {"margin": 0.5, "absolute_margin": 0.25},
        {"margin": None, "absolute_margin": 0.0},
        {"margin": 1.0, "first_rank": 3, "last_rank": 8},
        {"margin": None, "num_negatives": 20, "last_rank": 40},
    ],
)
@pytest.mark.parametrize("num_teachers", [1, 3])
def test_the_rules_equal_a_loop(options, num_teachers):
    rules = NegativeRules(**{"num_negatives": 3, **options})
    some = 0
    for seed in range(20):
        candidates, facts = world(seed, num_teachers)
        found = choose_negatives(candidates, facts, rules)
        expected, removed = loop(candidates, facts, rules)
        assert found.removed == removed
        assert pairs(found) == [left[: rules.num_negatives] for left in expected]
        assert found.num_left == sum(map(len, expected))
        some += found.num_left
        shape = (len(candidates.row_QC), rules.num_negatives)
        assert found.row_QN.shape == found.score_QN.shape == shape
        assert (np.isneginf(found.score_QN) == (found.row_QN < 0)).all()
    assert some > 0


def one_query(scores, positive, **known):
    """One query whose candidates are documents 0, 1, … with these scores, in one or several teachers' rows."""
    score_TQC = np.atleast_2d(np.array(scores, np.float32))[:, None]
    width = score_TQC.shape[2]
    facts = MinedQueries(
        np.array([0]), np.array([known.get("query_hash", -1)]), np.array([0]), np.array([0]),
        np.array([known.get("row", 99)]), np.array([known.get("hash", 99)]),
        np.atleast_1d(np.array(positive, np.float32))[:, None],
    )  # fmt: skip
    texts = np.array([known.get("hashes", range(width))])
    return ScoredCandidates(np.arange(width)[None], texts, score_TQC), facts


def rows(candidates_and_facts, **options):
    return choose_negatives(*candidates_and_facts, NegativeRules(**{**FREE, **options})).row_QN[0].tolist()


def test_the_margin_lies_below_a_negative_positive_score_too():
    # A positive at -0.5: the bound is -0.525, where -0.5 * 0.95 = -0.475 would let candidates above it through.
    assert rows(one_query([-0.49, -0.51, -0.53], -0.5), margin=0.95) == [2, -1, -1]
    assert rows(one_query([-0.1, 0.0], 0.0), margin=0.95) == [0, -1, -1]


def test_a_candidate_at_the_margin_goes():
    assert rows(one_query([0.5, 0.25], 1.0), absolute_margin=0.5) == [1, -1, -1]
    assert rows(one_query([0.5, 0.25], 1.0), margin=0.5) == [1, -1, -1]


def test_a_draw_is_of_the_window_hardest_first_and_follows_from_seed_query_and_document():
    candidates, facts = world(3, queries=6)
    rules = NegativeRules(3, None, None, 1, 8, "random", 5)
    drawn = choose_negatives(candidates, facts, rules)
    window, _ = loop(candidates, facts, rules)
    for found, left in zip(pairs(drawn), window, strict=True):
        assert found == [pair for pair in left if pair in found]
        assert len(found) == min(3, len(left))
    mixed = np.random.default_rng(0).permutation(candidates.row_QC.shape[1])
    shuffled = ScoredCandidates(
        candidates.row_QC[:, mixed], candidates.hash_QC[:, mixed], candidates.score_TQC[:, :, mixed]
    )
    np.testing.assert_array_equal(choose_negatives(shuffled, facts, rules).row_QN, drawn.row_QN)
    last = ScoredCandidates(*(part[..., -1:, :] for part in candidates[:3]))
    alone = facts._replace(
        number_Q=facts.number_Q[-1:], hash_Q=facts.hash_Q[-1:], group_Q=facts.group_Q[-1:],
        positive_score_TQ=facts.positive_score_TQ[:, -1:],
    )  # fmt: skip
    np.testing.assert_array_equal(choose_negatives(last, alone, rules).row_QN[0], drawn.row_QN[-1])
    other = choose_negatives(candidates, facts, NegativeRules(3, None, None, 1, 8, "random", 6))
    assert (other.row_QN != drawn.row_QN).any()


def test_a_draw_is_even_over_the_window():
    candidates, facts = one_query(np.linspace(1, 0, 6), 2.0)
    count = np.zeros(6)
    for number in range(600):
        asked = facts._replace(number_Q=np.array([number]))
        found = choose_negatives(candidates, asked, NegativeRules(2, None, None, 2, 6, "random"))
        count[found.row_QN[0]] += 1
    assert count[0] == 0
    np.testing.assert_allclose(count[1:] / 600, 0.4, atol=0.07)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_negatives": 0}, "num_negatives must be >= 1"),
        ({"margin": 0.0}, "margin must lie in"),
        ({"margin": 1.5}, "margin must lie in"),
        ({"margin": float("nan")}, "margin must lie in"),
        ({"absolute_margin": -0.1}, "absolute_margin must be finite"),
        ({"first_rank": 0}, "first_rank must be >= 1"),
        ({"choice": "best"}, "choice must be top or random"),
        ({"num_negatives": 7, "first_rank": 10, "last_rank": 12}, "last_rank must leave 7 ranks"),
    ],
)
def test_impossible_rules_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        NegativeRules(**options)
