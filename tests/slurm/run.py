"""Checks the batch files with a real SLURM: `python -m tests.slurm.run`, or `make slurm-test`.

It needs SLURM and munge (`slurm-wlm` and `munge` on Debian), and starts a cluster of one node in a temporary folder.
Without them it prints a message and passes. The node claims to have four CPUs and two GPUs, so that the batch files can
request them; the runs are tiny and use the CPU.
"""

import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.callbacks.preempted_runs import STEPS, preempted_config
from tests.helpers.runs import write_config
from tests.helpers.waiting import wait_for
from tests.slurm.cluster import ROOT, Cluster, Job, missing_programs, started

BATCH = ROOT / "lightning_configs" / "slurm"
TWO_TASKS = ["--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=2", str(BATCH / "train.sbatch")]
STEPS_TAKEN = [str(step) for step in range(1, STEPS + 1)]


def expect(what: str, actual: Any, expected: Any) -> None:
    assert actual == expected, f"{what}: got {actual}, expected {expected}"


def expect_completed(jobs: list[Job], restarts: list[int]) -> None:
    """Check that jobs have completed, with the expected number of restarts."""
    for job, times in zip(jobs, restarts, strict=True):
        what = f"the state of job {job.fields['JobId']} with this output:\n{job.output}\n"
        expect(what, (job.state, job.exit_code, job.restarts), ("COMPLETED", "0:0", times))


def array(cluster: Cluster) -> str:
    """Three points of a sweep, two at a time; the second gets a signal, and its job is requeued."""
    folder = cluster.folder / "array"
    content = {
        "configs": [noted_config(folder)],
        "parameters": {"model.init_args.loss.init_args.temperature": [0.05, 0.1, 0.2]},
        "metric": {"column": "train/loss", "mode": "min"},
    }
    (folder / "tried.yaml").write_text(yaml.safe_dump(content))
    words = ["--array=0-2", "--cpus-per-task=1", str(BATCH / "array.sbatch"), str(folder / "tried.yaml")]
    number = cluster.submit(*words)
    second = f"{number}_1"
    cluster.wait_while_running(second, lambda: bool(steps_of(cluster, "array", 0)), "the first step of a point")
    cluster.ask("scancel", "--signal=USR1", second)
    jobs = sorted(cluster.ended(number), key=lambda job: job.fields["ArrayTaskId"])
    expect_completed(jobs, [0, 1, 0])
    line = f"job {second} is queued again"
    expect(f"the number of {line!r} in\n{jobs[1].output}\n", jobs[1].output.count(line), 1)
    records = (cluster.project / "checkpoints" / "sweeps" / "tried").rglob("run.json")
    ends = [json.loads(path.read_text())["end"]["how"] for path in records]
    expect("the ends of the runs", ends, ["finished"] * 3)
    return "an array of three tasks trained the three points of a sweep, one of them in two parts after SIGUSR1"


def ddp(cluster: Cluster) -> str:
    """Two tasks that train together, with all CPUs of the job."""
    number = submit_pair(cluster, "whole")
    cluster.wait_while_running(number, lambda: bool(steps_of(cluster, "whole", 0)), "its first step")
    step = f"{number}.0"
    shown = cluster.ask("scontrol", "show", "step", step)
    has_all = re.search(r"TresPer(Step=cpu[:=]4|Task=cpu[:=]2)", shown)
    assert has_all, f"step {step} does not have two CPUs per task:\n{shown}"
    jobs = cluster.ended(number)
    expect_completed(jobs, [0])
    expect_all_steps_once(cluster, "whole")
    return f"two tasks trained together for {STEPS} steps"


def preemption(cluster: Cluster) -> str:
    """The same run with a signal during training: a checkpoint, a requeue, and the same final weights."""
    number = submit_pair(cluster, "stopped")
    cluster.wait_while_running(number, lambda: len(steps_of(cluster, "stopped", 1)) >= 2, "its second step")
    cluster.ask("scancel", "--signal=USR1", number)
    cluster.wait_while_running(number, lambda: cluster.jobs(number)[0].restarts == 1, "it was queued again")
    begin = time.monotonic()
    checkpoints = list((cluster.project / "checkpoints" / "runs" / number).rglob("*.ckpt"))
    expect("the checkpoints", [path.name for path in checkpoints], ["last.ckpt"])
    taken = len(steps_of(cluster, "stopped", 0))
    assert 2 <= taken < STEPS, f"the run stopped after {taken} of {STEPS} steps"
    wait_for(lambda: cluster.jobs(number)[0].state == "RUNNING", f"job {number} to run again", 300)
    waited = time.monotonic() - begin
    (job,) = cluster.ended(number)
    expect_completed([job], [1])
    line = f"preempted: SIGUSR1: stopped after step {taken}; job {number} is queued again"
    expect(f"the number of {line!r} in\n{job.output}\n", job.output.count(line), 1)
    expect_all_steps_once(cluster, "stopped")
    expect("weights that differ from those of the uninterrupted run", differing(cluster, "whole", "stopped"), [])
    return (
        f"SIGUSR1 stopped two tasks after step {taken}, they waited {waited:.0f} s in the queue, resumed once, "
        "and ended with the weights of the uninterrupted run"
    )


