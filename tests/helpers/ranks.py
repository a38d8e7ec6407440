"""Runs functions of tests on several gloo ranks."""

import datetime
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes import Command

Cases = Callable[[int], dict[str, Any]]


def run_on_two_ranks(cases: Cases) -> list[dict[str, Any]]:
    """As `run_on_ranks`, on two."""
    return run_on_ranks(cases, 2)


def run_on_ranks(cases: Cases, num_ranks: int) -> list[dict[str, Any]]:
    """Run `cases(rank)`, a module-level function, on some ranks; returns the result of each.

    Each call forks new processes from the fork server. A collective that only one rank enters fails after a minute.
    If a rank fails, a `RuntimeError` contains its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Command([rank, num_ranks, folder, cases], function=_worker) for rank in range(num_ranks)]
        end = time.monotonic() + 280
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.returncode for rank in ranks) or time.monotonic() > end:
                    break
                time.sleep(0.005)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        results = [Path(folder) / f"{rank}.pt" for rank in range(num_ranks)]
        if any(rank.returncode for rank in ranks) or not all(path.exists() for path in results):
            errors = [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
            raise RuntimeError("\n".join([f"exit codes {[rank.returncode for rank in ranks]}", *errors]))
        return [torch.load(path, weights_only=False) for path in results]


def _worker(rank: int, num_ranks: int, folder: str, cases: Cases) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=limit)
        torch.save(cases(rank), Path(folder) / f"{rank}.pt")
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    # Do not destroy the group: gloo may abort a rank after a peer has closed the connections.
    end, results = time.monotonic() + limit.total_seconds(), [Path(folder, f"{each}.pt") for each in range(num_ranks)]
    while not all(path.exists() for path in results) and time.monotonic() < end:
        time.sleep(0.005)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
