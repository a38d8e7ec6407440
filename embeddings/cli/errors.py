"""How a command ends: a documented exit code, and one line on standard error for a user's error."""

import io
import os
import re
import select
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from embeddings.common import NumericError, PreemptedError, UserError
from embeddings.common.errors import RESUME, SeveralErrors, WorkerError, is_panic
from embeddings.common.text import one_line

EXIT_OK, EXIT_BUG, EXIT_INPUT, EXIT_FAILED, EXIT_IO, EXIT_INTERRUPTED, EXIT_NO_READER = 0, 1, 2, 70, 74, 130, 141

INTERRUPTED = "interrupted; the same command starts again from the beginning"
RESUMABLE = "interrupted; finished files and shards are kept, and the same command continues after them"

_DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (\w+)|exited unexpectedly)"
)

# Messages of gloo, NCCL and torch's store after another rank has ended.
_LOST_RANK = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset)|remote process exited|remote worker|Broken pipe"
)


class ConfigError(UserError):
    """A command line or config that cannot be parsed."""


def run_guarded(command: Callable[[], None], is_resuming: bool = False) -> int:
    """Run a command and return its exit code; each failure but the first is one line on standard error.

    A command that `is_resuming` continues after its finished work when it is run again; the line after Ctrl-C says so.

    Exit codes:
        1: Any other exception, which is an error in this program; its traceback is on standard error.
        2: A `UserError`, or a file where a folder is needed.
        70: NaN or Inf, or a worker process that died.
        74: A full disk, a path or standard output that cannot be written, or a library's file or connection error.
        75 or 143: A stop signal.
        130: Ctrl-C.
        141: The reader of standard output has ended, as in `| head -1`; without a line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    code = _run(command, is_resuming)
    output_error = _flush_output()
    return _output_code(output_error) if output_error is not None and code == EXIT_OK else code


def _run(command: Callable[[], None], is_resuming: bool) -> int:
    interrupted = RESUMABLE if is_resuming else INTERRUPTED
    try:
        command()
    except (UserError, NumericError, WorkerError) as error:
        num_errors = len(error.errors) if isinstance(error, SeveralErrors) else 1
        return _report(str(error), error.exit_code, 500 * max(1, num_errors))
    except KeyboardInterrupt:
        return _report(interrupted, EXIT_INTERRUPTED)
    except PreemptedError as stop:
        if stop.line:
            how = "interrupted" if stop.exit_code == EXIT_INTERRUPTED else "preempted"
            finds_it = is_resuming and stop.checkpoint is not None
            line = f"{stop.why}; the same command continues there" if finds_it else stop.line
            _say(f"{how}: {one_line(line, limit=600)}")
        return stop.exit_code
    except SystemExit as stop:
        # Lightning turns Ctrl-C into a SystemExit; the parser raises one after printing its help.
        if isinstance(stop.__context__, KeyboardInterrupt):
            return _report(interrupted, EXIT_INTERRUPTED)
        if isinstance(stop.code, str):
            raise
        return stop.code or EXIT_OK
    except OSError as error:
        output_error = _flush_output() if error.filename is None else None
        if output_error is not None or (isinstance(error, BrokenPipeError) and _reader_has_ended()):
            return _output_code(output_error or error)
        # The name of a temporary file of an atomic write is not one that the user knows.
        name = re.sub(r"\.([^/]+)\.\w+\.tmp\b", r"\1", str(error.filename or ""))
        if isinstance(error, NotADirectoryError | FileExistsError | IsADirectoryError):
            what = f"{error.strerror}, so nothing can be written there; choose another path"
            return _report(f"{name or 'a path'}: {what}", EXIT_INPUT)
        if error.errno is None:  # a library's error, which has the file and the reason in its text
            what = str(error) or type(error).__name__
            return _report(f"{what}; correct the named file or connection, then run the command again", EXIT_IO)
        where = f"{name}: " if name else ""
        hint = "free space or change permissions, then run the command again"
        return _report(f"{where}{error.strerror}; {hint}", EXIT_IO)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return _report_unexpected(error)
    return EXIT_OK


def _report_unexpected(error: BaseException) -> int:
    """Report any other exception: one line if its cause is known, else the traceback; returns the exit code."""
    if str(error) == "Could not determine home directory.":  # by `Path.expanduser`
        return _report("a path begins with ~ and a name that is no user's; write the whole path", EXIT_INPUT)
    # torch raises this in the main process when a loader's worker dies.
    dead = _DEAD_WORKER.search(str(error))
    if dead is not None:
        cause = f"was killed by a signal ({dead[2]})" if dead[2] else "exited"
        fix = f"lower data.num_workers or data.batch_size if memory ran out, and {RESUME}"
        return _report(f"a data loader worker, process {dead[1]}, {cause}; {fix}", EXIT_FAILED)
    ranks = sys.modules.get("embeddings.strategies.ranks")
    if ranks is not None and isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        lost = ranks.lost_rank()
        if lost is not None:
            return _report(f"{lost}; {RESUME}", EXIT_FAILED) if lost else EXIT_FAILED
    _say("".join(traceback.format_exception(error)).rstrip())
    return EXIT_BUG


def _report(message: str, code: int, limit: int = 500) -> int:
    _say(f"error: {one_line(message, limit)}")
    return code


def _say(line: str) -> None:
    """Write a line to standard error, unless that fails: then only the exit code reports the error."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _redirect_to_null(sys.stderr)


def _flush_output() -> OSError | None:
    """Flush standard output; returns the error if that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _redirect_to_null(sys.stdout)
        return error
    return None


def _reader_has_ended() -> bool:
    """Whether standard output is a pipe that nobody reads; a library's broken connection is another error."""
    output = select.poll()
    with suppress(OSError, ValueError):
        output.register(sys.stdout, 0)
        return any(events & select.POLLERR for _, events in output.poll(0))
    return False


def _output_code(error: OSError) -> int:
    """Report a standard output that cannot be written; returns the exit code."""
    _redirect_to_null(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return EXIT_NO_READER
    what = f"standard output: {error.strerror}"
    return _report(f"{what}; free disk space or redirect it, then run the command again", EXIT_IO)


def _redirect_to_null(stream: IO[str]) -> None:
    """Redirect a stream to the null device, so that Python's flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
