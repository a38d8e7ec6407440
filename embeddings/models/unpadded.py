"""Texts without padding: the tokens of a mini-batch are one row, in which each text attends only to itself.

`Unpadding` prepares a backbone and runs it. The inputs are those of transformers' flash attention: (1, T) tokens,
positions from 0 in each text, and `cu_seq_lens_q`, the boundaries of the texts. The attention function of every layer
is replaced by `_row_attention`, which calls the original function for padded texts.
"""

import copy
import functools
import inspect
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from embeddings.common import OptionError, TokenBatch
from embeddings.common.text import one_line
from embeddings.models.attention_capture import own_attention, visible_range
from embeddings.models.backbone import attention_dropouts
from embeddings.models.bidirectional import relative_difference, short_window, tolerated_difference, trial_ids
from embeddings.models.context_layers import without_positions
from embeddings.models.pooling import (
    TextPlaces,
    evaluating,
    first_position,
    learned_positions,
    plain_backbone,
    without_cache,
)

UnpaddedMode = bool | Literal["auto"]

NAME = "embeddings_unpadded"
# Supported by torch's kernel.
_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_WIDTH = 256
# Padded lengths on a GPU in half precision are multiples of this.
_MULTIPLE = 8
_TRIAL_LENGTHS = (5, 3, 1)


def unpadding_of(backbone: nn.Module, mode: UnpaddedMode) -> "Unpadding | None":
    """Prepare a backbone for texts without padding, or return None and restore its attention if they are padded.

    `mode` is as in `BackboneConfig.unpadded`; an `OptionError` if it is True and the backbone does not support it.
    """
    plain = plain_backbone(backbone)
    _restore(plain)
    # The model of `plan` has no weights to test.
    if mode is False or plain.device.type == "meta" or (mode == "auto" and not torch.cuda.is_available()):
        return None
    try:
        return Unpadding(backbone, always=mode is True)
    except ValueError as error:
        _restore(plain)
        if mode == "auto":
            return None
        raise OptionError("backbone.unpadded", mode, f"is not supported: {error}", "leave it out") from error


