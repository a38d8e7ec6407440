"""Surrogate losses, leaves of graphs, the memory of a graph, and the limits on kept graphs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from embeddings.callbacks.gradcache import free_memory_bytes
from embeddings.training.gradcache import GraphBudget, GraphMemory, attach_gradient, graph_leaves


def test_the_surrogate_has_the_value_and_passes_the_gradients() -> None:
    """An untouched leaf gets a zero gradient that uses no memory."""
    weight, untouched = torch.tensor([2.0, 3.0], requires_grad=True), torch.ones(3, 4, requires_grad=True)
    leaf, seen = torch.tensor(5.0, requires_grad=True), []
    untouched.register_hook(seen.append)
    gradients = [torch.tensor([1.0, -1.0]), torch.tensor(4.0)]
    surrogate = attach_gradient(torch.tensor(7.0), [weight * 10, leaf], gradients, [untouched])
    assert surrogate.item() == 7.0
    (surrogate * 3).backward()
    assert weight.grad.tolist() == [30.0, -30.0]
    assert leaf.grad.item() == 12.0
    assert torch.equal(untouched.grad, torch.zeros(3, 4))
    assert seen[0].untyped_storage().nbytes() == 4


def test_a_loss_scale_saves_gradients_too_small_for_half_precision() -> None:
    weight = torch.ones(4, dtype=torch.float16, requires_grad=True)
    tiny = torch.full((4,), 6e-8, dtype=torch.float16)
    (attach_gradient(torch.tensor(1.0), [weight * 1], [tiny]) * 65536).backward()
    assert weight.grad.dtype == torch.float16
    assert weight.grad.tolist() == pytest.approx([65536 * float(tiny[0])] * 4)


def test_leaves_are_found_once_through_shared_and_frozen_paths() -> None:
    first, second, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), torch.ones(2)
    shared = first * frozen
    leaves = graph_leaves((shared * shared + second).sum())
    assert len(leaves) == 2
    assert {id(leaf) for leaf in leaves} == {id(first), id(second)}
    assert [id(leaf) for leaf in graph_leaves(first)] == [id(first)]
    assert graph_leaves(frozen) == []


def test_memory_counts_each_saved_tensor_once_and_no_parameter() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    memory = GraphMemory()
    with memory.measured(torch.device("cpu"), lambda: [weight]):
        hidden: Tensor = torch.ones(4, 8) @ weight
        kept = (hidden * hidden).exp()
    assert kept.requires_grad
    # The input, the hidden states (saved twice by the square) and the output of exp: 4 x 8 floats each.
    assert memory.num_bytes == 3 * 4 * 8 * 4


def test_weights_cast_by_autocast_are_subtracted() -> None:
    layer, other = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)
    memory = GraphMemory()
    weights, autocast = [*layer.parameters(), *other.parameters()], torch.autocast("cpu", torch.bfloat16)
    with memory.measured(torch.device("cpu"), lambda: weights), autocast:
        output = other(layer(torch.ones(3, 8)).exp())
    # Two bytes per value: the first layer's input, the result of exp, and the second matrix; the first is not saved.
    assert memory.num_bytes == 2 * (3 * 8) + 2 * (3 * 16) + 2 * (16 * 4)
    memory.leave_out_casts([output])
    assert memory.num_bytes == 2 * (3 * 8) + 2 * (3 * 16)


def test_freed_storages_and_parameters_are_not_counted() -> None:
    """As under FSDP2: gathered weights are freed after a layer's forward, or kept for the root module."""
    gathered, kept = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    memory = GraphMemory()
    with memory.measured(torch.device("cpu"), lambda: [kept]):
        output = torch.ones(4, 8, requires_grad=True) @ gathered @ kept
        gathered.untyped_storage().resize_(0)
    assert output.requires_grad
    assert memory.num_bytes == 2 * 4 * 8 * 4


STAGES = [[30, 20, 10], [20, 10, 10]]


@pytest.mark.parametrize(
    ("fraction", "first", "second"), [(0.0, 0, 0), (0.3, 1, 0), (0.7, 3, 0), (0.9, 3, 2), (1.0, 3, 3)]
)
def test_a_later_stage_may_keep_the_tokens_that_the_first_one_did_not(fraction: float, first: int, second: int) -> None:
    budget = GraphBudget(kept_fraction=fraction)
    assert budget.num_kept(STAGES) == first
    assert budget.num_kept(STAGES, [first]) == second


def test_memory_per_token_is_measured_for_each_stage() -> None:
    budget = GraphBudget(kept_gib=100 / 2**30)
    assert budget.measures
    budget.learn(0, num_bytes=60, num_tokens=30)
    assert budget.num_kept(STAGES) == 2
    budget.learn(1, num_bytes=10, num_tokens=20)
    assert budget.num_kept(STAGES, [1]) == 3
    budget.learn(1, num_bytes=40, num_tokens=20)
    assert budget.num_kept(STAGES, [1]) == 1
    assert budget.num_kept(STAGES, [2]) == 0


def write_machine(root: Path, available_kib: int, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {available_kib} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


GROUP_2 = {"memory.max": "5000\n", "memory.current": "3000\n", "memory.stat": "anon 5\ninactive_file 400\n"}


@pytest.mark.parametrize(
    ("groups", "folder", "files", "expected"),
    [
        ("0::/job\n", "job", GROUP_2, 2400),
        ("0::/job\n", "", GROUP_2, 2400),  # seen from inside a container
        ("0::/job/step/task\n", "job", GROUP_2, 2400),  # SLURM limits the job, not the task
        ("0::/job\n", "job", GROUP_2 | {"memory.max": "max\n"}, 10 * 1024),
        ("", "", {}, 10 * 1024),
    ],
)
def test_free_memory_of_a_cpu_is_the_minimum_of_the_machine_and_the_cgroup(
    groups: str, folder: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    cgroup_files = {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}
    root = write_machine(tmp_path, 10, {"proc/self/cgroup": groups, **cgroup_files})
    assert free_memory_bytes(torch.device("cpu"), root) == expected


def test_unknown_free_memory_is_zero_and_this_machine_has_some(tmp_path: Path) -> None:
    assert free_memory_bytes(torch.device("cpu"), tmp_path) == 0
    assert 2**20 < free_memory_bytes(torch.device("cpu")) < 2**50
