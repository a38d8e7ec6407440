"""The layers of a contextual model, and the forward pass of its backbone with a context before each text.

This file travels inside model directories: it imports only torch, transformers and its siblings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import sliding_window_bidirectional_overlay, sliding_window_overlay

from .pooling import MeanPooling


class FirstStage(nn.Module):
    """Maps context documents to context vectors: encoder, mean pooling, Linear-GELU-Linear.

    The vectors are not normalised: they are inputs of the second stage, before its word embeddings.

    Args:
        backbone: A Hugging Face encoder or decoder, adapted by peft or not.
        backbone_size: Width of the backbone's states.
        context_size: Width of the second stage's word embeddings, H.
        max_length: Maximum tokens of a document, which is truncated to it; None for no limit.
        pools_prompt: Whether all tokens of a document are pooled, whatever the pooling mask.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2; the projection is from the released code, not the paper.
    """

    def __init__(
        self,
        backbone: nn.Module,
        backbone_size: int,
        context_size: int,
        max_length: int | None = None,
        pools_prompt: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.max_length = max_length
        self.pools_prompt = pools_prompt
        self.pooling = MeanPooling(backbone_size)
        self.projection = nn.Sequential(
            nn.Linear(backbone_size, backbone_size), nn.GELU(), nn.Linear(backbone_size, context_size)
        )

    def forward(self, input_ids_ML: Tensor, attention_mask_ML: Tensor, pooling_mask_ML: Tensor) -> Tensor:
        """One vector per context document, (M, H), from ids padded on the right and boolean masks."""
        if self.max_length is not None and input_ids_ML.shape[1] > self.max_length:
            parts = (input_ids_ML, attention_mask_ML, pooling_mask_ML.clone())
            input_ids_ML, attention_mask_ML, pooling_mask_ML = (part[:, : self.max_length] for part in parts)
            # The last token is pooled, because a document truncated within its prompt has no other pooled token.
            last_M1 = attention_mask_ML.sum(dim=1, keepdim=True).clamp(min=1) - 1
            pooling_mask_ML.scatter_(1, last_M1, True)
        output = self.backbone(input_ids=input_ids_ML, attention_mask=attention_mask_ML.long())
        pooled_ML = attention_mask_ML.bool() if self.pools_prompt else pooling_mask_ML
        return self.project(self.pooling(output.last_hidden_state, pooled_ML))

    def project(self, pooled_MH: Tensor) -> Tensor:
        """The vectors of pooled states, (M, H) float32 or float64."""
        first: nn.Module = self.projection[0]
        vector_MH: Tensor = self.projection(pooled_MH.to(next(first.parameters()).dtype))
        return vector_MH.to(torch.promote_types(vector_MH.dtype, torch.float32))

    def extra_repr(self) -> str:
        length = [] if self.max_length is None else [f"max_length={self.max_length}"]
        return ", ".join([*length, *(["pools_prompt=True"] if self.pools_prompt else [])])


class ContextSlots(nn.Module):
    """The context vectors of each text of a batch: one shared context, with dropout, padded with a null vector.

    Without a context, every slot has the null vector. A model without a null vector has no empty slots: a smaller
    context makes the input shorter.

    Args:
        num_context: Number of slots, J.
        context_size: Width of a context vector, H.
        dropout_fraction: Probability of replacing a slot of a text by the null vector in training, so that the model
            learns to work with any number of documents. The released training uses 0.005.
        has_null: Whether there is a null vector. The released code has one only with dropout.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 (sequence dropout), §5 (its fraction) and Figure 16; the null
        vector's initialisation, N(0, 0.01), is from the released code.
    """

    null_H: Tensor

    def __init__(
        self, num_context: int, context_size: int, dropout_fraction: float = 0.005, has_null: bool = True
    ) -> None:
        super().__init__()
        self.num_context = num_context
        self.dropout_fraction = dropout_fraction
        self.has_null = has_null
        if has_null:
            self.null_H = nn.Parameter(torch.randn(context_size) * 0.01)
        else:  # only its width, device and dtype are used
            self.register_buffer("null_H", torch.zeros(context_size), persistent=False)

    def forward(self, context_MH: Tensor | None, num_texts: int) -> Tensor:
        """The context vectors of N texts from M <= J vectors or None, (N, J, H), or (N, M, H) without a null vector."""
        width = len(self.null_H)
        context_MH = self.null_H.new_empty(0, width) if context_MH is None else context_MH
        if context_MH.ndim != 2 or context_MH.shape[1] != width or len(context_MH) > self.num_context:
            shape = tuple(context_MH.shape)
            raise ValueError(f"context must be at most {self.num_context} vectors of width {width}, got {shape}")
        if not self.has_null:
            return context_MH.to(self.null_H.dtype).expand(num_texts, -1, -1)
        null_NJH = self.null_H.expand(num_texts, self.num_context, width)
        num_empty = self.num_context - len(context_MH)
        full_JH = torch.cat([context_MH.to(self.null_H.dtype), self.null_H.expand(num_empty, width)])
        full_NJH = full_JH.expand(num_texts, -1, -1)
        if not self.training:
            return full_NJH
        # Also drawn for a fraction of 0, so that every rank's graph contains the null vector.
        dropped_NJ = torch.rand(num_texts, self.num_context, device=full_NJH.device) < self.dropout_fraction
        return torch.where(dropped_NJ[:, :, None], null_NJH, full_NJH)

    def extra_repr(self) -> str:
        null = "" if self.has_null else ", has_null=False"
        return f"num_context={self.num_context}, dropout_fraction={self.dropout_fraction}{null}"


class SoftPrompt(nn.Module):
    """Learned vectors between context and text, (S, H): Linear-ReLU-Linear of a constant vector of ones.

    Source: the released code of arXiv:2410.02525, with S = 8; not in the paper.
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
        assert isinstance(self.ones_H, Tensor)
        if not self.num_soft_prompts:
            return self.ones_H.new_empty(0, self.context_size)
        vectors: Tensor = self.layers(self.ones_H)
        return vectors.view(self.num_soft_prompts, self.context_size)


