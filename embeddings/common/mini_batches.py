"""Mini-batches by token budget from length-sorted texts, so that padding all but vanishes."""

import torch
from torch import Tensor

from embeddings.common.errors import OptionError
from embeddings.common.types import TokenBatch


def plan_mini_batches(lengths_N: Tensor, mini_batch_tokens: int, max_texts: int | None = None) -> list[Tensor]:
    """Cut texts into mini-batches whose padded size stays within a token budget.

    Texts are taken from the longest to the shortest (ties in their order), so the first mini-batch needs the most
    memory: a run that does not fit fails at once, not hours later. Each text is in exactly one mini-batch.

    Args:
        lengths_N: Tokens of each text, (N,) int64 on the processor.
        mini_batch_tokens: Most padded tokens (texts x longest text) of a mini-batch. A text longer than this is alone.
        max_texts: Most texts of a mini-batch, or None for no such limit.

    Returns:
        For each mini-batch the rows of its texts, (n,) int64.

    Raises:
        OptionError: If a limit is not positive.
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
    """Some texts of a token batch as a token batch, in the order given.

    Args:
        tokens: N texts.
        rows_n: Indices of texts, (n,) int64 on the processor.
        max_length: Most tokens of a text, from its start; None cuts nothing. A cut text may lose all pooled tokens.
    """
    lengths_n = tokens.lengths_N[rows_n]
    if max_length is not None:
        lengths_n = lengths_n.clamp(max=max_length)
    starts_n = (torch.cumsum(tokens.lengths_N, 0) - tokens.lengths_N)[rows_n]
    shift_n = starts_n - (torch.cumsum(lengths_n, 0) - lengths_n)
    index_T = torch.arange(int(lengths_n.sum())) + torch.repeat_interleave(shift_n, lengths_n)
    index_T = index_T.to(tokens.device, non_blocking=True)
    return TokenBatch(tokens.input_ids_T[index_T], tokens.pooling_mask_T[index_T], lengths_n)
