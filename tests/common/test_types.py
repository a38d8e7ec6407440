"""Token batches, packed rows and mini-batches."""

import pytest
import torch

from embeddings.common import ContrastiveBatch, OptionError, TokenBatch
from embeddings.common.types import PackedRows, Prediction, plan_mini_batches, positions_in_document, take_texts


def batch_of(texts, masks=None):
    return TokenBatch.from_lists(texts, masks or [[True] * len(text) for text in texts])


def test_padding_keeps_every_token_in_the_row_of_its_text():
    tokens = batch_of([[5, 6, 7], [8], [9, 10]], [[False, True, True], [True], [True, False]])
    padded = tokens.padded(pad_token_id=1)
    assert padded.input_ids_NL.tolist() == [[5, 6, 7], [8, 1, 1], [9, 10, 1]]
    assert padded.attention_mask_NL.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert padded.pooling_mask_NL.int().tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert tokens.padded(torch.tensor([2, 1])).input_ids_NL.tolist() == [[9, 10], [8, 0]]


def test_empty_texts_and_empty_batches_pad_to_nothing():
    assert batch_of([]).padded().input_ids_NL.shape == (0, 0)
    assert batch_of([[], []]).padded().attention_mask_NL.shape == (2, 0)
    mixed = batch_of([[], [3]]).padded(pad_token_id=7)
    assert mixed.input_ids_NL.tolist() == [[7], [3]]
    assert mixed.pooling_mask_NL.tolist() == [[False], [True]]


def test_lengths_stay_on_the_cpu_when_tokens_move():
    tokens = batch_of([[1, 2], [3]]).to("meta")
    assert (len(tokens), tokens.num_tokens) == (2, 3)
    assert tokens.input_ids_T.device.type == tokens.pooling_mask_T.device.type == "meta"
    assert tokens.lengths_N.device.type == "cpu"
    assert tokens.device_lengths_N.device.type == "meta"


def test_all_tensors_of_a_batch_move_to_the_device():
    number = torch.zeros(1, dtype=torch.int64)
    fields = dict.fromkeys(ContrastiveBatch.__dataclass_fields__, number)
    texts = {"query": batch_of([[1]]), "candidate": batch_of([[2]]), "context": batch_of([[3]])}
    moved = ContrastiveBatch(**{**fields, **texts}).to("meta")
    assert len(moved) == 1
    assert moved.row_B.device.type == moved.candidate.device.type == moved.context.device.type == "meta"
    absent = ["surrogate_query_BS", "surrogate_candidate_CS", "teacher_score_C", "teacher_query", "teacher_candidate"]
    absent = dict.fromkeys(["context", *absent])
    moved = ContrastiveBatch(**{**fields, **texts, **absent}).to("meta")
    assert moved.query.device.type == "meta"
    assert all(getattr(moved, name) is None for name in absent)


DOCUMENT_NL = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, -1, -1]])


def test_positions_count_within_each_document_and_restart_in_each_row() -> None:
    expected = []
    for row in DOCUMENT_NL.tolist():
        counts: dict[int, int] = {}
        for document in row:
            expected.append(counts.get(document, 0))
            counts[document] = counts.get(document, 0) + 1
    assert positions_in_document(DOCUMENT_NL).flatten().tolist() == expected


def test_packed_rows_and_predictions_move_and_their_row_indices_stay_on_the_cpu() -> None:
    index_N, read_P = torch.arange(2), torch.tensor([1, 2, 3])
    rows = PackedRows(DOCUMENT_NL, DOCUMENT_NL, DOCUMENT_NL < 0, index_N, index_N).to("meta")
    moved = Prediction(DOCUMENT_NL, DOCUMENT_NL, read_P, read_P + 1, True, index_N).to("meta")
    assert (len(rows), len(moved), moved.has_padding) == (2, 3, True)
    assert rows.special_NL.device.type == moved.label_P.device.type == moved.document_NL.device.type == "meta"
    assert rows.draw_N is rows.row_N is moved.row_N is index_N


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("budget", "max_texts"), [(1, None), (30, None), (30, 3), (1000, 3), (1000, None)])
def test_each_text_is_in_one_mini_batch_within_the_budget(budget: int, max_texts: int | None) -> None:
    lengths_N = torch.randint(1, 20, (37,), generator=torch.Generator().manual_seed(0))
    plan = plan_mini_batches(lengths_N, budget, max_texts)
    assert sorted(row for rows_n in plan for row in rows_n.tolist()) == list(range(37))
    for rows_n in plan:
        assert len(rows_n) == 1 or len(rows_n) * int(lengths_N[rows_n].max()) <= budget
        assert max_texts is None or len(rows_n) <= max_texts


