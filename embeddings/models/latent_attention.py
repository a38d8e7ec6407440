"""NV-Embed's latent attention: each token attends to a trainable dictionary before mean pooling.

This file travels inside model directories: it imports only torch and its siblings.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pooling import Pooling, TextPlaces


class LatentAttentionPooling(Pooling):
    """The mean of the pooled tokens' states after each has attended to a trainable dictionary.

    The released form, where Z are the R latents and each LN is a separate layer norm:

        h <- h + W_o softmax((W_q LN(h)) (W_k LN(Z))^T / sqrt(E)) (W_v LN(Z))      per head, E wide
        h <- h + W_2 (a * GELU(g)) + b_2,   (a, g) = W_1 LN(h) + b_1               GEGLU, four times as wide
        vector = mean of h over the pooled tokens

    Only pooled tokens enter the block. A text without a pooled token gets the zero vector.

    Args:
        hidden_size: Width of the states, H.
        num_latents: Rows of the dictionary, R. NV-Embed uses 512.
        num_heads: Attention heads, A. NV-Embed uses 8.
        head_dim: Width of each head, E; None is the hidden size, as released (740 M parameters at H = 4096), or
            H / A in the paper's form.
        paper_literal: The paper's form instead of the released one: Eq. 1 with K = V = Z and no projection, scale, norm
            or residual, then a two-layer GELU MLP of inner width 4 H (the paper does not state the width).
        zero_init_residual: Initialise the output layers of both residual branches with zeros: training starts from
            mean pooling of the pretrained encoder. Released form only.

    Source: Lee 2024, arXiv:2405.17428, §3.2 Eq. 1 and the released NV-Embed-v2 code. Differs: `zero_init_residual`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_latents: int = 512,
        num_heads: int = 8,
        head_dim: int | None = None,
        paper_literal: bool = False,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__(hidden_size)
        if paper_literal and (head_dim is not None or zero_init_residual):
            rule = "paper_literal has neither projections nor residuals"
            raise ValueError(f"pooling: {rule}; drop head_dim and zero_init")
        for name, value in (("num_latents", num_latents), ("num_heads", num_heads), ("head_dim", head_dim)):
            if value is not None and value < 1:
                raise ValueError(f"pooling.{name} must be >= 1, got {value}")
        if paper_literal and hidden_size % num_heads:
            raise ValueError(f"pooling.num_heads must divide the hidden size {hidden_size}, got {num_heads}")
        self.num_latents, self.num_heads, self.head_dim = num_latents, num_heads, head_dim
        self.paper_literal, self.zero_init_residual = paper_literal, zero_init_residual
        self.latents = nn.Parameter(torch.randn(num_latents, hidden_size))
        if paper_literal:
            self.mlp = nn.Sequential(
                nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
            )
        else:
            self.attention = LatentAttention(hidden_size, num_heads, head_dim or hidden_size)
            self.feed_forward = GatedFeedForward(hidden_size)
            if zero_init_residual:
                for layer in (self.attention.to_output, self.feed_forward.contract):
                    _zero_parameters(layer)

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        state_TH = self._block_output(hidden_NLH.flatten(0, 1), pooling_mask_NL.flatten())
        sum_NH = state_TH.view(*pooling_mask_NL.shape, -1).sum(dim=1)
        return sum_NH / pooling_mask_NL.sum(dim=1, keepdim=True).clamp(min=1)

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        return places.means(self._block_output(hidden_TH, pooling_mask_T), pooling_mask_T)

    def _block_output(self, hidden_TH: Tensor, pooling_mask_T: Tensor) -> Tensor:
        """The block's output at the pooled tokens, zeros at the others, (T, H)."""
        index_T = pooling_mask_T.nonzero().squeeze(1)
        token_TH = self.token_states(hidden_TH.index_select(0, index_T))
        token_TH = token_TH.to(torch.promote_types(token_TH.dtype, torch.float32))
        # Copied into rows and summed without atomic additions, so that the sum is deterministic.
        return token_TH.new_zeros(len(pooling_mask_T), self.hidden_size).index_copy(0, index_T, token_TH)

    def weights(self, token_TH: Tensor) -> Tensor:
        """The attention of T pooled tokens to each latent, (A, T, R) float32; NV-Embed, appendix D, Fig. 2."""
        token_TH = token_TH.to(self.latents.dtype)
        if self.paper_literal:
            query_ATE, key_ARE = (_split_heads(part, self.num_heads) for part in (token_TH, self.latents))
            scale = 1.0
        else:
            query_ATE, key_ARE, _ = self.attention.project(token_TH, self.latents)
            scale = query_ATE.shape[-1] ** -0.5
        dtype = torch.promote_types(query_ATE.dtype, torch.float32)
        return (scale * query_ATE.to(dtype) @ key_ARE.to(dtype).mT).softmax(dim=-1)

    def token_states(self, token_TH: Tensor) -> Tensor:
        token_TH = token_TH.to(self.latents.dtype)
        if self.paper_literal:
            latent_ARE = _split_heads(self.latents, self.num_heads)
            attended_ATE = _attend(_split_heads(token_TH, self.num_heads), latent_ARE, latent_ARE, scale=1.0)
            paper_TH: Tensor = self.mlp(_join_heads(attended_ATE))
            return paper_TH
        token_TH = token_TH + self.attention(token_TH, self.latents)
        branch_TH: Tensor = self.feed_forward(token_TH)
        return token_TH + branch_TH


