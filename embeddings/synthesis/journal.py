"""The answers that have been paid for: a file that only grows, and survives a kill at any moment."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError
from embeddings.common.fileio import fsync_path
from embeddings.synthesis.answers import Answer


class Journal:
    """Answers by the key of their request, one JSON line each, on disk before `append` returns.

    A line that a kill cut off is dropped when the file is opened again; whatever came before it stays. One process at a
    time holds the file.

    Attributes:
        prompt_tokens: Tokens of all prompts so far, where the endpoint says.
        completion_tokens: Tokens of all answers so far.
        num_answers: Answers so far, those not counted that refuse.

    Memory: a key and a number an answer; the answers stay on disk.

    Raises:
        InputError: If another process holds the file, or a line before the last is no answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompt_tokens = self.completion_tokens = self.num_answers = 0
        self._places: dict[str, int] = {}
        is_new = not path.exists()
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InputError(
                str(path), "another process is at work on it", "wait for it, or name another folder"
            ) from None
        if is_new:
            fsync_path(path.parent)
        self._reader = open(path, "rb")  # noqa: SIM115 - closed by `close`
        try:
            self._read()
        except InputError:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of requests with an answer."""
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        """Whether a request has its answer."""
        return key in self._places

    def get(self, key: str) -> Answer | None:
        """The answer to a request, or None where there is none yet."""
        place = self._places.get(key)
        if place is None:
            return None
        self._reader.seek(place)
        return _answer_of(json.loads(self._reader.readline()))

    def append(self, key: str, answer: Answer) -> None:
        """Keep the answer to a request; it is on disk on return. A request is answered once."""
        assert key not in self._places
        # ASCII, so that half of a character in an answer can be written.
        line = json.dumps({"key": key, **answer._asdict()}).encode("ascii") + b"\n"
        place = self._file.seek(0, os.SEEK_END)
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) or 0 :]
            os.fsync(self._file.fileno())
        except OSError:
            # On a full disk the beginning of a line must not stand before the next one.
            with suppress(OSError):
                self._file.truncate(place)
            raise
        self._note(key, place, answer)

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()
        self._file.close()

    def _note(self, key: str, place: int, answer: Answer) -> None:
        self._places[key] = place
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.num_answers += answer.refused is None

    def _read(self) -> None:
        """Note where each answer lies, and cut off what a kill left behind the last whole one."""
        place = 0
        for number, line in enumerate(self._reader, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                fields = json.loads(line)
                key, answer = fields["key"], _answer_of(fields)
            except (ValueError, KeyError, TypeError):
                if self._reader.read(1):
                    raise InputError(
                        f"{self.path}:{number}", "is no answer", "take the line out, or name another folder"
                    ) from None
                break
            if key not in self._places:
                self._note(key, place, answer)
            place += len(line)
        self._file.truncate(place)


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """A journal, closed on leaving."""
    journal = Journal(path)
    try:
        yield journal
    finally:
        journal.close()


def _answer_of(fields: dict[str, Any]) -> Answer:
    return Answer(**{name: fields[name] for name in Answer._fields})
