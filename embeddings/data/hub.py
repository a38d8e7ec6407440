"""Rows of a data set on the Hugging Face Hub."""

import re
from collections.abc import Iterator
from typing import Any

from embeddings.common.errors import InputError
from embeddings.common.text import one_line
from embeddings.data.readers import Row


def resolve_revision(name: str, revision: str | None) -> str:
    """The commit that a revision of a Hub data set stands for; a full commit needs no network.

    Raises:
        InputError: If the Hub cannot be reached, or does not know the data set or the revision.
    """
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    return _ask_commit(name, revision)


def _ask_commit(name: str, revision: str | None) -> str:
    # The Hub's client is slow to import, and most runs read files.
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision, timeout=20).sha
    # The client raises the errors of several libraries, which change with its versions.
    except Exception as error:
        raise _unreachable(name, error) from error
    assert commit is not None
    return commit


class HubReader:
    """Rows of one split of a Hub data set, streamed, counted from 1.

    Args:
        name: Data set (`organisation/name`).
        subset: Its configuration, or None for its only one.
        split: Its split.
        commit: Commit to read, so that what was converted is known to the byte.

    Raises:
        InputError: While reading, if the Hub cannot be reached or the split is not there.
    """

    total_bytes = None

    def __init__(self, name: str, subset: str | None, split: str, commit: str) -> None:
        self.name, self.subset, self.split, self.commit = name, subset, split, commit
        self.bytes_read, self.unread_columns = 0, ()

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""
        # Streaming would try an unreachable Hub again for half a minute, and say so each time.
        _ask_commit(self.name, self.commit)
        rows, number = self._next_rows(), 0
        while True:
            try:
                fields = next(rows, None)
            except Exception as error:
                raise _unreachable(self.name, error) from error
            if fields is None:
                break
            number += 1
            yield Row(f"hub:{self.name}[{self.split}]:{number}", fields)
        if number == 0:
            raise InputError(f"hub:{self.name}", f"split {self.split!r} holds no rows", "choose another split")

    def _next_rows(self) -> Iterator[dict[str, Any]]:
        # Imported here because it is slow to load, and most runs read files.
        from datasets import load_dataset

        yield from load_dataset(self.name, self.subset, split=self.split, revision=self.commit, streaming=True)


def _unreachable(name: str, error: Exception) -> InputError:
    reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0], 160)
    return InputError(
        f"hub:{name}", f"cannot be read ({reason})", "check name, split and network, or download it and give its files"
    )
