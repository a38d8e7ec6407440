"""The ranks of a run: a check that they can start, a limit on waiting for each other, and a watch over dead ones."""

import os
import signal
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

TIMEOUT = timedelta(minutes=10)
_SECONDS_BETWEEN_LOOKS = 0.25
# How long the first rank may take to end once another has been killed, or has reported an error.
_SECONDS_AFTER_KILL = 2.0
_SECONDS_AFTER_ERROR = 5.0
_EXIT_INTERNAL = 70

Processes = list[subprocess.Popen[bytes]]

# The processes that this one has started for the other ranks, in the order of the ranks.
_started: list[Processes] = []
# Held by the one thread that names the dead rank.
_told = Lock()
_parent = os.getppid()


def set_up_ranks(trainer: L.Trainer) -> None:
    """Check that the ranks can meet, and watch those that Lightning starts.

    They wait ten minutes in a collective unless the config says otherwise; torch waits thirty.
    """
    strategy: Any = trainer.strategy
    environment = getattr(strategy, "cluster_environment", None)
    is_alone = isinstance(environment, LightningEnvironment) and not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys()
    if trainer.num_nodes > 1 and is_alone:
        rule = "must be 1 where no launcher starts a process on each node"
        raise OptionError("trainer.num_nodes", trainer.num_nodes, rule, "start it by srun or torchrun on every node")
    if getattr(strategy, "_timeout", None) == default_pg_timeout:
        strategy._timeout = TIMEOUT
    # Lightning's own observer looks every five seconds, and kills this process without a word.
    setattr(subprocess_script, "_launch_process_observer", _watch)  # noqa: B010 - it is not exported


def lost_rank() -> str | None:
    """Which rank has died, for the message after a collective has failed; None where something else starts the ranks.

    One process gets the sentence: the one that has started the others, or the second rank where that one has died. The
    others get an empty text.
    """
    is_launched = not _started and os.environ.get("LOCAL_RANK", "0") != "0" and "RANK" not in os.environ
    if not _started and (not is_launched or "SLURM_PROCID" in os.environ):
        return None
    end = time.monotonic() + _SECONDS_AFTER_KILL
    while time.monotonic() < end:
        if is_launched and os.getppid() != _parent:
            return f"rank 0, process {_parent}, has ended" if os.environ["LOCAL_RANK"] == "1" else ""
        dead = _dead(_started[-1]) if _started else ""
        if dead:
            _kill(_started[-1])
            return _tell(dead)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return "" if is_launched else None


def _watch(children: Processes) -> None:
    """Watch the processes of the other ranks as long as they run, in place of Lightning's observer."""
    _started.append(children)
    Thread(target=_end_with, args=(children,), daemon=True, name="ranks").start()


def _end_with(children: Processes) -> None:
    """End all processes of this run once one has died, since the others would wait for it in their next collective."""
    while not (dead := _dead(children)):
        # A run that ends normally has emptied the list.
        if all(child.poll() == 0 for child in children):
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    is_killed = any((child.returncode or 0) < 0 for child in children)
    time.sleep(_SECONDS_AFTER_KILL if is_killed else _SECONDS_AFTER_ERROR)
    if not children:
        return
    line = _tell(dead)
    if line:
        print(f"error: {line}; resume with --ckpt_path", file=sys.stderr, flush=True)
    _kill(children)
    os._exit(_EXIT_INTERNAL)


def _kill(children: Processes) -> None:
    """Kill the remaining processes: over NCCL they would wait in a collective for minutes."""
    for child in children:
        child.kill()


def _tell(line: str) -> str:
    """The line for the first caller, empty for later ones."""
    return line if _told.acquire(blocking=False) else ""


def _dead(children: Processes) -> str:
    """Which process ended with an error or by a signal, and how; empty for none."""
    first = int(os.environ.get("NODE_RANK", 0)) * (len(children) + 1)
    for rank, child in enumerate(list(children), start=first + 1):
        code = child.poll()
        if code:
            how = f"was ended by a signal ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
            return f"rank {rank}, process {child.pid}, {how}"
    return ""