class Unpadding:
    """Runs a backbone on texts without padding, and decides when to.

    The states of the tokens equal those of padded texts up to rounding. On a GPU in half precision attention is one
    call of torch's `varlen_attn`, or the flash attention that the backbone was loaded with; elsewhere a loop. Without
    `always`, texts are unpadded only where this is faster: on a GPU in half precision. `varlen_attn` has no dropout.

    The constructor tests the backbone on three short texts and raises a `ValueError` if it is not supported.
    """

    def __init__(self, backbone: nn.Module, always: bool = False) -> None:
        plain = plain_backbone(backbone)
        self.always = always
        attention = str(plain.config._attn_implementation)
        self._is_flash = "flash" in attention
        if not self._is_flash:
            if attention not in ("eager", "sdpa"):
                raise ValueError(f"{attention} supports only padded texts")
            _prepare(plain)
            self._try(backbone)

    def applies_to(self, backbone: nn.Module, tokens: TokenBatch) -> bool:
        """Whether to process these texts, on the backbone's device, without padding."""
        if int(tokens.lengths_N.min()) == 0:
            return False
        return self.always or (tokens.device.type == "cuda" and self._is_quick(plain_backbone(backbone)))

    def states(self, backbone: nn.Module, tokens: TokenBatch) -> tuple[Tensor, TextPlaces]:
        """The states of the last layer at the texts' tokens, (T, H), and the layout of the texts."""
        places = _places(tokens)
        position_T, table = places.position_T, learned_positions(plain_backbone(backbone))
        if table is not None:
            position_T = position_T + first_position(table)
        return self.run(backbone, places, position_T, input_ids=tokens.input_ids_T[None]), places

    def states_behind_context(
        self,
        backbone: nn.Module,
        context_NMH: Tensor,
        soft_prompt_SH: Tensor,
        tokens: TokenBatch,
        has_positions: bool = False,
    ) -> tuple[Tensor, TextPlaces]:
        """The states of the texts' tokens after their context, (T, H), and the layout of the texts without it."""
        model = plain_backbone(backbone)
        words: Any = model.get_input_embeddings()
        word_TH = words(tokens.input_ids_T)
        soft_prompt_NSH = soft_prompt_SH.expand(len(tokens), -1, -1)
        prefix_NPH = torch.cat([context_NMH, soft_prompt_NSH], dim=1).to(word_TH.dtype)
        num_prefix = prefix_NPH.shape[1]
        texts, with_prefix = _places(tokens), _places(tokens, num_prefix)
        position_U = with_prefix.position_T
        if not has_positions:
            position_U, prefix_NPH = without_positions(model, position_U, prefix_NPH, context_NMH.shape[1])
        # The index of each of the U tokens, prefixes included, in the concatenation of all prefixes and all words.
        prefix_index_U = with_prefix.text_T * num_prefix + with_prefix.position_T
        word_index_U = texts.start_N[with_prefix.text_T] + with_prefix.position_T + (len(tokens) - 1) * num_prefix
        source_U = torch.where(with_prefix.position_T < num_prefix, prefix_index_U, word_index_U)
        input_UH = torch.cat([prefix_NPH.flatten(0, 1), word_TH]).index_select(0, source_U)
        state_UH = self.run(backbone, with_prefix, position_U, inputs_embeds=input_UH[None])
        text_index_T = torch.arange(len(word_TH), device=tokens.device) + (texts.text_T + 1) * num_prefix
        return state_UH.index_select(0, text_index_T), texts

    def run(self, backbone: nn.Module, places: TextPlaces, position_T: Tensor, **inputs: Tensor) -> Tensor:
        """The states of the last layer, (T, H), for `input_ids`, (1, T), or `inputs_embeds`, (1, T, H)."""
        start_N1 = F.pad(places.length_N.cumsum(0), (1, 0)).int()
        arguments: dict[str, Any] = {"cu_seq_lens_q": start_N1, "cu_seq_lens_k": start_N1, **inputs}
        arguments |= {"max_length_q": places.longest, "max_length_k": places.longest, "position_ids": position_T[None]}
        # A four-dimensional mask prevents transformers from building a T x T mask; the attention ignores it.
        mask = None if self._is_flash else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=position_T.device)
        output = backbone(**arguments, attention_mask=mask, **without_cache(backbone))
        states: Tensor = output.last_hidden_state
        return states[0]

    def ignored_dropout(self, backbone: nn.Module, device: torch.device) -> float:
        """The attention dropout that training on `device` in half precision leaves out; 0 if there is none."""
        plain = plain_backbone(backbone)
        if self._is_flash or not _has_kernel(device, _head_width(plain)):
            return 0.0
        return max(attention_dropouts(plain.config).values(), default=0.0)

    def _is_quick(self, plain: PreTrainedModel) -> bool:
        """Whether a kernel for unpadded texts supports this model's dtype and head width on its GPU now."""
        return _in_half_precision(plain) and (self._is_flash or bool(_has_kernel(plain.device, _head_width(plain))))

    @torch.no_grad()
    def _try(self, backbone: nn.Module) -> None:
        """Compare the states of three short texts, some longer than a window, with those of padded texts."""
        plain = plain_backbone(backbone)
        id_T = trial_ids(plain, 1, sum(_TRIAL_LENGTHS))[0].cpu()
        tokens = TokenBatch(id_T, torch.ones_like(id_T, dtype=torch.bool), torch.tensor(_TRIAL_LENGTHS))
        tokens = tokens.to(plain.device)
        batch, name = tokens.padded(), type(plain).__name__
        inputs = {"input_ids": batch.input_ids_NL, "attention_mask": batch.attention_mask_NL.long()}
        with evaluating(backbone), short_window(plain):
            padded_NLH = backbone(**inputs, **without_cache(backbone)).last_hidden_state
            try:
                unpadded_TH = self.states(backbone, tokens)[0].float()
            except Exception as error:  # an architecture without position_ids raises any type of exception
                raise ValueError(f"{name} does not support unpadded texts ({one_line(str(error), 80)})") from error
        difference = relative_difference(unpadded_TH, padded_NLH[batch.attention_mask_NL].float())
        # Negated so that NaN is refused.
        if not difference <= tolerated_difference(plain):
            raise ValueError(f"{name} has other states for unpadded texts, by {difference:.0e}")


def _places(tokens: TokenBatch, num_prefix: int = 0) -> TextPlaces:
    """The layout of texts, each with a prefix of `num_prefix` tokens."""
    num_tokens, longest = tokens.num_tokens + num_prefix * len(tokens), int(tokens.lengths_N.max()) + num_prefix
    return TextPlaces.of(tokens.placed()[1] + num_prefix, num_tokens, longest)


def padded_length(
    backbone: nn.Module, tokens: TokenBatch, longest: int | None = None, num_prefix: int = 0
) -> int | None:
    """The length to pad texts to: on a GPU in half precision a multiple of 8, else None for that of the longest text.

    Attention with a mask is fastest at such lengths. `longest` is the maximum length that the backbone's positions
    allow; `num_prefix` tokens before each text count in the multiple.
    """
    if not _in_half_precision(plain_backbone(backbone)):
        return None
    length = int(tokens.lengths_N.max())
    rounded = length + -(length + num_prefix) % _MULTIPLE
    return rounded if longest is None else max(length, min(rounded, longest))


def _in_half_precision(plain: PreTrainedModel) -> bool:
    """Whether matrix products of a model on a GPU are in half precision now."""
    return torch.is_autocast_enabled("cuda") or plain.dtype in _HALF


def _head_width(plain: PreTrainedModel) -> int:
    config = plain.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def has_window(backbone: nn.Module) -> bool:
    return "sliding_attention" in (getattr(plain_backbone(backbone).config, "layer_types", None) or ())


