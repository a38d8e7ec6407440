"""Queries line by line from standard input."""

import sys
from collections.abc import Callable, Iterator
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
    for number, query in enumerate(_lines(), start=1):
        if not query.strip():
            break
        try:
            query.encode()
        except UnicodeEncodeError:
            raise _not_text(number) from None
        start = perf_counter()
        answer(query.strip())
        print(f"       {1000 * (perf_counter() - start):.0f} ms", flush=True)


def _lines() -> Iterator[str]:
    """The lines of standard input; a person is shown where to type."""
    number = 0
    while True:
        if is_terminal():
            print("query> ", end="", file=sys.stderr, flush=True)
        number += 1
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise _not_text(number) from None
        if not line:
            return
        yield line


def _not_text(number: int) -> InputError:
    return InputError(f"standard input:{number}", "is not valid UTF-8", "write it as UTF-8")
