"""P17: a checkpoint every 100 steps costs at most 2 % of their time, a tenth of that if a thread writes it.

The checkpoint has MiniLM's weights and AdamW's state after steps of 32 question-answer pairs. It is written to the disk
of this repository. The peer writes as Lightning does, and then waits for the disk: torch.save, fsync, rename. Times of
a disk vary more than those of a CPU: the control may be from 0.8 to 1.25. Outside this range a run is refused.
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
from embeddings.common.checkpoint_file import plain, read_checkpoint
from embeddings.common.io import atomic_path

STEPS_BETWEEN = 100
CONTROL_LIMITS = (0.8, 1.25)


def seconds(action: Action) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def trained_state(tiny: bool) -> tuple[dict[str, Any], float]:
    """The content of a checkpoint after some optimiser steps, and the median time of a step."""
    step, batch = question_answer_workload(tiny, 32)
    optimizer = AdamW(step.parameters(), lr=1e-5)

    def train() -> None:
        """One step."""
        step.plain_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    train()
    median = statistics.median(seconds(train) for _ in range(3))
    return {"global_step": 4, "state_dict": step.state_dict(), "optimizer_states": [optimizer.state_dict()]}, median


def torch_save(content: dict[str, Any], path: Path) -> None:
    """The peer."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        torch.save(content, file)


def ratio_of(of_ours: list[float], of_peer: list[float], peer_again: list[float], tiny: bool = False) -> Ratio:
    """Median, minimum and maximum of the rounds' ratios, and the control: the peer over itself.

    Raises:
        RuntimeError: If the control is outside its limits and the run is not tiny: the times are then not reliable.
    """
    ratios = [ours / peer for ours, peer in zip(of_ours, of_peer, strict=True)]
    control = statistics.median([again / once for again, once in zip(peer_again, of_peer, strict=True)])
    if not tiny and not CONTROL_LIMITS[0] <= control <= CONTROL_LIMITS[1]:
        raise RuntimeError(f"void: the control is {control:.3f}; run again on a quiet disk")
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), control)


def timed(content: dict[str, Any], path: Path, rounds: int) -> dict[str, list[float]]:
    """The times of each way of saving, in turn, each twice a round; earlier writes are finished before each."""
    blocking, threaded = DurableCheckpointIO(), DurableCheckpointIO(asynchronous=True)
    threaded.save_checkpoint(content, path)  # the first save allocates its memory
    ways: dict[str, Action] = {
        "blocking": lambda: blocking.save_checkpoint(content, path),
        "thread": lambda: threaded.save_checkpoint(content, path),
        "torch": lambda: torch_save(content, path),
    }
    times: dict[str, list[float]] = {f"{name}{again}": [] for name in ways for again in ("", " again")}
    for _ in range(rounds):
        for name, of_way in times.items():
            threaded.wait()
            os.sync()
            of_way.append(seconds(ways[name.removesuffix(" again")]))
    threaded.teardown()
    return times


def main() -> None:
    """Check that the restored state is equal, then time the ways of saving it."""
    chosen = options(__doc__, threads=2)
    content, step_seconds = trained_state(chosen.tiny)
    with tempfile.TemporaryDirectory(dir=RESULTS.parent) as folder:
        path = Path(folder, "last.ckpt")
        DurableCheckpointIO().save_checkpoint(content, path)
        found, expected = list[torch.Tensor](), list[torch.Tensor]()
        plain(read_checkpoint(path), lambda tensor, _: (found.append(tensor), tensor)[1])
        plain(content, lambda tensor, _: (expected.append(tensor), tensor)[1])
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            raise RuntimeError("the restored state differs from the saved one: nothing to compare")
        file_bytes, state_bytes = path.stat().st_size, sum(x.nbytes for x in expected)
        times = timed(content, path, 2 if chosen.tiny else chosen.pairs)
    of_thread = ratio_of(times["thread"], times["blocking"], times["blocking again"], chosen.tiny)
    of_torch = ratio_of(times["blocking"], times["torch"], times["torch again"], chosen.tiny)
    size, stall = f"{state_bytes / 2**20:.0f} MiB", statistics.median(times["blocking"])
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