def _prepare(plain: PreTrainedModel) -> None:
    """Replace each attention layer's config by a copy that names `_row_attention`."""
    for module in plain.modules():
        config: Any = getattr(module, "config", None)
        name = str(getattr(config, "_attn_implementation", None))
        if hasattr(module, "is_causal") and not isinstance(module, PreTrainedModel) and not name.startswith(NAME):
            AttentionInterface.register(f"{NAME}_{name}", functools.partial(_row_attention, name=name))
            changed: Any = copy.copy(config)
            changed._attn_implementation_internal = f"{NAME}_{name}"
            changed.embeddings_before = config
            module.config = changed


def _restore(plain: PreTrainedModel) -> None:
    for module in plain.modules():
        config: Any = getattr(module, "config", None)
        if str(getattr(config, "_attn_implementation", None)).startswith(NAME):
            module.config = config.embeddings_before


def _row_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, name: str, **arguments: Any
) -> Any:
    """The attention output of unpadded texts, (1, T, A, E); padded texts go to the original attention, `name`.

    Queries are (1, A, T, E), keys and values (1, G, T, E) with G a divisor of A. Unpadded texts have no mask.
    """
    start_N1, longest = arguments.get("cu_seq_lens_q"), arguments.get("max_length_q")
    if start_N1 is None or longest is None:
        return own_attention(module, name)(module, query, key, value, attention_mask, **arguments)
    for option in ("softcap", "position_bias", "s_aux"):
        if arguments.get(option) is not None:
            raise ValueError(f"attention with {option}")
    is_causal, window = visible_range(module, arguments)
    window = None if window is None or window >= longest else window
    dropout, scaling = float(arguments.get("dropout") or 0.0), arguments.get("scaling")
    if _kernel_supports(query, value):
        # It has no dropout; no config of a method has dropout in the attention.
        return _by_kernel(query, key, value, start_N1, longest, is_causal, window, scaling), None
    return _by_loop(query, key, value, start_N1, is_causal, window, dropout, scaling), None


def _kernel_supports(query: Tensor, value: Tensor) -> bool:
    is_half = torch.is_autocast_enabled(query.device.type) or query.dtype in _HALF
    if query.device.type != "cuda" or not is_half or query.shape[-1] != value.shape[-1]:
        return False
    return bool(_has_kernel(query.device, query.shape[-1]))


# A constant in the graph of a compiled layer, as is `_shares_keys`.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device: torch.device, width: int) -> bool:
    return _finds_kernel(device, width)


@functools.cache
def _finds_kernel(device: torch.device, width: int) -> bool:
    """Whether torch's kernel supports this GPU, windows and heads of this width."""
    from torch.nn.attention.varlen import varlen_attn

    is_recent = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    supports_width = width % 8 == 0 and width <= _MAX_HEAD_WIDTH
    return is_recent and supports_width and "window_size" in inspect.signature(varlen_attn).parameters


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _shares_keys() -> bool:
    """Whether torch's kernel lets several heads share a key."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_N1: Tensor,
    longest: int,
    is_causal: bool,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """The result of `_row_attention` by torch's kernel."""
    from torch.nn.attention.varlen import varlen_attn

    run: Any = varlen_attn  # its signature differs between releases
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    num_shared = query.shape[1] // key.shape[1]
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0 if is_causal else left)}
    if _shares_keys():
        options["enable_gqa"] = num_shared > 1
    else:
        key, value = (side.repeat_interleave(num_shared, dim=1) for side in (key, value))
    rows = (side[0].transpose(0, 1).to(dtype) for side in (query, key, value))
    output_TAE: Tensor = run(*rows, start_N1, start_N1, longest, longest, **options)
    return output_TAE[None]


def _by_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_N1: Tensor,
    is_causal: bool,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """The result of `_row_attention`, by groups of consecutive texts of equal length."""
    outputs, start = [], 0
    for length, group in groupby(start_N1.diff().tolist()):
        count = len(list(group))
        rows, start = slice(start, start + count * length), start + count * length
        query_nALE, key_nGLE, value_nGLE = (
            torch.unflatten(side[0, :, rows], 1, (count, length)).transpose(0, 1) for side in (query, key, value)
        )
        mask = None
        if window is not None and window < length:
            position_L = torch.arange(length, device=query.device)
            distance_LL = position_L[:, None] - position_L
            mask = (distance_LL if is_causal else distance_LL.abs()) < window
            mask &= (distance_LL >= 0) | (not is_causal)
        shares_keys, causal = query.shape[1] != key.shape[1], is_causal and mask is None
        output_nALE = F.scaled_dot_product_attention(
            query_nALE, key_nGLE, value_nGLE, mask, dropout, causal, scale=scaling, enable_gqa=shares_keys
        )
        outputs.append(output_nALE.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]
