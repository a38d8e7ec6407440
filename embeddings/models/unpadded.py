"""Texts without padding: the tokens of a mini-batch in one row, in which each text attends to itself alone.

`Unpadding` prepares a backbone and runs it so. What a backbone is given is what transformers gives flash attention:
(1, T) tokens, positions from 0 in each text, and `cu_seq_lens_q`, where the texts begin and end. The attention of
every layer gets a function that reads them (`_row_attention`); given padded texts, it does what the layer did before.
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

from embeddings.common import OptionError, PaddedTokens, TokenBatch
from embeddings.common.text import one_line
from embeddings.models.attention_capture import own_attention, visible_range
from embeddings.models.backbone import attention_dropouts
from embeddings.models.bidirectional import relative_difference, tolerated_difference, trial_ids
from embeddings.models.context_layers import evaluating, first_position, learned_positions, without_positions
from embeddings.models.lora import plain_backbone, without_cache
from embeddings.models.pooling import TextPlaces

UnpaddedMode = bool | Literal["auto"]

NAME = "embeddings_unpadded"
# What torch's kernel takes.
_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_WIDTH = 256
# Lengths of padded texts on a GPU in half precision.
_MULTIPLE = 8
# Tokens of the texts that a backbone is tried with.
_TRIAL_LENGTHS = (5, 3, 1)


def unpadding_of(backbone: nn.Module, mode: UnpaddedMode) -> "Unpadding | None":
    """How a backbone reads texts without padding, or None where it never does; `mode` as in `BackboneConfig.unpadded`.

    Where the result is None, the backbone's layers have their own attention. An `OptionError` if it must and cannot.
    """
    plain = plain_backbone(backbone)
    _restore(plain)
    # A plan's model has no weights to try.
    if mode is False or plain.device.type == "meta" or (mode == "auto" and not torch.cuda.is_available()):
        return None
    try:
        return Unpadding(backbone, always=mode is True)
    except ValueError as error:
        _restore(plain)
        if mode == "auto":
            return None
        raise OptionError("backbone.unpadded", mode, f"cannot be: {error}", "leave it out") from error


class Unpadding:
    """What runs a backbone on texts without padding, and says when.

    The states of the tokens are those of padded texts, to rounding. On a GPU in half precision attention is one call of
    torch's `varlen_attn`; a backbone that was loaded with a flash attention keeps it. Elsewhere it is a loop over runs
    of equally long texts. Dropout draws other numbers than over padded texts, and the same ones when replayed.

    A new one tries the backbone out on three short texts and refuses it by a `ValueError`. Without `always` texts are
    read so only where it is quicker: on a GPU in half precision, without dropout in the attention.
    """

    def __init__(self, backbone: nn.Module, always: bool = False) -> None:
        plain = plain_backbone(backbone)
        self.always = always
        attention = str(plain.config._attn_implementation)
        self._is_flash = "flash" in attention
        if not self._is_flash:
            if attention not in ("eager", "sdpa"):
                raise ValueError(f"{attention} reads padded texts alone")
            _prepare(plain)
            self._try(backbone)

    def takes(self, backbone: nn.Module, tokens: TokenBatch) -> bool:
        """Whether these texts, on the backbone's device, are to be read without padding."""
        if int(tokens.lengths_N.min()) == 0:
            return False
        return self.always or (tokens.device.type == "cuda" and self._is_quick(plain_backbone(backbone)))

    def states(self, backbone: nn.Module, tokens: TokenBatch) -> tuple[Tensor, TextPlaces]:
        """The states of the last layer at the texts' tokens, (T, H), and where the texts lie."""
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
        """The states of the texts' tokens behind their context, (T, H), and where the texts lie without it.

        Arguments are as in `context_layers.states_behind_context`.
        """
        model = plain_backbone(backbone)
        words: Any = model.get_input_embeddings()
        word_TH = words(tokens.input_ids_T)
        soft_prompt_NSH = soft_prompt_SH.expand(len(tokens), -1, -1)
        prefix_NPH = torch.cat([context_NMH, soft_prompt_NSH], dim=1).to(word_TH.dtype)
        num_prefix = prefix_NPH.shape[1]
        texts, whole = _places(tokens), _places(tokens, num_prefix)
        position_U = whole.position_T
        if not has_positions:
            position_U, prefix_NPH = without_positions(model, position_U, prefix_NPH, context_NMH.shape[1])
        # Where the U tokens of texts and prefixes lie among prefixes and words laid end to end.
        of_prefix_U = whole.text_T * num_prefix + whole.position_T
        of_word_U = texts.start_N[whole.text_T] + whole.position_T + (len(tokens) - 1) * num_prefix
        source_U = torch.where(whole.position_T < num_prefix, of_prefix_U, of_word_U)
        input_UH = torch.cat([prefix_NPH.flatten(0, 1), word_TH]).index_select(0, source_U)
        state_UH = self.run(backbone, whole, position_U, inputs_embeds=input_UH[None])
        own_T = torch.arange(len(word_TH), device=tokens.device) + (texts.text_T + 1) * num_prefix
        return state_UH.index_select(0, own_T), texts

    def run(self, backbone: nn.Module, places: TextPlaces, position_T: Tensor, **inputs: Tensor) -> Tensor:
        """The states of the last layer, (T, H), of `input_ids`, (1, T), or `inputs_embeds`, (1, T, H).

        `position_T`, (T,) int64, are positions as the backbone counts them.
        """
        start_N1 = F.pad(places.length_N.cumsum(0), (1, 0)).int()
        given: dict[str, Any] = {"cu_seq_lens_q": start_N1, "cu_seq_lens_k": start_N1, **inputs}
        given |= {"max_length_q": places.longest, "max_length_k": places.longest, "position_ids": position_T[None]}
        # Four dimensions keep transformers from making a T x T mask of its own; the attention does not read it.
        mask = None if self._is_flash else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=position_T.device)
        output = backbone(**given, attention_mask=mask, **without_cache(backbone))
        states: Tensor = output.last_hidden_state
        return states[0]

    def _is_quick(self, plain: PreTrainedModel) -> bool:
        """Whether a kernel for texts without padding takes what this model computes on a GPU now."""
        if not _in_half_precision(plain):
            return False
        if self._is_flash:
            return True
        config = plain.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        drops = plain.training and any(attention_dropouts(config).values())
        return not drops and _has_kernel(plain.device, width)

    @torch.no_grad()
    def _try(self, backbone: nn.Module) -> None:
        """Compare the states of three short texts with those that padded texts have."""
        plain = plain_backbone(backbone)
        id_T = trial_ids(plain, 1, sum(_TRIAL_LENGTHS))[0].cpu()
        tokens = TokenBatch(id_T, torch.ones_like(id_T, dtype=torch.bool), torch.tensor(_TRIAL_LENGTHS))
        tokens = tokens.to(plain.device)
        usual, kind = tokens.padded(), type(plain).__name__
        inputs = {"input_ids": usual.input_ids_NL, "attention_mask": usual.attention_mask_NL.long()}
        with evaluating(backbone):
            usual_TH = backbone(**inputs, **without_cache(backbone)).last_hidden_state[usual.attention_mask_NL].float()
            try:
                found_TH = self.states(backbone, tokens)[0].float()
            except Exception as error:  # an architecture that does not take its positions raises anything
                raise ValueError(f"{kind} does not read texts without padding ({one_line(str(error), 80)})") from error
        spread = relative_difference(found_TH, usual_TH)
        # Written so that NaN is refused.
        if not spread <= tolerated_difference(plain):
            raise ValueError(f"{kind} reads texts without padding otherwise, by {spread:.0e}")


