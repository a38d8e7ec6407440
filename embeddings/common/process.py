"""The current process: its rank, logger, hardware, memory allocator and signals. Importing this never loads torch."""

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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from embeddings.common.errors import PreemptedError

if TYPE_CHECKING:
    import torch


TIMEOUT_SECONDS = 60


def job_id() -> str | None:
    """The SLURM job of this process, as `ARRAY_TASK` for an array's task; None outside SLURM."""
    if "SLURM_ARRAY_JOB_ID" in os.environ and "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def is_first_process() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def num_processes() -> int:
    """Number of processes that srun or torchrun started for this run; 1 without them."""
    # Not SLURM_NTASKS: it is the job's, even in a batch script that starts one process without srun.
    return max(int(os.environ.get(name) or 1) for name in ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"))


def requeue(job: str) -> str:
    """Ask SLURM to requeue the job; returns the reason of a refusal, or an empty string."""
    try:
        result = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            # A signal to the run's process group must not interrupt the request.
            start_new_session=True,
        )
    except OSError as error:
        return error.strerror or type(error).__name__
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT_SECONDS} s"
    if result.returncode == 0:
        return ""
    return result.stderr.strip() or f"exit code {result.returncode}"


logger = logging.getLogger("embeddings")


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Inside, the logger writes to standard error: info of a run's first process, and warnings of all."""
    handler, previous_level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)


# Messages of other libraries that a user of this one cannot act on.
_IRRELEVANT = ("Setting accelerator to CPU", "Tip: ", "💡")
_ADVICE_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")
_DEPRECATION = r"`isinstance\(treespec, LeafSpec\)` is deprecated"


def _is_relevant(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _IRRELEVANT)


# transformers imports DeepSpeed if it is installed, whichever of our modules a script imports first. DeepSpeed then
# reports a missing accelerator on standard output.
logging.getLogger("DeepSpeed").addFilter(_is_relevant)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, advice and deprecation messages of libraries are suppressed."""
    loggers = [logging.getLogger(name) for name in _ADVICE_LOGGERS]
    for library_logger in loggers:
        library_logger.addFilter(_is_relevant)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _DEPRECATION, FutureWarning)
            warnings.filterwarnings("ignore", "Starting from v1.9.0, `tensorboardX`")
            yield
    finally:
        for library_logger in loggers:
            library_logger.removeFilter(_is_relevant)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' reports of unused weights and its progress bars."""
    from transformers.utils import logging as library  # importing it takes seconds

    verbosity, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()  # type: ignore[no-untyped-call]
    library.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if bars:
            library.enable_progress_bar()  # type: ignore[no-untyped-call]


def lazy_names(package: str) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562) that loads the names under its `if TYPE_CHECKING:` on first use."""

    @cache
    def modules() -> dict[str, str]:
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def getattribute(name: str) -> Any:
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules()[name]), name)

    return getattribute


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    models = [line for line in lines if line.startswith("model name")]
    if models:
        return f"{len(models)} x {models[0].split(':')[1].strip()}"
    return platform.processor() or platform.machine()


def device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


# mallopt's numbers in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Maximum block that is allocated from the heap, and maximum free memory at the heap's end, in bytes.
_MAX_HEAP_BLOCK = 256 * 1024**2
_MAX_FREE_HEAP = 1024**3


@cache
def tune_malloc() -> bool:
    """Make glibc retain up to 1 GiB of freed memory in this process; returns whether it succeeded.

    Otherwise the system clears fresh pages for each new tensor. Variables of the environment take precedence.
    """
    is_configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_configured or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Setting one disables glibc's dynamic choice of both, so both are set.
    is_set = mallopt(_MMAP_THRESHOLD, _MAX_HEAP_BLOCK) == 1
    return is_set and bool(mallopt(_TRIM_THRESHOLD, _MAX_FREE_HEAP) == 1)


def limit_kernel_cache() -> None:
    """Let oneDNN keep 64 compiled kernels, not 1,024: each shape of a product has its own, and they take memory."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def trim_malloc() -> bool:
    """Return the free pages of glibc's heap to the system; returns whether any were."""
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).malloc_trim(0))


# SLURM's usual warning before the time limit (`--signal`), the signal of pre-emption and most schedulers, and Ctrl-C.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

EXIT_RESUMABLE = 75
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopRequest:
    """The first stop signal (`first`, 0 for none) that this process received while `listening`.

    Before training the handler ends the run at once. Once `deferred` is set, or with several ranks, it only records the
    signal, and training checks it between steps. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.first, self.deferred, self.listening = 0, False, False
        self._process, self._num_interrupts = 0, 0
        self._previous: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Reset, and install the handlers; outside the main thread no handler is installed."""
        self.first, self.deferred, self._process, self._num_interrupts = 0, False, os.getpid(), 0
        self._previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOP_SIGNALS}
        if self._previous[signal.SIGINT] == signal.SIG_IGN:
            del self._previous[signal.SIGINT]
        self.listening = True
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                signal.signal(number, self._record)

    def leave(self, ignored: bool = False) -> None:
        """Restore the previous handlers, or ignore the signals until the process exits."""
        if self.listening and threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, signal.SIG_IGN if ignored else handler)
        self.listening = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child is not the run: the default action ends it.
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
    """Handle stop signals during a run; one before training requeues the job and raises a `PreemptedError`."""
    stop_request.listen()
    ignored = False
    try:
        yield
    except BaseException as error:
        # An interrupted import or file may raise another error; its cause is the signal.
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
    """Block signals inside, and permanently in processes started inside; this process receives them afterwards."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def answer(number: int, where: str, checkpoint: Any, is_first: bool) -> PreemptedError:
    """Requeue the job from the run's first process; returns the error that ends the run, stopped at `where`."""
    # After Ctrl-C the user does not want the job requeued.
    job = None if number == signal.SIGINT else job_id()
    if not is_first:
        return PreemptedError("", exit_code(number, requeued=job is not None))
    refusal = requeue(job) if job else ""
    parts = [f"{signal.Signals(number).name}: {where}"]
    if job:
        parts.append(f"scontrol requeue {job} failed ({refusal})" if refusal else f"job {job} is queued again")
    return PreemptedError("; ".join(parts), exit_code(number, requeued=bool(job) and not refusal), checkpoint)


def exit_description(code: int) -> str:
    """How a child process ended, by the exit code that Python reports (negative after a signal)."""
    return f"was ended by a signal ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def exit_code(number: int, requeued: bool) -> int:
    """75 for a requeued job and for SIGUSR1, which announces a requeue; 130 for Ctrl-C; otherwise 143."""
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_RESUMABLE if requeued or number == signal.SIGUSR1 else EXIT_TERMINATED
