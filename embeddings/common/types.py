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

from embeddings.common.errors import OptionError


def queues_work(device: torch.device | str) -> bool:
    """Whether a device runs asynchronously, so that reading a value from it waits for all queued work."""
    return torch.device(device).type != "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to `device`; for CUDA asynchronously, from page-locked memory."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class PaddedTokens(NamedTuple):
    """Texts padded on the right to one length, the input of a backbone.

    Attributes:
        input_ids_NL: Token ids, (N, L) int64.
        attention_mask_NL: True where there is a token, (N, L) bool.
        pooling_mask_NL: True where a token enters the pooling, (N, L) bool.
    """

    input_ids_NL: Tensor
    attention_mask_NL: Tensor
    pooling_mask_NL: Tensor


class _Movable:
    """A dataclass whose tensors move together, except the fields in `_ON_CPU`."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _ON_CPU: ClassVar[tuple[str, ...]] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._each(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> Self:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name, value in values.items():
            if isinstance(value, Tensor | _Movable) and name not in self._ON_CPU:
                values[name] = change(value)
        return type(self)(**values)


@dataclass(slots=True, eq=False)
class TokenBatch(_Movable):
    """Texts as one ragged row of tokens; padding is added only when a mini-batch is formed.

    Attributes:
        input_ids_T: Concatenated token ids of all texts, (T,) int64.
        pooling_mask_T: True where a token enters the pooling, (T,) bool.
        lengths_N: Number of tokens of each text, (N,) int64, always on the CPU, so planning needs no synchronisation.
        device_lengths_N: A copy of the lengths on the tokens' device, (N,) int64; None for tokens in host memory.
    """

    _ON_CPU = ("lengths_N",)

    input_ids_T: Tensor
    pooling_mask_T: Tensor
    lengths_N: Tensor
    device_lengths_N: Tensor | None = None

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
    """Queries, candidates, and the facts about each text that a loss needs. Independent of the method.

    Attributes:
        query: The queries, B texts.
        candidate: The candidates, C texts: the positives of query 0 … B-1 first, then the negatives.
        positive_index_B: Row of each query's positive among the candidates, (B,) int64.
        owner_C: Row of the query that each candidate was sampled for, (C,) int64.
        query_hash_B: Hash of each query's text without its prompt (`io.text_hash`), (B,) int64.
        candidate_hash_C: The same for each candidate, (C,) int64.
        known_positive_hash_BP: Hashes of every known positive of each query, padded with the first one, (B, P) int64.
        source_B: Index of the data source of each query, (B,) int64; a candidate has the source of its owner.
        query_label_B: Class of each query within its source, -1 for none, (B,) int64.
        candidate_label_C: The same for each candidate, (C,) int64.
        in_batch_B: True where the query's source allows candidates of other queries as negatives, (B,) bool.
        row_B: Row of each query in the mixture of sources, (B,) int64.
        context: Context documents for all texts, M texts; None for methods without a context stage.
        surrogate_query_BS: Vector of each query by a surrogate model, (B, S) float32, NaN if its source has none; None
            if no source has them.
        surrogate_candidate_CS: The same for each candidate, (C, S) float32.
        num_extra_tokens: Positions before each text in the encoder, for context slots (filled or not) and soft
            prompts; they count towards the mini-batch size.
        negative_level: The curriculum's level of hard negatives, 1 (hardest) to 4 (easiest); 0 without a curriculum.
        teacher_score_C: A teacher's score of each candidate for its owner, (C,) float32, NaN if missing; None
            without a teacher.
        teacher_query: The queries tokenised for an online teacher, B texts; None without one.
        teacher_candidate: The same for the candidates, C texts.
    """

    query: TokenBatch
    candidate: TokenBatch
    positive_index_B: Tensor
    owner_C: Tensor
    query_hash_B: Tensor
    candidate_hash_C: Tensor
    known_positive_hash_BP: Tensor
    source_B: Tensor
    query_label_B: Tensor
    candidate_label_C: Tensor
    in_batch_B: Tensor
    row_B: Tensor
    context: TokenBatch | None = None
    surrogate_query_BS: Tensor | None = None
    surrogate_candidate_CS: Tensor | None = None
    num_extra_tokens: int = 0
    negative_level: int = 0
    teacher_score_C: Tensor | None = None
    teacher_query: TokenBatch | None = None
    teacher_candidate: TokenBatch | None = None

    def __len__(self) -> int:
        return len(self.query)


@dataclass(frozen=True, slots=True, eq=False)
class Representations:
    """The outputs of a method for each text.

    Attributes:
        vector_ND: One vector per text, (N, D) float; concatenated over mini-batches.
        statistics: Tensors summed over mini-batches, such as router counts.
    """

    vector_ND: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


class LossOutput(NamedTuple):
    """A loss and its parts.

    Attributes:
        loss: The value to minimise, () float32, the mean over this rank's B queries.
        terms: Detached scalars for logging, by name (`train/<name>`).
    """

    loss: Tensor
    terms: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class PackedRows(_Movable):
    """Rows of equal length, split from a concatenation of documents.

    Attributes:
        input_ids_NL: Token ids, (N, L) int64; the last row of a corpus is padded.
        document_NL: Index of each token's document within its row, from 0, and -1 for padding, (N, L) int64.
        special_NL: True at padding and at the tokenizer's special tokens, (N, L) bool.
        draw_N: Random key of each row, (N,) int64, always on the CPU.
        row_N: Index of each row in the mixture of sources, (N,) int64, always on the CPU.
    """

    _ON_CPU = ("draw_N", "row_N")

    input_ids_NL: Tensor
    document_NL: Tensor
    special_NL: Tensor
    draw_N: Tensor
    row_N: Tensor

    def __len__(self) -> int:
        return len(self.input_ids_NL)


@dataclass(slots=True, eq=False)
class Prediction(_Movable):
    """The input of a language model, the tokens to predict, and the states that predict them.

    Attributes:
        input_ids_NL: Input token ids, after masking, (N, L) int64.
        document_NL: As in `PackedRows`.
        read_P: Index of the state that predicts each target, in the flattened N·L states, (P,) int64.
        label_P: The token to predict, (P,) int64.
        has_padding: Whether any token is padding; known without reading from the device.
        row_N: Index of each row in the mixture of sources, (N,) int64, always on the CPU.
    """

    _ON_CPU = ("row_N",)

    input_ids_NL: Tensor
    document_NL: Tensor
    read_P: Tensor
    label_P: Tensor
    has_padding: bool
    row_N: Tensor

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
        if limit is not None and limit < 1:
            raise OptionError(name, limit, "must be >= 1", "try 4096 tokens; a larger budget needs more memory")
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
