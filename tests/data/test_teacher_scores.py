"""Teacher scores from the file to the batch: they stay with their texts, and sources without scores do not change."""

import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from embeddings.common import TextSettings
from embeddings.common.random import derive_seed
from embeddings.data import ContrastiveCollator, Mixture, PlanEntry
from embeddings.data.records import Example, Negative, Record, parse_record, write_records
from embeddings.data.samplers.base import LevelRule
from embeddings.data.tokenize import TextTokenizer
from tests.data.rows import dataset, pairs
from tests.helpers.tiny import wordpiece_tokenizer

LEVELS = [{"text": f"n{place}", "level": level} for place, level in enumerate([3, 1, 4, 1])]


def score_of(text):
    """A float32 number that identifies the text."""
    return float(sum(text.encode()) + 0.5 * len(text))


def scored(rows):
    """Rows with the score of each of their texts."""
    for row in rows:
        texts = [row["positive"]] if isinstance(row["positive"], str) else row["positive"]
        texts = [*texts, *(item["text"] if isinstance(item, dict) else item for item in row.get("negatives") or [])]
        yield {**row, "scores": [score_of(text) for text in texts]}


def mixed(count):
    """Rows of three kinds in turn: two positives and negatives with levels; no scores; plain pairs with scores."""
    rows = pairs(count)
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row |= {"positive": [f"p{number}", f"q{number}"], "negatives": LEVELS}
    return [row if number % 3 == 1 else next(scored([row])) for number, row in enumerate(rows)]


def test_negatives_sorted_by_level_keep_their_scores():
    row = next(scored([{"query": "q", "positive": ["a", "bc"], "negatives": LEVELS}]))
    record = parse_record(row, {}, "f:1")
    assert [negative.text for negative in record.negatives] == ["n1", "n3", "n0", "n2"]
    texts = [*record.positives, *(negative.text for negative in record.negatives)]
    assert record.scores == tuple(map(score_of, texts))
    assert len(set(record.scores)) == 6
    # Scores may be null, and the column may have another name.
    row = {"query": "q", "positive": "p", "negatives": ["n", "m"], "teacher": [2, None, -1.5], "scores": "unused"}
    found = parse_record(row, {"scores": "teacher"}, "f:1").scores
    assert (found[0], found[2], math.isnan(found[1])) == (2.0, -1.5, True)
    assert parse_record({**row, "scores": None}, {}, "f:1").scores == ()
    row = {"query": "q", "pos": ["p"], "neg": ["n"], "pos_scores": [1], "neg_scores": [2]}
    for columns, scores in (({}, (1.0, 2.0)), ({"scores": None}, ())):
        assert parse_record(row, columns, "f:1").scores == scores


@pytest.mark.parametrize("rule", [None, LevelRule(1, cumulative=True), LevelRule(3, cumulative=True), LevelRule(1)])
def test_the_scores_of_an_example_are_those_of_its_texts(rule, tmp_path):
    source, plain = dataset(tmp_path, mixed(9)), dataset(tmp_path, pairs(4), name="plain")
    assert [Mixture(sources).has_scores for sources in ([plain], [source], [plain, source])] == [False, True, True]
    orders = set()
    for draw in range(12):
        for number, example in enumerate(source.__getitems__([PlanEntry(row, draw, rule) for row in range(9)])):
            texts = [*example.positives, *(negative.text for negative in example.negatives)]
            assert example.scores == (() if number % 3 == 1 else tuple(map(score_of, texts)))
            orders.add(example.scores[2:])
    assert len(orders) > 1 + (rule is not None and rule.cumulative)


def test_a_batch_has_the_score_of_each_candidate():
    collate = ContrastiveCollator(TextTokenizer(wordpiece_tokenizer(), TextSettings()), 2, has_scores=True)
    examples = [
        Example(0, 4, 0, "q", ("a", "b", "c"), tuple(map(Negative, "def")), scores=(1, 2, 3, 4, 5, 6)),
        Example(1, 5, 0, "q", ("a",), (Negative("d"),)),
        Example(2, 6, 0, "q", ("a",), scores=(7,)),
        Example(3, 7, 0, "q", ("a",), (Negative("d"),), scores=(math.nan, 8)),
    ]
    chosen = 1 + derive_seed(4, "positive") % 3
    batch = collate(examples)
    assert batch.teacher_score_C.dtype == torch.float32
    assert batch.teacher_score_C.nan_to_num(-1).tolist() == [chosen, -1, 7, -1, 4, 5, -1, 8]
    assert batch.owner_C.tolist() == [0, 1, 2, 3, 0, 0, 1, 3]
    # All ranks have the same fields, even if the examples of one have no scores.
    assert collate([replace(example, scores=()) for example in examples]).teacher_score_C.isnan().all()
    collate.has_scores = False
    assert collate(examples).teacher_score_C is None


def test_records_are_written_with_null_for_what_the_teacher_did_not_score(tmp_path):
    record = Record("q", ("p",), (Negative("n"),), scores=(math.nan, 2.0))
    for name in ("a.parquet", "a.jsonl"):
        write_records(tmp_path / name, [record], False, json_lines=name.endswith("l"), scored=True)
    assert pq.read_table(tmp_path / "a.parquet")["scores"].to_pylist() == [[None, 2.0]]
    assert '"scores": [null, 2.0]' in (tmp_path / "a.jsonl").read_text()
