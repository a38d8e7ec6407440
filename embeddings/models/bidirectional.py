"""Disables a decoder's causal mask, and checks every layer for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from embeddings.common import OptionError
from embeddings.common.text import one_line
from embeddings.models.pooling import evaluating, without_cache

_FIX = "use an architecture whose masks transformers builds, or another attn_implementation"
# Longer than any text. Some architectures need a number, and some rotate queries and keys only in layers with a window.
_NO_WINDOW = 2**30


def make_bidirectional_config(config: PretrainedConfig) -> None:
    """Change a decoder's config to bidirectional attention without a window; saving and loading keeps this.

    A config that is bidirectional already (EmbeddingGemma) stays as it is: `is_causal` would widen its window by one.
    If layers with and without a window have different rotary bases (Gemma 3, OLMo 3), the model depends on its window,
    which is then kept in both directions. Otherwise the window is removed, or longer than any text.
    """
    if getattr(config, "use_bidirectional_attention", False) is True:
        return
    config.is_causal = False
    rope = getattr(config, "rope_parameters", None)
    rotates_by_layer_type = isinstance(rope, dict) and "sliding_attention" in rope
    if rotates_by_layer_type or getattr(config, "sliding_window", None) is None:
        return
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and not hasattr(config, "use_sliding_window"):
        config.sliding_window = _NO_WINDOW
        return
    config.sliding_window = None
    if getattr(config, "use_sliding_window", False):
        config.use_sliding_window = False
    if layer_types is not None:
        config.layer_types = ["full_attention" if kind == "sliding_attention" else kind for kind in layer_types]


def make_bidirectional(model: PreTrainedModel) -> None:
    """Disable the causal mask and the window of a decoder in place, including its config.

    Source: Lee 2024, arXiv:2405.17428, §3.1.
    """
    before = getattr(model.config, "sliding_window", None)
    make_bidirectional_config(model.config)
    window = getattr(model.config, "sliding_window", None)
    for module in model.modules():
        # Layers have copies of these config fields.
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False  # type: ignore[assignment]
        if window != before and isinstance(getattr(module, "sliding_window", None), int):
            module.sliding_window = window  # type: ignore[assignment]
        if window is None and getattr(module, "layer_type", None) == "sliding_attention":
            module.layer_type = "full_attention"  # type: ignore[assignment]
        if window is None and getattr(module, "has_sliding_layers", False) is True:
            module.has_sliding_layers = False  # type: ignore[assignment]


def require_bidirectional(model: PreTrainedModel) -> None:
    """Run `check_bidirectional` now, or in the first forward if the attention runs only on a GPU."""
    if model.device.type == "meta":  # the model of `plan`, which has no weights
        return
    try:
        check_bidirectional(model)
    except (RuntimeError, NotImplementedError, ImportError) as error:
        if not torch.cuda.is_available():
            rule = f"does not run here ({one_line(str(error), 80)})"
            fix = "set it to sdpa, or train on a device that runs it"
            raise OptionError("backbone.attn_implementation", model.config._attn_implementation, rule, fix) from error
        model.register_forward_pre_hook(_check_first)


def _check_first(model: nn.Module, _: Any) -> None:
    """A hook that checks a model before its first forward pass."""
    assert isinstance(model, PreTrainedModel)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _check_first:
            del model._forward_pre_hooks[key]
    check_bidirectional(model)


@torch.no_grad()
def check_bidirectional(model: PreTrainedModel) -> None:
    """Check that each text's first token sees its last one, in every layer, and that neither sees padding.

    Runs tiny forward passes on two texts of unequal length. Each layer is then called separately with a different state
    of the last token, so that later layers cannot hide a causal one.
    """
    ids_NL = trial_ids(model, 2, 12)
    attention_NL = torch.ones_like(ids_NL)
    attention_NL[1, 9:] = 0
    changed_NL = ids_NL.clone()
    changed_NL[[0, 1], [11, 8]] = int(model.config.vocab_size) - 1
    with evaluating(model):
        with _recorded(model) as calls:
            first_NH = _states(model, ids_NL, attention_NL)[:, 0]
        change_N = (_states(model, changed_NL, attention_NL)[:, 0] - first_NH).abs().amax(dim=1)
        alone_LH = _states(model, ids_NL[1:, :9], attention_NL[1:, :9])[0]
        causal = sorted({call.layer for call in calls if _is_causal(call)})
    name = f"{type(model).__name__} with {model.config._attn_implementation} attention"
    if float(change_N.min()) == 0.0:
        rule = "cannot take effect: the first token does not see the last one"
        raise OptionError("backbone.bidirectional", name, rule, _FIX)
    if causal:
        kinds = sorted({type(list(layers(model))[index]).__name__ for index in causal})
        rule = f"cannot take effect: layers {causal} ({', '.join(kinds)}) read from left to right"
        raise OptionError("backbone.bidirectional", name, rule, "take a decoder with attention in every layer")
    difference = relative_difference(first_NH[1], alone_LH[0])
    if not difference <= tolerated_difference(model):
        raise OptionError("backbone.bidirectional", name, f"lets padding change a state (by {difference:.1e})", _FIX)


def trial_ids(model: PreTrainedModel, num_texts: int, length: int) -> Tensor:
    """Ids of short texts for testing a model, (N, L) int64 on its device."""
    ids = torch.arange(num_texts * length, device=model.device) % (int(model.config.vocab_size) - 4) + 3
    return ids.view(num_texts, length)


@contextmanager
def short_window(model: PreTrainedModel) -> Iterator[None]:
    """Shorten a model's attention window to two tokens within the context, so that the texts of a check exceed it."""
    window: int = getattr(model.config, "sliding_window", None) or 0
    before: dict[int, tuple[Any, int]] = {}
    for part in model.modules():
        for owner in (part, getattr(part, "config", None)):
            size = getattr(owner, "sliding_window", None)
            if isinstance(size, int) and window:
                before[id(owner)] = owner, size
    try:
        for owner, size in before.values():
            # The window of a layer can be one larger than that of the config.
            owner.sliding_window = size - window + 2
        yield
    finally:
        for owner, size in before.values():
            owner.sliding_window = size


