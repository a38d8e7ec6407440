"""Errors that people cause, and the exit code each one ends a command with."""

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
DISTRIBUTION = "embedding-zoo"
# The folder of the repository that this code runs from; None in an installed package, which holds the configs itself.
CHECKOUT = None if (PACKAGE / "lightning_configs").is_dir() else PACKAGE.parent


def program() -> str:
    """How the command line is called here, for lines that a person copies."""
    is_command = CHECKOUT is None or Path(sys.argv[0]).name == "embeddings"
    return "embeddings" if is_command else "python main.py"


def pip_install(extra: str) -> str:
    """The line that installs an extra of this library."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if CHECKOUT is None else f"pip install -e '.[{extra}]'"


class UserError(ValueError):
    """A mistake that a person can mend; the command line prints its one line and exits with `exit_code`.

    Raise it at the border where a human wrote the value; inside the library trust the types.
    """

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that gets the error has no parts to make the line of.
        return UserError.__new__, (type(self), *self.args)


class InputError(UserError):
    """A file or record that cannot be used.

    Args:
        where: File and row (`train.jsonl:17`), or the option that named the file.
        what: The rule and the value that broke it.
        hint: What to do, as an imperative.
    """

    def __init__(self, where: str, what: str, hint: str) -> None:
        super().__init__(f"{where}: {what}; {hint}")


class OptionError(UserError):
    """An option whose value is impossible, or cannot take effect.

    Args:
        option: Its name as the user writes it (`data.batch_size`).
        value: What was given.
        rule: What must hold (`must be > 0`).
        hint: What to do, as an imperative.
    """

    def __init__(self, option: str, value: object, rule: str, hint: str) -> None:
        super().__init__(f"{option} {rule}, got {shown(value)}; {hint}")


def refuse_given(options: Mapping[str, object], rule: str, hint: str = "leave it out") -> None:
    """Raise an `OptionError` for the first of some options that is given, that is, not None."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(name, str(value) if isinstance(value, Path) else value, rule, hint)


class MissingExtraError(UserError):
    """A library that is optional and not installed, and the extra of this package that brings it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; run: {pip_install(extra)}")


class NumericError(RuntimeError):
    """A run whose numbers went wrong (NaN, Inf)."""

    exit_code = 70


class WorkerError(RuntimeError):
    """A process that worked for this one and died, or met an error that nobody foresaw."""

    exit_code = 70


class PreemptedError(SystemExit):
    """A run that a signal ended early; no `Exception`, so that retries do not take it for a failure.

    Args:
        line: What was kept and how to resume, for standard error; empty on all ranks but the first.
        code: 75 where the job is queued again or the signal says that it will be, 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, line: str, code: int) -> None:
        super().__init__(code)
        self.line, self.exit_code = line, code


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has panicked; the exception's class cannot be imported, and is no Exception."""
    return type(error).__name__ == "PanicException"


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Inside, a panic of a library written in Rust is a RuntimeError, and its backtrace on stderr is dropped.

    Standard error is held back meanwhile; without a panic it follows afterwards.
    """
    try:
        standard_error = os.dup(2)
    except OSError:  # it is closed
        standard_error = -1
    is_dropped = False
    with tempfile.TemporaryFile() as held:
        try:
            if standard_error >= 0:
                os.dup2(held.fileno(), 2)
            yield
        except BaseException as error:
            if not is_panic(error):
                raise
            is_dropped = True
            raise RuntimeError(str(error)) from error
        finally:
            if standard_error >= 0:
                if sys.stderr is not None:
                    sys.stderr.flush()
                os.dup2(standard_error, 2)
                os.close(standard_error)
                held.seek(0)
                if not is_dropped:
                    os.write(2, held.read())


def shown(value: object, most: int = 60) -> str:
    """A value in a message: of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def require(library: str, extra: str) -> ModuleType:
    """The module `library`, imported now; a `MissingExtraError` that names the extra where it is not installed."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name is not None and library.split(".")[0] == error.name.split(".")[0]:
            raise MissingExtraError(library, extra) from error
        raise
