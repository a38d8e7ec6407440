import logging
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from embeddings.common import OptionError
from embeddings.strategies import FSDP2Strategy
from embeddings.strategies.ranks import set_up_ranks
from tests.helpers.processes import run_command
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import run_config, write_config
from tests.helpers.waiting import wait_for


@pytest.mark.parametrize(
    ("strategy", "minutes"),
    [("ddp", 10), (DDPStrategy(timeout=timedelta(minutes=3)), 3), (FSDP2Strategy(), 10)],
    ids=["ddp", "explicit", "fsdp2"],
)
def test_ranks_wait_ten_minutes_unless_a_timeout_is_set(strategy: object, minutes: int) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    set_up_ranks(trainer)
    assert trainer.strategy._timeout == timedelta(minutes=minutes)


def kinds_of_handlers(rank: int) -> dict[str, Any]:
    loggers = logging.root.manager.loggerDict.values()
    return {type(handler).__module__: rank for of in loggers for handler in getattr(of, "handlers", ())}


def test_ranks_do_not_log_to_files_of_pytest() -> None:
    # Their descriptors are closed: the texts went into a socket of gloo, and collectives of eight ranks timed out.
    (kinds,) = run_on_ranks(kinds_of_handlers, 1)
    assert "logging" in kinds
    assert not any("pytest" in kind for kind in kinds)


def test_a_single_process_needs_no_ranks() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    set_up_ranks(trainer)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)


def test_two_nodes_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"accelerator": "cpu", "num_nodes": 2, "logger": False, "enable_checkpointing": False}
    with pytest.raises(OptionError, match=r"trainer\.num_nodes must be 1 if no launcher starts a process on each"):
        set_up_ranks(L.Trainer(**options))
    monkeypatch.setenv("NODE_RANK", "0")
    set_up_ranks(L.Trainer(**options))


# Rank 0 starts two processes for the other ranks. Arguments: their shell commands, and how long rank 0 waits.
RANKS = """
import subprocess, sys, time
from embeddings.strategies import ranks
ranks._SECONDS_AFTER_KILL, ranks._SECONDS_AFTER_ERROR = 0.5, 0.5
shells = [subprocess.Popen(["sh", "-c", command]) for command in sys.argv[1:3]]
ranks._watch(shells)
time.sleep(float(sys.argv[3]))
if sys.argv[3] == "0":
    print(ranks.lost_rank())
print("ended by itself", [shell.poll() for shell in shells])
"""


@pytest.mark.parametrize(
    ("arguments", "code", "error", "output"),
    [
        (("kill -9 $$", "exec sleep 60", "60"), 70, "was ended by a signal (SIGKILL); resume with --ckpt_path", ""),
        (("exit 3", "exec sleep 60", "60"), 70, "ended with code 3; resume with --ckpt_path", ""),
        (("exit 0", "exit 0", "2"), 0, "", "ended by itself [0, 0]"),
        (("kill -9 $$", "exec sleep 2", "0"), 0, "", "was ended by a signal (SIGKILL)"),
    ],
    ids=["killed", "failed", "succeeded", "lost_rank"],
)
def test_a_dead_rank_is_named_in_one_line_and_ends_the_others(
    arguments: tuple[str, ...], code: int, error: str, output: str
) -> None:
    process = run_command(["-c", RANKS, *arguments])
    assert process.returncode == code, process.stderr
    assert process.stderr.count("\n") == bool(error)
    assert error in process.stderr
    assert output in process.stdout
    if error:
        assert process.stderr.startswith("error: rank 1, process ")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_a_run_in_one_line(tmp_path: Path, victim: int) -> None:
    config = run_config(tmp_path)
    config["trainer"] |= {"devices": 2, "strategy": "ddp", "max_steps": 10**6}
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    command = [sys.executable, "main.py", "fit", "--config", write_config(tmp_path, config)]
    with (tmp_path / "errors.txt").open("w") as errors:
        run = subprocess.Popen(command, stdout=errors, stderr=errors)
        wait_for(lambda: bool(list(tmp_path.rglob("metrics.csv"))), "a step", 200)
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        child = next(int(pid) for pid in children if b"LOCAL_RANK=1" in Path("/proc", pid, "environ").read_bytes())
        os.kill((run.pid, child)[victim], signal.SIGKILL)
        run.wait(60)
        wait_for(lambda: not Path("/proc", str(child)).exists(), "the other rank's end", 60)
    assert run.returncode == (-signal.SIGKILL, 70)[victim]
    (line,) = [line for line in (tmp_path / "errors.txt").read_text().splitlines() if "rror" in line]
    assert line.startswith(f"error: rank {victim}, process {(run.pid, child)[victim]}, ")