class ResidualProjection(nn.Module):
    """A vector plus Linear-ReLU-Linear of it; the last layer is initialised with zeros, which is the identity.

    Args:
        hidden_size: Width of the vectors, H.
        adds_pooled: Whether the vector is added; if not, the last layer is initialised at random.

    Source: the released code of arXiv:2410.02525; not in the paper. Differs: the release starts from random weights.
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
        """The projected vectors, (N, H), in the input's dtype or a wider one."""
        first: nn.Module = self.layers[0]
        branch_NH: Tensor = self.layers(vector_NH.to(next(first.parameters()).dtype))
        return vector_NH + branch_NH if self.adds_pooled else branch_NH

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON types."""
        return {"hidden_size": self.hidden_size, "adds_pooled": self.adds_pooled}

    def extra_repr(self) -> str:
        return "" if self.adds_pooled else "adds_pooled=False"


def states_behind_context(
    backbone: nn.Module,
    context_NMH: Tensor,
    soft_prompt_SH: Tensor,
    input_ids_NL: Tensor,
    attention_mask_NL: Tensor,
    has_positions: bool = False,
) -> Tensor:
    """The states of a text's tokens, (N, L, H), with M context vectors and S soft-prompt vectors before them.

    With rotary positions, every context vector has index 0; soft prompt and text have indices from M. With learned
    position embeddings, only the text has positions, from the table's first position. In layers with a window the
    prefix sees all tokens and all tokens see it; the window applies between the text's tokens.

    Args:
        backbone: A Hugging Face encoder, or a decoder without its causal mask, adapted by peft or not.
        context_NMH: Context vectors of each text.
        soft_prompt_SH: Learned vectors between context and text; S may be 0.
        input_ids_NL: Token ids, padded on the right.
        attention_mask_NL: True where there is a token.
        has_positions: Whether the prefix has positions and windows like ordinary tokens.

    Precision: the prefix is cast to the dtype of the word embeddings; removing learned positions is exact to rounding.
    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 and §10.4; the released rotary code, which does not rotate
        context tokens. Differs: §10.4 as printed sets context tokens to zero within attention and adds them back by a
        residual. Their keys and values would then be zero, so that a text could not depend on the content of its
        context; the released code sets them to zero only in the rotation.
    """
    model = plain_model(backbone)
    words: Any = model.get_input_embeddings()
    word_NLH = words(input_ids_NL)
    (num_texts, length), device = input_ids_NL.shape, input_ids_NL.device
    prefix_NPH = torch.cat([context_NMH, soft_prompt_SH.expand(num_texts, -1, -1)], dim=1).to(word_NLH.dtype)
    num_context, num_prefix = context_NMH.shape[1], prefix_NPH.shape[1]
    seen_NT = torch.cat([attention_mask_NL.new_ones(num_texts, num_prefix), attention_mask_NL], dim=1).bool()
    inputs: dict[str, Any] = {"attention_mask": seen_NT.long()}
    if not has_positions:
        position_T, prefix_NPH = without_positions(
            model, torch.arange(num_prefix + length, device=device), prefix_NPH, num_context
        )
        mask = _attention_mask(model, seen_NT, num_prefix, word_NLH.dtype)
        inputs = {"attention_mask": mask, "position_ids": position_T[None]}
    output = backbone(inputs_embeds=torch.cat([prefix_NPH, word_NLH], dim=1), **inputs)
    states: Tensor = output.last_hidden_state
    return states[:, num_prefix:]


def without_positions(
    model: PreTrainedModel, index_T: Tensor, prefix_NPH: Tensor, num_context: int
) -> tuple[Tensor, Tensor]:
    """The positions of tokens after a prefix without positions, and the prefix as the model's input.

    `index_T` is each token's index from the start of its prefix of P vectors, `num_context` of which are context. The
    position embedding that the model will add to a prefix vector is subtracted.
    """
    learned = learned_positions(model)
    if learned is None:
        return index_T.masked_fill(index_T < num_context, 0), prefix_NPH
    first = first_position(learned)
    position_T = (index_T - prefix_NPH.shape[1]).clamp(min=0) + first
    return position_T, prefix_NPH - learned(index_T.new_full((1,), first))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the context."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)


def plain_model(backbone: nn.Module) -> PreTrainedModel:
    """The Hugging Face model that peft wraps, or the backbone itself."""
    plain: Any = backbone if isinstance(backbone, PreTrainedModel) else backbone.get_base_model()  # type: ignore[operator]
    assert isinstance(plain, PreTrainedModel)
    return plain


def learned_positions(model: PreTrainedModel) -> nn.Embedding | None:
    """The table of position embeddings that a model adds to its inputs, or None (rotary positions)."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(table: nn.Embedding) -> int:
    """The position of a text's first token: 0 for BERT, one after the padding index for RoBERTa and XLM-R."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _near(config: Any, index_T: Tensor) -> Tensor:
    """Whether a token sees another within its window, (T, T), by the rule of the backbone's own mask."""
    query_T1, window = index_T[:, None], config.sliding_window
    if getattr(config, "use_bidirectional_attention", False) and getattr(config, "is_causal", True):
        # Gemma 3 sees in both directions as far as a causal mask sees to the left, one token less than other encoders.
        sees = sliding_window_overlay(window)
        return sees(0, 0, query_T1, index_T) & sees(0, 0, index_T, query_T1)  # type: ignore[no-any-return]
    return sliding_window_bidirectional_overlay(window)(0, 0, query_T1, index_T)  # type: ignore[no-any-return]


def _attention_mask(model: PreTrainedModel, seen_NT: Tensor, num_prefix: int, dtype: torch.dtype) -> Any:
    """The backbone's attention mask, or a dict of masks by layer type if some layers have a window."""
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return seen_NT.long()
    index_T = torch.arange(seen_NT.shape[1], device=seen_NT.device)
    is_text_T = index_T >= num_prefix
    near_TT = _near(model.config, index_T) | ~(is_text_T[:, None] & is_text_T)
    seen_N1TT = seen_NT[:, None, None, :].expand(-1, 1, len(index_T), -1)
    masks = {"full_attention": seen_N1TT, "sliding_attention": seen_N1TT & near_TT}
    if model.config._attn_implementation == "eager":
        masked = torch.finfo(dtype).min
        return {kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, masked) for kind, mask in masks.items()}
    return masks
