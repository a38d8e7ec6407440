"""The data types that packages exchange, and the legend of shape letters.

B queries on this rank · C candidates · N texts in a token batch · L tokens of the longest text · T tokens in total ·
H hidden size · D embedding width · S width of a surrogate's vectors · A attention heads · X experts ·
K experts a token · R ranks · M context documents.
Tensor names carry them: `query_BD`, `score_BC`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from embeddings.common.errors import require_minimum


def queues_work(device: torch.device | str) -> bool:
    """Whether a device runs asynchronously, so that reading a value from it waits for all queued work."""
    return torch.device(device).type != "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to `device`; for CUDA asynchronously, from page-locked memory."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class PaddedTokens(NamedTuple):
    """Texts padded on the right to one length, the input of a backbone."""

    input_ids_NL: Tensor  # int64
    attention_mask_NL: Tensor  # bool, true where there is a token
    pooling_mask_NL: Tensor  # bool, true where a token enters the pooling


class _Movable:
    """A dataclass whose tensors move together, except those in `_ON_CPU`; Lightning cannot traverse frozen ones."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _ON_CPU: ClassVar[tuple[str, ...]] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._each(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Any], Any], without: Sequence[str] = ()) -> Self:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name, value in values.items():
            if isinstance(value, Tensor | _Movable) and name not in (*self._ON_CPU, *without):
                values[name] = change(value)
        return type(self)(**values)


