"""How a command ends: one line on standard error, and an exit code that scripts can rely on."""

import importlib
import inspect
import io
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from typing import IO

from embeddings.cli.imports import may_name
from embeddings.cli.source_names import parameters_in_source, public_names
from embeddings.cli.source_types import argument_in_source
from embeddings.common import NumericError, PreemptedError, UserError
from embeddings.common.errors import WorkerError, is_panic
from embeddings.common.process import is_first_process, process_rank
from embeddings.common.text import one_line

EXIT_OK = 0
EXIT_INPUT = 2
EXIT_INTERNAL = 70
EXIT_IO = 74
EXIT_INTERRUPTED = 130

INTERRUPTED = "interrupted; finished files and shards are kept"


_DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (\w+)|exited unexpectedly)"
)

# What gloo, NCCL and torch's store say where another rank has ended.
_LOST_RANK = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset)|remote process exited|remote worker|Broken pipe"
)

# The functions that do a command's work; what is raised outside of them is about what the user wrote.
_AT_WORK = {("lightning.pytorch.trainer.trainer", "_run_stage"), ("embeddings.cli.main", "call")}

_KEY = re.compile(r'Parser key "([^"]+)":\s*')
_EXPECTED = re.compile(r"Expected an? (.+)", re.DOTALL)

_CALLABLE = re.compile(r"^\s*Type .*? expects a function or a callable class: (.*?)\. Got value: .*", re.DOTALL)
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*")
# An unknown option of a record, where a class takes nothing but the record.
_GROUP = re.compile(
    r": Problem with given class_path '([^']+)':\s*"
    r"(?:Group '(\w+)' does not accept option '([^']+)'|unrecognized arguments: --(\w+)\.(\w+)(?:=.*)?$)"
)


class ConfigError(UserError):
    """A command line or config that does not parse."""


def reason(message: str) -> str:
    """The reason inside a parser's message, behind the whole key that it is about.

    Where a value fits none of several types, it is the first type's complaint, or the list of types if each complains
    of the value's type alone.
    """
    keys: list[str] = []
    refused = re.search(r"Importing '([^']+)' is not allowed", message)
    while "Errors:" in message:
        head, _, tail = message.partition("Errors:")
        found = _branches(tail)
        if not found:
            break
        keys += _KEY.findall(head)
        if all(_EXPECTED.match(branch) for branch in found):
            given = re.search(r"Given value: (.*?)(?:\. Got value: Namespace.*)?$", tail, re.MULTILINE)
            message = f"expected {_types(found)}" + (f", got {given[1]}" if given else "")
            break
        message = found[0]
    keys += _KEY.findall(message)
    message = _KEY.split(message)[-1] if _KEY.search(message) else message
    message = _CALLABLE.sub(r"\1", message)
    single = re.match(r"\s*Expected an? (.*?)\. Got value: (.*?)(?:\. Got value: .*)?$", message, re.DOTALL)
    if single is not None:
        message = f"expected {_types([f'Expected a {single[1]}'])}, got {'null' if single[2] == 'None' else single[2]}"
    if refused is not None:
        package = refused[1].partition(".")[0]
        message = f"a config may not name {refused[1]}; name a class of embeddings, lightning, torch.nn or torch.optim"
        if package not in sys.stdlib_module_names:
            message += f", or set EMBED_IMPORTS={package} to trust all of that package"
    return f"{'.'.join(keys)}: {message.strip()}" if keys else message


def _branches(tail: str) -> list[str]:
    """What each type of a union complains of."""
    indent = re.match(r"\n(\s*)- ", tail)
    if indent is None:
        return []
    outer = indent[1][:-2]
    body = re.split(rf"\n{outer}Given value", tail)[0]
    return [part.strip() for part in body.split(f"\n{indent[1]}- ")[1:]]


def _types(complaints: Iterable[str]) -> str:
    """The types that a union's complaints name, in words."""
    names = []
    for complaint in complaints:
        name = re.sub(r"^Expected an? ", "", complaint)
        name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", name)
        name = re.sub(r"typing\.Literal\[(.*)\]", r"\1", name)
        if not name.startswith("dot import path"):
            names.append("null" if name == "NoneType" else name)
    return one_line(" or ".join(names), 100)


def with_way_out(message: str, options: Iterable[str]) -> str:
    """The reason inside a parser's message; where an option is unknown, those like it too.

    Args:
        message: What the parser says.
        options: The parser's own options.
    """
    line = _GROUP.sub(_as_record, reason(message))
    owner = _CLASS.search(line)
    if owner is not None:
        options, line = _parameters(owner[1]), _CLASS.sub("", line)
    unknown = re.search(r"unrecognized arguments: (--[^\s=]+)|(?:Option|accept option) '([^']+)'", line)
    if unknown is None:
        takes = "--help says what each option takes"
        return f"{one_line(line, 220)}; {takes}" if "expected " in line[:200] else with_fix(line)
    name = unknown[1] or unknown[2]
    prefix = "" if unknown[1] or owner else "--"
    whole = [option for option in dict.fromkeys(options) if option.startswith(prefix + name)]
    alike = whole[:4] or get_close_matches(prefix + name, list(options), n=1)
    where = f" by {owner[1].rpartition('.')[2]}" if owner else ""
    guess = f"did you mean {' or '.join(option.removeprefix(prefix) for option in alike)}? " if alike else ""
    return f"{line}{where}; {guess}--help lists the options"


def _as_record(found: re.Match[str]) -> str:
    """The complaint of a record's option as the parser words it of records that may be null."""
    group, name = found[2] or found[4], found[3] or found[5]
    record = argument_in_source(found[1], group).record
    if not record:
        return found[0]
    return f".{group}: Problem with given class_path '{record}': Option '{name}' is not accepted"


