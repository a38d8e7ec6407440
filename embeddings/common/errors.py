"""User errors and run failures, with the exit code of each."""

import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
DISTRIBUTION = "embedding-zoo"
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")
# The folder of the repository that this code runs from; None in an installed package, which contains the configs.
CHECKOUT = None if (PACKAGE / "lightning_configs").is_dir() else PACKAGE.parent


def program() -> str:
    """The command to call in this installation, for messages."""
    is_command = CHECKOUT is None or Path(sys.argv[0]).name == "embeddings"
    return "embeddings" if is_command else "python main.py"


def pip_install(extra: str) -> str:
    """The command that installs an extra: in a clone by name, else its requirements, as no index has this library."""
    if CHECKOUT is not None:
        return f"pip install -e '.[{extra}]'"
    stated = (line.partition(";") for line in requires(DISTRIBUTION) or ())
    return f"pip install {shlex.join(name.strip() for name, _, marker in stated if _EXTRA.findall(marker) == [extra])}"


class UserError(ValueError):
    """A mistake that the user can fix; the command line prints its one-line message and exits with `exit_code`."""

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling has only the finished message, not the arguments of `__init__`.
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
    """An option whose value is invalid or has no effect.

    Args:
        option: Its name as the user writes it (`data.batch_size`).
        value: The user's value.
        rule: The requirement (`must be > 0`).
        hint: What to do, as an imperative.
    """

    def __init__(self, option: str, value: object, rule: str, hint: str) -> None:
        super().__init__(f"{option} {rule}, got {shown(value)}; {hint}")


class SeveralErrors(UserError):
    """Several independent errors in one line."""

    # Of one that was pickled only the message is left.
    errors: Sequence[UserError] = ()

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__(f"{len(errors)} errors: {' | '.join(map(str, errors))}")
        self.errors = errors


def run_checks(checks: Iterable[Callable[[], object]]) -> None:
    """Run every check, and raise the error of the only one that failed, or one `SeveralErrors`."""
    found: dict[str, UserError] = {}
    for check in checks:
        try:
            check()
        except UserError as error:
            each = error.errors if isinstance(error, SeveralErrors) else [error]
            found |= {str(error): error for error in each if str(error) not in found}
    if found:
        errors = list(found.values())
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def refuse_given(options: Mapping[str, object], rule: str, hint: str = "leave it out") -> None:
    """Raise an `OptionError` for the first option that is not None."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(name, str(value) if isinstance(value, Path) else value, rule, hint)


def require_minimum(
    option: str, value: float | None, minimum: int, hint: str = "leave it out for the default", optional: bool = False
) -> None:
    """Refuse an option below its minimum; the parser accepts null, so without `optional` this refuses it too."""
    if not (optional if value is None else value >= minimum):
        raise OptionError(option, value, f"must be >= {minimum}", hint)


class MissingExtraError(UserError):
    """An optional library that is not installed; the message names the extra that installs it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; run: {pip_install(extra)}")


class NumericError(RuntimeError):
    """A NaN or an infinite value in a run."""

    exit_code = 70


class WorkerError(RuntimeError):
    exit_code = 70


# How a run of `fit` is resumed, at the end of the line that says why it stopped.
RESUME = "resume with --ckpt_path"


class PreemptedError(SystemExit):
    """A signal ended the run early; not an `Exception`, so that retries do not treat it as a failure.

    Args:
        why: Where the run stopped; empty on all ranks but the first.
        code: 75 if the job is requeued or the signal announces it, 130 after Ctrl-C, 143 after SIGTERM.
        checkpoint: The checkpoint that `fit` resumes from, if any.
    """

    def __init__(self, why: str, code: int, checkpoint: str | os.PathLike[str] | None = None) -> None:
        super().__init__(code)
        self.why, self.exit_code, self.checkpoint = why, code, checkpoint

    @property
    def line(self) -> str:
        """Where the run stopped and how to resume it, empty on all ranks but the first."""
        if not self.why or self.checkpoint is None:
            return self.why
        return f"{self.why}; {RESUME} {shlex.quote(os.fspath(self.checkpoint))}"


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library has panicked; its class does not inherit `Exception`."""
    return type(error).__name__ == "PanicException"


def shown(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def require(library: str, extra: str) -> ModuleType:
    """Import `library`; a `MissingExtraError` that names the extra if it is not installed."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name is not None and library.split(".")[0] == error.name.split(".")[0]:
            raise MissingExtraError(library, extra) from error
        raise
