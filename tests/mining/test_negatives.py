"""The rules, levels and judgments equal plain loops, with ties, negative scores, copies, draws and several teachers."""

from collections import Counter

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.mining.negatives import (
    REASONS,
    DocumentQrels,
    LevelRules,
    MinedQueries,
    NegativeRules,
    ScoredCandidates,
    TextQrels,
    choose_levels,
    choose_negatives,
    draw_documents,
)
from embeddings.mining.pair_index import KnownPositives, index_pairs
from tests.data.rows import write_jsonl
from tests.helpers.refusals import refused
from tests.mining.pair_sources import source


def survivors(candidates, facts, rules, q):
    """A query's remaining candidates as (mean, row, rank, judged level), hardest first, and the removal counts."""
    own = facts.known.group_P == facts.known.group_Q[q]
    rows, texts = set(facts.known.row_P[own].tolist()), set(facts.known_hash_P[own].tolist())
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
        np.arange(queries) + 100, generator.integers(0, 30, queries), KnownPositives(group, known_group, known_row),
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
@pytest.mark.parametrize(("num_teachers", "few_known"), [(1, 8), (3, 8), (3, 0)])
def test_the_rules_equal_a_loop(options, num_teachers, few_known, monkeypatch):
    monkeypatch.setattr("embeddings.mining.negatives._FEW_KNOWN", few_known)
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


def one_query(scores, positive):
    """One query whose candidates are documents 0, 1, … with these scores, in one or several teachers' rows."""
    score_TQC = np.atleast_2d(np.array(scores, np.float32))[:, None]
    width = score_TQC.shape[2]
    zero, other = np.array([0]), np.array([99])
    known = KnownPositives(zero, zero, other)
    facts = MinedQueries(zero, np.array([-1]), known, other, np.atleast_1d(np.array(positive, np.float32))[:, None])
    return ScoredCandidates(np.arange(width)[None], np.arange(width)[None], score_TQC), facts


@pytest.mark.parametrize(
    ("scores", "positive", "margins", "expected"),
    [
        # A positive at -0.5: the bound is -0.525, where -0.5 * 0.95 = -0.475 would let candidates above it through.
        ([-0.49, -0.51, -0.53], -0.5, {"margin": 0.95}, [2, -1, -1]),
        ([-0.1, 0.0], 0.0, {"margin": 0.95}, [0, -1, -1]),
        # A candidate at the margin is removed.
        ([0.5, 0.25], 1.0, {"margin": None, "absolute_margin": 0.5}, [1, -1, -1]),
        ([0.5, 0.25], 1.0, {"margin": 0.5}, [1, -1, -1]),
    ],
)
def test_a_negative_scores_below_the_margins_for_scores_of_any_sign(scores, positive, margins, expected):
    found = choose_negatives(*one_query(scores, positive), NegativeRules(3, **margins))
    assert found.row_QN[0].tolist() == expected


def test_a_draw_from_the_window_depends_only_on_seed_query_and_document():
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
        number_Q=facts.number_Q[-1:], hash_Q=facts.hash_Q[-1:],
        known=facts.known._replace(group_Q=facts.known.group_Q[-1:]),
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


def graded_world(seed, num_teachers):
    """As `world`, with random and judged documents, and queries without judgments."""
    candidates, facts = world(seed, num_teachers)
    generator = np.random.default_rng(seed + 1000)
    shape = candidates.row_QC.shape
    drawn = generator.random(shape) < 0.4
    level = np.where(generator.random(shape) < 0.3, generator.integers(1, 4, shape), 0).astype(np.int8)
    judged_Q = generator.random(shape[0]) < 0.8
    level[~judged_Q] = 0
    return candidates._replace(drawn_QC=drawn, level_QC=level), facts, judged_Q


def quarters(left):
    """A list in four equal parts; the last ones may be larger by one."""
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


def test_documents_are_drawn_by_row_alone_and_evenly():
    rules = NegativeRules(4, first_rank=11, last_rank=60, seed=3)
    drawn = draw_documents(np.arange(400), 20, rules)
    assert drawn.shape == (400, 20)
    np.testing.assert_array_equal(draw_documents(np.arange(100, 103), 20, rules), drawn[100:103])
    np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=20) / drawn.size, 0.05, atol=0.01)
    assert draw_documents(np.arange(2), 1000, rules).shape == (2, 50)
    other = draw_documents(np.arange(400), 20, NegativeRules(4, first_rank=11, last_rank=60, seed=4))
    assert (other != drawn).mean() > 0.9


ROWS = [
    {"query": "q0", "positive": "a"},
    {"query": "q1", "positive": ["b", "c"]},
    {"query": "q2", "positive": "nobody judged this"},
    {"query": "q0", "positive": "b"},
    {"query": "q3", "positive": "d"},
    {"query": "q4", "positive": ["a", "nobody judged this"]},
]
JUDGED = [
    *(("q0", text, grade) for text, grade in (("a", 3), ("b", 2), ("c", 3), ("d", 1), ("e", 0), ("f", 2))),
    *(("q1", text, grade) for text, grade in (("b", 3), ("d", 2), ("e", 1), ("f", -1), ("not there", 1), ("c", 4))),
    *(("q2", text, grade) for text, grade in (("a", 1), ("b", 0), ("c", 3))),
    *(("q4", text, grade) for text, grade in (("a", 3), ("c", 1), ("e", 0))),
    ("another query", "a", 3),
]


