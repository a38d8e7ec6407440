"""Planned traffic of a step against the collectives of two gloo ranks, within 10%."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embeddings.callbacks import GradCacheCallback
from embeddings.strategies import FSDP2Strategy
from embeddings.training.gradcache import GradCache
from embeddings.training.plan import LossSize, Setting, StrategyName, sent_bytes
from tests.helpers.ranks import run_on_two_ranks
from tests.strategies.fits import batches, be_launched, methods, train

RANKS, ACCUMULATED = 2, 2
STRATEGIES: dict[StrategyName, Any] = {"ddp": DDPStrategy, "fsdp2": FSDP2Strategy}
# A trained backbone under checkpointing, frozen weights under LoRA, and experts.
METHODS = ("nv-embed, whole backbone", "nv-embed", "moe")
CASES: list[tuple[str, StrategyName, bool, Any]] = [
    (method, strategy, cached, "32")
    for method in METHODS
    for strategy in STRATEGIES
    for cached in (False, True)
    if method != "moe" or cached
]
CASES += [("nv-embed, whole backbone", "fsdp2", cached, "bf16-mixed") for cached in (False, True)]
QUICK: list[Any] = [("moe", "ddp", True, "32"), (METHODS[0], "fsdp2", True, "bf16-mixed")]
SLOW = [case for case in CASES if case not in QUICK]


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, if they use a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)] if name.startswith("c10d") else []
        match name:
            case "c10d::allreduce_":
                self.num_bytes += 2 * (RANKS - 1) / RANKS * tensors[0].nbytes
            case "c10d::allgather_" | "c10d::_allgather_base_":
                # The last argument is this rank's input.
                self.num_bytes += (RANKS - 1) * tensors[-1].nbytes
            case "c10d::reduce_scatter_" | "c10d::_reduce_scatter_base_":
                # The first argument is this rank's output.
                self.num_bytes += (RANKS - 1) * tensors[0].nbytes
        return func(*args, **(kwargs or {}))


def sent_and_planned(folder: Path, cases: list[Any], rank: int) -> dict[Any, Any]:
    be_launched(rank)
    makers, results = methods(folder), {}
    for method, strategy, cached, precision in cases:
        data = batches(method, rank)[:1] * ACCUMULATED
        engine = GradCache(60, equal_mini_batches=strategy == "fsdp2")
        num_mini_batches = len(engine.plan(data[0])[-1]) if cached else 2
        callbacks = [GradCacheCallback(mini_batch_tokens=60)] if cached else []
        options: dict[str, Any] = {"callbacks": callbacks, "accumulate_grad_batches": ACCUMULATED}
        with Sent() as sent:
            train(makers[method], data, STRATEGIES[strategy](), RANKS, 1, precision=precision, **options)
        module: Any = makers[method]()
        setting = Setting(RANKS, strategy, precision != "32", 60 if cached else None, accumulated=ACCUMULATED)
        candidates = RANKS * len(data[0].candidate)
        loss = LossSize(0, 0, module.embedder.embedding_dim, 0, gathered=candidates)
        kept = 1 / num_mini_batches if cached else 1.0
        parts = sent_bytes(module, setting, loss, num_mini_batches, kept)
        results[method, strategy, cached, precision] = sent.num_bytes, parts
    return results


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_two_ranks_send_the_planned_bytes(cases: list[Any], folder: Path) -> None:
    results = run_on_two_ranks(partial(sent_and_planned, folder, cases))[0]
    assert list(results) == cases
    for case, (sent, parts) in results.items():
        assert set(parts) == {"gradients", "candidates and their gradients"} | (
            {"weights"} if case[1] == "fsdp2" else set()
        )
        assert min(parts.values()) > 0, case
        assert sent == pytest.approx(sum(parts.values()), rel=0.1), case


def test_planned_bytes_of_each_strategy() -> None:
    """Computed by hand, all in 16 bits: 1,000 weights on 4 ranks; 3 mini-batches, of which one keeps its graph."""
    module, loss = torch.nn.Linear(1000, 1, bias=False), LossSize(0, 0, 8, 0, gathered=40)
    expected = {
        "zero1": {"gradients": 1500.0, "weights": 1500.0},
        "zero2": {"gradients": 4500.0, "weights": 1500.0},
        # 3 + 2 forwards and 3 backwards.
        "zero3": {"gradients": 4500.0, "weights": 8 * 1500.0},
    }
    names: tuple[StrategyName, ...] = ("zero1", "zero2", "zero3")
    for name in names:
        setting = Setting(4, name, True, mini_batch_tokens=100)
        sent = sent_bytes(module, setting, loss, 3, 1 / 3)
        assert sent == pytest.approx(expected[name] | {"candidates and their gradients": 2 * 0.75 * 40 * 8 * 4})
    assert sent_bytes(module, Setting(1, "single"), loss, 3, 1.0) == {}
