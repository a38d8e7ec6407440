"""The masks of false negatives and the surrogate filter, against loops, in tiles and on two ranks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE, SurrogateFilter, info_nce, similarity_matrix
from embeddings.losses.info_nce import (
    CandidateKeys,
    QueryKeys,
    exclude_candidates_,
    exclude_queries_,
    false_negatives,
)
from embeddings.losses.surrogates import surrogate_vectors
from tests.helpers.contrastive import Record, batch_of, random_batch, random_records
from tests.helpers.ranks import run_on_two_ranks

SWITCHES = [(True, True), (True, False), (False, True), (False, False)]


def keys(batch: ContrastiveBatch, *compared: bool) -> tuple[QueryKeys, CandidateKeys]:
    index_B = torch.arange(len(batch))
    return QueryKeys.of(batch, index_B, *compared), CandidateKeys.of(batch, index_B, *compared)


def is_negative_mask(query: QueryKeys, candidate: CandidateKeys, positive_index_Q: Tensor) -> Tensor:
    """The negatives of each query, (Q, C) bool: the definition of the exclusions in tiles."""
    is_negative_QC = ~false_negatives(query, candidate)
    is_negative_QC &= query.in_batch_Q[:, None] | (candidate.owner_C == query.index_Q[:, None])
    return is_negative_QC.scatter_(1, positive_index_Q[:, None], False)


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
def test_the_mask_equals_the_rule_on_records(compared: tuple[bool, bool]) -> None:
    records = tangled_records()
    batch, expected = batch_of(records), loop_reference(records, *compared)
    assert is_negative_mask(*keys(batch, *compared), batch.positive_index_B).tolist() == expected
    assert 0 < sum(map(sum, expected)) < len(expected) * (len(expected[0]) - 1)
    assert compared == (True, True) or expected != loop_reference(records)


@pytest.mark.parametrize("compared", SWITCHES)
@pytest.mark.parametrize("height", [1, 5, 12, 100])
def test_exclusions_in_tiles_equal_the_full_mask(height: int, compared: tuple[bool, bool]) -> None:
    batch = batch_of(tangled_records())
    query, candidate = keys(batch, *compared)
    mask = is_negative_mask(query, candidate, batch.positive_index_B)
    score = torch.randn(mask.shape)
    expected = score.masked_fill(~mask.scatter(1, batch.positive_index_B[:, None], True), -torch.inf)
    for start in range(0, len(batch), height):
        rows = slice(start, start + height)
        exclude_candidates_(score[rows], query[rows], candidate, batch.positive_index_B[rows])
    assert torch.equal(score, expected)


@pytest.mark.parametrize("height", [5, 100])
def test_documents_against_queries_use_the_transposed_rule(height: int) -> None:
    records = tangled_records()
    batch = batch_of(records)
    query, candidate = keys(batch)
    all_in_batch = [Record(**{**vars(record), "in_batch": True}) for record in records]
    competes = torch.tensor(loop_reference(all_in_batch))[:, : len(batch)].T.clone()
    competes &= batch.in_batch_B[:, None]
    competes.fill_diagonal_(True)
    score = torch.randn(len(batch), len(batch))
    expected = score.masked_fill(~competes, -torch.inf)
    for start in range(0, len(batch), height):
        rows = slice(start, start + height)
        exclude_queries_(score[rows], candidate[: len(batch)][rows], query, torch.arange(len(batch))[rows])
    assert torch.equal(score, expected)


@pytest.mark.parametrize("directions", ["query_to_document", "both"])
def test_a_device_masks_the_same_scores_without_synchronisation(
    directions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(tangled_records())
    query, candidate = torch.randn(len(batch), 4), torch.randn(len(batch.candidate), 4)
    loss = InfoNCE(0.1, directions=directions, tile_size=1)
    expected = loss(query, candidate, batch)
    monkeypatch.setattr(info_nce, "queues_work", lambda device: True)
    monkeypatch.setattr(Tensor, "nonzero", lambda *_: pytest.fail("the host synchronises"))
    found = loss(query, candidate, batch)
    assert torch.equal(found.loss, expected.loss)
    assert found.terms == expected.terms
    unmasked = InfoNCE(0.1, directions=directions, mask_same_text=False, mask_same_class=False)
    assert not torch.equal(found.loss, unmasked(query, candidate, batch).loss)


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


def found_mask(batch: ContrastiveBatch, rule: SurrogateFilter) -> list[list[bool]]:
    queries, candidate_CS = surrogate_vectors(batch)
    query, candidate = keys(batch)
    return rule.false_negatives(queries, candidate_CS, query.own(candidate)).tolist()


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
    (facts, other), count = keys(batch), len(batch)
    may_compete = torch.tensor(True) if rule is None else ~torch.tensor(filter_reference(batch, rule))
    competes = (is_negative_mask(facts, other, batch.positive_index_B) & may_compete).fill_diagonal_(True)
    score = similarity_matrix(query, candidate) / temperature
    loss = torch.nn.functional.cross_entropy(score.masked_fill(~competes, -torch.inf), batch.positive_index_B)
    if not both:
        return loss
    all_in_batch = replace(facts, in_batch_Q=torch.ones_like(batch.in_batch_B))
    competes = (is_negative_mask(all_in_batch, other, batch.positive_index_B) & may_compete)[:, :count].T
    competes = (competes & batch.in_batch_B[:, None]).fill_diagonal_(True)
    score = score[:, :count].T.masked_fill(~competes, -torch.inf)
    return (loss + torch.nn.functional.cross_entropy(score, batch.positive_index_B)) / 2


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rule", FILTERS.values(), ids=FILTERS)
def test_the_loss_excludes_the_candidates_that_the_filter_selects(rule: SurrogateFilter, both: bool) -> None:
    batch = with_surrogates(random_batch(40, 2))
    query, candidate = (torch.randn(count, 5, dtype=torch.float64) for count in (40, 120))
    directions: Any = "both" if both else "query_to_document"
    filtered = InfoNCE(0.1, directions=directions, tile_size=1, false_negative_filter=rule)
    loss = filtered(query, candidate, batch).loss.item()
    assert loss == pytest.approx(dense_loss(query, candidate, batch, rule, both).item(), rel=1e-12)
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
    assert found_mask(shuffled, rule) == expected[:, order_C].tolist()
    query, candidate = torch.randn(9, 5, dtype=torch.float64), torch.randn(27, 5, dtype=torch.float64)
    directions: Any
    for directions in ("query_to_document", "both"):
        loss = InfoNCE(0.1, directions=directions, tile_size=2, false_negative_filter=rule)
        found = loss(query, candidate[order_C], shuffled).loss.item()
        assert found == pytest.approx(loss(query, candidate, batch).loss.item(), rel=1e-12)


def test_the_filter_removes_planted_duplicates_from_the_negatives() -> None:
    """Queries 0 and 2 have equivalent documents with other texts, which neither hashes nor labels detect."""
    batch = batch_of([Record([1], [2]), Record([3], [4]), Record([5], [6])])
    surrogate = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    batch = replace(batch, surrogate_query_BS=surrogate, surrogate_candidate_CS=surrogate.clone())
    assert found_mask(batch, SurrogateFilter()) == [[False, False, True], [False] * 3, [True, False, False]]
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
    mask = torch.tensor(found_mask(batch, SurrogateFilter()))
    assert mask.fill_diagonal_(True).all()


@pytest.mark.parametrize("missing", ["surrogate_query_BS", "surrogate_candidate_CS"])
def test_a_filter_without_vectors_is_refused(missing: str) -> None:
    batch = replace(with_surrogates(random_batch(3, 0)), **{missing: None})
    with pytest.raises(OptionError, match=r"model\.loss .*surrogate_vectors"):
        InfoNCE(false_negative_filter=SurrogateFilter())(torch.eye(3), torch.eye(3), batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": None}, "margin must be set if threshold is not, got None"),
        ({"margin": math.nan}, "margin must be finite, got nan"),
        ({"threshold": 1.5}, r"threshold must be between -1 and 1, got 1\.5"),
    ],
)
def test_invalid_filter_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SurrogateFilter(**options)


def losses_of_two_ranks(rank: int) -> dict[str, Any]:
    """The loss of this rank's queries with the filter on, and that of all in one process."""
    results: dict[str, Any] = {}
    records, rows = [Record([row], [row + 50]) for row in range(8)], slice(4 * rank, 4 * rank + 4)
    whole = with_surrogates(batch_of(records), seed=3)
    vectors = {name: getattr(whole, name)[rows] for name in ("surrogate_query_BS", "surrogate_candidate_CS")}
    shard = replace(batch_of(records[rows]), **vectors)
    generator = torch.Generator().manual_seed(1)
    query, candidate = (torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    directions: Any
    for directions in ("query_to_document", "both"):
        loss = InfoNCE(0.1, directions=directions, false_negative_filter=SurrogateFilter())
        own = loss(query[rows], candidate[rows], shard).loss
        results[directions] = (own.item(), dense_loss(query, candidate, whole, SurrogateFilter(), directions == "both"))
    return results


def test_the_filter_also_masks_candidates_of_other_ranks() -> None:
    first, second = run_on_two_ranks(losses_of_two_ranks)
    for directions in first:
        (one, expected), (other, _) = first[directions], second[directions]
        assert (one + other) / 2 == pytest.approx(expected.item(), rel=1e-12)
