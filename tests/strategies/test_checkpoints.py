"""One file for all strategies: a run goes on bit for bit under its own, and under any other with the same weights."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_on_two_ranks
from tests.strategies.fits import State, batches, be_launched, methods, train
from tests.strategies.test_gradients import STRATEGIES

FAST = ("fsdp2", "zero 2")
SLOW = ("zero 1", "zero 3", "fsdp2, bf16", "zero 2, bf16", "zero 3, bf16")
IN_FLOAT32 = [name for name in (*FAST, *SLOW) if "bf16" not in name]
METHOD = "nv-embed"


def run(
    folder: Path,
    strategy: Any,
    rank: int | None,
    name: str,
    start: str | None = None,
    steps: int = 2,
    precision: str = "32-true",
) -> State:
    """Train on one batch with AdamW, from a checkpoint if one is named, and write one."""
    make = partial(methods(folder)[METHOD], optimizer=partial(torch.optim.AdamW, lr=1e-3))
    devices = 1 if rank is None else 2
    checkpoint = None if start is None else folder / f"{start}.ckpt"
    output = folder / f"{name}.ckpt"
    data = batches(METHOD, rank)[:1]
    return train(make, data, strategy, devices, steps, checkpoint, output, precision=precision)


def cases(folder: Path, names: tuple[str, ...], rank: int) -> dict[str, State]:
    be_launched(rank)
    found = {}
    for name in names:
        strategy, _, precision = name.partition(", ")
        train = partial(run, folder, rank=rank, precision="bf16-mixed" if precision else "32-true")
        found[name] = train(STRATEGIES[strategy](), name=f"{name}, whole", steps=4)
        train(STRATEGIES[strategy](), name=name)
        dist.barrier()
        found[f"{name}, resumed"] = train(STRATEGIES[strategy](), name=f"{name}, resumed", start=name, steps=4)
        if not precision:
            found[f"{name}, from alone"] = train(STRATEGIES[strategy](), name=f"{name}, on", start="alone", steps=4)
    return found


Found = Callable[[str], dict[str, State]]


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What two ranks had of the fast ones or of the slow ones, of which the name is one."""
    run(folder, "auto", None, "alone")

    @cache
    def of(names: tuple[str, ...]) -> dict[str, State]:
        first, second = run_on_two_ranks(partial(cases, folder, names))
        assert all(torch.equal(first[case][name], second[case][name]) for case in first for name in first[case])
        return first

    return lambda name: of(FAST if name in FAST else SLOW)


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("strategy", marked)


@pytest.fixture(scope="module")
def alone(folder: Path) -> State:
    """The weights after four steps of a single process."""
    return run(folder, "auto", None, "alone, whole", steps=4)


@each([*FAST, *SLOW])
def test_a_resumed_run_ends_with_the_same_bits(strategy: str, found: Found) -> None:
    whole, resumed = (found(strategy)[name] for name in (strategy, f"{strategy}, resumed"))
    different = {name: float((whole[name] - resumed[name]).abs().max()) for name in whole}
    assert not any(different.values()), different


@each(IN_FLOAT32)
def test_two_ranks_go_on_from_a_single_process(strategy: str, found: Found, alone: State) -> None:
    resumed = found(strategy)[f"{strategy}, from alone"]
    for name, value in alone.items():
        # A hundredth of a step: without the optimiser's state it would be a whole one.
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-5)


@each(IN_FLOAT32)
def test_a_single_process_goes_on_from_two_ranks(strategy: str, folder: Path, found: Found, alone: State) -> None:
    found(strategy)
    resumed = run(folder, "auto", None, "again", start=strategy, steps=4)
    for name, value in alone.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-5)
