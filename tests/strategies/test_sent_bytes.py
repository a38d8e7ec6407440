"""What a plan says that a GPU sends in a step, against the collectives of two gloo ranks, within a tenth."""

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
# Each strategy plain and cached, LoRA, experts and half precision; the others take as long again.
QUICK = [case for case in CASES if case[0] == METHODS[0] and case[3] == "32"]
QUICK += [("nv-embed", "fsdp2", True, "32"), ("moe", "ddp", True, "32"), (METHODS[0], "fsdp2", True, "bf16-mixed")]
SLOW = [case for case in CASES if case not in QUICK]


class Sent(TorchDispatchMode):
    """Adds up what this rank sends by the collectives of a step, if they go round a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)] if name.startswith("c10d") else []
        match name:
            case "c10d::allreduce_":
                self.num_bytes += 2 * (RANKS - 1) / RANKS * tensors[0].nbytes
            case "c10d::allgather_" | "c10d::_allgather_base_":
                # After what is received comes this rank's part.
                self.num_bytes += (RANKS - 1) * tensors[-1].nbytes
            case "c10d::reduce_scatter_" | "c10d::_reduce_scatter_base_":
                # Before what is reduced comes this rank's part of the sum.
                self.num_bytes += (RANKS - 1) * tensors[0].nbytes
        return func(*args, **(kwargs or {}))


def sent_and_planned(folder: Path, cases: list[Any], rank: int) -> dict[Any, Any]:
    be_launched(rank)
    made, found = methods(folder), {}
    for method, strategy, cached, precision in cases:
        data = batches(method, rank)[:1] * ACCUMULATED
        engine = GradCache(60, equal_mini_batches=strategy == "fsdp2")
        num_mini_batches = len(engine.plan(data[0])[-1]) if cached else 2
        callbacks = [GradCacheCallback(mini_batch_tokens=60)] if cached else []
        options: dict[str, Any] = {"callbacks": callbacks, "accumulate_grad_batches": ACCUMULATED}
        with Sent() as sent:
            train(made[method], data, STRATEGIES[strategy](), RANKS, 1, precision=precision, **options)
        module: Any = made[method]()
        setting = Setting(RANKS, strategy, precision != "32", 60 if cached else None, accumulated=ACCUMULATED)
        candidates = RANKS * len(data[0].candidate)
        loss = LossSize(0, 0, module.embedder.embedding_dim, 0, gathered=candidates)
        kept = 1 / num_mini_batches if cached else 1.0
        parts = sent_bytes(module, setting, loss, num_mini_batches, kept)
        found[method, strategy, cached, precision] = sent.num_bytes, parts
    return found


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_two_ranks_send_what_is_planned(cases: list[Any], folder: Path) -> None:
    found = run_on_two_ranks(partial(sent_and_planned, folder, cases))[0]
    assert list(found) == cases
    for case, (sent, parts) in found.items():
        assert set(parts) == {"gradients", "candidates and their gradients"} | (
            {"weights"} if case[1] == "fsdp2" else set()
        )
        assert min(parts.values()) > 0, case
        assert sent == pytest.approx(sum(parts.values()), rel=0.1), case


def test_what_the_stages_of_zero_share() -> None:
    """With 16 bits for all, by hand: 1,000 weights on 4 ranks in 3 mini-batches of which one keeps its graph."""
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
        found = sent_bytes(module, setting, loss, 3, 1 / 3)
        assert found == pytest.approx(expected[name] | {"candidates and their gradients": 2 * 0.75 * 40 * 8 * 4})
    assert sent_bytes(module, Setting(1, "single"), loss, 3, 1.0) == {}
