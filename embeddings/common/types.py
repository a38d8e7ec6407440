"""The values that flow from floor to floor, and the legend of shape letters.

B queries on this rank · C candidates · N texts in a token batch · L tokens of the longest text · T tokens in all ·
H hidden size · D embedding width · S width of a surrogate's vectors · A attention heads · X experts ·
K experts a token · R ranks · M context documents.
Tensor names carry them: `query_BD`, `score_BC`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PaddedTokens(NamedTuple):
    """Texts padded on the right to one length, as a backbone takes them.

    Attributes:
        input_ids_NL: Token ids, (N, L) int64.
        attention_mask_NL: True where there is a token, (N, L) bool.
        pooling_mask_NL: True where a token enters the pooling (no padding, no excluded prompt), (N, L) bool.
    """

    input_ids_NL: Tensor
    attention_mask_NL: Tensor
    pooling_mask_NL: Tensor


@dataclass(slots=True, eq=False)
class TokenBatch:
    """Texts as one ragged row of tokens: nothing is padded until a mini-batch is cut.

    Never changed once made; it is not frozen only because Lightning refuses to walk frozen dataclasses.

    Attributes:
        input_ids_T: Token ids of all texts one after another, (T,) int64.
        pooling_mask_T: True where a token enters the pooling, (T,) bool.
        lengths_N: Tokens of each text, (N,) int64, always on the processor: planning costs no synchronisation.
    """

    input_ids_T: Tensor
    pooling_mask_T: Tensor
    lengths_N: Tensor

    def __len__(self) -> int:
        """Number of texts, N."""
        return int(self.lengths_N.numel())

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all texts, T."""
        return int(self.input_ids_T.numel())

    @property
    def device(self) -> torch.device:
        """Where the tokens lie."""
        return self.input_ids_T.device

    @classmethod
    def from_lists(cls, input_ids: Sequence[Sequence[int]], pooling_mask: Sequence[Sequence[bool]]) -> "TokenBatch":
        """A token batch of lists; `pooling_mask[i]` is as long as `input_ids[i]`."""
        return cls(
            torch.tensor([token for text in input_ids for token in text], dtype=torch.int64),
            torch.tensor([flag for text in pooling_mask for flag in text], dtype=torch.bool),
            torch.tensor([len(text) for text in input_ids], dtype=torch.int64),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TokenBatch":
        """The same texts with their tokens on `device`; the lengths stay on the processor."""
        ids, mask = self.input_ids_T, self.pooling_mask_T
        return TokenBatch(
            ids.to(device, non_blocking=non_blocking), mask.to(device, non_blocking=non_blocking), self.lengths_N
        )

    def pin_memory(self) -> "TokenBatch":
        """The same texts in page-locked memory."""
        return TokenBatch(self.input_ids_T.pin_memory(), self.pooling_mask_T.pin_memory(), self.lengths_N)

    def padded(self, rows_N: Tensor | None = None, pad_token_id: int = 0) -> PaddedTokens:
        """Some texts (all when `rows_N` is None), in the order given, padded on the right to the longest of them.

        Args:
            rows_N: Indices of texts, (n,) int64 on the processor.
            pad_token_id: Id that fills the padding.
        """
        lengths_n = self.lengths_N if rows_N is None else self.lengths_N[rows_N]
        starts_N = torch.cumsum(self.lengths_N, 0) - self.lengths_N
        starts_n = starts_N if rows_N is None else starts_N[rows_N]
        position_L = torch.arange(int(lengths_n.max()) if len(lengths_n) else 0)
        attention_NL = position_L[None, :] < lengths_n[:, None]
        index_NL = torch.where(attention_NL, starts_n[:, None] + position_L[None, :], 0)
        attention_NL, index_NL = attention_NL.to(self.device), index_NL.to(self.device)
        if self.num_tokens == 0:
            empty = torch.full(attention_NL.shape, pad_token_id, dtype=torch.int64, device=self.device)
            return PaddedTokens(empty, attention_NL, attention_NL)
        ids_NL = torch.where(attention_NL, self.input_ids_T[index_NL], pad_token_id)
        return PaddedTokens(ids_NL, attention_NL, self.pooling_mask_T[index_NL] & attention_NL)


@dataclass(slots=True, eq=False)
class ContrastiveBatch:
    """Queries, candidates, and what a loss needs to know of each text. Nothing in it depends on a method.

    Attributes:
        query: The queries, B texts.
        candidate: The candidates, C texts: the positives of query 0 … B-1 first, then the negatives.
        positive_index_B: For each query its positive's row among the candidates, (B,) int64.
        owner_C: For each candidate the row of the query it was drawn for, (C,) int64.
        query_hash_B: Hash of each query's text without its prompt (`fileio.text_hash`), (B,) int64.
        candidate_hash_C: The same of each candidate, (C,) int64.
        known_positive_hash_BP: Hashes of every known positive of each query, the first repeated to fill, (B, P) int64.
        source_B: Index of the data source of each query, (B,) int64; a candidate has its owner's.
        query_label_B: Class of each query within its source, -1 where it has none, (B,) int64.
        candidate_label_C: Class of each candidate within its source, -1 where it has none, (C,) int64.
        in_batch_B: True where the query's source allows candidates of other queries as negatives, (B,) bool.
        row_B: Row of each query in the mixture, (B,) int64: what a ledger of consumed examples records.
        context: Documents that every text of the batch is read beside, M texts; None where a method has no such stage.
        surrogate_query_BS: Vector of each query by another model, NaN where its source has none, (B, S) float32; None
            where no source has.
        surrogate_candidate_CS: The same of each candidate, (C, S) float32.
        num_extra_tokens: Positions that the encoder reads before each text beside its tokens: every slot of a context,
            filled or not, and soft prompts. What mini-batches are cut by.
        negative_level: Level of hard negatives that a curriculum asks for at this step, 1 (hardest) to 4 (easiest); 0
            where there is no curriculum.
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

    def __len__(self) -> int:
        """Number of queries, B."""
        return len(self.query)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ContrastiveBatch":
        """The same batch on `device`."""
        return self._each(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "ContrastiveBatch":
        """The same batch in page-locked memory."""
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> "ContrastiveBatch":
        values: Iterator[Any] = (getattr(self, name) for name in self.__dataclass_fields__)
        changed: list[Any] = [value if value is None or isinstance(value, int) else change(value) for value in values]
        return ContrastiveBatch(*changed)


@dataclass(frozen=True, slots=True, eq=False)
class Representations:
    """What a method computes of each text.

    Attributes:
        vector_ND: One vector a text, (N, D) float; concatenated over mini-batches.
        statistics: Tensors that are summed over mini-batches, such as router counts; empty for most methods.
    """

    vector_ND: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


class LossOutput(NamedTuple):
    """A loss and its parts.

    Attributes:
        loss: The value to minimise, () float32, the mean over this rank's B queries.
        terms: Detached scalars for logging, by name (`train/loss_<name>`).
    """

    loss: Tensor
    terms: dict[str, Tensor]
