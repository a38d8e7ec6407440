"""How a command ends: one line on standard error, and an exit code that scripts can rely on."""

import re
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from embeddings.common import NumericError, UserError

EXIT_OK = 0
EXIT_INPUT = 2
EXIT_IO = 74
EXIT_INTERRUPTED = 130

INTERRUPTED = "interrupted; finished checkpoints and shards are kept, --ckpt_path resumes from a checkpoint"


class ConfigError(UserError):
    """A command line or config that does not parse."""


def one_line(message: str, limit: int = 300) -> str:
    """The message as one line of at most `limit` characters; what is cut is the middle, never the start or the end."""
    line = re.sub(r"\s+", " ", message).strip()
    if len(line) <= limit:
        return line
    half = (limit - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def reason(message: str) -> str:
    """The reason inside a parser's message: where a value fits none of several types, the first type's complaint."""
    while "Errors:" in message:
        found = re.search(r"\n(\s*)- (.*?)(?=\n\1- |\nGiven value|\Z)", message[message.index("Errors:") :], re.DOTALL)
        if found is None:
            break
        message = found.group(2)
    return message


def with_way_out(message: str, options: Iterable[str]) -> str:
    """The reason inside a parser's message; where an option is unknown, the known one that is written most like it.

    Args:
        message: What the parser says.
        options: The parser's own options.
    """
    line = reason(message)
    unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", line)
    if unknown is None:
        return line
    alike = get_close_matches(unknown[1], list(options), n=1)
    return f"{line}; {f'did you mean {alike[0]}? ' if alike else ''}--help lists the options"


def run_guarded(command: Callable[[], None]) -> int:
    """Run a command and return its exit code.

    A `UserError` ends in one line and code 2, a full disk or a refused path in one line and code 74, NaN or Inf in one
    line and code 70, Ctrl-C in one line and code 130. Any other exception is a defect of ours and keeps its traceback.
    """
    try:
        command()
    except (UserError, NumericError) as error:
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _report(INTERRUPTED, EXIT_INTERRUPTED)
    except SystemExit as stop:
        # Lightning turns Ctrl-C into an exit of its own.
        if isinstance(stop.__context__, KeyboardInterrupt):
            return _report(INTERRUPTED, EXIT_INTERRUPTED)
        raise
    except OSError as error:
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _report(f"{where}{error.strerror}; free or allow the path, then run the command again", EXIT_IO)
    return EXIT_OK


def _report(message: str, code: int) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return code
