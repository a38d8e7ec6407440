"""The ranks of a run: a check that they can start, a timeout for collectives, and a watcher for ranks that die."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed.constants import default_pg_timeout

from embeddings.common import OptionError
from embeddings.common.errors import RESUME
from embeddings.common.process import exit_description

TIMEOUT = timedelta(minutes=10)
_POLL_SECONDS = 0.25
# Seconds that the first rank may continue after another rank was killed, or after it reported an error.
_SECONDS_AFTER_KILL = 2.0
_SECONDS_AFTER_ERROR = 5.0
_EXIT_INTERNAL = 70

Processes = list[subprocess.Popen[bytes]]

# The processes that this process started for the other ranks, in rank order.
_started: list[Processes] = []
# Acquired once, by the first thread that reports the dead rank.
_reported = Lock()
_parent = os.getppid()


def set_up_ranks(trainer: L.Trainer) -> None:
    """Check that the ranks can connect, and watch the processes that Lightning starts.

    The default timeout of a collective becomes ten minutes, instead of torch's thirty.
    """
    strategy: Any = trainer.strategy
    environment = getattr(strategy, "cluster_environment", None)
    has_launcher = not isinstance(environment, LightningEnvironment) or {"NODE_RANK", "GROUP_RANK"} & os.environ.keys()
    if trainer.num_nodes > 1 and not has_launcher:
        rule = "must be 1 if no launcher starts a process on each node"
        raise OptionError("trainer.num_nodes", trainer.num_nodes, rule, "use srun or torchrun on every node")
    if getattr(strategy, "_timeout", None) == default_pg_timeout:
        strategy._timeout = TIMEOUT
    # Lightning's observer polls every five seconds, and kills this process without a message.
    setattr(subprocess_script, "_launch_process_observer", _watch)  # noqa: B010 - it is private


def lost_rank() -> str | None:
    """The rank that died, for the message after a failed collective; None if an external launcher started the ranks.

    Only one process gets the message; the others get an empty string.
    """
    is_launched = not _started and os.environ.get("LOCAL_RANK", "0") != "0" and "RANK" not in os.environ
    if not _started and (not is_launched or "SLURM_PROCID" in os.environ):
        return None
    end = time.monotonic() + _SECONDS_AFTER_KILL
    while time.monotonic() < end:
        if is_launched and os.getppid() != _parent:
            return f"rank 0, process {_parent}, has ended" if os.environ["LOCAL_RANK"] == "1" else ""
        dead = _dead_rank(_started[-1]) if _started else ""
        if dead:
            _kill(_started[-1])
            return _once(dead)
        time.sleep(_POLL_SECONDS)
    return "" if is_launched else None


def _watch(children: Processes) -> None:
    """Replaces Lightning's observer."""
    _started.append(children)
    Thread(target=_end_with_dead_rank, args=(children,), daemon=True, name="ranks").start()


def _end_with_dead_rank(children: Processes) -> None:
    """End all processes of this run after one died, because the others would wait for it."""
    while not (dead := _dead_rank(children)):
        # The list is empty after a run that ended normally.
        if all(child.poll() == 0 for child in children):
            return
        time.sleep(_POLL_SECONDS)
    is_killed = any((child.returncode or 0) < 0 for child in children)
    time.sleep(_SECONDS_AFTER_KILL if is_killed else _SECONDS_AFTER_ERROR)
    if not children:
        return
    if message := _once(dead):
        print(f"error: {message}; {RESUME}", file=sys.stderr, flush=True)
    _kill(children)
    os._exit(_EXIT_INTERNAL)


def _kill(children: Processes) -> None:
    for child in children:
        child.kill()


def _once(message: str) -> str:
    return message if _reported.acquire(blocking=False) else ""


def _dead_rank(children: Processes) -> str:
    """A description of the first process that failed or was killed; empty if there is none."""
    first = int(os.environ.get("NODE_RANK", 0)) * (len(children) + 1)
    for rank, child in enumerate(list(children), start=first + 1):
        code = child.poll()
        if code:
            return f"rank {rank}, process {child.pid}, {exit_description(code)}"
    return ""
