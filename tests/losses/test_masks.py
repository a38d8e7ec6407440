"""The masks of false negatives and the surrogate filter, against loops, in tiles and on two ranks."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE, SurrogateFilter
from tests.helpers.contrastive import Record, batch_of, random_batch, random_records
from tests.helpers.ranks import run_on_two_ranks

DIRECTIONS = ["query_to_document", "both"]
SWITCHES = [(True, True), (True, False), (False, True), (False, False)]


def is_negative_mask(batch: ContrastiveBatch, height: int = 1000, **options: Any) -> Tensor:
    """The negatives of each query, (B, C) bool, from tiles of `height` rows."""
    masks = InfoNCE(gather_across_devices=False, **options).masks(batch)
    tiles = [masks.excluded(slice(start, start + height)) for start in range(0, len(batch), height)]
    return (~torch.cat(tiles)).scatter_(1, batch.positive_index_B[:, None], False)


def loop_reference(records: list[Record], by_text: bool = True, by_class: bool = True) -> list[list[bool]]:
    """The masking rule, evaluated on the records."""
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
    """Records with every relation that masks a candidate, within a source and between sources."""
    records = random_records(12, 2, seed=3)
    for row, record in enumerate(records):
        record.label = (-1, 0, 1)[row % 3] if row < 9 else -1
        record.negative_labels = [0, -1] if row % 2 else []
    records[5].source = records[1].source
    records[4].negatives[0] = records[4].query
    records[6].negatives[1] = records[6].positive
    records[10].positive = records[3].query
    records[7].known = [records[8].positive, records[9].negatives[0]]
    return records


@pytest.mark.parametrize("compared", SWITCHES)
@pytest.mark.parametrize("height", [1, 5, 100])
def test_the_masks_of_tiles_equal_the_rule_on_records(height: int, compared: tuple[bool, bool]) -> None:
    records = tangled_records()
    batch, expected = batch_of(records), loop_reference(records, *compared)
    by_text, by_class = compared
    found = is_negative_mask(batch, height, mask_same_text=by_text, mask_same_class=by_class)
    assert found.tolist() == expected
    assert 0 < sum(map(sum, expected)) < len(expected) * (len(expected[0]) - 1)
    assert compared == (True, True) or expected != loop_reference(records)


FILTERS = {
    "own positive": SurrogateFilter(),
    "margin above": SurrogateFilter(margin=0.2),
    "margin below": SurrogateFilter(margin=-0.2),
    "threshold": SurrogateFilter(margin=None, threshold=0.3),
    "both": SurrogateFilter(margin=0.1, threshold=0.4),
    "own negatives too": SurrogateFilter(spare_own_negatives=False),
}


def with_surrogates(batch: ContrastiveBatch, width: int = 4, missing: bool = True, seed: int = 0) -> ContrastiveBatch:
    """The batch with random surrogate vectors, except for the first query and two of the candidates."""
    generator = torch.Generator().manual_seed(seed)
    query, candidate = (
        torch.randn(len(tokens), width, generator=generator) for tokens in (batch.query, batch.candidate)
    )
    if missing:
        query[0], candidate[1], candidate[-1] = math.nan, math.nan, math.nan
    return replace(batch, surrogate_query_BS=query, surrogate_candidate_CS=candidate)


def filter_reference(batch: ContrastiveBatch, rule: SurrogateFilter) -> list[list[bool]]:
    """The filter's rules by loops; a comparison with NaN is false."""
    queries, candidates = batch.surrogate_query_BS.tolist(), batch.surrogate_candidate_CS.tolist()
    mask = []
    for row, query in enumerate(queries):
        own = cosine(query, candidates[row])
        answers = []
        for column, candidate in enumerate(candidates):
            score = cosine(query, candidate)
            is_false = rule.margin is not None and score >= own + rule.margin - 1e-6
            is_false = is_false or (rule.threshold is not None and score >= rule.threshold - 1e-6)
            is_own = batch.owner_C[column] == row and bool(batch.in_batch_B[row])
            answers.append(is_false and not (rule.spare_own_negatives and is_own))
        mask.append(answers)
    return mask


def cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))


def dense_loss(
    query: Tensor,
    candidate: Tensor,
    batch: ContrastiveBatch,
    rule: SurrogateFilter | None = None,
    both: bool = False,
    temperature: float = 0.1,
) -> Tensor:
    """InfoNCE from the full matrix of scores, whose positives are on the diagonal."""
    may_compete = torch.tensor(True) if rule is None else ~torch.tensor(filter_reference(batch, rule))
    competes = (is_negative_mask(batch) & may_compete).fill_diagonal_(True)
    score, count = F.normalize(query) @ F.normalize(candidate).T / temperature, len(batch)
    cross_entropy = partial(F.cross_entropy, target=batch.positive_index_B, reduction="none")
    loss = cross_entropy(score.masked_fill(~competes, -torch.inf))
    if not both:
        return loss.mean()
    competes = (is_negative_mask(batch, in_batch_negatives="on") & may_compete)[:, :count].T
    competes = (competes & batch.in_batch_B[:, None]).fill_diagonal_(True)
    score = score[:, :count].T.masked_fill(~competes, -torch.inf)
    return torch.where(batch.in_batch_B, (loss + cross_entropy(score)) / 2, loss).mean()


@pytest.mark.parametrize("compared", SWITCHES)
@pytest.mark.parametrize("height", [5, 100])
def test_documents_against_queries_use_the_transposed_rule(height: int, compared: tuple[bool, bool]) -> None:
    records = tangled_records()
    batch, count = batch_of(records), len(records)
    all_in_batch = [replace(record, in_batch=True) for record in records]
    competes = torch.tensor(loop_reference(all_in_batch, *compared))[:, :count].T & batch.in_batch_B[:, None]
    masks = InfoNCE(mask_same_text=compared[0], mask_same_class=compared[1]).masks(batch).of_positives()
    tiles = [masks.excluded_queries(slice(start, start + height)) for start in range(0, count, height)]
    assert torch.equal(~torch.cat(tiles), competes.fill_diagonal_(True))


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("rule", FILTERS.values(), ids=FILTERS)
def test_the_loss_excludes_the_candidates_that_the_filter_selects(rule: SurrogateFilter, directions: Any) -> None:
    batch = with_surrogates(random_batch(40, 2))
    query, candidate = (torch.randn(count, 5, dtype=torch.float64) for count in (40, 120))
    filtered = InfoNCE(0.1, directions=directions, tile_size=1, false_negative_filter=rule)
    loss = filtered(query, candidate, batch).loss.item()
    expected = dense_loss(query, candidate, batch, rule, directions == "both")
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert loss != pytest.approx(InfoNCE(0.1, directions=directions)(query, candidate, batch).loss.item(), rel=1e-3)


def permuted(batch: ContrastiveBatch, order_C: Tensor) -> ContrastiveBatch:
    """The batch with its candidates in another order."""
    return replace(
        batch,
        candidate=take_texts(batch.candidate, order_C),
        positive_index_B=torch.argsort(order_C)[batch.positive_index_B],
        owner_C=batch.owner_C[order_C],
        candidate_hash_C=batch.candidate_hash_C[order_C],
        candidate_label_C=batch.candidate_label_C[order_C],
        surrogate_candidate_CS=batch.surrogate_candidate_CS[order_C],
    )


@pytest.mark.parametrize("rule", FILTERS.values(), ids=FILTERS)
def test_the_filter_equals_a_loop_with_positives_in_any_column(rule: SurrogateFilter) -> None:
    batch, order_C = with_surrogates(random_batch(9, 2)), torch.randperm(27, generator=torch.Generator().manual_seed(1))
    shuffled = permuted(batch, order_C)
    assert (shuffled.positive_index_B != batch.positive_index_B).all()
    expected = torch.tensor(filter_reference(batch, rule))
    assert 0 < expected.sum() < 9 * 27
    assert not expected[0].any()
    found = is_negative_mask(shuffled, false_negative_filter=rule)
    assert torch.equal(found, (is_negative_mask(batch) & ~expected)[:, order_C])
    query, candidate = torch.randn(9, 5, dtype=torch.float64), torch.randn(27, 5, dtype=torch.float64)
    both = InfoNCE(0.1, directions="both", tile_size=2, false_negative_filter=rule)
    loss = both(query, candidate[order_C], shuffled).loss.item()
    assert loss == pytest.approx(both(query, candidate, batch).loss.item(), rel=1e-12)


