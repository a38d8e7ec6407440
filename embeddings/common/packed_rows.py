"""Rows of tokens in which documents lie back to back, and what a language model is to predict in them.

N rows · L tokens a row · P predicted tokens (see `types` for the other letters).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class PackedRows:
    """Rows of one length, cut from documents that follow each other without a gap.

    Never changed once made; not frozen only because Lightning refuses to walk frozen dataclasses.

    Attributes:
        input_ids_NL: Token ids, (N, L) int64; the last row of a corpus is filled up with padding.
        document_NL: Which document of its row a token is of, counted from 0, and -1 for padding, (N, L) int64.
        special_NL: True at padding and at the tokenizer's special tokens, (N, L) bool.
        draw_N: Key of every random choice made for a row, (N,) int64.
        row_N: Row of each in the mixture, (N,) int64.
    """

    input_ids_NL: Tensor
    document_NL: Tensor
    special_NL: Tensor
    draw_N: Tensor
    row_N: Tensor

    def __len__(self) -> int:
        """Number of rows, N."""
        return len(self.input_ids_NL)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedRows":
        """The same on `device`; keys and numbers stay on the processor."""
        ids_NL, document_NL, special_NL = (
            tensor.to(device, non_blocking=non_blocking)
            for tensor in (self.input_ids_NL, self.document_NL, self.special_NL)
        )
        return PackedRows(ids_NL, document_NL, special_NL, self.draw_N, self.row_N)


@dataclass(slots=True, eq=False)
class Prediction:
    """What a model reads and which tokens it is to predict from which of its states.

    Attributes:
        input_ids_NL: Token ids as the model reads them, (N, L) int64.
        document_NL: As in `PackedRows`.
        read_P: The state that predicts each target, as its place in the N·L states laid end to end, (P,) int64.
        label_P: The token to predict, (P,) int64.
        has_padding: Whether any token is padding, known without asking the device.
        row_N: Row of each in the mixture, (N,) int64, always on the processor.
    """

    input_ids_NL: Tensor
    document_NL: Tensor
    read_P: Tensor
    label_P: Tensor
    has_padding: bool
    row_N: Tensor

    def __len__(self) -> int:
        """Number of tokens to predict, P."""
        return len(self.label_P)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Prediction":
        """The same on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Prediction":
        """The same in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Prediction":
        ids_NL, document_NL = change(self.input_ids_NL), change(self.document_NL)
        read_P, label_P = change(self.read_P), change(self.label_P)
        return Prediction(ids_NL, document_NL, read_P, label_P, self.has_padding, self.row_N)


def positions_in_document(document_NL: Tensor) -> Tensor:
    """How many tokens of its own document stand before each token in its row, (N, L) int64.

    A document that began in an earlier row counts from 0 again: what lies there is not seen.
    """
    index_L = torch.arange(document_NL.shape[1], device=document_NL.device)
    begins_NL = torch.ones_like(document_NL, dtype=torch.bool)
    begins_NL[:, 1:] = document_NL[:, 1:] != document_NL[:, :-1]
    start_NL = torch.where(begins_NL, index_L, 0).cummax(dim=1).values
    return index_L - start_NL
