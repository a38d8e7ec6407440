"""What a run asks of SLURM: its job's name, and a place in the queue again."""

import os
import subprocess

from embeddings.common.errors import UserError

TIMEOUT_SECONDS = 60
# What SLURM, torchrun or a person say of a run's processes, all of it whole numbers, and read by Lightning too.
_NUMBERS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"),
)


def job_id() -> str | None:
    """The job that this process belongs to, an array's task as `ARRAY_TASK`; None outside SLURM."""
    if "SLURM_ARRAY_JOB_ID" in os.environ and "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def check_variables() -> None:
    """Check what the environment says of this run's processes.

    Raises:
        UserError: Naming the first variable that is no whole number.
    """
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdecimal()):
            raise UserError(f"{name} must be a whole number >= 0 in the environment, got {value!r}; set or unset it")


def process_rank() -> str:
    """This process's rank among a run's, as its environment says."""
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return next((rank for rank in ranks if rank), "0")


def is_first_process() -> bool:
    """Whether this is the first of a run's processes, where nothing but its environment can tell yet."""
    ranks = (os.environ.get(name, "0") for name in ("SLURM_PROCID", "RANK", "LOCAL_RANK"))
    return all(rank == "0" for rank in ranks)


def num_processes() -> int:
    """How many processes srun or torchrun has started for this run, as its environment says; 1 without them.

    Raises:
        UserError: If what it says is no number.
    """
    check_variables()
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
