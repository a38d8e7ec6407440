"""The rule of false negatives, case by case, and the in-place tiles against the whole mask."""

import pytest
import torch

from embeddings.common import ContrastiveBatch
from embeddings.losses import is_negative_mask
from embeddings.losses.masks import (
    CandidateFacts,
    Compared,
    QueryFacts,
    exclude_candidates_,
    exclude_queries_,
    query_index,
)
from tests.helpers.contrastive import Record, batch_of, random_records

SWITCHES = [(True, True), (True, False), (False, True), (False, False)]


def facts(batch: ContrastiveBatch, *compared: bool) -> tuple[QueryFacts, CandidateFacts]:
    index_B, rule = query_index(batch, [len(batch)], 0), Compared(*compared)
    return QueryFacts.of(batch, index_B, rule), CandidateFacts.of(batch, index_B, rule)


def negatives(records: list[Record], *compared: bool) -> list[list[bool]]:
    batch = batch_of(records)
    query, candidate = facts(batch, *compared)
    return is_negative_mask(query, candidate, batch.positive_index_B).tolist()


def loop_reference(records: list[Record], by_text: bool = True, by_class: bool = True) -> list[list[bool]]:
    """The rule in words, on the records themselves."""
    candidates = [(owner, record.positive, record.label, True) for owner, record in enumerate(records)]
    for owner, record in enumerate(records):
        labels = record.negative_labels or [-1] * len(record.negatives)
        candidates += [(owner, text, label, False) for text, label in zip(record.negatives, labels, strict=True)]
    mask = []
    for row, record in enumerate(records):
        answers = []
        for column, (owner, text, label, is_positive) in enumerate(candidates):
            same_source = records[owner].source == record.source
            is_false = by_text and text in (record.query, record.positive, *record.known)
            is_false = is_false or (by_text and is_positive and records[owner].query == record.query)
            is_false = is_false or (by_class and label >= 0 and label == record.label and same_source)
            may_compete = record.in_batch or owner == row
            answers.append(column != row and may_compete and not is_false)
        mask.append(answers)
    return mask


def tangled_records() -> list[Record]:
    """Records with every relation that masks a candidate, in and across sources."""
    records = random_records(12, 2, seed=3)
    for row, record in enumerate(records):
        record.label = (-1, 0, 1)[row % 3] if row < 9 else -1
        record.negative_labels = [0, -1] if row % 2 else []
    records[5].source = records[1].source
    records[4].negatives[0] = records[4].query
    records[6].negatives[1] = records[6].positive
    records[7].known = [records[8].positive, records[9].negatives[0]]
    return records


def test_other_queries_positives_and_all_hard_negatives_are_negatives() -> None:
    records = [Record([1], [2], [[3]]), Record([4], [5], [[6]])]
    assert negatives(records) == [[False, True, True, True], [True, False, True, True]]


def test_a_source_without_in_batch_negatives_has_only_its_own() -> None:
    records = [Record([1], [2], [[3]], in_batch=False), Record([4], [5], [[6]])]
    assert negatives(records) == [[False, False, True, False], [True, False, True, True]]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Record([4], [2]), id="the same positive"),
        pytest.param(Record([4], [7]), id="another known positive"),
        pytest.param(Record([4], [1]), id="the query's own text"),
        pytest.param(Record([1], [5]), id="the positive of the same query"),
        pytest.param(Record([4], [5], source=3, label=8), id="the same label in the same source"),
    ],
)
def test_a_candidate_that_may_answer_is_no_negative(other: Record) -> None:
    first = Record([1], [2], known=[[7]], source=3, label=8)
    assert negatives([first, other])[0] == [False, False]


@pytest.mark.parametrize(("source", "label"), [(4, 8), (3, 9), (3, -1)])
def test_another_label_or_another_source_stays_a_negative(source: int, label: int) -> None:
    records = [Record([1], [2], source=3, label=8), Record([4], [5], source=source, label=label)]
    assert negatives(records)[0] == [False, True]


def test_texts_without_a_label_are_not_of_one_class() -> None:
    assert negatives([Record([1], [2]), Record([4], [5])])[0] == [False, True]


def test_a_hard_negative_that_is_the_positive_again_is_no_negative() -> None:
    assert negatives([Record([1], [2], [[2], [3]])]) == [[False, False, True]]


@pytest.mark.parametrize("compared", SWITCHES)
def test_the_mask_equals_the_rule_on_records(compared: tuple[bool, bool]) -> None:
    records = tangled_records()
    found, expected = negatives(records, *compared), loop_reference(records, *compared)
    assert found == expected
    assert 0 < sum(map(sum, expected)) < len(expected) * (len(expected[0]) - 1)


def test_each_switch_gives_back_the_candidates_that_its_facts_mask() -> None:
    counts = [sum(map(sum, negatives(tangled_records(), *compared))) for compared in SWITCHES]
    all_masks, without_class, without_text, without_both = counts
    assert all_masks < min(without_class, without_text) <= max(without_class, without_text) < without_both


@pytest.mark.parametrize("compared", SWITCHES)
@pytest.mark.parametrize("height", [1, 5, 12, 100])
def test_tiles_equal_the_whole_mask(height: int, compared: tuple[bool, bool]) -> None:
    batch = batch_of(tangled_records())
    query, candidate = facts(batch, *compared)
    mask = is_negative_mask(query, candidate, batch.positive_index_B)
    score = torch.randn(mask.shape)
    expected = score.masked_fill(~mask.scatter(1, batch.positive_index_B[:, None], True), -torch.inf)
    for start in range(0, len(batch), height):
        rows = slice(start, start + height)
        exclude_candidates_(score[rows], query[rows], candidate, batch.positive_index_B[rows])
    assert torch.equal(score, expected)


@pytest.mark.parametrize("height", [5, 100])
def test_the_other_direction_is_the_same_rule_turned_round(height: int) -> None:
    records = tangled_records()
    batch = batch_of(records)
    query, candidate = facts(batch)
    everybody = [Record(**{**vars(record), "in_batch": True}) for record in records]
    competes = torch.tensor(loop_reference(everybody))[:, : len(batch)].T.clone()
    competes &= batch.in_batch_B[:, None]
    competes.fill_diagonal_(True)
    score = torch.randn(len(batch), len(batch))
    expected = score.masked_fill(~competes, -torch.inf)
    for start in range(0, len(batch), height):
        rows = slice(start, start + height)
        exclude_queries_(score[rows], candidate[: len(batch)][rows], query, torch.arange(len(batch))[rows])
    assert torch.equal(score, expected)