class LatentAttention(nn.Module):
    """Pre-norm cross-attention from tokens to latents, without biases; the caller adds the residual."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden_size)
        self.norm_latents = nn.LayerNorm(hidden_size)
        self.to_query = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.to_key_value = nn.Linear(hidden_size, 2 * num_heads * head_dim, bias=False)
        self.to_output = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, token_TH: Tensor, latent_RH: Tensor) -> Tensor:
        return self.to_output(_join_heads(_attend(*self.project(token_TH, latent_RH))))  # type: ignore[no-any-return]

    def project(self, token_TH: Tensor, latent_RH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of the tokens, (A, T, E), and the keys and values of the latents, (A, R, E)."""
        query = self.to_query(self.norm(token_TH))
        key, value = self.to_key_value(self.norm_latents(latent_RH)).chunk(2, dim=-1)
        query_ATE, key_ARE, value_ARE = (_split_heads(part, self.num_heads) for part in (query, key, value))
        return query_ATE, key_ARE, value_ARE


def _attend(query_ATE: Tensor, key_ARE: Tensor, value_ARE: Tensor, scale: float | None = None) -> Tensor:
    batch = (query_ATE.unsqueeze(0), key_ARE.unsqueeze(0), value_ARE.unsqueeze(0))
    return F.scaled_dot_product_attention(*batch, scale=scale).squeeze(0)


def _split_heads(state: Tensor, num_heads: int) -> Tensor:
    return state.view(state.shape[0], num_heads, state.shape[1] // num_heads).transpose(0, 1)


def _join_heads(state: Tensor) -> Tensor:
    return state.transpose(0, 1).flatten(1)


class SelfAttentionPooling(Pooling):
    """The mean of the pooled tokens' states after one more self-attention layer and its MLP.

    NV-Embed's baseline for latent attention: the released block, with the text's pooled tokens as keys and values
    instead of the latents. A text without a pooled token gets the zero vector.

    Args:
        hidden_size: Width of the states, H.
        num_heads: Attention heads, A; each is H / A wide.
        zero_init_residual: Initialise the output layers of both residual branches with zeros: plain mean pooling.

    Source: Lee 2024, arXiv:2405.17428, §5.2.3, Tables 2 and 3. The paper does not describe the layer's structure.
    """

    def __init__(self, hidden_size: int, num_heads: int = 8, zero_init_residual: bool = False) -> None:
        super().__init__(hidden_size)
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
                _zero_parameters(layer)

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """States (N, L, H) and the tokens to pool (N, L) to vectors (N, H), at least float32."""
        # A NaN at a token that is not pooled must not reach a pooled one.
        outside_NL1 = ~pooling_mask_NL.unsqueeze(-1)
        state_NLH = hidden_NLH.to(self.norm.weight.dtype).masked_fill(outside_NL1, 0.0)
        # A text without a pooled token attends to all tokens: a softmax over no key is NaN, and so is its gradient.
        mask_NL = pooling_mask_NL | ~pooling_mask_NL.any(dim=1, keepdim=True)
        query, key, value = (
            part.view(*mask_NL.shape, self.num_heads, -1).transpose(1, 2)
            for part in self.to_query_key_value(self.norm(state_NLH)).chunk(3, dim=-1)
        )
        attended_NALE = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_NL[:, None, None, :])
        state_NLH = state_NLH + self.to_output(attended_NALE.transpose(1, 2).flatten(2))
        state_NLH = state_NLH + self.feed_forward(state_NLH)
        state_NLH = state_NLH.to(torch.promote_types(state_NLH.dtype, torch.float32)).masked_fill(outside_NL1, 0.0)
        mean_NH: Tensor = state_NLH.sum(dim=1) / pooling_mask_NL.sum(dim=1, keepdim=True).clamp(min=1)
        return mean_NH


class GatedFeedForward(nn.Module):
    """Pre-norm GEGLU, (…, H) to (…, H), inner width 4 H, with the exact GELU; the caller adds the residual."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.expand = nn.Linear(hidden_size, 8 * hidden_size)
        self.contract = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, token: Tensor) -> Tensor:
        value, gate = self.expand(self.norm(token)).chunk(2, dim=-1)
        output: Tensor = self.contract(value * F.gelu(gate))
        return output


def _zero_parameters(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
