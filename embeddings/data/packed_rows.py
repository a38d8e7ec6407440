"""Rows of all streams as one data set, and the batch that some of them make."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embeddings.common.packed_rows import PackedRows
from embeddings.data.examples import RowDraw
from embeddings.data.token_stream import TokenStream


class TokenRow(NamedTuple):
    """One row: its tokens, which document of the row each is of, the key of its random choices, and its number."""

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    draw: int
    row: int


class RowMixture:
    """The rows of all sources one after another; no row holds tokens of two sources.

    Determinism: a row is a pure function of the streams and its number.
    Guarantees: it can be pickled and forked, since its streams can.

    Args:
        streams: The sources' tokens.
        row_length: Tokens of a row, L.
    """

    def __init__(self, streams: Sequence[TokenStream], row_length: int) -> None:
        self.streams, self.row_length = tuple(streams), row_length
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        """Number of rows of all sources."""
        return self._starts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each source."""
        return tuple(stream.num_rows(self.row_length) for stream in self.streams)

    def __getitem__(self, entry: RowDraw) -> TokenRow:
        """The row of an entry of a plan; a negative number stands for a row of padding alone."""
        if entry.row < 0:
            none = np.empty(0, dtype=np.int64)
            return TokenRow(none, none, entry.draw, entry.row)
        source = bisect_right(self._starts, entry.row) - 1
        ids, documents = self.streams[source].row(entry.row - self._starts[source], self.row_length)
        return TokenRow(ids, documents, entry.draw, entry.row)


class RowCollator:
    """Makes `PackedRows` of rows, shorter ones padded on the right, and hands them to a task where there is one.

    Determinism: a batch is a pure function of its rows; neither rank nor worker enters.

    Args:
        tokenizer: Says which ids are special, and which one is padding.
        row_length: Tokens of a row, L.
        task: What is made of the packed rows; None leaves them as they are.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, row_length: int, task: Callable[[PackedRows], Any] | None = None
    ) -> None:
        self._special_ids = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        pad = tokenizer.pad_token_id
        self._pad_id = pad if isinstance(pad, int) else 0
        self.row_length, self.task = row_length, task

    def __call__(self, rows: Sequence[TokenRow]) -> Any:
        """The batch of N rows."""
        input_ids_NL = torch.full((len(rows), self.row_length), self._pad_id, dtype=torch.int64)
        document_NL = torch.full_like(input_ids_NL, -1)
        for place, row in enumerate(rows):
            input_ids_NL[place, : len(row.ids)] = torch.from_numpy(row.ids)
            document_NL[place, : len(row.ids)] = torch.from_numpy(row.documents)
        special_NL = torch.isin(input_ids_NL, self._special_ids) | (document_NL < 0)
        draw_N, row_N = torch.tensor([row.draw for row in rows]), torch.tensor([row.row for row in rows])
        packed = PackedRows(input_ids_NL, document_NL, special_NL, draw_N, row_N)
        return packed if self.task is None else self.task(packed)
