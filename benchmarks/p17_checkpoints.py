"""P17: a checkpoint every 100 steps costs at most 2 % of their time, a tenth of that if a thread writes it.

MiniLM's weights and AdamW's state after a step of 32 question-answer pairs, on the disk that this repository lies on.
The peer is what Lightning's own writing costs once it waits for the disk: torch.save, fsync, rename. A disk is less
steady than a CPU: the peer against itself may read 0.8 to 1.25, and a run beyond that is refused.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from benchmarks.harness import RESULTS, Action, Ratio, options, record
from benchmarks.workloads import question_answer_workload
from embeddings.callbacks import DurableCheckpointIO
from embeddings.common.checkpoint_file import pack, read_checkpoint
from embeddings.common.io import atomic_path

STEPS_BETWEEN = 100
CONTROL_LIMITS = (0.8, 1.25)


def seconds(action: Action) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def trained_state(tiny: bool) -> tuple[dict[str, Any], float]:
    """What a checkpoint holds after some optimiser steps, and the median time of one."""
    step, batch = question_answer_workload(tiny, 32)
    optimizer = AdamW(step.parameters(), lr=1e-5)

    def train() -> None:
        """One step."""
        step.plain_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    train()
    taken = statistics.median(seconds(train) for _ in range(3))
    return {"global_step": 4, "state_dict": step.state_dict(), "optimizer_states": [optimizer.state_dict()]}, taken


def torch_save(content: dict[str, Any], path: Path) -> None:
    """The peer."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        torch.save(content, file)


def ratio_of(taken: list[float], of_peer: list[float], control: list[float], tiny: bool = False) -> Ratio:
    """Median, least and greatest of the rounds' ratios, and the peer against itself.

    Raises:
        RuntimeError: If the latter lies outside its limits, unless the run is tiny; such a run proves nothing.
    """
    ratios = [ours / peer for ours, peer in zip(taken, of_peer, strict=True)]
    twice = [again / once for again, once in zip(control, of_peer, strict=True)]
    middle = statistics.median(twice)
    if not tiny and not CONTROL_LIMITS[0] <= middle <= CONTROL_LIMITS[1]:
        raise RuntimeError(f"void: the peer against itself read {middle:.3f}; run again on a quiet disk")
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), middle)


def timed(content: dict[str, Any], path: Path, rounds: int) -> dict[str, list[float]]:
    """The times of each way of saving, in turn, some of them twice; what a thread writes is waited for apart."""
    waits, goes_on = DurableCheckpointIO(), DurableCheckpointIO(asynchronous=True)
    goes_on.save_checkpoint(content, path)  # its memory is taken once, by the first
    ways: dict[str, Action] = {
        "waits": lambda: waits.save_checkpoint(content, path),
        "thread": lambda: goes_on.save_checkpoint(content, path),
        "torch": lambda: torch_save(content, path),
    }
    taken: dict[str, list[float]] = {f"{name}{again}": [] for name in ways for again in ("", " again")}
    for _ in range(rounds):
        for name, found in taken.items():
            goes_on.wait()
            os.sync()
            found.append(seconds(ways[name.removesuffix(" again")]))
    goes_on.teardown()
    return taken


def main() -> None:
    """Check that the state comes back, then time the ways of saving it."""
    chosen = options(__doc__, threads=2)
    content, step_seconds = trained_state(chosen.tiny)
    with tempfile.TemporaryDirectory(dir=RESULTS.parent) as folder:
        path = Path(folder, "last.ckpt")
        DurableCheckpointIO().save_checkpoint(content, path)
        found, expected = pack(read_checkpoint(path)), pack(content)
        if found.tree != expected.tree or not all(
            torch.equal(x, expected.tensors[n]) for n, x in found.tensors.items()
        ):
            raise RuntimeError("what is read is not what was saved: nothing to compare")
        file_bytes, state_bytes = path.stat().st_size, sum(x.nbytes for x in expected.tensors.values())
        taken = timed(content, path, 2 if chosen.tiny else chosen.pairs)
    of_thread = ratio_of(taken["thread"], taken["waits"], taken["waits again"], chosen.tiny)
    of_torch = ratio_of(taken["waits"], taken["torch"], taken["torch again"], chosen.tiny)
    size, stall = f"{state_bytes / 2**20:.0f} MiB", statistics.median(taken["waits"])
    print(f"{size}: {stall:.3f} s, a step of training {step_seconds:.3f} s")
    record(
        chosen, f"P17 bytes of the file over those of the state, {size}", file_bytes / state_bytes, "ratio", "<=1.02"
    )
    share = stall / (STEPS_BETWEEN * step_seconds)
    record(chosen, f"P17 stall as a share of {STEPS_BETWEEN} steps, {size}", share, "fraction", "<=0.02")
    record(chosen, f"P17 stall where a thread writes over the one that waits, {size}", of_thread, "ratio", "<=0.1")
    record(chosen, f"P17 checked checkpoint over torch.save and fsync, {size}", of_torch, "ratio", "none", "torch")


if __name__ == "__main__":
    main()
