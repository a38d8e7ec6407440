"""Cross-entropies over a vocabulary: tokens predicted from hidden states, and a text's words from its vector."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embeddings.common import LossOutput, TokenBatch
from embeddings.common.distributed import is_distributed
from embeddings.losses.info_nce import working_dtype

Head = Callable[[Tensor], Tensor]


def token_cross_entropy(
    state_PH: Tensor, label_P: Tensor, head: Head, tile_positions: int, num_targets: float | None = None
) -> LossOutput:
    """The mean cross-entropy of P tokens, each predicted from one state, with the term `accuracy`.

    Logits are computed one tile at a time, in float32, and again in the backward pass if there are several tiles.

    Args:
        state_PH: The state that predicts each token, (P, H) float.
        label_P: The tokens, (P,) int64.
        head: Maps states, (p, H), to logits over the vocabulary, (p, V); deterministic (no dropout).
        tile_positions: Maximum number of states whose logits are in memory at once, >= 1.
        num_targets: Divisor of the sums, the mean number of targets per rank; None for P.
    """
    dtype = working_dtype(state_PH)
    total, correct = state_PH.new_zeros((), dtype=dtype), torch.zeros((), dtype=torch.int64, device=state_PH.device)
    tiles = list(zip(torch.split(state_PH, tile_positions), torch.split(label_P, tile_positions), strict=True))
    for state_pH, label_p in tiles:
        if len(tiles) > 1 and torch.is_grad_enabled():
            tile_sum, tile_correct = checkpoint(_tile, state_pH, label_p, head, use_reentrant=False)
        else:
            tile_sum, tile_correct = _tile(state_pH, label_p, head)
        total, correct = total + tile_sum, correct + tile_correct
    count = max(1.0, len(label_P) if num_targets is None else num_targets)
    return LossOutput(total / count, {"accuracy": correct / count})


def _tile(state_pH: Tensor, label_p: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies, and the number of correct predictions."""
    logit_pV = head(state_pH)
    logit_pV = logit_pV.to(working_dtype(logit_pV))
    return F.cross_entropy(logit_pV, label_p, reduction="sum"), (logit_pV.argmax(dim=-1) == label_p).sum()


# Texts whose logits over the vocabulary are in memory at once.
_TILE = 256
# The logit of each word of a text if the text's vector is the sum of orthogonal word vectors.
_LOGIT = 3.0
# Count of a word that has not occurred yet, so that its log is finite.
_UNSEEN = 0.01


class WordPrediction(nn.Module):
    """The cross-entropy between the uniform distribution over a text's distinct tokens and a predicted softmax.

    The logit of token v is 3 sqrt(W) cos(text's vector, v's row of a fixed table) + log(number of texts so far with v).
    W is the number of the text's distinct tokens: no vector has a cosine above 1 / sqrt(W) with each of W orthogonal
    rows. The log counts predict frequent words without the vector. Rows are centred over the vocabulary, so that a
    component that all vectors share does not help.

    Args:
        table_VH: A vector for each token id, (V, H) float: the word embeddings of the model that consumes the vectors.
        special_ids: Tokens that are not predicted, such as [CLS].

    Source: this project; neither the CDE paper nor its release has it.
    """

    def __init__(self, table_VH: Tensor, special_ids: Iterable[int]) -> None:
        super().__init__()
        table_VH = table_VH.detach().float()
        # Not buffers: DDP broadcasts buffers in every step.
        self.table_VH = F.normalize(table_VH - table_VH.mean(dim=0), dim=-1)
        self.is_word_V = torch.ones(len(table_VH), dtype=torch.bool)
        self.is_word_V[list(special_ids)] = False
        self.count_V: Tensor
        # Integers, which `bf16-true` does not round.
        self.register_buffer("count_V", torch.zeros(len(table_VH), dtype=torch.int64))

    def forward(self, vector_NH: Tensor, tokens: TokenBatch) -> Tensor:
        """The mean cross-entropy, (), over the texts that have a target; `count_V` is updated first."""
        device, num_texts = vector_NH.device, len(tokens)
        self.table_VH, self.is_word_V = self.table_VH.to(device), self.is_word_V.to(device)
        _, lengths_N = tokens.placed()
        text_N = torch.arange(num_texts, device=device)
        text_T = torch.repeat_interleave(text_N, lengths_N, output_size=tokens.num_tokens)
        is_target_T = tokens.pooling_mask_T & self.is_word_V[tokens.input_ids_T]
        distinct_2W: Tensor = torch.stack([text_T, tokens.input_ids_T])[:, is_target_T]
        text_W, word_W = torch.unique(distinct_2W, dim=1)
        count_N = _counted(text_W, num_texts)
        self._count(word_W)
        with torch.autocast(device.type, enabled=False):
            unit_NH = F.normalize(vector_NH.to(working_dtype(vector_NH)), dim=-1)
            prior_V = (self.count_V + _UNSEEN).log().masked_fill(~self.is_word_V, -torch.inf).to(unit_NH.dtype)
            scaled_NH = _LOGIT * count_N.to(unit_NH.dtype).sqrt()[:, None] * unit_NH
            logit_W = (scaled_NH[text_W] * self.table_VH[word_W].to(unit_NH.dtype)).sum(dim=1) + prior_V[word_W]
            mean_N = torch.zeros_like(unit_NH[:, 0]).index_add(0, text_W, logit_W) / count_N.clamp(min=1)
            tiles = [
                checkpoint(self._log_sum, tile_nH, prior_V, use_reentrant=False, preserve_rng_state=False)
                for tile_nH in torch.split(scaled_NH, _TILE)
            ]
            has_target_N = count_N > 0
            loss_N = torch.where(has_target_N, torch.cat(tiles) - mean_N, 0.0)
            return loss_N.sum() / has_target_N.sum().clamp(min=1)

    def _count(self, word_W: Tensor) -> None:
        """Add the distinct words of all ranks' texts to `count_V`."""
        new_V = _counted(word_W, len(self.count_V))
        if is_distributed():
            torch.distributed.all_reduce(new_V)
        self.count_V += new_V

    def _log_sum(self, scaled_nH: Tensor, prior_V: Tensor) -> Tensor:
        logit_nV = scaled_nH @ self.table_VH.T.to(scaled_nH.dtype) + prior_V
        return logit_nV.logsumexp(dim=1)


def _counted(index_P: Tensor, number: int) -> Tensor:
    """How often each index below `number` occurs, (number,) int64; `torch.bincount` would synchronise with a GPU."""
    count = torch.zeros(number, dtype=torch.int64, device=index_P.device)
    return count.scatter_add_(0, index_P, torch.ones_like(index_P))
