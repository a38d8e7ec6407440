"""The sparse method on two gloo ranks against one process with the whole batch."""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from embeddings.common import ContrastiveBatch
from embeddings.losses import InfoNCE
from embeddings.modules import MoEEmbedModule
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import Record, batch_of, gradient_vector, random_records, relative_error
from tests.helpers.ranks import run_on_two_ranks
from tests.modules.moe_modules import dense_folder, moe_module

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
ENGINES = {"plain": None, "uneven": GradCache(mini_batch_tokens=30)}


def records() -> list[Record]:
    """Eight records; those of the second rank are longer, so that the ranks have unequal shares of the tokens."""
    return random_records(4, 1, seed=5) + random_records(4, 1, seed=6, longest=25)


class StepModule(nn.Module):
    """What Lightning puts inside DDP: a module whose forward is the training step."""

    def __init__(self, step: MoEEmbedModule, engine: GradCache | None) -> None:
        super().__init__()
        self.step, self.engine = step, engine

    def forward(self, batch: ContrastiveBatch) -> Tensor:
        whole = self.engine is None
        return (plain_step(self.step, batch) if whole else self.engine.forward_backward(self.step, batch)).loss


def under_ddp(module: MoEEmbedModule, engine: GradCache | None, batch: ContrastiveBatch) -> Tensor:
    wrapper = DistributedDataParallel(StepModule(module, engine))
    wrapper(batch).backward()
    return gradient_vector(module)


def make(folder: str, gathers: bool, dtype: torch.dtype, **options: Any) -> MoEEmbedModule:
    loss = InfoNCE(temperature=0.1, gather_across_devices=gathers)
    return moe_module(folder, loss=loss, **options).to(dtype)


def error(rank: int, folder: str, engine: GradCache | None, dtype: torch.dtype, **options: Any) -> float:
    found = under_ddp(make(folder, True, dtype, **options), engine, batch_of(records()[4 * rank : 4 * rank + 4]))
    reference = make(folder, False, dtype, **options)
    with patch("embeddings.modules.moe_embed.sum_over_ranks", lambda value: value):
        plain_step(reference, batch_of(records())).loss.backward()
    return relative_error(found, gradient_vector(reference))


def error_with_dropout(rank: int, folder: str, dtype: torch.dtype) -> float:
    """Against the same mini-batches with every graph kept, from the same random state on each rank."""
    found = []
    for kept_fraction in (None, 1.0):
        torch.manual_seed(10 + rank)
        under = GradCache(mini_batch_tokens=30, kept_fraction=kept_fraction)
        own = batch_of(records()[4 * rank : 4 * rank + 4])
        found.append(under_ddp(make(folder, True, dtype), under, own))
    return relative_error(*found)


def own_gradient_only(value: Tensor) -> Tensor:
    """The sum over ranks as a plain all-reduce, whose gradient stays on the rank."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total + (value - value.detach()) if value.is_floating_point() else total


def cases(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # transformers writes a model on the first rank alone, so both read that one's.
        paths = [str(dense_folder(Path(folder) / str(dropout), dropout)) for dropout in (0.0, 0.1)]
        dist.broadcast_object_list(paths)
        dense, dropping = paths
        for dtype in TOLERANCE:
            for name, engine in ENGINES.items():
                results[name, dtype] = error(rank, dense, engine, dtype)
            results["recomputed layers", dtype] = error(rank, dense, ENGINES["uneven"], dtype, checkpointing=True)
            results["dropout", dtype] = error_with_dropout(rank, dropping, dtype)
        for name, mutant in {"own": own_gradient_only, "none": lambda value: value}.items():
            with patch("embeddings.modules.moe_embed.sum_over_ranks", mutant):
                own = batch_of(records()[4 * rank : 4 * rank + 4])
                found = under_ddp(make(dense, True, torch.float64), None, own)
            results[name] = found
        results["right"] = under_ddp(make(dense, True, torch.float64), None, own)
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_on_two_ranks(cases)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", [*ENGINES, "recomputed layers", "dropout"])
def test_two_ranks_have_the_gradient_of_one_process(
    results: list[dict[Any, Any]], case: str, dtype: torch.dtype
) -> None:
    assert max(result[case, dtype] for result in results) <= TOLERANCE[dtype]


@pytest.mark.parametrize("mutant", ["own", "none"])
def test_a_balancing_loss_of_a_rank_alone_shows(results: list[dict[Any, Any]], mutant: str) -> None:
    assert min(relative_error(result[mutant], result["right"]) for result in results) > 1e-3