def _places(tokens: TokenBatch, num_prefix: int = 0) -> TextPlaces:
    """Where texts lie, each with a prefix of so many tokens."""
    num_tokens, longest = tokens.num_tokens + num_prefix * len(tokens), int(tokens.lengths_N.max()) + num_prefix
    return TextPlaces.of(tokens.placed()[1] + num_prefix, num_tokens, longest)


def padded(
    tokens: TokenBatch, backbone: nn.Module, pad_token_id: int, longest: int | None = None, num_prefix: int = 0
) -> PaddedTokens:
    """Texts padded on the right to the longest of them, on a GPU in half precision to a multiple of 8.

    Attention with a mask is quickest there at such lengths. A mini-batch then has up to 7 tokens a text more than
    `mini_batch_tokens` counts. `longest` is the backbone's number of positions, which padding keeps to; `num_prefix`
    tokens that it reads before each text are part of the multiple.
    """
    length = int(tokens.lengths_N.max()) if len(tokens) else 0
    if _is_half_on_gpu(tokens, plain_backbone(backbone)):
        rounded = length + -(length + num_prefix) % _MULTIPLE
        length = rounded if longest is None else max(length, min(rounded, longest))
    return tokens.padded(pad_token_id=pad_token_id, length=length)


def _is_half_on_gpu(tokens: TokenBatch, plain: PreTrainedModel) -> bool:
    return tokens.device.type == "cuda" and _in_half_precision(plain)


def _in_half_precision(plain: PreTrainedModel) -> bool:
    """Whether the products of a model on a GPU are in half precision now."""
    return torch.is_autocast_enabled("cuda") or plain.dtype in _HALF