def relative_difference(states: Tensor, expected: Tensor) -> float:
    """The maximum absolute difference of states over the maximum of `expected`; NaN if a state is NaN."""
    return float((states - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def tolerated_difference(model: PreTrainedModel) -> float:
    """The `relative_difference` that rounding may cause."""
    is_exact = model.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(model.device.type)
    return 1e-3 if is_exact else 0.1


class _Call(NamedTuple):
    """One call of a layer, or of a child of it, for the two texts of the check."""

    layer: int
    part: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[list[_Call]]:
    """Record the calls of each layer and of its children: a mixer may be causal in parallel to an attention."""
    calls: list[_Call] = []

    def record(index: int, *call: Any) -> None:
        calls.append(_Call(index, *call))

    handles = [
        part.register_forward_hook(partial(record, index), with_kwargs=True)
        for index, layer in enumerate(layers(model))
        for part in (layer, *layer.children())
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _is_causal(call: _Call) -> bool:
    """Whether the first token changes later states and the last one changes no earlier state."""
    inputs = [*call.args, *call.kwargs.values()]
    states = next((value for value in inputs if isinstance(value, Tensor) and value.shape[:2] == (2, 12)), None)
    before = _tensor(call.output)
    if states is None or before is None or states.dim() != 3 or before.shape[:2] != (2, 12):
        return False

    def change(*indices: int) -> Tensor:
        """The change of each output state, (2, 12, H), if the input state of one token per text changes."""
        changed_NLH = states.clone()
        # Rolled, not negated: a product of gate and value could be the same.
        for text, index in enumerate(indices):
            changed_NLH[text, index] = states[text, index].roll(1)
        args = [changed_NLH if value is states else value for value in call.args]
        kwargs = {name: changed_NLH if value is states else value for name, value in call.kwargs.items()}
        after = _tensor(call.part(*args, **kwargs))
        assert after is not None
        return (after - before).abs()

    # The first threshold is just above rounding, elementwise because states have a few huge values. The second one is
    # larger, so that experts do not reach it by rounding when they process tokens in other groups.
    by_last = change(11, 8) > 1e-6 * before.abs()
    sees_later = bool(by_last[0, :11].any()) and bool(by_last[1, :8].any())
    return not sees_later and bool((change(0, 0)[:, 1:9] > 1e-3 * before.abs().max()).any())


def _tensor(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) else None


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether a text's first token does not see its last one."""
    ids_NL = trial_ids(model, 1, 12)
    changed_NL = ids_NL.clone()
    changed_NL[0, -1] = int(model.config.vocab_size) - 1
    with evaluating(model):
        first_H, other_H = (_states(model, ids, torch.ones_like(ids))[0, 0] for ids in (ids_NL, changed_NL))
    return float((first_H - other_H).abs().max()) <= 1e-5 * float(first_H.abs().max())


def check_causal(model: PreTrainedModel) -> None:
    """Check that a model is causal, as next-token prediction requires."""
    if model.device.type != "meta" and not is_causal(model):
        rule = "needs a causal mask: here the first token sees the last one"
        raise OptionError("model.objective", "causal", rule, "take a decoder that was saved with its mask, or mntp")


def _states(model: PreTrainedModel, ids_NL: Tensor, attention_NL: Tensor) -> Tensor:
    # With a cache, a layer that is called again would also see the tokens of its first call.
    output = model(input_ids=ids_NL, attention_mask=attention_NL, **without_cache(model))
    states: Tensor = output.last_hidden_state
    return states.float()


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: a transformer's layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers(child)
