"""How a command ends: one line on standard error and a documented exit code."""

import io
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from embeddings.common import NumericError, PreemptedError, UserError
from embeddings.common.errors import WorkerError, is_panic
from embeddings.common.process import is_first_process, process_rank
from embeddings.common.text import one_line

EXIT_OK, EXIT_INPUT, EXIT_INTERNAL, EXIT_IO, EXIT_INTERRUPTED = 0, 2, 70, 74, 130

INTERRUPTED = "interrupted; the same command starts again from the beginning"
RESUMABLE = "interrupted; finished files and shards are kept, and the same command continues after them"

_DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (\w+)|exited unexpectedly)"
)

# Messages of gloo, NCCL and torch's store after another rank has ended.
_LOST_RANK = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset)|remote process exited|remote worker|Broken pipe"
)

# The functions that run a command's work; errors raised outside of them are about the arguments.
_WORK_FUNCTIONS = {("lightning.pytorch.trainer.trainer", "_run_stage"), ("embeddings.cli.main", "call")}


class ConfigError(UserError):
    """A command line or config that cannot be parsed."""


def run_guarded(command: Callable[[], None], interrupted: str = INTERRUPTED) -> int:
    """Run a command and return its exit code; each failure is one line on standard error.

    `interrupted` is the line after Ctrl-C.

    Exit codes:
        2: A `UserError`, or a file where a folder is needed.
        70: NaN or Inf, or a worker process that died.
        74: A full disk, a path or standard output that cannot be written, or a library's file or connection error.
        75 or 143: A stop signal.
        130: Ctrl-C.
        Any other exception: 2 before the command's work has begun, else 70; the line names a file with its traceback.
    """
    _prepare_output()
    code = _run(command, interrupted)
    output_error = _flush_output()
    return _report(_output_line(output_error), EXIT_IO) if output_error is not None and code == EXIT_OK else code


def _run(command: Callable[[], None], interrupted: str) -> int:
    try:
        command()
    except (UserError, NumericError, WorkerError) as error:
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _report(interrupted, EXIT_INTERRUPTED)
    except PreemptedError as stop:
        if stop.line:
            how = "interrupted" if stop.exit_code == EXIT_INTERRUPTED else "preempted"
            _say(f"{how}: {one_line(stop.line, limit=600)}")
        return stop.exit_code
    except SystemExit as stop:
        # Lightning turns Ctrl-C into a SystemExit; the parser raises one after printing its help.
        if isinstance(stop.__context__, KeyboardInterrupt):
            return _report(interrupted, EXIT_INTERRUPTED)
        if isinstance(stop.code, str):
            raise
        return stop.code or EXIT_OK
    except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        where = _without_suffix(error.filename or "a path")
        return _report(f"{where}: {error.strerror}, so nothing can be written there; choose another path", EXIT_INPUT)
    except OSError as error:
        output_error = _flush_output() if error.filename is None else None
        return _report(_io_line(error) if output_error is None else _output_line(output_error), EXIT_IO)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return _report_unexpected(error)
    return EXIT_OK


def _report_unexpected(error: BaseException) -> int:
    """Report any other exception in one line, and write its traceback to a file; returns the exit code."""
    # torch raises this in the main process when a loader's worker dies.
    dead = _DEAD_WORKER.search(str(error))
    if dead is not None:
        cause = f"was killed by a signal ({dead[2]})" if dead[2] else "exited"
        fix = "lower data.num_workers or data.batch_size if memory ran out, and resume with --ckpt_path"
        return _report(f"a data loader worker, process {dead[1]}, {cause}; {fix}", EXIT_INTERNAL)
    path = _write_traceback(error)
    where = f"the traceback is in {path}" if path else "no folder for its traceback is writable"
    ranks = sys.modules.get("embeddings.strategies.ranks")
    if ranks is not None and isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        lost = ranks.lost_rank()
        if lost is not None:
            return _report(f"{lost}; resume with --ckpt_path, {where}", EXIT_INTERNAL) if lost else EXIT_INTERNAL
    rank = "" if is_first_process() else f"rank {process_rank()}: "
    message, kind = one_line(str(error), 300).rstrip("."), type(error).__name__
    frames = traceback.walk_tb(error.__traceback__)
    was_at_work = any((frame.f_globals.get("__name__"), frame.f_code.co_name) in _WORK_FUNCTIONS for frame, _ in frames)
    what = f"{message} ({kind})" if message else kind
    return _report(f"{rank}{what}; {where}", EXIT_INTERNAL if was_at_work else EXIT_INPUT)


def _write_traceback(error: BaseException) -> str:
    """Write an exception's traceback to the run's or the temporary folder; returns the file, or ""."""
    text = f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (getattr(error, "run_folder", None), None):
        with suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="traceback-", suffix=".txt", dir=folder)
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            return name
    return ""


def _io_line(error: OSError) -> str:
    """The problem and a hint. A library's error without `errno` has the file and the reason in its text."""
    if error.errno is None:
        what = str(error) or type(error).__name__
        return f"{what}; correct the named file or connection, then run the command again"
    where = f"{_without_suffix(error.filename)}: " if error.filename else ""
    return f"{where}{error.strerror}; free space or change permissions, then run the command again"


def _without_suffix(path: object) -> str:
    return re.sub(r"\.([^/]+)\.\w+\.tmp\b", r"\1", str(path))


def _report(message: str, code: int) -> int:
    _say(f"error: {one_line(message, 500)}")
    return code


def _say(line: str) -> None:
    """Write a line to standard error, unless that fails: then only the exit code reports the error."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _redirect_to_null(sys.stderr)


def _prepare_output() -> None:
    """Escape characters that the standard streams cannot encode, and replace closed streams by the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _flush_output() -> OSError | None:
    """Flush standard output; returns the error if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _redirect_to_null(sys.stdout)
        return error
    return None


def _output_line(error: OSError) -> str:
    return f"standard output: {error.strerror}; free disk space or redirect it, then run the command again"


def _redirect_to_null(stream: IO[str]) -> None:
    """Redirect a stream to the null device, so that Python's flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
