"""Kill training at random times and go on, until it ends: `python -m tests.reliability.kills [--count 100] [--seed 0]`.

Runs of every method, plain and under GradCache, with accumulated batches, with none to two worker processes, are killed
(SIGKILL, the whole group) after a random time, again and again. Each ends with the bits of a run that nobody killed:
weights, optimiser, schedule, loader and random state. The ledger that each step's rows and loss were written to has
every step of the plan, and the last entry of a step is the uninterrupted run's: no example is lost, or there twice.

Processes are forked from one that has imported everything, so that a start takes half a second.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from embeddings.cli.main import main
from embeddings.common.checkpoint_file import read_checkpoint
from tests.helpers.processes import Command
from tests.helpers.runs import component, run_config, write_config
from tests.modules.cde_runs import cde_config
from tests.modules.language_runs import language_config
from tests.modules.mgh_runs import mgh_config
from tests.modules.moe_modules import moe_config

STEPS = 12
CACHE = component("GradCacheCallback", mini_batch_tokens=80)
KEEP = component("ModelCheckpoint", every_n_train_steps=1, save_last=True, save_top_k=0)
# A tiny run of each method with dropout.
METHODS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "nv-embed": lambda folder: run_config(folder, "mistral", dropout=0.1),
    "mgh": lambda folder: mgh_config(folder, dropout=0.1),
    "moe": moe_config,
    "cde": lambda folder: cde_config(folder, dropout=0.1),
    "masked language model": lambda folder: language_config(folder, "mlm"),
    "moe, accumulated": moe_config,
    "nv-embed, changing accumulation": lambda folder: run_config(folder, dropout=0.1),
}
# Batches of one optimiser step: the same number in all epochs, or from one epoch on another.
ACCUMULATIONS: dict[str, dict[str, Any]] = {
    "moe, accumulated": {"accumulate_grad_batches": 2, "callbacks": [CACHE]},
    "nv-embed, changing accumulation": {
        "callbacks": [component("GradientAccumulationScheduler", scheduling={0: 1, 1: 3, 2: 2})]
    },
}
# What follows from when a run took place, and not from what it computed.
CLOCK = ("callbacks", "run", "run_config")
# What a validation has counted, since one that a kill cut short is not repeated; and the base model's folder, which the
# uninterrupted run has beside its own.
NOT_COMPARED = ("/loops/fit_loop/epoch_loop.val_loop", "/frozen_base/name")


class Ledger(Callback):
    """Appends each batch's rows and loss to a file, and leaves time for a kill."""

    def __init__(self, path: str, seconds: float) -> None:
        self.path, self.seconds = path, seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rows = getattr(batch, "row_B", None)
        entry = {
            "step": trainer.global_step,
            "rows": batch.label_P.tolist() if rows is None else rows.tolist(),
            "loss": outputs["loss"].item().hex(),
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
        time.sleep(self.seconds)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that there is no step left."""
        Path(self.path).with_name("done").touch()


def chosen(run_number: int) -> tuple[str, bool]:
    """The method of a run, and whether it is under GradCache: each comes with each in turn."""
    method = list(METHODS)[run_number % len(METHODS)]
    has_cache = method != "masked language model" and method not in ACCUMULATIONS
    return method, bool(run_number // len(METHODS) % 2) and has_cache


def killed_config(
    folder: Path, method: str, cached: bool, num_workers: int, seconds: float, keep: dict[str, Any]
) -> dict[str, Any]:
    """The config of one run in `folder`, whose checkpoints `keep` writes, and which waits after each step."""
    folder.mkdir(parents=True)
    config = METHODS[method](folder)
    ledger = component(f"{__package__}.kills.Ledger", path=str(folder / "ledger.jsonl"), seconds=seconds)
    accumulation = ACCUMULATIONS.get(method, {"callbacks": []})
    callbacks = [ledger, keep, *([CACHE] if cached else []), *accumulation["callbacks"]]
    config["trainer"] |= {**accumulation, "max_steps": STEPS, "callbacks": callbacks}
    config["data"]["init_args"]["num_workers"] = num_workers
    return config


def start(folder: Path, config: dict[str, Any]) -> Command:
    """Train from the newest checkpoint, in a process with a group of its own."""
    words = ["fit", "--config", write_config(folder, config), "--ckpt_path", "auto"]
    with open(folder / "output.txt", "ab") as output:
        return Command([words], function=main, stdout=output, stderr=output)


def run(folder: Path, config: dict[str, Any], kill_after: float | None = None) -> bool:
    """Train in a process, and kill it after some seconds; returns whether it ended before."""
    process = start(folder, config)
    try:
        code = process.wait(300 if kill_after is None else kill_after)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert kill_after is not None, "no end after 300 seconds"
        return False
    assert code == 0, f"exit code {code}: {(folder / 'output.txt').read_text()[-2000:]}"
    return True


def ledger(folder: Path) -> dict[int, list[Any]]:
    """The last entry of each step."""
    found: dict[int, list[Any]] = {}
    path = folder / "ledger.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):  # a kill may cut a line
            entry = json.loads(line)
            found[entry["step"]] = [entry["rows"], entry["loss"]]
    return found


def final_state(folder: Path) -> dict[str, Any]:
    """The last checkpoint, without what is the clock's."""
    newest = max(folder.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return {name: value for name, value in read_checkpoint(newest).items() if name not in CLOCK}


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two states differ in a bit."""
    if path.startswith(NOT_COMPARED):
        return []
    if isinstance(expected, torch.Tensor):
        return [] if found.dtype == expected.dtype and torch.equal(found, expected) else [path]
    if isinstance(expected, dict):
        different = [path] if found.keys() != expected.keys() else []
        return different + [x for key in expected for x in differences(found.get(key), expected[key], f"{path}/{key}")]
    if isinstance(expected, list | tuple):
        pairs = list(zip(found, expected, strict=True))
        return [x for place, pair in enumerate(pairs) for x in differences(*pair, f"{path}/{place}")]
    return [] if found == expected else [path]


def unlike(folder: Path, whole: Path) -> list[str]:
    """What differs in the end between a run that was cut short and one that was not."""
    expected, entries = ledger(whole), ledger(folder)
    lost = [f"step {step} is lost" for step in expected if step not in entries]
    lost += [f"step {step} differs" for step in entries if entries[step] != expected.get(step)]
    return differences(final_state(folder), final_state(whole)) + lost


def kill(folder: Path, config: dict[str, Any], chance: random.Random, seconds: float, most: int) -> Counter[str]:
    """Train one run of so many seconds with at most so many kills, and no more than eight; returns their number."""
    kills = 0
    while not run(folder, config, chance.uniform(0, 1.2 * seconds) if kills < min(8, most) else None):
        kills += 1
    return Counter(kills=kills)


def cut_runs(
    text: str | None, count: int, cut: Callable[..., Counter[str]], keep: dict[str, Any], workers: Iterable[int]
) -> int:
    """Cut runs of all methods short, as often as the command line says or `count` times; returns how many were spoilt.

    Args:
        text: What the command's help says.
        count: The usual number of cuts.
        cut: Trains a run to its end, and returns how often it cut it short, by kind.
        keep: What writes the checkpoints.
        workers: Numbers of workers of the loader, which each come in turn.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["EMBED_IMPORTS"] = "tests"
    torch.set_num_threads(1)
    chance, cuts, runs, wrong, turns = random.Random(given.seed), Counter[str](), 0, 0, itertools.cycle(workers)
    while cuts.total() < given.count:
        (method, cached), num_workers = chosen(runs), next(turns)
        with tempfile.TemporaryDirectory() as name:
            whole, folder = Path(name, "whole"), Path(name, "cut")
            config = killed_config(whole, method, cached, num_workers, 0.0, keep)
            began = time.monotonic()
            run(whole, config)
            seconds = time.monotonic() - began
            config = killed_config(folder, method, cached, num_workers, 0.05, keep)
            made = cut(folder, config, chance, seconds, given.count - cuts.total())
            found = unlike(folder, whole)
        cuts, runs, wrong = cuts + made, runs + 1, wrong + bool(found)
        how = f"{method}{', GradCache' if cached else ''}, {num_workers} workers"
        print(f"{cuts.total():>4}  {how}: {dict(made)}, {'; '.join(found[:3]) or 'the same bits'}", flush=True)
    print(f"{dict(cuts)} in {runs} runs; {runs - wrong} ended with the same bits and ledger, {wrong} did not")
    return wrong


if __name__ == "__main__":
    raise SystemExit(bool(cut_runs(__doc__, 100, kill, KEEP, range(3))))
