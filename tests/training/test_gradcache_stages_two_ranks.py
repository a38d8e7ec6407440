"""Two stages on two gloo ranks against one process: with one context for both, two ranks x B = one rank x 2B."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from embeddings.common import ContrastiveBatch, Representations, TokenBatch
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE
from embeddings.training import GradCache
from tests.helpers.contrastive import TinyContextualStep, batch_of, gradient_vector, relative_error, with_context
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.tiny import tiny_bert
from tests.training.test_gradcache import TOLERANCE
from tests.training.test_gradcache_stages import OneTower, TruncatedFirstStage
from tests.training.test_gradcache_two_ranks import CUTS, ENGINES, StepModule, records


def make_step(gathers: bool, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> TinyContextualStep:
    step = TinyContextualStep(tiny_bert(1, dropout), tiny_bert(2, dropout), context_dropout=dropout).to(dtype)
    step.loss = InfoNCE(temperature=0.05, gather_across_devices=gathers)
    return step.train(dropout > 0)


def shared_context() -> TokenBatch:
    return take_texts(batch_of(records(1)).candidate, torch.arange(7))


def shard(rank: int, num_negatives: int = 1) -> ContrastiveBatch:
    own = records(num_negatives)[4 * rank : 4 * rank + 4]
    return replace(batch_of(own), context=shared_context())


def errors(step: TinyContextualStep, expected: TinyContextualStep) -> tuple[float, float]:
    return (
        relative_error(gradient_vector(step.first), gradient_vector(expected.first)),
        relative_error(gradient_vector(step.backbone), gradient_vector(expected.backbone)),
    )


@cache
def reference(num_negatives: int = 1, dtype: torch.dtype = torch.float64) -> TinyContextualStep:
    step = make_step(False, dtype=dtype)
    step.plain_loss(replace(batch_of(records(num_negatives)), context=shared_context())).loss.backward()
    return step


def under_ddp(step: TinyContextualStep, engine: GradCache | None, batch: ContrastiveBatch) -> TinyContextualStep:
    module = DistributedDataParallel(StepModule(step, engine))
    module(batch).backward()
    return step


class Encoders(nn.Module):
    """Both encoders behind one forward, as a wrapper needs them."""

    def __init__(self, step: TinyContextualStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, tokens: TokenBatch, context: Tensor | None, is_first: bool) -> Tensor:
        return self.step.embed_context(tokens) if is_first else self.step.embed(tokens, context).vector_ND


class WrappedStep:
    """A step whose encoders are inside one DDP, so that each mini-batch's forward goes through it."""

    trains_context = True

    def __init__(self, step: TinyContextualStep) -> None:
        self.step, self.encoders = step, DistributedDataParallel(Encoders(step))
        self.loss_from_representations = step.loss_from_representations

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        return self.encoders(tokens, None, True)

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        return Representations(self.encoders(tokens, context, False))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.encoders.no_sync()


def errors_through_the_wrapper(rank: int, dtype: torch.dtype) -> tuple[float, float]:
    """All graphs may be kept, but the one whose backward synchronises."""
    step = make_step(True, dtype=dtype)
    wrapped = WrappedStep(step)
    GradCache(40, kept_fraction=1.0).step(wrapped, shard(rank), no_sync=wrapped.no_sync)
    return errors(step, reference(dtype=dtype))


def errors_with_dropout(rank: int, dtype: torch.dtype, engine: GradCache) -> tuple[float, float]:
    """Against the same mini-batches with every graph kept, from the same random state on each rank."""
    steps = []
    for kept_fraction in (None, 1.0):
        step = make_step(True, dropout=0.1, dtype=dtype)
        torch.manual_seed(10 + rank)
        under = GradCache(engine.mini_batch_tokens, engine.mini_batch_texts, kept_fraction=kept_fraction)
        steps.append(under_ddp(step, under, shard(rank)))
    return errors(*steps)


def errors_with_own_contexts(rank: int, dtype: torch.dtype, engine: GradCache) -> tuple[float, float]:
    """Each rank reads its own documents, of which one has two and the other seven; against the plain step under DDP."""
    own = with_context(batch_of(records(1)[4 * rank : 4 * rank + 4]), (2, 7)[rank])
    return errors(*(under_ddp(make_step(True, dtype=dtype), one, own) for one in (engine, None)))


def num_synchronisations(rank: int) -> int:
    """Gradient reductions in a step over many mini-batches of both stages."""
    calls = []
    module = DistributedDataParallel(StepModule(make_step(True), GradCache(mini_batch_texts=1)))

    def count(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module.register_comm_hook(None, count)
    module(shard(rank)).backward()
    return max(calls.count(index) for index in calls)


def errors_of_equal_steps(rank: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    engines = {"plain": None, **{name: ENGINES[name] for name in (*CUTS, "half kept")}}
    results = {
        name: errors(under_ddp(make_step(True, dtype=dtype), engine, shard(rank)), reference(dtype=dtype))
        for name, engine in engines.items()
    }
    step = under_ddp(make_step(True, dtype=dtype), ENGINES["uneven"], shard(rank, 0))
    results["no negatives"] = errors(step, reference(0, dtype))
    results["through the wrapper"] = errors_through_the_wrapper(rank, dtype)
    results |= {f"dropout, {name}": errors_with_dropout(rank, dtype, ENGINES[name]) for name in CUTS}
    results["own contexts"] = errors_with_own_contexts(rank, dtype, GradCache(mini_batch_texts=1))
    equal = GradCache(40, kept_gib=1e-3, equal_mini_batches=True)
    results["equal mini-batches"] = errors_with_own_contexts(rank, dtype, equal)
    return results


def cases(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {dtype: errors_of_equal_steps(rank, dtype) for dtype in TOLERANCE}
    for mutant in (OneTower, TruncatedFirstStage):
        with patch("embeddings.training.gradcache._TwoPasses", mutant):
            step = under_ddp(make_step(True), GradCache(mini_batch_texts=2), shard(rank))
        results[mutant.__name__] = errors(step, reference())
    results["synchronisations"] = num_synchronisations(rank)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_on_two_ranks(cases)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_both_encoders_have_the_gradient_of_one_process(results: list[dict[Any, Any]], dtype: torch.dtype) -> None:
    for found in (result[dtype] for result in results):
        assert len(found) == 6 + 2 * len(CUTS)
        assert max(map(max, found.values())) <= TOLERANCE[dtype], found


@pytest.mark.parametrize("mutant", ["OneTower", "TruncatedFirstStage"])
def test_a_first_stage_that_loses_mini_batches_or_a_tower_is_caught(results: list[dict[Any, Any]], mutant: str) -> None:
    assert min(result[mutant][0] for result in results) > 1e-2


def test_gradients_are_synchronised_once_a_step(results: list[dict[Any, Any]]) -> None:
    assert [result["synchronisations"] for result in results] == [1, 1]
