"""Levels equal a plain loop over candidates, with ties, negative scores, copies, draws and several teachers."""

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.mining.negatives import (
    LevelRules,
    NegativeRules,
    ScoredCandidates,
    TextQrels,
    choose_levels,
    draw_documents,
)
from tests.mining.test_negatives import one_query, survivors, world

JUDGED = TextQrels.of([("q", "a", 1), ("q", "b", 0)], "qrels")


def graded_world(seed, num_teachers):
    """The world of the plain rules, with draws, judged documents and a query that nobody judged."""
    candidates, facts = world(seed, num_teachers)
    generator = np.random.default_rng(seed + 1000)
    shape = candidates.row_QC.shape
    drawn = generator.random(shape) < 0.4
    level = np.where(generator.random(shape) < 0.3, generator.integers(1, 4, shape), 0).astype(np.int8)
    judged_Q = generator.random(shape[0]) < 0.8
    level[~judged_Q] = 0
    return candidates._replace(drawn_QC=drawn, level_QC=level), facts, judged_Q


def quarters(left):
    """The four parts of a list, as even as can be, the larger ones last."""
    sizes = [(len(left) + extra) // 4 for extra in range(4)]
    ends = np.cumsum(sizes)
    return [left[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def found_of(negatives, each):
    """(score, row) of each query and level."""
    scores, rows = negatives.score_QN.tolist(), negatives.row_QN.tolist()
    return [
        [
            [(s, r) for s, r in zip(score[at : at + each], row[at : at + each], strict=True) if r >= 0]
            for at in range(0, 4 * each, each)
        ]
        for score, row in zip(scores, rows, strict=True)
    ]


@pytest.mark.parametrize("kind", ["quantiles", "grades"])
@pytest.mark.parametrize("options", [{}, {"margin": None}, {"first_rank": 3, "num_negatives": 8, "last_rank": 10}])
@pytest.mark.parametrize("num_teachers", [1, 3])
def test_the_levels_equal_a_loop(kind, options, num_teachers):
    rules = NegativeRules(**{"num_negatives": 4, "margin": 0.75, "last_rank": 7, **options})
    each, lengths = rules.num_negatives // 4, set()
    for seed in range(15):
        candidates, facts, judged_Q = graded_world(seed, num_teachers)
        if kind == "quantiles":
            candidates = candidates._replace(level_QC=np.zeros_like(candidates.level_QC))
        found = choose_levels(candidates, facts, rules, kind, judged_Q if kind == "grades" else None)
        assert found.level_N.tolist() == [level for level in (1, 2, 3, 4) for _ in range(each)]
        num_left = 0
        for q, by_level in enumerate(found_of(found, each)):
            left, _ = survivors(candidates, facts, rules, q)
            if kind == "quantiles":
                expected = [part[:each] for part in quarters(left)]
            else:
                left = left if judged_Q[q] else []
                level = [given or (3 if rank <= rules.last_rank else 4) for _, _, rank, given in left]
                expected = []
                for wanted in (1, 2, 3, 4):
                    own = [item for item, has in zip(left, level, strict=True) if has == wanted]
                    # The sort is stable: judged ones first, each kind hardest first.
                    chosen = sorted(own, key=lambda item: item[3] == 0)[:each]
                    expected.append([item for item in own if item in chosen])
            num_left += len(left)
            lengths.add(len(left))
            assert by_level == [[(score, row) for score, row, *_ in part] for part in expected]
        assert found.num_left == num_left
        assert num_left + sum(found.removed.values()) == np.count_nonzero(candidates.row_QC >= 0)
    assert len(lengths) > 3
    assert max(lengths) >= 4


def levels_of(scores, positive, num_negatives=4, **options):
    """Documents level by level of one query whose candidates are documents 0, 1, … with these scores."""
    rules = NegativeRules(num_negatives, **{"margin": None, **options})
    found = choose_levels(*one_query(scores, positive), rules, "quantiles")
    return [found.row_QN[0][found.level_N == level].tolist() for level in (1, 2, 3, 4)]


MIXED = [-0.9, 0.5, -0.1, 0.2, 0.4, -0.5, 0.1, 0.3]
NEAR = [0.99, 0.98, 0.97, 0.96, 0.5, 0.4, 0.3, 0.2]


@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    [
        (MIXED, {}, [[1], [7], [6], [5]]),
        (MIXED, {"num_negatives": 8}, [[1, 4], [7, 3], [6, 2], [5, 0]]),
        # Of equal scores the lower document is the harder one.
        ([0.0] * 8, {"num_negatives": 8}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (NEAR, {}, [[0], [2], [4], [6]]),
        (NEAR, {"margin": 0.95}, [[4], [5], [6], [7]]),
    ],
)
def test_quarters_go_from_near_to_far_and_are_cut_after_the_margin(scores, options, expected):
    assert levels_of(scores, 1.0, **options) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, [[], [], [], []]),
        (1, [[], [], [], [0]]),
        (3, [[], [0], [1], [2]]),
        (6, [[0], [1], [2, 3], [4, 5]]),
        (7, [[0], [1, 2], [3, 4], [5, 6]]),
    ],
)
def test_a_surplus_goes_to_the_easier_quarters_and_fewer_than_four_leave_the_hardest_empty(count, expected):
    scores = [*np.linspace(0.9, 0.1, count), *[5.0] * (8 - count)]
    found = levels_of(scores, 1.0, 8, margin=0.95)
    assert [[row for row in rows if row >= 0] for rows in found] == expected


def test_a_draw_within_levels_is_of_the_level_and_follows_from_seed_query_and_document():
    scores = np.linspace(1, 0, 40)
    taken = []
    for number in range(50):
        candidates, facts = one_query(scores, 2.0)
        facts = facts._replace(number_Q=np.array([number]))
        rules = NegativeRules(4, None, choice="random")
        found = choose_levels(candidates, facts, rules, "quantiles").row_QN[0]
        mixed = ScoredCandidates(*(np.ascontiguousarray(part[..., ::-1]) for part in candidates[:3]))
        np.testing.assert_array_equal(choose_levels(mixed, facts, rules, "quantiles").row_QN[0], found)
        assert (found // 10).tolist() == [0, 1, 2, 3]
        taken.append(found)
    assert (np.ptp(taken, axis=0) >= 6).all()


def test_documents_are_drawn_by_row_alone_and_evenly():
    rules = NegativeRules(4, first_rank=11, last_rank=60, seed=3)
    drawn = draw_documents(np.arange(400), 20, rules)
    assert drawn.shape == (400, 20)
    np.testing.assert_array_equal(draw_documents(np.arange(100, 103), 20, rules), drawn[100:103])
    np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=20) / drawn.size, 0.05, atol=0.01)
    assert draw_documents(np.arange(2), 1000, rules).shape == (2, 50)
    other = draw_documents(np.arange(400), 20, NegativeRules(4, first_rank=11, last_rank=60, seed=4))
    assert (other != drawn).mean() > 0.9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "grades"}, "levels needs judgments"),
        ({"kind": "steps"}, "levels must be quantiles or grades"),
        ({"kind": "quantiles", "judged": JUDGED}, "judgments have no effect on quantiles"),
    ],
)
def test_impossible_rules_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        LevelRules(**options)


def test_the_manifest_tells_judgments_apart():
    assert LevelRules("quantiles").fields == {"kind": "quantiles"}
    assert LevelRules("grades", JUDGED).fields == {"kind": "grades", "judgments_sha256": JUDGED.sha256()}
