"""How a command ends: one line on standard error, and an exit code that scripts can rely on."""

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

INTERRUPTED = "interrupted; finished files and shards are kept"

_DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (\w+)|exited unexpectedly)"
)

# What gloo, NCCL and torch's store say where another rank has ended.
_LOST_RANK = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset)|remote process exited|remote worker|Broken pipe"
)

# The functions that do a command's work; errors raised outside of them are about the arguments.
_AT_WORK = {("lightning.pytorch.trainer.trainer", "_run_stage"), ("embeddings.cli.main", "call")}


class ConfigError(UserError):
    """A command line or config that does not parse."""


def run_guarded(command: Callable[[], None]) -> int:
    """Run a command and return its exit code; whatever fails is one line on standard error.

    Code 2: a `UserError`, or a file where a folder is needed. 74: a full disk, a refused path or standard output, and
    what libraries say of a file or a connection. 70: NaN or Inf, and a worker process that died. 130: Ctrl-C. 75 or
    143: a stop signal. The traceback of any other exception is in a file that the line names; its code is 2 before the
    command's work has begun, and 70 afterwards.
    """
    _prepare_output()
    code = _run(command)
    refusal = _unwritten()
    return _report(_output_line(refusal), EXIT_IO) if refusal is not None and code == EXIT_OK else code


def _run(command: Callable[[], None]) -> int:
    try:
        command()
    except (UserError, NumericError, WorkerError) as error:
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _report(INTERRUPTED, EXIT_INTERRUPTED)
    except PreemptedError as stop:
        if stop.line:
            how = "interrupted" if stop.exit_code == EXIT_INTERRUPTED else "preempted"
            _say(f"{how}: {one_line(stop.line, limit=600)}")
        return stop.exit_code
    except SystemExit as stop:
        # Lightning turns Ctrl-C into an exit of its own; the parser ends so behind its help.
        if isinstance(stop.__context__, KeyboardInterrupt):
            return _report(INTERRUPTED, EXIT_INTERRUPTED)
        if isinstance(stop.code, str):
            raise
        return stop.code or EXIT_OK
    except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        where = _without_suffix(error.filename or "a path")
        return _report(f"{where}: {error.strerror}, so nothing can be written there; name another place", EXIT_INPUT)
    except OSError as error:
        refusal = _unwritten() if error.filename is None else None
        return _report(_io_line(error) if refusal is None else _output_line(refusal), EXIT_IO)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return _unforeseen(error)
    return EXIT_OK


def _unforeseen(error: BaseException) -> int:
    """End a command for any other exception: one line, and a file with the traceback."""
    # torch raises it in the main process as soon as the system reports the death.
    dead = _DEAD_WORKER.search(str(error))
    if dead is not None:
        cause = f"was ended by a signal ({dead[2]})" if dead[2] else "exited"
        fix = "lower data.num_workers or data.batch_size if memory ran out, and resume with --ckpt_path"
        return _report(f"a worker of the loader, process {dead[1]}, {cause}; {fix}", EXIT_INTERNAL)
    path = _write_traceback(error)
    where = f"the traceback is in {path}" if path else "no folder takes its traceback"
    ranks = sys.modules.get("embeddings.strategies.ranks")
    if ranks is not None and isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        lost = ranks.lost_rank()
        if lost is not None:
            return _report(f"{lost}; resume with --ckpt_path, {where}", EXIT_INTERNAL) if lost else EXIT_INTERNAL
    rank = "" if is_first_process() else f"rank {process_rank()}: "
    message, kind = one_line(str(error), 300).rstrip("."), type(error).__name__
    frames = traceback.walk_tb(error.__traceback__)
    was_at_work = any((frame.f_globals.get("__name__"), frame.f_code.co_name) in _AT_WORK for frame, _ in frames)
    what = f"{message} ({kind})" if message else kind
    return _report(f"{rank}{what}; {where}", EXIT_INTERNAL if was_at_work else EXIT_INPUT)


def _write_traceback(error: BaseException) -> str:
    """Write an exception's traceback beside the run, or into the temporary folder; returns the file, "" for none."""
    text = f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (getattr(error, "run_folder", None), None):
        with suppress(OSError):
            handle, name = tempfile.mkstemp(prefix="traceback-", suffix=".txt", dir=folder)
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            return name
    return ""


def _io_line(error: OSError) -> str:
    """What failed and a hint; a library's error without a number says both file and reason in its text."""
    if error.errno is None:
        what = str(error) or type(error).__name__
        return f"{what}; correct the file or the connection that this names, then run the command again"
    where = f"{_without_suffix(error.filename)}: " if error.filename else ""
    return f"{where}{error.strerror}; free or allow the path, then run the command again"


def _without_suffix(path: object) -> str:
    return re.sub(r"\.([^/]+)\.\w+\.tmp\b", r"\1", str(path))


def _report(message: str, code: int) -> int:
    _say(f"error: {one_line(message, 500)}")
    return code


def _say(line: str) -> None:
    """Write a line to standard error; where that is full, only the exit code is left."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _prepare_output() -> None:
    """Let the standard streams take any text: an escape for what their encoding lacks; a closed one takes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it is open as long as the process lives
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _unwritten() -> OSError | None:
    """Why standard output has not taken all that was printed, None where it has."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _give_up(sys.stdout)
        return error
    return None


def _output_line(error: OSError) -> str:
    return f"standard output: {error.strerror}; free its disk or give another, then run the command again"


def _give_up(stream: IO[str]) -> None:
    """Point a stream to the null device: Python would fail again as it flushes the rest at its exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
