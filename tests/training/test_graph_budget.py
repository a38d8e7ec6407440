import pytest

from embeddings.common import OptionError
from embeddings.training.graphs import GraphBudget

STAGES = [[30, 20, 10], [20, 10, 10]]


def test_without_a_limit_nothing_is_kept() -> None:
    assert GraphBudget().num_kept(STAGES) == 0
    assert not GraphBudget().measures


@pytest.mark.parametrize(
    ("fraction", "first", "second"), [(0.0, 0, 0), (0.3, 1, 0), (0.7, 3, 0), (0.9, 3, 2), (1.0, 3, 3)]
)
def test_a_later_stage_has_the_share_of_tokens_that_the_first_one_left(
    fraction: float, first: int, second: int
) -> None:
    budget = GraphBudget(kept_fraction=fraction)
    assert budget.num_kept(STAGES) == first
    assert budget.num_kept(STAGES, [first]) == second


def test_each_stage_needs_what_its_own_first_graph_held() -> None:
    budget = GraphBudget(kept_gib=100 / 2**30)
    assert budget.measures
    budget.learn(0, num_bytes=60, num_tokens=30)
    assert budget.num_kept(STAGES) == 2
    budget.learn(1, num_bytes=10, num_tokens=20)
    assert budget.num_kept(STAGES, [1]) == 3
    budget.learn(1, num_bytes=40, num_tokens=20)
    assert budget.num_kept(STAGES, [1]) == 1
    assert budget.num_kept(STAGES, [2]) == 0


def test_of_two_limits_both_hold() -> None:
    budget = GraphBudget(kept_fraction=0.5, kept_gib=1.0)
    assert budget.num_kept(STAGES) == 2
    assert GraphBudget(kept_fraction=0.5, kept_gib=0.0).num_kept(STAGES) == 0


@pytest.mark.parametrize("limits", [{"kept_fraction": -0.1}, {"kept_fraction": 1.1}, {"kept_gib": float("nan")}])
def test_impossible_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(limits))):
        GraphBudget(**limits)
