"""Checkpoints of sharded runs: exact resuming, other numbers of ranks, damage, kills and asynchronous writes."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from embeddings.callbacks import DurableCheckpointIO
from embeddings.common import InputError
from embeddings.common.checkpoint_file import inspect_checkpoint, peek_checkpoint, read_checkpoint
from embeddings.strategies import FSDP2Strategy
from tests.helpers.checkpoints import damage
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
    """Train on one batch with AdamW, from checkpoint `start` if it is given, and write checkpoint `name`."""
    make = partial(methods(folder)[METHOD], optimizer=partial(torch.optim.AdamW, lr=1e-3))
    devices = 1 if rank is None else 2
    checkpoint = None if start is None else folder / f"{start}.ckpt"
    output = folder / f"{name}.ckpt"
    data = batches(METHOD, rank)[:1]
    return train(make, data, strategy, devices, steps, checkpoint, output, precision=precision)


def cases(folder: Path, names: tuple[str, ...], rank: int) -> dict[str, State]:
    be_launched(rank)
    states = {}
    for name in names:
        strategy, _, precision = name.partition(", ")
        train = partial(run, folder, rank=rank, precision="bf16-mixed" if precision else "32-true")
        states[name] = train(STRATEGIES[strategy](), name=f"{name}, whole", steps=4)
        train(STRATEGIES[strategy](), name=name)
        dist.barrier()
        states[f"{name}, resumed"] = train(STRATEGIES[strategy](), name=f"{name}, resumed", start=name, steps=4)
        if not precision:
            output = f"{name}, from alone"
            states[output] = train(STRATEGIES[strategy](), name=output, start="alone", steps=4)
    return states


States = Callable[[str], dict[str, State]]


@pytest.fixture(scope="module")
def states(folder: Path) -> States:
    """The weights on two ranks; the call with a strategy runs all fast or all slow strategies once."""
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
def test_a_resumed_run_ends_with_the_same_weights(strategy: str, states: States) -> None:
    whole, resumed = (states(strategy)[name] for name in (strategy, f"{strategy}, resumed"))
    different = {name: float((whole[name] - resumed[name]).abs().max()) for name in whole}
    assert not any(different.values()), different


@each(IN_FLOAT32)
def test_two_ranks_resume_from_a_single_process(strategy: str, states: States, alone: State) -> None:
    resumed = states(strategy)[f"{strategy}, from alone"]
    for name, value in alone.items():
        # 1% of a step: without the optimiser state the error would be a full step.
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-5)


@each(IN_FLOAT32)
def test_a_single_process_resumes_from_two_ranks(strategy: str, folder: Path, states: States, alone: State) -> None:
    states(strategy)
    resumed = run(folder, "auto", None, "again", start=strategy, steps=4)
    for name, value in alone.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-5)


class SaveEachStep(L.Callback):
    """Writes one path after each step; `states` gets this rank's weights at that moment."""

    def __init__(self, path: Path) -> None:
        self.path, self.states = path, list[State]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.states.append({name: value.full_tensor().clone() for name, value in pl_module.state_dict().items()})
        trainer.save_checkpoint(self.path)


def saved_each_step(folder: Path, rank: int) -> dict[str, Any]:
    be_launched(rank)
    states = {}
    for asynchronous in (False, True):
        keep = SaveEachStep(folder / f"each {asynchronous}.ckpt")
        make = partial(methods(folder)[METHOD], optimizer=partial(torch.optim.AdamW, lr=1e-3))
        options: dict[str, Any] = {"callbacks": [keep], "plugins": [DurableCheckpointIO(asynchronous)]}
        train(make, batches(METHOD, rank), FSDP2Strategy(), 2, 3, **options)
        states[asynchronous] = keep.states[-1]
    return states


def test_a_folder_holds_the_last_of_several_saves_and_refuses_damage(folder: Path) -> None:
    states, _ = run_on_two_ranks(partial(saved_each_step, folder))
    for asynchronous, expected in states.items():
        path = folder / f"each {asynchronous}.ckpt"
        found = read_checkpoint(path)
        assert len(found["state_dict"]) > 10  # the trained weights
        assert all(torch.equal(value, expected[name]) for name, value in found["state_dict"].items())
        assert peek_checkpoint(path)["global_step"] == 3
        parts, content = sorted(path.iterdir(), key=lambda entry: entry.is_file())
        assert len(list(parts.iterdir())) == 2
        assert content.stat().st_size < 0.3 * sum(part.stat().st_size for part in parts.iterdir())
        # A write that was killed leaves other parts, and no other content.
        (path / "parts-killed").mkdir()
        assert inspect_checkpoint(path)["global_step"] == 3
        for damaged in (*parts.iterdir(), content):
            damage(damaged)
            for read in (read_checkpoint, inspect_checkpoint):
                with pytest.raises(InputError, match=r"\.ckpt.* is damaged: .*; use a complete \.ckpt"):
                    read(path)
            damage(damaged)
        content.unlink()
        with pytest.raises(InputError, match="is not a complete checkpoint"):
            peek_checkpoint(path)


def test_a_checkpoint_of_the_other_kind_is_replaced(folder: Path) -> None:
    """A file where a folder was, and a folder where a file was."""
    run(folder, "auto", None, "kind")
    assert (folder / "kind.ckpt").is_file()
    run_on_two_ranks(partial(other_kind, folder))
    assert (folder / "kind.ckpt").is_dir()
    run(folder, "auto", None, "kind", start="kind", steps=4)
    assert (folder / "kind.ckpt").is_file()
    assert not list(folder.glob("kind-*"))


def other_kind(folder: Path, rank: int) -> dict[str, Any]:
    be_launched(rank)
    run(folder, FSDP2Strategy(), rank, "kind", start="kind", steps=3)
    return {}
