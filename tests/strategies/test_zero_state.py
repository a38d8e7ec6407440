"""Flat partitions as DeepSpeed has them, put together and cut again; with DeepSpeed itself in `test_checkpoints`."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from embeddings.strategies.zero import full_optimizer_state, set_full_optimizer_state


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters() -> list[list[nn.Parameter]]:
    """Two groups: a matrix and a matrix, and a vector."""
    return [[nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(1, 2))], [nn.Parameter(torch.zeros(4))]]


def flat(groups: list[list[nn.Parameter]]) -> Any:
    """DeepSpeed's optimiser over one flat partition a group, each parameter with its place in it."""
    partitions = [torch.zeros(sum(parameter.numel() for parameter in group)) for group in groups]
    for partition, group in zip(partitions, groups, strict=True):
        start = 0
        for parameter in group:
            size = parameter.numel()
            mapping = SimpleNamespace(
                get_hp_fragment=lambda partition=partition: partition,
                hp_fragment_address=SimpleNamespace(start=start, numel=size),
                lp_fragment_address=SimpleNamespace(start=0, numel=size),
            )
            parameter._hp_mapping = mapping  # type: ignore[attr-defined]
            start += size
    inner = torch.optim.AdamW([{"params": [partitions[0]]}, {"params": [partitions[1]], "weight_decay": 0.0}], lr=0.1)
    return SimpleNamespace(optimizer=inner, param_groups=inner.param_groups, single_partition_of_fp32_groups=partitions)


def test_the_state_is_that_of_a_plain_optimiser_and_comes_back() -> None:
    groups = parameters()
    plain = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.1)
    for number, parameter in enumerate(parameter for group in groups for parameter in group):
        parameter.grad = torch.arange(float(parameter.numel())).view_as(parameter) + number
    plain.step()
    expected = plain.state_dict()
    zero = flat(groups)
    set_full_optimizer_state(zero, groups, expected)
    found = full_optimizer_state(zero, groups, keep=True)
    assert found["param_groups"] == expected["param_groups"]
    for index, values in expected["state"].items():
        assert found["state"][index].keys() == values.keys()
        assert all(torch.equal(found["state"][index][name], value) for name, value in values.items())
    assert full_optimizer_state(zero, groups, keep=False)["state"][0]["exp_avg"] is None


def test_an_optimiser_that_has_made_no_step_has_no_state() -> None:
    groups = parameters()
    assert full_optimizer_state(flat(groups), groups, keep=True)["state"] == {}
