"""Cross-entropy of predicted tokens, computed at the predicted places only and in tiles of them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embeddings.common import LossOutput
from embeddings.losses.similarity import working_dtype

Head = Callable[[Tensor], Tensor]


def token_cross_entropy(
    state_PH: Tensor, label_P: Tensor, head: Head, tile_positions: int, num_targets: float | None = None
) -> LossOutput:
    """The mean cross-entropy of P tokens, each predicted from one state.

    The states were gathered before the head, so logits exist for them alone; and only for one tile of them at a time:
    where there are several, each tile's logits are computed again in the backward pass.

    Args:
        state_PH: The state that predicts each token, (P, H) float. P may be 0: the loss is then zero, with a zero
            gradient for every weight.
        label_P: The tokens, (P,) int64.
        head: States, (p, H), to logits over the vocabulary, (p, V); without random choices.
        tile_positions: Most states whose logits exist at once, >= 1.
        num_targets: What the sum is divided by: the mean number of targets over the ranks, so that the average of
            the ranks' gradients is that of all targets together; None for P.

    Returns:
        `loss`, () float32; `terms`: `perplexity` (exp of this rank's own mean) and `accuracy`.

    Precision: softmax and sums in float32 (float64 where the logits are), whatever the head's dtype.
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
    count = max(1, len(label_P))
    loss = total / (count if num_targets is None else max(1.0, num_targets))
    terms = {"perplexity": (total.detach() / count).exp(), "accuracy": correct / count}
    return LossOutput(loss, terms)


def _tile(state_pH: Tensor, label_p: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies, and how many tokens have the highest logit."""
    logit_pV = head(state_pH)
    logit_pV = logit_pV.to(working_dtype(logit_pV))
    return F.cross_entropy(logit_pV, label_p, reduction="sum"), (logit_pV.argmax(dim=-1) == label_p).sum()