def with_fix(line: str) -> str:
    """A line of a library's with a way out, where it names none itself."""
    if "; " in line:
        return line
    unknown = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", line)
    names = public_names(unknown[1]) or dir(sys.modules.get(unknown[1])) if unknown else []
    alike = get_close_matches(unknown[2], names, n=1) if unknown else []
    guess = f"did you mean {alike[0]}? " if alike else ""
    return f"{one_line(line, 220).rstrip('.')}; {guess}--help lists the options"


def _parameters(class_path: str) -> list[str]:
    """The arguments of a class, by its path; none where it cannot be imported, or may not be."""
    module, _, name = class_path.rpartition(".")
    if not may_name(class_path):
        return []
    listed = parameters_in_source(class_path)
    if listed is not None:
        return list(listed)
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, ValueError):
        return []


def run_guarded(command: Callable[[], None]) -> int:
    """Run a command and return its exit code.

    A `UserError`, or a file where a folder is needed, ends in one line and code 2. A full disk, a refused path,
    standard output that takes no more, and what a library reports of a file or a connection end in one line and code
    74. NaN or Inf, and a process of ours that died, end in one line and code 70, Ctrl-C in one line and code 130, a
    stop signal in one line and code 75 or 143. Any other exception ends in one line with its message, and its traceback
    is in a file that the line names; the code is 2 before the command's work has begun, and 70 afterwards.
    """
    _prepare_output()
    try:
        code = _run(command)
    except SystemExit:
        # The parser ends so behind its help.
        refusal = _unwritten()
        if refusal is None:
            raise
        return _report(_output_line(refusal), EXIT_IO)
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
        # Lightning turns Ctrl-C into an exit of its own.
        if isinstance(stop.__context__, KeyboardInterrupt):
            return _report(INTERRUPTED, EXIT_INTERRUPTED)
        raise
    except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        where = _without_suffix(error.filename or "a path")
        return _report(f"{where}: {error.strerror}, so nothing can be written there; name another place", EXIT_INPUT)
    except OSError as error:
        refusal = _unwritten() if error.filename is None else None
        return _report(_io_line(error) if refusal is None else _output_line(refusal), EXIT_IO)
    except Exception as error:
        return _unforeseen(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        return _unforeseen(error)
    return EXIT_OK


def _unforeseen(error: BaseException) -> int:
    """End a command for an exception that nothing here has foreseen: one line, and a file with the traceback."""
    # torch raises it in the main process, wherever that is, as soon as the system tells of the death.
    dead = _DEAD_WORKER.search(str(error))
    if dead is not None:
        return _report(_dead_worker_line(*dead.groups()), EXIT_INTERNAL)
    path = _write_traceback(error)
    where = f"the traceback is in {path}" if path else "no folder takes its traceback"
    ranks = sys.modules.get("embeddings.strategies.ranks")
    if ranks is not None and isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        lost = ranks.lost_rank()
        if lost == "":
            return EXIT_INTERNAL
        if lost is not None:
            return _report(f"{lost}; resume with --ckpt_path, {where}", EXIT_INTERNAL)
    rank = "" if is_first_process() else f"rank {process_rank()}: "
    message = one_line(str(error), 300).rstrip(".")
    kind = type(error).__name__
    what = f"{message} ({kind})" if message else kind
    return _report(f"{rank}{what}; {where}", EXIT_INTERNAL if _was_at_work(error) else EXIT_INPUT)


def _was_at_work(error: BaseException) -> bool:
    """Whether an exception comes out of a command's work: training steps, or the function that is the command."""
    frames = traceback.walk_tb(error.__traceback__)
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) in _AT_WORK for frame, _ in frames)


def _write_traceback(error: BaseException) -> str:
    """Write an exception's traceback beside the run, or into the temporary folder; returns the file, "" for none."""
    text = f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (getattr(error, "run_folder", None), None):
        with (
            suppress(OSError),
            tempfile.NamedTemporaryFile(
                "w", prefix="traceback-", suffix=".txt", dir=folder, delete=False, encoding="utf-8", errors="replace"
            ) as file,
        ):
            file.write(text)
            return file.name
    return ""


def _dead_worker_line(processes: str, signal: str | None) -> str:
    cause = f"was ended by a signal ({signal})" if signal else "exited"
    fix = "lower data.num_workers or data.batch_size if memory ran out, and resume with --ckpt_path"
    return f"a worker of the loader, process {processes}, {cause}; {fix}"


def _io_line(error: OSError) -> str:
    """What failed and the way out; a library that raises without a number says both file and reason in its text."""
    if error.errno is None:
        what = str(error) or type(error).__name__
        return f"{what}; mend the file or the connection that this names, then run the command again"
    where = f"{_without_suffix(error.filename)}: " if error.filename else ""
    return f"{where}{error.strerror}; free or allow the path, then run the command again"


def _without_suffix(path: object) -> str:
    """A path, or that of the file that a temporary one is to become."""
    return re.sub(r"\.([^/]+)\.\w+\.tmp\b", r"\1", str(path))


def _report(message: str, code: int) -> int:
    _say(f"error: {one_line(message, 500)}")
    return code


def _say(line: str) -> None:
    """Write a line to standard error; where that is full, the exit code alone tells of the end."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _prepare_output() -> None:
    """Have the standard streams take any text: what their encoding lacks as an escape, nothing where one is closed."""
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
    """Let a stream lead nowhere: Python would fail again as it writes the rest on its way out."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
