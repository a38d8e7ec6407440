"""This process: its place among a run's processes, its logger, its machine, its memory. Nothing here loads torch."""

import ast
import ctypes
import importlib
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.abc import InspectLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embeddings.common.errors import UserError

if TYPE_CHECKING:
    import torch


TIMEOUT_SECONDS = 60
# What SLURM, torchrun or a person say of a run's processes, all of it integers, and read by Lightning too.
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
    """Check what the environment says of this run's processes; a `UserError` names the first that is no integer."""
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdecimal()):
            raise UserError(f"{name} must be an integer >= 0 in the environment, got {value!r}; set or unset it")


def process_rank() -> str:
    """This process's rank among a run's, or among a node's, where nothing but its environment can tell yet."""
    ranks = (os.environ.get(name, "0") for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return next((rank for rank in ranks if rank != "0"), "0")


def is_first_process() -> bool:
    """Whether this is the first of a run's processes."""
    return process_rank() == "0"


def num_processes() -> int:
    """How many processes srun or torchrun has started for this run, as its environment says; 1 without them."""
    check_variables()
    # SLURM_NTASKS is the whole job's too, in a batch script that starts one process without srun.
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


logger = logging.getLogger("embeddings")


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Inside, the logger writes lines to standard error: notes of a run's first process, and warnings of all."""
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# Lines of libraries about themselves, for which a user of this one can do nothing.
_NOISE = ("Setting accelerator to CPU", "Tip: ", "💡")
_ADVISERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")
_OLD_CALLS = r"`isinstance\(treespec, LeafSpec\)` is deprecated"


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a library's log record is more than advice about the library."""
    return not any(noise in record.getMessage() for noise in _NOISE)


# transformers loads DeepSpeed where it is installed, whichever of our modules a script imports first; DeepSpeed then
# says on standard output that it misses an accelerator.
logging.getLogger("DeepSpeed").addFilter(_is_news)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, libraries give no advice about themselves or each other."""
    advisers = [logging.getLogger(name) for name in _ADVISERS]
    for adviser in advisers:
        adviser.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _OLD_CALLS, FutureWarning)
            warnings.filterwarnings("ignore", "Starting from v1.9.0, `tensorboardX`")
            yield
    finally:
        for adviser in advisers:
            adviser.removeFilter(_is_news)


def lazy_names(package: str) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) for a package: each name that it imports for type checkers, on first use.

    The block `if TYPE_CHECKING:` of its `__init__.py` is the only place that says which module a name comes from. It
    is read from the source, as type checkers and editors read it.
    """

    @cache
    def modules() -> dict[str, str]:
        """The module of each name."""
        spec = sys.modules[package].__spec__
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        blocks = [node for node in ast.parse(spec.loader.get_source(package) or "").body if isinstance(node, ast.If)]
        imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
        return {alias.name: str(line.module) for line in imports for alias in line.names}

    def getattribute(name: str) -> Any:
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules()[name]), name)

    return getattribute


_CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Number and name of the CPUs."""
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.is_file() else ""
    models = [line for line in text.splitlines() if line.startswith("model name")]
    if models:
        return f"{len(models)} x {models[0].split(':')[1].strip()}"
    return platform.processor() or platform.machine()


def device_name(device: "torch.device") -> str:
    """The name of a GPU, or the CPUs."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


# mallopt's numbers in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks up to the first are cut from memory that is kept; the second is the most of it that stays free at its end.
_MAX_KEPT_BLOCK = 256 * 1024**2
_MAX_KEPT = 1024**3


@cache
def tune_malloc() -> bool:
    """Keep up to 1 GiB of freed memory, for the rest of the process; the first call decides.

    glibc hands the memory of a freed tensor back, and the next layer's tensor gets fresh pages, which the system clears
    one by one as they are touched: MiniLM met up to 470,000 page faults in 4 s of encoding in int8 and up to 310,000 in
    8 s in float32; where memory is kept mostly 1, and 17,000 at most.

    Returns:
        Whether it is kept: not without glibc, nor where the environment decides (`MALLOC_…`, `GLIBC_TUNABLES`).
    """
    decided = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if decided or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # 1 is success. Setting one switches glibc's own choice of both off, so that both are set.
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_KEPT_BLOCK) == 1 == mallopt(_TRIM_THRESHOLD, _MAX_KEPT))
