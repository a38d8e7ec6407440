"""Queries line by line from standard input."""

import io
import sys
from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter

from embeddings.common import InputError


def is_terminal() -> bool:
    """Whether a person can type queries."""
    return sys.stdin is not None and sys.stdin.isatty()


def answer_lines(answer: Callable[[str], None]) -> None:
    """Answer queries until the end of the input or an empty line, each with the time that it took.

    Args:
        answer: Prints the answer to a query.

    Raises:
        InputError: If a line is not UTF-8.
    """
    for query in _lines():
        if not query.strip():
            break
        start = perf_counter()
        answer(query.strip())
        print(f"       {1000 * (perf_counter() - start):.0f} ms", flush=True)


def _lines() -> Iterator[str]:
    """The lines of standard input, none where it is closed; a person is shown where to type."""
    # The bytes: text is decoded ahead, and would fail on a line that is not asked for yet.
    stream = io.BytesIO() if sys.stdin is None else sys.stdin.buffer
    for number in count(1):
        if is_terminal():
            print("query> ", end="", file=sys.stderr, flush=True)
        line = stream.readline()
        if not line:
            return
        try:
            query = line.decode()
        except UnicodeDecodeError:
            raise InputError(f"standard input:{number}", "is not valid UTF-8", "write it as UTF-8") from None
        yield query