def has_window(backbone: nn.Module) -> bool:
    """Whether a layer of a backbone sees only the neighbours of each token."""
    return "sliding_attention" in (getattr(plain_backbone(backbone).config, "layer_types", None) or ())


def _prepare(plain: PreTrainedModel) -> None:
    """Give each attention layer, in a config of its own, the function that reads texts without padding."""
    for module in plain.modules():
        config: Any = getattr(module, "config", None)
        name = str(getattr(config, "_attn_implementation", None))
        if hasattr(module, "is_causal") and not isinstance(module, PreTrainedModel) and not name.startswith(NAME):
            AttentionInterface.register(f"{NAME}_{name}", functools.partial(_row_attention, own=name))
            own_config: Any = copy.copy(config)
            own_config._attn_implementation_internal = f"{NAME}_{name}"
            own_config.embeddings_before = config
            module.config = own_config


def _restore(plain: PreTrainedModel) -> None:
    """Undo `_prepare`."""
    for module in plain.modules():
        config: Any = getattr(module, "config", None)
        if str(getattr(config, "_attn_implementation", None)).startswith(NAME):
            module.config = config.embeddings_before


def _row_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, own: str, **arguments: Any
) -> Any:
    """What each token of texts in one row reads, (1, T, A, E); for padded texts the layer's own function, named `own`.

    Queries are (1, A, T, E), keys and values (1, G, T, E) with G a divisor of A. A row has no mask.
    """
    start_N1, longest = arguments.get("cu_seq_lens_q"), arguments.get("max_length_q")
    if start_N1 is None or longest is None:
        return own_attention(module, own)(module, query, key, value, attention_mask, **arguments)
    for name in ("softcap", "position_bias", "s_aux"):
        if arguments.get(name) is not None:
            raise ValueError(f"attention with {name}")
    is_causal, window = visible_range(module, arguments)
    window = None if window is None or window >= longest else window
    dropout, scaling = float(arguments.get("dropout") or 0.0), arguments.get("scaling")
    if _kernel_takes(query, value, dropout):
        return _by_kernel(query, key, value, start_N1, longest, is_causal, window, scaling), None
    return _by_loop(query, key, value, start_N1, is_causal, window, dropout, scaling), None


def _kernel_takes(query: Tensor, value: Tensor, dropout: float) -> bool:
    is_half = torch.is_autocast_enabled(query.device.type) or query.dtype in _HALF
    if query.device.type != "cuda" or not is_half or dropout > 0 or query.shape[-1] != value.shape[-1]:
        return False
    return _has_kernel(query.device, query.shape[-1])


@functools.cache
def _has_kernel(device: torch.device, width: int) -> bool:
    """Whether torch has its kernel for this GPU, with windows, and for heads of this width."""
    from torch.nn.attention.varlen import varlen_attn

    is_new = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    takes_width = width % 8 == 0 and width <= _MAX_HEAD_WIDTH
    return is_new and takes_width and "window_size" in inspect.signature(varlen_attn).parameters


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

    run: Any = varlen_attn  # whose signature is not the same in every release
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    num_shared = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if num_shared > 1:
        # Where the option is missing, heads that share a key get a copy of it.
        if "enable_gqa" in inspect.signature(run).parameters:
            options["enable_gqa"] = True
        else:
            key, value = (side.repeat_interleave(num_shared, dim=1) for side in (key, value))
    rows = (side[0].transpose(0, 1).to(dtype) for side in (query, key, value))
    left = -1 if window is None else window - 1
    options |= {"scale": scaling, "window_size": (left, 0 if is_causal else left)}
    read_TAE: Tensor = run(*rows, start_N1, start_N1, longest, longest, **options)
    return read_TAE[None]


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
    """The result of `_row_attention`, run by run of equally long texts."""
    parts, start = [], 0
    for length, run in groupby(start_N1.diff().tolist()):
        count = len(list(run))
        rows, start = slice(start, start + count * length), start + count * length
        query_nALE, key_nGLE, value_nGLE = (
            torch.unflatten(side[0, :, rows], 1, (count, length)).transpose(0, 1) for side in (query, key, value)
        )
        mask = None
        if window is not None and window < length:
            place_L = torch.arange(length, device=query.device)
            distance_LL = place_L[:, None] - place_L
            mask = (distance_LL if is_causal else distance_LL.abs()) < window
            mask &= (distance_LL >= 0) | (not is_causal)
        shares_keys, causal = query.shape[1] != key.shape[1], is_causal and mask is None
        read_nALE = F.scaled_dot_product_attention(
            query_nALE, key_nGLE, value_nGLE, mask, dropout, causal, scale=scaling, enable_gqa=shares_keys
        )
        parts.append(read_nALE.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None]
