"""Poolings: one vector from the states of a text's tokens, by mean, position, first or last token, or self-attention.

This file travels inside model directories: it imports nothing but torch.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Pooling(nn.Module):
    """What turns the states of a text's tokens into one vector; the base of every pooling.

    A config names a class and the arguments past the first (`Callable[[int], Pooling]`), since the hidden size is
    known only when the backbone is there. Each of them is an attribute of its name. A pooling that travels in a model
    directory imports nothing but torch and its siblings here.

    Args:
        hidden_size: Width of the states, H. The vectors are as wide.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """One vector a text.

        Args:
            hidden_NLH: States of the last layer, (N, L, H) float, padded on the right.
            pooling_mask_NL: True where a token enters the pooling, (N, L) bool.

        Returns:
            Vectors, (N, H), float32 (float64 where the states are).
        """
        raise NotImplementedError

    def token_states(self, token_TH: Tensor) -> Tensor:
        """The pooled tokens' states that the vector is made of, (T, H): a block's output, or as they are."""
        return token_TH

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments past the hidden size, as plain types: what a model directory keeps."""
        values = {name: getattr(self, name) for name in signature(type(self)).parameters if name != "hidden_size"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the backbone whose queries and keys `forward` is given beside the states; none by default."""
        return ()


class MeanPooling(Pooling):
    """The mean of the pooled tokens' states.

    A text without a pooled token gets the zero vector.

    Precision: sums in float32 whatever the input dtype, under autocast too.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The mean over the pooled tokens, (N, H) float32."""
        state_NLH = _at_least_float32(hidden_NLH).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        return mean_of_sum(state_NLH.sum(dim=1), pooling_mask_NL)


class ClsPooling(Pooling):
    """The state of the first token, be it pooled or not.

    An encoder trained this way gathers the text in its [CLS] token, so a prompt left out of the pooling changes
    nothing here.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The first token's state, (N, H) float32."""
        return _at_least_float32(hidden_NLH[:, 0])


class LastTokenPooling(Pooling):
    """The state of the last pooled token: the end-of-sequence token where one is appended.

    A text without a pooled token gets its first token's state.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The last pooled token's state, (N, H) float32."""
        position_L = torch.arange(hidden_NLH.shape[1], device=hidden_NLH.device)
        last_N = (position_L * pooling_mask_NL).amax(dim=1)
        row_N = torch.arange(hidden_NLH.shape[0], device=hidden_NLH.device)
        return _at_least_float32(hidden_NLH[row_N, last_N])


class WeightedMeanPooling(Pooling):
    """The mean of the pooled tokens' states, weighted by position: token i (from 1) weighs i.

    Made for causal decoders, whose later tokens have seen more. Positions count from the text's first token, so
    leaving a prompt out of the pooling keeps the weights of the tokens after it. A text without a pooled token gets
    the zero vector.

    Precision: sums in float32 whatever the input dtype, under autocast too.
    Source: Muennighoff 2022, arXiv:2202.08904, Eq. 2.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The position-weighted mean over the pooled tokens, (N, H) float32."""
        state_NLH = _at_least_float32(hidden_NLH).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        position_L = torch.arange(1, state_NLH.shape[1] + 1, device=state_NLH.device, dtype=state_NLH.dtype)
        weight_NL = position_L * pooling_mask_NL
        total_N = weight_NL.sum(dim=1, keepdim=True).clamp(min=1.0)
        return (state_NLH * (weight_NL / total_N).unsqueeze(-1)).sum(dim=1)


def mean_of_sum(sum_NH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
    """Sums over the pooled tokens divided by their number; zero where there is none."""
    return sum_NH / pooling_mask_NL.sum(dim=1, keepdim=True).clamp(min=1)


def _at_least_float32(state: Tensor) -> Tensor:
    return state.to(torch.promote_types(state.dtype, torch.float32))


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


class GatedFeedForward(nn.Module):
    """Pre-normed GEGLU, four times as wide as its input, with the exact GELU; the residual is the caller's.

    Args:
        hidden_size: Width of the tokens, H.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.expand = nn.Linear(hidden_size, 8 * hidden_size)
        self.contract = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, token: Tensor) -> Tensor:
        """The branch's output, shaped as its input (…, H)."""
        value, gate = self.expand(self.norm(token)).chunk(2, dim=-1)
        output: Tensor = self.contract(value * F.gelu(gate))
        return output


def zero_parameters(layer: nn.Module) -> None:
    """Set every parameter of a layer to zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
