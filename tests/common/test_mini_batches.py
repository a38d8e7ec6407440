import pytest
import torch

from embeddings.common import OptionError, TokenBatch
from embeddings.common.mini_batches import plan_mini_batches, take_texts


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("budget", [1, 7, 30, 1000])
@pytest.mark.parametrize("max_texts", [None, 1, 3])
def test_each_text_is_in_one_mini_batch_within_the_budget(budget: int, max_texts: int | None) -> None:
    lengths_N = torch.randint(1, 20, (37,), generator=torch.Generator().manual_seed(0))
    plan = plan_mini_batches(lengths_N, budget, max_texts)
    assert sorted(row for rows_n in plan for row in rows_n.tolist()) == list(range(37))
    for rows_n in plan:
        assert len(rows_n) == 1 or len(rows_n) * int(lengths_N[rows_n].max()) <= budget
        assert max_texts is None or len(rows_n) <= max_texts


def test_the_longest_texts_come_first_and_ties_keep_their_order() -> None:
    assert [rows.tolist() for rows in plan_mini_batches(lengths(2, 5, 2, 4), 8)] == [[1], [3, 0], [2]]


def test_a_text_longer_than_the_budget_is_alone() -> None:
    assert [rows.tolist() for rows in plan_mini_batches(lengths(3, 50, 3), 10)] == [[1], [0, 2]]


def test_texts_without_tokens_and_no_texts_make_a_plan() -> None:
    assert [rows.tolist() for rows in plan_mini_batches(lengths(0, 0), 10)] == [[0, 1]]
    assert plan_mini_batches(lengths(), 10) == []


def test_sorting_leaves_almost_no_padding_in_a_long_tailed_set() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths_N = (torch.randn(2000, generator=generator) * 0.8 + 4).exp().clamp(4, 512).long()
    plan = plan_mini_batches(lengths_N, 2048)
    padded = sum(len(rows_n) * int(lengths_N[rows_n].max()) for rows_n in plan)
    assert int(lengths_N.sum()) / padded >= 0.95


@pytest.mark.parametrize(("budget", "max_texts", "name"), [(0, None, "mini_batch_tokens"), (5, 0, "max_texts")])
def test_an_impossible_limit_is_refused(budget: int, max_texts: int | None, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} must be >= 1, got 0"):
        plan_mini_batches(lengths(1), budget, max_texts)


def test_texts_are_taken_whole_in_the_order_given() -> None:
    tokens = TokenBatch.from_lists([[1, 2, 3], [], [4], [5, 6]], [[True, False, True], [], [False], [True, True]])
    taken = take_texts(tokens, torch.tensor([3, 1, 0]))
    assert taken.input_ids_T.tolist() == [5, 6, 1, 2, 3]
    assert taken.pooling_mask_T.tolist() == [True, True, True, False, True]
    assert taken.lengths_N.tolist() == [2, 0, 3]


def test_taking_no_text_leaves_an_empty_batch() -> None:
    taken = take_texts(TokenBatch.from_lists([[1, 2]], [[True, True]]), torch.empty(0, dtype=torch.int64))
    assert (len(taken), taken.num_tokens) == (0, 0)


def test_taken_texts_can_be_cut_at_their_ends():
    tokens = TokenBatch.from_lists([[1, 2, 3], [4], [], [5, 6]], [[False, True, True], [True], [], [True, True]])
    cut = take_texts(tokens, torch.tensor([3, 0, 2, 1]), max_length=1)
    assert cut.input_ids_T.tolist() == [5, 1, 4]
    assert cut.pooling_mask_T.tolist() == [True, False, True]
    assert cut.lengths_N.tolist() == [1, 1, 0, 1]
    assert take_texts(tokens, torch.tensor([0]), max_length=9).input_ids_T.tolist() == [1, 2, 3]