def test_the_filter_removes_planted_duplicates_from_the_negatives() -> None:
    """Queries 0 and 2 have equivalent documents with other texts, which neither hashes nor labels detect."""
    batch = batch_of([Record([1], [2]), Record([3], [4]), Record([5], [6])])
    surrogate = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    batch = replace(batch, surrogate_query_BS=surrogate, surrogate_candidate_CS=surrogate.clone())
    found = is_negative_mask(batch, false_negative_filter=SurrogateFilter()).tolist()
    assert found == [[False, True, False], [True, False, True], [False, True, False]]
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    with_it = InfoNCE(0.5, false_negative_filter=SurrogateFilter())(vectors, vectors, batch)
    without = InfoNCE(0.5)(vectors, vectors, batch)
    one_negative, two_negatives = math.log(1 + math.exp(-2)), math.log(2 + math.exp(-2))
    assert with_it.loss.item() == pytest.approx(one_negative * 2 / 3 + math.log(1 + 2 * math.exp(-2)) / 3)
    assert without.loss.item() == pytest.approx(two_negatives * 2 / 3 + math.log(1 + 2 * math.exp(-2)) / 3)
    assert (with_it.terms["accuracy"].item(), without.terms["accuracy"].item()) == (1.0, pytest.approx(1 / 3))


def test_copies_of_a_vector_count_as_equal_despite_rounding() -> None:
    batch = batch_of([Record([row], [row + 50]) for row in range(40)])
    surrogate = torch.randn(1, 768).expand(40, -1) * torch.rand(40, 1)
    batch = replace(batch, surrogate_query_BS=torch.randn(40, 768), surrogate_candidate_CS=surrogate)
    assert not is_negative_mask(batch, false_negative_filter=SurrogateFilter()).any()


@pytest.mark.parametrize("missing", ["surrogate_query_BS", "surrogate_candidate_CS"])
def test_a_filter_without_vectors_is_refused(missing: str) -> None:
    batch = replace(with_surrogates(random_batch(3, 0)), **{missing: None})
    with pytest.raises(OptionError, match=r"model\.loss .*surrogate_vectors"):
        InfoNCE(false_negative_filter=SurrogateFilter())(torch.eye(3), torch.eye(3), batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": None}, "margin must be set if threshold is not, got None"),
        ({"threshold": 1.5}, r"threshold must be between -1 and 1, got 1\.5"),
    ],
)
def test_invalid_filter_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SurrogateFilter(**options)


def losses_of_two_ranks(rank: int) -> list[tuple[float, float]]:
    """For each direction the loss of this rank's queries with the filter on, and that of all in one process."""
    records, rows = [Record([row], [row + 50]) for row in range(8)], slice(4 * rank, 4 * rank + 4)
    whole = with_surrogates(batch_of(records), seed=3)
    vectors = {name: getattr(whole, name)[rows] for name in ("surrogate_query_BS", "surrogate_candidate_CS")}
    shard = replace(batch_of(records[rows]), **vectors)
    generator = torch.Generator().manual_seed(1)
    query, candidate = (torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    results = []
    directions: Any
    for directions in DIRECTIONS:
        loss = InfoNCE(0.1, directions=directions, false_negative_filter=SurrogateFilter())
        own = loss(query[rows], candidate[rows], shard).loss
        expected = dense_loss(query, candidate, whole, SurrogateFilter(), directions == "both")
        results.append((own.item(), expected.item()))
    return results


def test_the_filter_also_masks_candidates_of_other_ranks() -> None:
    for (one, expected), (other, _) in zip(*run_on_two_ranks(losses_of_two_ranks), strict=True):
        assert (one + other) / 2 == pytest.approx(expected, rel=1e-12)
