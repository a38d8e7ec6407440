"""Kill training at random times and resume it: `python -m tests.reliability.kills [--count 100] [--seed 0]`.

Runs of every method, plain and under GradCache, with accumulated batches and zero to two workers, are killed repeatedly
(SIGKILL to the process group) after random times. Each must end exactly like an uninterrupted run: weights, optimiser,
schedule, loader and random state. Each step writes its rows and loss to a ledger. The ledger must contain every step,
and the last entry of a step must equal the uninterrupted run's: no example is lost or repeated.

Processes are forked from a process with all imports, so a start takes half a second.
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
# Batches per optimiser step: constant, or changing between epochs.
ACCUMULATIONS: dict[str, dict[str, Any]] = {
    "moe, accumulated": {"accumulate_grad_batches": 2, "callbacks": [CACHE]},
    "nv-embed, changing accumulation": {
        "callbacks": [component("GradientAccumulationScheduler", scheduling={0: 1, 1: 3, 2: 2})]
    },
}
# Entries of a checkpoint that depend on the time of the run.
CLOCK = ("callbacks", "run", "run_config")
# Counts of validation, because a resumed run counts an interrupted one again; the files of each process;
# the base model's path.
NOT_COMPARED = (
    "/loops/fit_loop/epoch_loop.val_loop",
    "/loops/fit_loop/state_dict/written_checkpoints",
    "/frozen_base/name",
)


class Ledger(Callback):
    """Appends each batch's rows and loss to a file, then sleeps to leave time for a kill."""

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
        Path(self.path).with_name("done").touch()


def chosen(run_number: int) -> tuple[str, bool]:
    """The method of a run, and whether it uses GradCache; the combinations alternate."""
    method = list(METHODS)[run_number % len(METHODS)]
    has_cache = method != "masked language model" and method not in ACCUMULATIONS
    return method, bool(run_number // len(METHODS) % 2) and has_cache


def killed_config(
    folder: Path, method: str, cached: bool, num_workers: int, seconds: float, keep: dict[str, Any]
) -> dict[str, Any]:
    """The config of one run in `folder` that waits `seconds` after each step; `keep` writes its checkpoints."""
    folder.mkdir(parents=True)
    config = METHODS[method](folder)
    ledger = component(f"{__package__}.kills.Ledger", path=str(folder / "ledger.jsonl"), seconds=seconds)
    accumulation = ACCUMULATIONS.get(method, {"callbacks": []})
    callbacks = [ledger, keep, *([CACHE] if cached else []), *accumulation["callbacks"]]
    config["trainer"] |= {**accumulation, "max_steps": STEPS, "callbacks": callbacks}
    config["data"]["init_args"]["num_workers"] = num_workers
    return config


def start(folder: Path, config: dict[str, Any]) -> Command:
    words = ["fit", "--config", write_config(folder, config), "--ckpt_path", "auto"]
    with open(folder / "output.txt", "ab") as output:
        return Command([words], function=main, stdout=output, stderr=output)


def run(folder: Path, config: dict[str, Any], kill_after: float | None = None) -> bool:
    """Train in a process, and kill it after some seconds; returns whether it ended before the kill."""
    process = start(folder, config)
    try:
        code = process.wait(300 if kill_after is None else kill_after)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert kill_after is not None, "still running after 300 seconds"
        return False
    assert code == 0, f"exit code {code}: {(folder / 'output.txt').read_text()[-2000:]}"
    return True


def ledger(folder: Path) -> dict[int, list[Any]]:
    """The last entry of each step."""
    entries: dict[int, list[Any]] = {}
    path = folder / "ledger.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):  # a kill may truncate a line
            entry = json.loads(line)
            entries[entry["step"]] = [entry["rows"], entry["loss"]]
    return entries


def final_state(folder: Path) -> dict[str, Any]:
    """The last checkpoint, without entries that depend on the time."""
    newest = max(folder.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return {name: value for name, value in read_checkpoint(newest).items() if name not in CLOCK}


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """The paths at which two states differ."""
    if path.startswith(NOT_COMPARED):
        return []
    if isinstance(expected, torch.Tensor):
        return [] if found.dtype == expected.dtype and torch.equal(found, expected) else [path]
    if isinstance(expected, dict):
        different = [path] if found.keys() != expected.keys() else []
        return different + [x for key in expected for x in differences(found.get(key), expected[key], f"{path}/{key}")]
    if isinstance(expected, list | tuple):
        pairs = list(zip(found, expected, strict=True))
        return [x for index, pair in enumerate(pairs) for x in differences(*pair, f"{path}/{index}")]
    return [] if found == expected else [path]


def unlike(folder: Path, whole: Path) -> list[str]:
    """The differences at the end between an interrupted run and an uninterrupted one."""
    expected, entries = ledger(whole), ledger(folder)
    lost = [f"step {step} is lost" for step in expected if step not in entries]
    lost += [f"step {step} differs" for step in entries if entries[step] != expected.get(step)]
    return differences(final_state(folder), final_state(whole)) + lost


def kill(folder: Path, config: dict[str, Any], chance: random.Random, seconds: float, maximum: int) -> Counter[str]:
    """Train one run of about `seconds` with at most `maximum` kills, and at most eight; returns their number."""
    kills = 0
    while not run(folder, config, chance.uniform(0, 1.2 * seconds) if kills < min(8, maximum) else None):
        kills += 1
    return Counter(kills=kills)


def interrupt_runs(
    text: str | None, count: int, interrupt: Callable[..., Counter[str]], keep: dict[str, Any], workers: Iterable[int]
) -> int:
    """Interrupt runs of all methods, `--count` or `count` times; returns the number of runs with a wrong result.

    `interrupt` trains a run to its end, and returns the number of interruptions by type. `workers` take turns.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["EMBED_IMPORTS"] = "tests"
    torch.set_num_threads(1)
    chance, made, runs, wrong, turns = random.Random(options.seed), Counter[str](), 0, 0, itertools.cycle(workers)
    while made.total() < options.count:
        (method, cached), num_workers = chosen(runs), next(turns)
        with tempfile.TemporaryDirectory() as name:
            whole, folder = Path(name, "whole"), Path(name, "interrupted")
            config = killed_config(whole, method, cached, num_workers, 0.0, keep)
            began = time.monotonic()
            run(whole, config)
            seconds = time.monotonic() - began
            config = killed_config(folder, method, cached, num_workers, 0.05, keep)
            new = interrupt(folder, config, chance, seconds, options.count - made.total())
            faults = unlike(folder, whole)
        made, runs, wrong = made + new, runs + 1, wrong + bool(faults)
        how = f"{method}{', GradCache' if cached else ''}, {num_workers} workers"
        print(f"{made.total():>4}  {how}: {dict(new)}, {'; '.join(faults[:3]) or 'identical'}", flush=True)
    print(f"{dict(made)} in {runs} runs; {runs - wrong} ended with an identical state and ledger, {wrong} did not")
    return wrong


if __name__ == "__main__":
    raise SystemExit(bool(interrupt_runs(__doc__, 100, kill, KEEP, range(3))))