@pytest.mark.parametrize(
    ("lengths_N", "plan"),
    [((2, 5, 2, 4), [[1], [3, 0], [2]]), ((3, 50, 3), [[1], [0, 2]]), ((0, 0), [[0, 1]]), ((), [])],
)
def test_the_longest_texts_come_first_and_ties_keep_their_order(lengths_N: tuple[int, ...], plan: object) -> None:
    assert [rows.tolist() for rows in plan_mini_batches(lengths(*lengths_N), 8)] == plan


def test_sorting_leaves_at_most_5_percent_padding_for_long_tailed_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths_N = (torch.randn(2000, generator=generator) * 0.8 + 4).exp().clamp(4, 512).long()
    plan = plan_mini_batches(lengths_N, 2048)
    padded = sum(len(rows_n) * int(lengths_N[rows_n].max()) for rows_n in plan)
    assert int(lengths_N.sum()) / padded >= 0.95


@pytest.mark.parametrize(("budget", "max_texts", "name"), [(0, None, "mini_batch_tokens"), (5, 0, "max_texts")])
def test_a_limit_below_one_is_refused(budget: int, max_texts: int | None, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} must be >= 1, got 0"):
        plan_mini_batches(lengths(1), budget, max_texts)


def test_texts_are_taken_in_the_requested_order_and_truncated() -> None:
    tokens = TokenBatch.from_lists([[1, 2, 3], [], [4], [5, 6]], [[True, False, True], [], [False], [True, True]])
    taken = take_texts(tokens, torch.tensor([3, 1, 0]))
    assert taken.input_ids_T.tolist() == [5, 6, 1, 2, 3]
    assert taken.pooling_mask_T.tolist() == [True, True, True, False, True]
    assert taken.lengths_N.tolist() == [2, 0, 3]
    truncated = take_texts(tokens, torch.tensor([3, 0, 1, 2]), max_length=1)
    assert truncated.input_ids_T.tolist() == [5, 1, 4]
    assert truncated.pooling_mask_T.tolist() == [True, True, False]
    assert truncated.lengths_N.tolist() == [1, 1, 0, 1]
    assert take_texts(tokens, torch.tensor([0]), max_length=9).input_ids_T.tolist() == [1, 2, 3]
    assert len(take_texts(tokens, torch.empty(0, dtype=torch.int64))) == 0


def test_consecutive_texts_are_views_of_the_same_tokens() -> None:
    texts, masks = [[1, 2, 3], [], [4], [5, 6]], [[True, False, True], [], [False], [True, True]]
    with_device_lengths = take_texts(TokenBatch.from_lists(texts, masks), torch.arange(4))
    for tokens in (with_device_lengths, TokenBatch.from_lists(texts, masks)):
        for first in range(4):
            for count in range(1, 5 - first):
                run, rows = tokens.run_of_texts(first, count), torch.arange(first, first + count)
                expected = take_texts(tokens, rows)
                assert run.lengths_N.tolist() == expected.lengths_N.tolist() == tokens.lengths_N[rows].tolist()
                assert torch.equal(run.input_ids_T, expected.input_ids_T)
                assert all(map(torch.equal, run.padded(), expected.padded()))
                assert run.input_ids_T.untyped_storage()._cdata == tokens.input_ids_T.untyped_storage()._cdata
