"""Every method under every strategy on two gloo ranks, plain and with GradCache, has the gradient of one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from embeddings.callbacks import GradCacheCallback
from embeddings.callbacks.progress import Work, flops
from embeddings.models import compilation
from embeddings.strategies import FSDP2Strategy
from tests.helpers.ranks import run_on_two_ranks
from tests.strategies.cpu_zero import CpuZero
from tests.strategies.fits import State, batches, be_launched, methods, one_update, relative_error, train

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp2": FSDP2Strategy,
    "zero 1": partial(CpuZero, stage=1),
    "zero 2": partial(CpuZero, stage=2),
    "zero 3": partial(CpuZero, stage=3),
}
METHODS = ("nv-embed", "nv-embed, whole backbone", "mgh", "moe", "cde", "cde, words", "cde, frozen", "language model")
# ZeRO-1 does not support two stages with GradCache.
REFUSED = {(method, "zero 1", True) for method in METHODS if method.startswith("cde")}
ALL = [
    (method, strategy, cached)
    for method in METHODS
    for strategy in STRATEGIES
    for cached in (False, True)
    if not (cached and method == "language model") and (method, strategy, cached) not in REFUSED
]
# Each method, and each way to shard with GradCache and without; the other combinations take a minute.
CASES = [("nv-embed", "fsdp2", True), ("nv-embed", "zero 3", True), ("moe", "fsdp2", True), ("cde", "zero 2", True)]
CASES += [("mgh", "zero 2", False), ("cde, words", "fsdp2", False), ("language model", "zero 3", False)]
SLOW = [case for case in ALL if case not in CASES]


def updates(folder: Path, cases: list[tuple[str, str, bool]], rank: int) -> dict[Any, Any]:
    be_launched(rank)
    makers, states = methods(folder), {}
    for method, strategy, cached in cases:
        data = batches(method, rank)
        states[method, strategy, cached] = one_update(makers[method], data, STRATEGIES[strategy](), 2, cached)
    return states


class Counts(L.Callback):
    """Stores the operations that `Throughput` counts for a hundred tokens, after a step."""

    flops = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.flops = flops(pl_module, Work(read=100))


COUNTED = ("fsdp2", "zero 3")
# Strategy and GradCache, for epochs of three batches of which two are accumulated.
SHORT = [("fsdp2", True), ("zero 1", True), ("zero 2", False), ("zero 2", True), ("zero 3", False)]


def short_epochs(folder: Path, rank: int | None, strategy: Any, cached: bool) -> State:
    """The weights after two epochs, each of which ends with one accumulated batch."""
    make = partial(methods(folder)["nv-embed"], optimizer=partial(torch.optim.SGD, lr=1e-2))
    first, second = batches("nv-embed", rank)
    callbacks: list[L.Callback] = [GradCacheCallback(mini_batch_tokens=60, kept_fraction=0.4)] if cached else []
    ranks, options = 1 if rank is None else 2, {"callbacks": callbacks, "accumulate_grad_batches": 2}
    return train(make, [first, second, first], strategy, ranks, 4, max_epochs=2, **options)


def updates_and_counts(folder: Path, rank: int) -> dict[Any, Any]:
    results, make = updates(folder, CASES, rank), methods(folder)["moe"]
    for name in COUNTED:
        counts = Counts()
        train(make, batches("moe", rank), STRATEGIES[name](), 2, 1, callbacks=[counts])
        results["operations", name] = counts.flops
    for name, cached in SHORT:
        results["short epochs", name, cached] = short_epochs(folder, rank, STRATEGIES[name](), cached)
    return results


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[Any, Any]]:
    return run_on_two_ranks(partial(updates_and_counts, folder))


@pytest.fixture(scope="module")
def slow_results(folder: Path) -> list[dict[Any, Any]]:
    return run_on_two_ranks(partial(updates, folder, SLOW))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """For each method, the weights before and after a plain update of one process with all rows."""
    weights = {}
    for name, make in methods(folder).items():
        start = {key: value.detach().clone() for key, value in make().named_parameters()}
        weights[name] = start, one_update(make, batches(name, None), "auto", 1, cached=False)
    return weights


@pytest.mark.parametrize(
    ("method", "strategy", "cached"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_two_ranks_have_the_gradient_of_one_process_with_both_batches(
    method: str, strategy: str, cached: bool, request: pytest.FixtureRequest, expected: dict[str, Any]
) -> None:
    is_quick = (method, strategy, cached) in CASES
    start, after = expected[method]
    for of_rank in request.getfixturevalue("results" if is_quick else "slow_results"):
        assert relative_error(of_rank[method, strategy, cached], after, start) < 1e-6


def test_an_epoch_ends_with_an_update_though_fewer_batches_are_accumulated(
    folder: Path, results: list[dict[Any, Any]]
) -> None:
    start = {key: value.detach().clone() for key, value in methods(folder)["nv-embed"]().named_parameters()}
    expected = short_epochs(folder, None, "auto", cached=False)
    for of_rank in results:
        for name, cached in SHORT:
            assert relative_error(of_rank["short epochs", name, cached], expected, start) < 1e-5, (name, cached)


def test_operations_of_a_sharded_model_are_counted_in_full(folder: Path, results: list[dict[Any, Any]]) -> None:
    whole = flops(methods(folder)["moe"](), Work(read=100))
    assert whole > 1e6
    assert [of_rank["operations", name] for of_rank in results for name in COUNTED] == [whole] * 4


COMPILED = "nv-embed, whole backbone"


def compiled_updates(folder: Path, rank: int) -> dict[Any, Any]:
    be_launched(rank)
    compilation._COMPILER = {"backend": "aot_eager"}
    make: Any = methods(folder)[COMPILED]
    compiled = partial(make.func, replace(make.args[0], compile=True), **make.keywords)
    names = ("fsdp2", "zero 3", "zero 2")
    return {name: one_update(compiled, batches(COMPILED, rank), STRATEGIES[name](), 2, cached=True) for name in names}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_layers_have_the_gradient_of_plain_ones(folder: Path, expected: dict[str, Any]) -> None:
    start, after = expected[COMPILED]
    for of_rank in run_on_two_ranks(partial(compiled_updates, folder)):
        assert len(of_rank) == 3
        for state in of_rank.values():
            assert relative_error(state, after, start) < 1e-6
