"""This process: its place among a run's processes, logger, machine, memory and signals. Nothing here loads torch."""

import ast
import ctypes
import importlib
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import InspectLoader
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from embeddings.common.errors import PreemptedError, UserError

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
    """Refuse a variable about this run's processes that is no integer."""
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdecimal()):
            raise UserError(f"{name} must be an integer >= 0 in the environment, got {value!r}; set or unset it")


def process_rank() -> str:
    """This process's rank among a run's, or among a node's, as its environment says."""
    ranks = (os.environ.get(name, "0") for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return next((rank for rank in ranks if rank != "0"), "0")


def is_first_process() -> bool:
    return process_rank() == "0"


def num_processes() -> int:
    """How many processes srun or torchrun has started for this run; 1 without them."""
    check_variables()
    # SLURM_NTASKS is the whole job's too, in a batch script that starts one process without srun.
    return max(int(os.environ.get(name) or 1) for name in ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"))


def requeue(job: str) -> str:
    """Ask SLURM to run the job again from its beginning; returns why it would not, or nothing."""
    try:
        asked = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            # A signal to the run's process group must not end the request half-way.
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
    """A package's `__getattr__` (PEP 562) that loads the names under its `if TYPE_CHECKING:` on first use.

    That block is read from the source, so no second list says which module a name comes from.
    """

    @cache
    def modules() -> dict[str, str]:
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
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


# mallopt's numbers in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks up to the first are cut from memory that is kept; the second is the most of it that stays free at its end.
_MAX_KEPT_BLOCK = 256 * 1024**2
_MAX_KEPT = 1024**3


@cache
def tune_malloc() -> bool:
    """Have this process keep up to 1 GiB of freed memory; returns whether it does.

    glibc returns the memory of a freed tensor, and the system clears fresh pages for the next one: MiniLM met up to
    470,000 page faults in 4 s of encoding in int8; where memory is kept mostly 1, and 17,000 at most. Nothing is
    changed without glibc, or where the environment decides (`MALLOC_…`, `GLIBC_TUNABLES`).
    """
    decided = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if decided or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # 1 is success. Setting one switches glibc's own choice of both off, so that both are set.
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_KEPT_BLOCK) == 1 == mallopt(_TRIM_THRESHOLD, _MAX_KEPT))


# SLURM's usual warning before the time limit (`--signal`), what pre-emption and most other schedulers send, and Ctrl-C.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

EXIT_RESUMABLE = 75
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopRequest:
    """The first stop signal (`first`, 0 for none) that this process got while `listening`.

    Before training the handler ends the run where it is. Once `deferred` is set it only notes the signal, and training
    looks here between two steps. One of several ranks notes it from the beginning: the others would wait for it, and
    the first may be ended while it asks for a place in the queue.

    A second Ctrl-C ends the process at once. A process that ignored Ctrl-C before, as a shell's background jobs do,
    keeps ignoring it.
    """

    def __init__(self) -> None:
        self.first, self.deferred, self.listening = 0, False, False
        self._process, self._num_interrupts = 0, 0
        self._previous: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Begin anew: no signal so far, and neither is deferred. Off the main thread nothing is heard."""
        self.first, self.deferred, self._process, self._num_interrupts = 0, False, os.getpid(), 0
        self._previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOP_SIGNALS}
        if self._previous[signal.SIGINT] == signal.SIG_IGN:
            del self._previous[signal.SIGINT]
        self.listening = True
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                signal.signal(number, self._note)

    def leave(self, ignored: bool = False) -> None:
        """Give the signals back to who had them; or ignore them, until the exit that follows a run's answer."""
        if self.listening and threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, signal.SIG_IGN if ignored else handler)
        self.listening = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child is not the run: it ends as it would have without us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        if not self.first:
            self.first = number
            self.deferred = self.deferred or num_processes() > 1
            if not self.deferred:
                raise PreemptedError("", exit_code(number, requeued=False))
            if number == signal.SIGINT and is_first_process():
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")


stop_request = StopRequest()


@contextmanager
def handle_preemption() -> Iterator[None]:
    """Listen to the stop signals while a run lasts; one before training is a `PreemptedError`, after a requeue."""
    stop_request.listen()
    ignored = False
    try:
        yield
    except BaseException as error:
        # Whatever the end of an unfinished import or file was turned into, the signal is what it is about.
        is_early = stop_request.first and not stop_request.deferred
        ignored = bool(is_early) or isinstance(error, PreemptedError)
        if not is_early:
            raise
        stop_request.deferred = True
        raise answer(stop_request.first, "stopped before its first step", None, is_first_process()) from None
    finally:
        stop_request.leave(ignored)


def ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def block_signals(signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Keep signals from what is started meanwhile, for good; this process hears them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer(number: int, where: str, checkpoint: Any, is_first: bool) -> PreemptedError:
    """Have the run's first process ask SLURM to queue the job again, and say how the run ends.

    `where` says in words at which point signal `number` stopped the run, and `checkpoint` what it resumes from.
    """
    # Who presses Ctrl-C does not want the job in the queue again.
    job = None if number == signal.SIGINT else job_id()
    if not is_first:
        return PreemptedError("", exit_code(number, requeued=job is not None))
    refusal = requeue(job) if job else ""
    parts = [f"{signal.Signals(number).name}: {where}"]
    if job:
        parts.append(f"scontrol requeue {job} failed ({refusal})" if refusal else f"job {job} is queued again")
    if checkpoint is not None:
        parts.append(f"resume with --ckpt_path {checkpoint}")
    return PreemptedError("; ".join(parts), exit_code(number, requeued=bool(job) and not refusal))


def exit_code(number: int, requeued: bool) -> int:
    """75 for a job that is queued again and for a warning that it will be, 130 for Ctrl-C, else 143."""
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_RESUMABLE if requeued or number == signal.SIGUSR1 else EXIT_TERMINATED
