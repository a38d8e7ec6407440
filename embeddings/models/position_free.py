"""Vectors in front of a text that its encoder attends to as a set: context tokens without position.

This file travels inside model directories: it imports nothing but torch and transformers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# The others build their masks and their packing from indices, which context tokens do not have.
_ATTENTIONS = ("eager", "sdpa")


def states_behind_context(
    backbone: nn.Module,
    context_NMH: Tensor,
    soft_prompt_SH: Tensor,
    input_ids_NL: Tensor,
    attention_mask_NL: Tensor,
    has_positions: bool = False,
) -> Tensor:
    """The states of a text's tokens, computed with M context vectors and S soft-prompt vectors in front of them.

    A backbone that rotates queries and keys by index gets index 0 for every context vector; soft prompt and text are
    numbered from M on. One that adds learned position vectors gets them for the text alone, from its own first
    position on: the position vector that it would add to a prefix vector is taken off beforehand. In layers with a
    window the prefix sees and is seen by everything, and the window holds among the text's tokens.

    Args:
        backbone: A Hugging Face encoder, or a decoder without its causal mask, adapted by peft or not.
        context_NMH: Context vectors of each text, (N, M, H) float.
        soft_prompt_SH: Learned vectors between context and text, (S, H) float; S may be 0.
        input_ids_NL: Token ids, (N, L) int64, padded on the right.
        attention_mask_NL: True where there is a token, (N, L) bool.
        has_positions: Whether the prefix is read as any tokens are, each at its own index.

    Returns:
        States of the last layer at the text's tokens, (N, L, H).

    Precision: the prefix takes the dtype of the word embeddings; leaving learned positions out is exact to rounding.
    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 and §10.4; the released rotary code, which leaves context
        tokens unrotated. Differs: §10.4 as printed sets context tokens to zero within attention and carries them past
        it by a residual. Their keys and values would be zero then, so no text could read them, and one context would
        do what any other of its size does; the release zeroes them for the rotation alone.
    """
    model = plain_model(backbone)
    words: Any = model.get_input_embeddings()
    word_NLH = words(input_ids_NL)
    (num_texts, length), device = input_ids_NL.shape, input_ids_NL.device
    prefix_NPH = torch.cat([context_NMH, soft_prompt_SH.expand(num_texts, -1, -1)], dim=1).to(word_NLH.dtype)
    num_context, num_prefix = context_NMH.shape[1], prefix_NPH.shape[1]
    if has_positions:
        seen_NT = torch.cat([attention_mask_NL.new_ones(num_texts, num_prefix), attention_mask_NL], dim=1).long()
        whole = backbone(inputs_embeds=torch.cat([prefix_NPH, word_NLH], dim=1), attention_mask=seen_NT)
        text_NLH: Tensor = whole.last_hidden_state[:, num_prefix:]
        return text_NLH
    position_T = torch.arange(num_prefix + length, device=device)
    learned = learned_positions(model)
    if learned is None:
        position_T = position_T.masked_fill(position_T < num_context, 0)
    else:
        first = first_position(learned)
        position_T = (position_T - num_prefix).clamp(min=0) + first
        prefix_NPH = prefix_NPH - learned(torch.tensor([first], device=device))
    seen_NT = torch.cat([attention_mask_NL.new_ones(num_texts, num_prefix), attention_mask_NL], dim=1).bool()
    output = backbone(
        inputs_embeds=torch.cat([prefix_NPH, word_NLH], dim=1),
        attention_mask=_attention_mask(model, seen_NT, num_prefix, word_NLH.dtype),
        position_ids=position_T[None],
    )
    states: Tensor = output.last_hidden_state
    return states[:, num_prefix:]


def plain_model(backbone: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside: what peft wraps, or the backbone itself."""
    plain: Any = backbone if isinstance(backbone, PreTrainedModel) else backbone.get_base_model()  # type: ignore[operator]
    assert isinstance(plain, PreTrainedModel)
    return plain