def time_limit(cluster: Cluster) -> str:
    """The same run, longer than the time limit: SLURM sends the signal a minute before it."""
    number = submit_pair(cluster, "limited", "--time=2", "--signal=SIGUSR1@60", seconds=10.0)
    (job,) = cluster.ended(number)
    # A machine that starts slowly gets the signal more than once.
    expect_completed([job], [max(1, job.restarts)])
    stops = re.findall(r"preempted: SIGUSR1: stopped after step (\d+); job \d+ is queued again", job.output)
    expect(f"stops in\n{job.output}\n", len(stops), job.restarts)
    expect_all_steps_once(cluster, "limited")
    expect("weights that differ from those of the uninterrupted run", differing(cluster, "whole", "limited"), [])
    return (
        f"SLURM's signal before the time limit stopped two tasks after step {stops[-1]}; the final weights are the same"
    )


def late_warning(cluster: Cluster) -> str:
    """The same run with a signal after its training: there is nothing to resume, and it completes."""
    number = submit_pair(cluster, "late")
    cluster.wait_while_running(number, (cluster.folder / "late" / "final.pt").exists, "its weights")
    cluster.ask("scancel", "--signal=USR1", number)
    jobs = cluster.ended(number)
    expect_completed(jobs, [0])
    expect_all_steps_once(cluster, "late")
    return "two tasks that got the signal at exit completed without a restart"


def submit_pair(cluster: Cluster, name: str, *options: str, seconds: float = 1.0) -> str:
    """Submit a job of two tasks that train together, with options of sbatch and the seconds per step."""
    config = noted_config(cluster.folder / name, seconds, strategy="ddp")
    return cluster.submit(*options, *TWO_TASKS, "--config", config)


def noted_config(folder: Path, seconds: float = 1.0, **trainer: str) -> str:
    """Write the config of a run that records its steps in a new folder and waits after each."""
    folder.mkdir()
    config = preempted_config(folder, batch_size=4)
    config["trainer"] |= trainer
    config["trainer"]["callbacks"][1]["init_args"]["seconds"] = seconds
    return write_config(folder, config, "tiny.yaml")


def steps_of(cluster: Cluster, name: str, rank: int) -> list[str]:
    """The optimiser steps that a rank has recorded."""
    path = cluster.folder / name / f"steps{rank}.txt"
    return path.read_text().splitlines() if path.exists() else []


def expect_all_steps_once(cluster: Cluster, name: str) -> None:
    """Check that both ranks ran every step once, in order."""
    for rank in range(2):
        expect(f"the steps of rank {rank}", steps_of(cluster, name, rank), STEPS_TAKEN)


def differing(cluster: Cluster, first: str, second: str) -> list[str]:
    """The names of the weights that differ between two runs."""
    one, other = (torch.load(cluster.folder / name / "final.pt", weights_only=True) for name in (first, second))
    expect("the names of the weights", sorted(other), sorted(one))
    return [name for name in one if not torch.equal(one[name], other[name])]


def check(cluster: Cluster, run: Callable[[Cluster], str]) -> bool:
    """Run one check and print its line; returns whether it passed."""
    begin = time.monotonic()
    try:
        line, passed = run(cluster), True
    # After any error the next checks run, and `main` prints the folder of the logs.
    except Exception as error:
        line, passed = f"{run.__name__}: {type(error).__name__}: {error}", False
    print(f"{'ok' if passed else 'FAILED'}: {line} ({time.monotonic() - begin:.0f} s)", flush=True)
    return passed


def main() -> int:
    """Run all checks; returns 1 and keeps the logs if one failed."""
    if missing := missing_programs():
        print(f"skipped: {', '.join(missing)} not on PATH; install the packages of SLURM and munge")
        return 0
    # SIGTERM raises KeyboardInterrupt, so that the daemons are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with started(folder) as cluster:
            # The next two compare their weights with those of `ddp`.
            num_failed = sum(not check(cluster, run) for run in (array, ddp, preemption, time_limit, late_warning))
    except Exception as error:
        print(f"FAILED: {type(error).__name__}: {error}")
        num_failed = 1
    if num_failed:
        print(f"the daemons' logs and the runs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