def levels_by_loop(judged, positives):
    """For each query text the documents judged as relevant as its positives, and the levels of the others."""
    scale = sorted({grade for *_, grade in judged if grade > 0})
    found = {}
    for query, own in positives.items():
        grades = {text: grade for asked, text, grade in judged if asked == query}
        least = max(min(grades.get(text, 0) for text in own), scale[0])
        equal = {text for text, grade in grades.items() if grade >= least} - own
        levels = {}
        for text, grade in grades.items():
            if text not in own and grade < least:
                levels[text] = 3 if grade <= 0 else min(scale.index(least) - scale.index(grade), 2)
        found[query] = (equal, levels)
    return found


def test_levels_and_judged_positives_equal_a_loop(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in "fedcba"])
    index = index_pairs(source(tmp_path, ROWS), tmp_path / "index", corpus)
    rows = np.arange(len(ROWS))
    known = index.known_positives(rows)
    judgments = DocumentQrels(TextQrels.of(JUDGED, "qrels"), index, "qrels")
    judged = judgments.of_queries(np.asarray(index.query_hashes), known)
    positives = {"q0": {"a", "b"}, "q1": {"b", "c"}, "q2": {"nobody judged this"}, "q3": {"d"}}
    positives["q4"] = {"a", "nobody judged this"}
    expected = levels_by_loop([row for row in JUDGED if row[1] != "not there"], positives)
    assert expected["q0"] == ({"c", "f"}, {"d": 1, "e": 3})
    assert expected["q1"] == (set(), {"d": 1, "e": 2, "f": 3})
    assert expected["q2"] == ({"a", "c"}, {"b": 3})
    # A positive without a judgement may be less relevant than the judged one.
    assert expected["q4"] == ({"c"}, {"e": 3})
    for query, row in (("q0", 0), ("q1", 1), ("q2", 2), ("q0", 3), ("q3", 4), ("q4", 5)):
        own = judged.query_L == row
        found = zip(judged.row_L[own].tolist(), judged.level_L[own].tolist(), strict=True)
        levels = {index.document_texts([document])[0]: level for document, level in found}
        good = set(index.document_texts(judged.known.row_P[judged.known.group_P == known.group_Q[row]]))
        assert (good - positives[query], levels) == expected[query]
        assert positives[query] <= good
        assert judged.is_judged_Q[row] == (query != "q3")
    assert (np.diff(judged.query_L) >= 0).all()
    assert len(np.unique(np.stack([judged.known.group_P, judged.known.row_P]), axis=1).T) == len(judged.known.row_P)


def test_the_higher_grade_of_a_pair_judged_twice_counts_in_any_order():
    first = TextQrels.of([("q", "a", 1), ("q", "b", 0), ("q", " a", 2)], "qrels")
    second = TextQrels.of([("q", "a ", 2), ("q", "a", 1), ("q", "b", 0)], "qrels")
    assert sorted(first.grade_J.tolist()) == [0, 2]
    assert first.sha256() == second.sha256()
    assert first.sha256() != TextQrels.of([("q", "a", 1), ("q", "b", 0)], "qrels").sha256()


@pytest.mark.parametrize(
    ("judged", "says"),
    [
        ([], "qrels: no document is relevant"),
        ([("q", "a", 0), ("q", "b", -1)], "qrels: no document is relevant"),
        ([("q", "a", 1), ("q", "b", 1)], "qrels: every judged document has the score 1, .*--levels quantiles"),
    ],
)
def test_judgments_without_two_grades_or_a_relevant_document_are_refused(judged, says):
    refused(InputError, says, TextQrels.of, judged, "qrels")


@pytest.mark.parametrize("judged", [[("q9", "a", 1), ("q9", "b", 0)], [("q0", "x", 1), ("q0", "y", 0)]])
def test_judgments_of_other_queries_or_documents_are_refused(judged, tmp_path):
    index = index_pairs(source(tmp_path, ROWS), tmp_path / "index")
    with pytest.raises(InputError, match="qrels: has no judgment of a document for a query of the source"):
        DocumentQrels(TextQrels.of(judged, "qrels"), index, "qrels")


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (NegativeRules, {"num_negatives": 0}, "num_negatives must be >= 1"),
        (NegativeRules, {"margin": float("nan")}, "margin must be > 0 and <= 1"),
        (NegativeRules, {"absolute_margin": -0.1}, "absolute_margin must be finite"),
        (NegativeRules, {"first_rank": 0}, "first_rank must be >= 1"),
        (NegativeRules, {"num_negatives": 7, "first_rank": 10, "last_rank": 12}, "last_rank must leave at least 7"),
        (LevelRules, {"kind": "grades"}, "levels needs judgments"),
    ],
)
def test_impossible_rules_are_refused(kind, options, says):
    refused(OptionError, says, kind, **options)
