"""What a run asks of SLURM: its job's name, and a place in the queue again."""

import os
import subprocess

TIMEOUT_SECONDS = 60


def job_id() -> str | None:
    """The job that this process belongs to, an array's task as `ARRAY_TASK`; None outside SLURM."""
    if "SLURM_ARRAY_JOB_ID" in os.environ and "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def is_first_process() -> bool:
    """Whether this is the first of a run's processes, where nothing but its environment can tell yet."""
    ranks = (os.environ.get(name, "0") for name in ("SLURM_PROCID", "RANK", "LOCAL_RANK"))
    return all(rank == "0" for rank in ranks)


def num_processes() -> int:
    """How many processes srun or torchrun has started for this run, as its environment says; 1 without them."""
    # SLURM_NTASKS is the whole job's too, in a batch script that starts a single process by itself.
    return max(int(os.environ.get(name) or 1) for name in ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"))


def requeue(job: str) -> str:
    """Ask SLURM to run the job again from its beginning; returns why it would not, or nothing.

    The question goes out in a session of its own: a signal to the run's process group does not end it half-way.
    """
    try:
        asked = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            start_new_session=True,
        )
    except OSError as error:
        return error.strerror or type(error).__name__
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT_SECONDS} s"
    if asked.returncode == 0:
        return ""
    return asked.stderr.strip() or f"exit code {asked.returncode}"