@dataclass(slots=True, eq=False)
class TokenBatch(_Movable):
    """Texts as one ragged row of tokens; padding is added only when a mini-batch is formed."""

    _ON_CPU = ("lengths_N",)

    input_ids_T: Tensor  # concatenated token ids of all texts, int64
    pooling_mask_T: Tensor  # bool, true where a token enters the pooling
    lengths_N: Tensor  # tokens of each text, int64, always on the CPU, so planning needs no synchronisation
    device_lengths_N: Tensor | None = None  # a copy on the tokens' device; None for tokens in host memory

    def __len__(self) -> int:
        return int(self.lengths_N.numel())

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids_T.numel())

    @property
    def device(self) -> torch.device:
        return self.input_ids_T.device

    @classmethod
    def from_lists(cls, input_ids: Sequence[Sequence[int]], pooling_mask: Sequence[Sequence[bool]]) -> "TokenBatch":
        return cls(
            torch.tensor([token for text in input_ids for token in text], dtype=torch.int64),
            torch.tensor([flag for text in pooling_mask for flag in text], dtype=torch.bool),
            torch.tensor([len(text) for text in input_ids], dtype=torch.int64),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        copy = _Movable.to(self, device, non_blocking)
        if copy.device_lengths_N is None and copy.device.type != "cpu":
            copy.device_lengths_N = moved(self.lengths_N, copy.device)
        return copy

    def moved(self, device: torch.device) -> "TokenBatch":
        """The texts on `device`, copied as by `moved` if they are in host memory."""
        if self.device == device:
            return self
        ids_T, mask_T, lengths_N = (
            moved(each, device) for each in (self.input_ids_T, self.pooling_mask_T, self.lengths_N)
        )
        return TokenBatch(ids_T, mask_T, self.lengths_N, lengths_N)

    def padded(self, rows_N: Tensor | None = None, pad_token_id: int = 0, length: int | None = None) -> PaddedTokens:
        """Texts `rows_N`, (n,) int64 on the CPU, or all, padded on the right to `length` or to the longest text."""
        lengths_n = self.lengths_N if rows_N is None else self.lengths_N[rows_N]
        starts_n, placed_n = self.placed(rows_N)
        if length is None:
            length = int(lengths_n.max()) if len(lengths_n) else 0
        position_L = torch.arange(length, device=self.device)
        attention_NL = position_L[None, :] < placed_n[:, None]
        index_NL = torch.where(attention_NL, starts_n[:, None] + position_L[None, :], 0)
        if self.num_tokens == 0:
            empty = torch.full(attention_NL.shape, pad_token_id, dtype=torch.int64, device=self.device)
            return PaddedTokens(empty, attention_NL, attention_NL)
        ids_NL = torch.where(attention_NL, self.input_ids_T[index_NL], pad_token_id)
        return PaddedTokens(ids_NL, attention_NL, self.pooling_mask_T[index_NL] & attention_NL)

    def placed(self, rows_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first token and the number of tokens of texts `rows_N`, or all, (n,) int64 on the tokens' device."""
        lengths_N = moved(self.lengths_N, self.device) if self.device_lengths_N is None else self.device_lengths_N
        starts_N = torch.cumsum(lengths_N, 0) - lengths_N
        if rows_N is None:
            return starts_N, lengths_N
        rows_n = moved(rows_N, self.device)
        return starts_N[rows_n], lengths_N[rows_n]

    def run_of_texts(self, first: int, count: int) -> "TokenBatch":
        """A range of consecutive texts, as views of the same memory."""
        start, num_tokens = (int(self.lengths_N[part].sum()) for part in (slice(first), slice(first, first + count)))
        tokens, texts = slice(start, start + num_tokens), slice(first, first + count)
        placed_N = None if self.device_lengths_N is None else self.device_lengths_N[texts]
        return TokenBatch(self.input_ids_T[tokens], self.pooling_mask_T[tokens], self.lengths_N[texts], placed_N)


@dataclass(slots=True, eq=False)
class ContrastiveBatch(_Movable):
    """Queries, candidates, and the facts about each text that a loss needs. Independent of the method."""

    query: TokenBatch  # B texts
    candidate: TokenBatch  # C texts: the positives of query 0 … B-1 first, then the negatives
    positive_index_B: Tensor  # row of each query's positive among the candidates, int64
    owner_C: Tensor  # row of the query that each candidate was sampled for, int64
    query_hash_B: Tensor  # hash of each query's text without its prompt (`io.text_hash`), int64
    candidate_hash_C: Tensor  # the same for each candidate
    known_positive_hash_BP: Tensor  # hashes of every known positive of each query, padded with the first one, int64
    source_B: Tensor  # index of the data source of each query, int64; a candidate has the source of its owner
    query_label_B: Tensor  # class of each query within its source, -1 for none, int64
    candidate_label_C: Tensor  # the same for each candidate
    in_batch_B: Tensor  # bool, true where the query's source allows candidates of other queries as negatives
    row_B: Tensor  # row of each query in the mixture of sources, int64
    context: TokenBatch | None = None  # context documents for all texts, M texts
    # Vectors by a surrogate model, float32, NaN if the source has none; None if no source has them.
    surrogate_query_BS: Tensor | None = None
    surrogate_candidate_CS: Tensor | None = None
    # Positions before each text in the encoder, for context slots (filled or not) and soft prompts.
    num_extra_tokens: int = 0
    negative_level: int = 0  # the curriculum's level, 1 (hardest) to 4 (easiest); 0 without a curriculum
    teacher_score_C: Tensor | None = None  # a teacher's score of each candidate for its owner, float32, NaN if missing
    teacher_query: TokenBatch | None = None  # the queries tokenised for an online teacher
    teacher_candidate: TokenBatch | None = None

    def __len__(self) -> int:
        return len(self.query)

    @property
    def device(self) -> torch.device:
        """The device of the loss; under GradCache the texts may stay in host memory."""
        return self.positive_index_B.device

    def without_texts_to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """A copy on `device`, except its texts: GradCache copies those of one mini-batch at a time."""
        return self._each(lambda value: value.to(device, non_blocking=non_blocking), _TEXTS)


_TEXTS = ("query", "candidate", "context")


@dataclass(frozen=True, slots=True, eq=False)
class Representations:
    """The outputs of a method for each text."""

    vector_ND: Tensor  # float, concatenated over mini-batches
    statistics: dict[str, Tensor] = field(default_factory=dict)  # summed over mini-batches, such as router counts


class LossOutput(NamedTuple):
    """A loss and its parts."""

    loss: Tensor  # () float32, the mean over this rank's B queries
    terms: dict[str, Tensor]  # detached scalars for logging, by name (`train/<name>`)


@dataclass(slots=True, eq=False)
class PackedRows(_Movable):
    """Rows of equal length, split from a concatenation of documents; the last row of a corpus is padded."""

    _ON_CPU = ("draw_N", "row_N")

    input_ids_NL: Tensor  # int64
    document_NL: Tensor  # index of each token's document within its row, from 0, and -1 for padding, int64
    special_NL: Tensor  # bool, true at padding and at the tokenizer's special tokens
    draw_N: Tensor  # random key of each row, int64
    row_N: Tensor  # index of each row in the mixture of sources, int64

    def __len__(self) -> int:
        return len(self.input_ids_NL)


@dataclass(slots=True, eq=False)
class Prediction(_Movable):
    """The input of a language model, the tokens to predict, and the states that predict them."""

    _ON_CPU = ("row_N",)

    input_ids_NL: Tensor  # after masking, int64
    document_NL: Tensor  # as in `PackedRows`
    read_P: Tensor  # index of the state that predicts each target, in the flattened N·L states, int64
    label_P: Tensor  # the token to predict, int64
    has_padding: bool  # known without reading from the device
    row_N: Tensor  # as in `PackedRows`

    def __len__(self) -> int:
        return len(self.label_P)


def positions_in_document(document_NL: Tensor) -> Tensor:
    """Position of each token within its document in the row, from 0, (N, L) int64."""
    index_L = torch.arange(document_NL.shape[1], device=document_NL.device)
    begins_NL = torch.ones_like(document_NL, dtype=torch.bool)
    begins_NL[:, 1:] = document_NL[:, 1:] != document_NL[:, :-1]
    start_NL = torch.where(begins_NL, index_L, 0).cummax(dim=1).values
    return index_L - start_NL


def plan_mini_batches(lengths_N: Tensor, mini_batch_tokens: int, max_texts: int | None = None) -> list[Tensor]:
    """Split texts into mini-batches of limited padded size (texts x longest text); the rows of each, (n,) int64.

    The longest texts come first (stable), so a run that does not fit fails at its first mini-batch. A text above the
    budget is a mini-batch by itself.

    Args:
        lengths_N: Number of tokens of each text, (N,) int64 on the CPU.
        mini_batch_tokens: Maximum number of padded tokens in a mini-batch, >= 1.
        max_texts: Maximum number of texts in a mini-batch, >= 1; None for no limit.
    """
    for name, limit in (("mini_batch_tokens", mini_batch_tokens), ("max_texts", max_texts)):
        require_minimum(name, limit, 1, "try 4096 tokens; a larger budget needs more memory", optional=True)
    order_N = torch.argsort(lengths_N, descending=True, stable=True)
    sorted_lengths = lengths_N[order_N].tolist()
    plan, start = [], 0
    while start < len(sorted_lengths):
        count = max(1, mini_batch_tokens // max(1, sorted_lengths[start]))
        if max_texts is not None:
            count = min(count, max_texts)
        plan.append(order_N[start : start + count])
        start += count
    return plan


def take_texts(tokens: TokenBatch, rows_n: Tensor, max_length: int | None = None) -> TokenBatch:
    """Texts `rows_n`, (n,) int64 on the CPU, in the given order, each truncated to `max_length` tokens."""
    lengths_n = tokens.lengths_N[rows_n]
    starts_n, placed_n = tokens.placed(rows_n)
    if max_length is not None:
        lengths_n, placed_n = lengths_n.clamp(max=max_length), placed_n.clamp(max=max_length)
    shift_n, num_tokens = starts_n - (torch.cumsum(placed_n, 0) - placed_n), int(lengths_n.sum())
    # `output_size` avoids reading the sum from the device.
    shift_T = torch.repeat_interleave(shift_n, placed_n, output_size=num_tokens)
    index_T = torch.arange(num_tokens, device=tokens.device) + shift_T
    return TokenBatch(tokens.input_ids_T[index_T], tokens.pooling_mask_T[index_T], lengths_n, placed_n)
