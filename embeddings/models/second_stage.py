"""What the second stage of a contextual model adds to its backbone: context slots, soft prompt, residual projection.

This file travels inside model directories: it imports nothing but torch.
"""

import torch
from torch import Tensor, nn

NULL_CONTEXT_STD = 0.01


class ContextSlots(nn.Module):
    """The context vectors of each text of a call: one shared context, thinned by dropout, filled with a null vector.

    In training each slot of each text is replaced by the null vector with probability `dropout_fraction`, so that a
    model learns to work with any number of documents, none included. A context of fewer documents than slots is
    filled with null vectors, and no context at all is null in every slot.

    Args:
        num_context: Slots, J. The paper uses 512, and 64 in its small setting.
        context_size: Width of a context vector, H.
        dropout_fraction: Probability of replacing one slot of one text in training. The released training uses 0.005.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 (sequence dropout), §5 (its fraction) and Figure 16; the null
        vector's start, N(0, 0.01), is the released code's.
    """

    def __init__(self, num_context: int, context_size: int, dropout_fraction: float = 0.005) -> None:
        super().__init__()
        self.num_context = num_context
        self.dropout_fraction = dropout_fraction
        self.null_H = nn.Parameter(torch.randn(context_size) * NULL_CONTEXT_STD)

    def forward(self, context_MH: Tensor | None, num_texts: int) -> Tensor:
        """The context vectors of every text.

        Args:
            context_MH: Vectors of the context documents, (M, H) with M <= J, or None for no context.
            num_texts: Texts of the call, N.

        Returns:
            (N, J, H); every text has the same but for dropout.

        Raises:
            ValueError: If there are more vectors than slots, or of another width.
        """
        width = len(self.null_H)
        context_MH = self.null_H.new_empty(0, width) if context_MH is None else context_MH
        if context_MH.ndim != 2 or context_MH.shape[1] != width or len(context_MH) > self.num_context:
            shape = tuple(context_MH.shape)
            raise ValueError(f"context must be at most {self.num_context} vectors of width {width}, got {shape}")
        null_NJH = self.null_H.expand(num_texts, self.num_context, width)
        num_empty = self.num_context - len(context_MH)
        full_JH = torch.cat([context_MH.to(self.null_H.dtype), self.null_H.expand(num_empty, width)])
        full_NJH = full_JH.expand(num_texts, -1, -1)
        if not self.training:
            return full_NJH
        # Drawn where the fraction is 0 too, so that every rank's graph holds the null vector.
        dropped_NJ = torch.rand(num_texts, self.num_context, device=full_NJH.device) < self.dropout_fraction
        return torch.where(dropped_NJ[:, :, None], null_NJH, full_NJH)

    def extra_repr(self) -> str:
        """What decides the vectors beside the weights."""
        return f"num_context={self.num_context}, dropout_fraction={self.dropout_fraction}"


class SoftPrompt(nn.Module):
    """Learned vectors between context and text: Linear-ReLU-Linear of a constant vector of ones.

    Args:
        num_soft_prompts: Vectors, S; 0 for the paper's model, which has none. The released models have 8.
        context_size: Width of a vector, H.

    Source: the released code of arXiv:2410.02525; the paper has none.
    """

    def __init__(self, num_soft_prompts: int, context_size: int) -> None:
        super().__init__()
        self.num_soft_prompts = num_soft_prompts
        self.context_size = context_size
        self.layers = nn.Sequential()
        if num_soft_prompts:
            last = nn.Linear(context_size, num_soft_prompts * context_size)
            self.layers = nn.Sequential(nn.Linear(context_size, context_size), nn.ReLU(), last)
        self.register_buffer("ones_H", torch.ones(context_size), persistent=False)

    def forward(self) -> Tensor:
        """The vectors, (S, H)."""
        assert isinstance(self.ones_H, Tensor)
        if not self.num_soft_prompts:
            return self.ones_H.new_empty(0, self.context_size)
        vectors: Tensor = self.layers(self.ones_H)
        return vectors.view(self.num_soft_prompts, self.context_size)


class ResidualProjection(nn.Module):
    """A vector plus Linear-ReLU-Linear of it; the identity, to the bit, until it is trained.

    The last layer starts at zero, so a pretrained encoder's pooled states leave as they came.

    Args:
        hidden_size: Width of the vectors, H.
        adds_pooled: Whether the vector is added; without it this is a plain projection that starts at random.

    Source: the released code of arXiv:2410.02525; the paper has none. Differs: the release starts from random weights.
    """

    def __init__(self, hidden_size: int, adds_pooled: bool = True) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.adds_pooled = adds_pooled
        last = nn.Linear(hidden_size, hidden_size)
        if adds_pooled:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), last)

    def forward(self, vector_NH: Tensor) -> Tensor:
        """The projected vectors, (N, H), in the dtype given or a wider one."""
        first: nn.Module = self.layers[0]
        branch_NH: Tensor = self.layers(vector_NH.to(next(first.parameters()).dtype))
        return vector_NH + branch_NH if self.adds_pooled else branch_NH

    def extra_repr(self) -> str:
        """What decides the vectors beside the weights."""
        return "" if self.adds_pooled else "adds_pooled=False"