def learned_positions(model: PreTrainedModel) -> nn.Embedding | None:
    """The table of position vectors that a model adds to its inputs, or None where it works by index (rotary)."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(table: nn.Embedding) -> int:
    """The position of a text's first token: 0 for BERT, one past the padding's for RoBERTa and its kin."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def longest_text(backbone: nn.Module, num_prefix: int) -> int | None:
    """Most tokens of a text behind a prefix that the backbone has positions for, or None where it sets no limit.

    Learned positions are the text's alone; the indices of a rotary model count the prefix too.
    """
    model = plain_model(backbone)
    table = learned_positions(model)
    if table is not None:
        return table.num_embeddings - first_position(table)
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None else int(limit) - num_prefix


@torch.no_grad()
def check_position_free(backbone: nn.Module) -> None:
    """Check that a backbone reads a context as a set, and a text without one as it always does.

    Runs four tiny forward passes, with a text's own word embeddings as the context.

    Raises:
        ValueError: If the order of the context changes a state, the context does not, the text alone is read otherwise
            than by the backbone itself, or positions cannot be left out; the message is the rule that was broken.
    """
    model = plain_model(backbone)
    attention = model.config._attn_implementation
    if attention not in _ATTENTIONS:
        raise ValueError(f"must be loaded with {' or '.join(_ATTENTIONS)} attention, not {attention}")
    if getattr(model.config, "relative_attention_num_buckets", None) is not None:
        raise ValueError("must not weigh tokens by their distance, from which no token can be left out")
    words: Any = model.get_input_embeddings()
    ids_NL = (torch.arange(24, device=model.device).view(2, 12) % (int(model.config.vocab_size) - 4)) + 3
    mask_NL = torch.ones_like(ids_NL, dtype=torch.bool)
    mask_NL[1, 9:] = False
    context_NMH, none_SH = words(ids_NL[:, 3:6]), words.weight.new_zeros(0, words.weight.shape[1])
    was_training = backbone.training
    backbone.train(False)
    try:
        given = states_behind_context(backbone, context_NMH, none_SH, ids_NL, mask_NL)
        turned = states_behind_context(backbone, context_NMH.flip(1), none_SH, ids_NL, mask_NL)
        alone = states_behind_context(backbone, context_NMH[:, :0], none_SH, ids_NL, mask_NL)
        usual = backbone(input_ids=ids_NL, attention_mask=mask_NL.long()).last_hidden_state
    finally:
        backbone.train(was_training)
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1
    if _spread(given, turned, mask_NL) > tolerance:
        raise ValueError("must read its context as a set, and sees its order")
    if _spread(alone, usual, mask_NL) > tolerance:
        raise ValueError("must read a text by its embeddings as it does by its tokens")
    if torch.equal(given[mask_NL], alone[mask_NL]):
        raise ValueError("must see what stands before a text")


def _attention_mask(model: PreTrainedModel, seen_NT: Tensor, num_prefix: int, dtype: torch.dtype) -> Any:
    """What the backbone takes as its mask: one for each kind of layer where some layers have a window."""
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return seen_NT.long()
    index_T = torch.arange(seen_NT.shape[1], device=seen_NT.device)
    is_text_T = index_T >= num_prefix
    near_TT = (index_T[:, None] - index_T).abs() <= model.config.sliding_window
    near_TT = near_TT | ~(is_text_T[:, None] & is_text_T)
    seen_N1TT = seen_NT[:, None, None, :].expand(-1, 1, len(index_T), -1)
    masks = {"full_attention": seen_N1TT, "sliding_attention": seen_N1TT & near_TT}
    if model.config._attn_implementation == "eager":
        masked = torch.finfo(dtype).min
        return {kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, masked) for kind, mask in masks.items()}
    return masks


def _spread(first: Tensor, second: Tensor, mask_NL: Tensor) -> float:
    """The largest difference of the text's states, relative to the largest state."""
    first, second = first[mask_NL].float(), second[mask_NL].float()
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-6))
