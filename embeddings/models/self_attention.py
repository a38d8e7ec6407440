"""NV-Embed's ablation: one more self-attention layer before the mean.

This file travels inside model directories: it imports nothing but torch and the siblings that travel with it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .latent_attention import GatedFeedForward, zero_parameters
from .pooling import Pooling, mean_of_sum


class SelfAttentionPooling(Pooling):
    """The mean of the pooled tokens' states after one more self-attention layer and its MLP.

    The baseline that NV-Embed compares its latent attention with. The block is the released latent attention's,
    pre-norms, residuals and GEGLU included, with the text's own pooled tokens in the latents' place, so that the
    comparison is of what is attended to. Tokens attend to pooled tokens of the same text only.

    Args:
        hidden_size: Width of the states, H.
        num_heads: Attention heads, A; each is H / A wide.
        zero_init_residual: Start the output layers of both residual branches at zero, so that the pooling starts as
            plain mean pooling.

    Precision: the block runs in the parameters' dtype or autocast's, its softmax accumulates in float32, the
        mean is summed in float32.
    Raises:
        ValueError: If there is no head, or the heads do not divide the hidden size.
    Source: Lee 2024, arXiv:2405.17428, §5.2.3, Tables 2 and 3. The layer's inner form is ours: the paper gives none.
    Related: `LatentAttentionPooling`, which does better in the paper.
    """

    def __init__(self, hidden_size: int, num_heads: int = 8, zero_init_residual: bool = False) -> None:
        super().__init__(hidden_size)
        if num_heads < 1:
            raise ValueError(f"pooling.num_heads must be >= 1, got {num_heads}")
        if hidden_size % num_heads:
            raise ValueError(f"pooling.num_heads must divide the hidden size {hidden_size}, got {num_heads}")
        self.num_heads = num_heads
        self.zero_init_residual = zero_init_residual
        self.norm = nn.LayerNorm(hidden_size)
        self.to_query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.to_output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.feed_forward = GatedFeedForward(hidden_size)
        if zero_init_residual:
            for layer in (self.to_output, self.feed_forward.contract):
                zero_parameters(layer)

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The mean over the pooled tokens after the layer, (N, H) float32; zero for a text without one."""
        # What stands at a token that is not pooled (NaN, at worst) must not reach a pooled one.
        outside_NL1 = ~pooling_mask_NL.unsqueeze(-1)
        state_NLH = hidden_NLH.to(self.norm.weight.dtype).masked_fill(outside_NL1, 0.0)
        # A row without a pooled token attends to itself: a softmax over nothing is NaN, and its gradient spreads.
        mask_NL = pooling_mask_NL | ~pooling_mask_NL.any(dim=1, keepdim=True)
        query, key, value = (
            part.view(*mask_NL.shape, self.num_heads, -1).transpose(1, 2)
            for part in self.to_query_key_value(self.norm(state_NLH)).chunk(3, dim=-1)
        )
        read_NALE = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_NL[:, None, None, :])
        state_NLH = state_NLH + self.to_output(read_NALE.transpose(1, 2).flatten(2))
        state_NLH = state_NLH + self.feed_forward(state_NLH)
        state_NLH = state_NLH.to(torch.promote_types(state_NLH.dtype, torch.float32)).masked_fill(outside_NL1, 0.0)
        return mean_of_sum(state_NLH.sum(dim=1), pooling_mask_NL)

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments past the hidden size."""
        return {"num_heads": self.num_heads, "zero_init_residual": self.zero_init_residual}
