"""Ranks, and collectives through which gradients flow."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def is_distributed() -> bool:
    return world_size() > 1


def rank() -> int:
    """This process's rank, 0 without torch.distributed."""
    return dist.get_rank() if _initialised() else 0


def world_size() -> int:
    """Number of ranks, 1 without torch.distributed."""
    return dist.get_world_size() if _initialised() else 1


_planned_ranks: list[int] = []


def planned_place() -> tuple[int, int]:
    """The rank and the number of ranks that batches are planned for: this process's, or those of `planning_for`."""
    return (0, _planned_ranks[-1]) if _planned_ranks else (rank(), world_size())


@contextmanager
def planning_for(num_ranks: int) -> Iterator[None]:
    """Inside, batches are planned for rank 0 of `num_ranks`; the other ranks need not exist."""
    _planned_ranks.append(num_ranks)
    try:
        yield
    finally:
        _planned_ranks.pop()


def reduce_int(value: int, operation: str, device: torch.device | str = "cpu") -> int:
    """The minimum (`"min"`) or maximum (`"max"`) of an integer over all ranks, sent from `device` (NCCL: the GPU)."""
    if not is_distributed():
        return value
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[operation])
    return int(tensor)


def full_shape(parameter: Tensor) -> torch.Size:
    """A parameter's shape over all ranks; ZeRO-3 leaves an empty parameter, bitsandbytes packed bytes."""
    unpacked = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
    shape: torch.Size = getattr(parameter, "ds_shape", unpacked)
    return shape


def count_values(parameters: Iterable[Tensor]) -> int:
    return sum(full_shape(parameter).numel() for parameter in parameters)


def gather_counts(count: int, device: torch.device | str = "cpu") -> list[int]:
    """The integers of all ranks, such as numbers of rows, in rank order."""
    if not is_distributed():
        return [count]
    mine = torch.tensor([count], dtype=torch.int64, device=device)
    counts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(counts, mine)
    counts_of_ranks: list[int] = torch.cat(counts).tolist()
    return counts_of_ranks


def gather_rows(value_N: Tensor, counts: list[int]) -> Tensor:
    """The rows of all ranks, (N, ...), in rank order, without a gradient; `counts` are `gather_counts` of N."""
    if len(counts) == 1:
        return value_N
    mine = _padded(value_N, max(counts))
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def gather_candidates(candidate_CD: Tensor, counts: list[int]) -> Tensor:
    """The candidates of all ranks, (sum of counts, D), in rank order; gradients flow back to each candidate's rank.

    The backward sums the gradients of all ranks' losses. The strategy averages parameter gradients, so if each loss is
    the mean over its rank's queries, the step equals that of one process and needs no world-size factor.

    Args:
        candidate_CD: This rank's candidates, (C, D) float.
        counts: `gather_counts` of C; the ranks may differ.

    Distributed: all-gather forward; reduce-scatter (sum) backward. Every rank must run both.
    """
    if len(counts) == 1:
        return candidate_CD
    gathered: Tensor = _GatherCandidates.apply(candidate_CD, counts)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of all ranks' values; the backward sums the gradients of all ranks' losses (see `gather_candidates`)."""
    if not is_distributed():
        return value
    total: Tensor = _SumOverRanks.apply(value)  # type: ignore[no-untyped-call]
    return total


def mean_over_ranks(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means of scalars over all ranks in float32 (float64 if any is), without a gradient; one all-reduce."""
    detached = {name: value.detach() for name, value in values.items()}
    if not is_distributed():
        return detached
    is_double = any(value.dtype == torch.float64 for value in detached.values())
    total = torch.stack([value.to(torch.float64 if is_double else torch.float32) for value in detached.values()])
    dist.all_reduce(total)
    return dict(zip(detached, (total / world_size()).unbind(), strict=True))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class _GatherCandidates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, candidate_CD: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts  # type: ignore[attr-defined]
        return gather_rows(candidate_CD, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_CD: Tensor) -> tuple[Tensor, None]:
        counts: list[int] = ctx.counts  # type: ignore[attr-defined]
        parts = [_padded(part, max(counts)) for part in torch.split(gradient_CD, counts)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine[: counts[rank()]], None


def _padded(value_N: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - len(value_N)
    if not missing:
        return value_N.contiguous()
    return torch.cat([value_N, value_N.new_zeros(missing, *value_N.shape[1:])])


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
