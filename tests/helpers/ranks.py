"""Two gloo ranks for tests: start them once, run many cases, bring the results back."""

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Cases = Callable[[int], dict[str, Any]]


def run_on_two_ranks(cases: Cases) -> list[dict[str, Any]]:
    """What `cases(rank)`, a function of a module's top level, returns on rank 0 and on rank 1.

    A deadlock ends in an error after a minute.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder, cases), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _worker(rank: int, folder: str, cases: Cases) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    try:
        torch.save(cases(rank), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
