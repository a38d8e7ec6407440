"""Turning a decoder's causal mask off, and proving that it is off in every layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from embeddings.common import OptionError
from embeddings.models.context_layers import evaluating
from embeddings.models.lora import without_cache

_FIX = "use an architecture that transformers builds its masks for, or another attn_implementation"
# Wider than any text. Some architectures need a number, and some rotate queries and keys in layers with a window alone.
_NO_WINDOW = 2**30


def make_bidirectional_config(config: PretrainedConfig) -> None:
    """Switch a decoder's config to attention in both directions without a window; it stays so when saved and reloaded.

    transformers builds its mask from `config.is_causal`: the eager path never reads the flag of a single layer, and the
    others lose it as soon as a batch has padding. Where layers with and without a window differ in their rotary base
    (Gemma 3, OLMo 3) the window is part of what was trained, so it stays, in both directions. Elsewhere the layers keep
    their types and the window is wider than any text, unless the architecture can do without one (Mistral, Qwen).
    """
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
    """Turn the causal mask and the window of a built decoder off, in place, its config included.

    Source: Lee 2024, arXiv:2405.17428, §3.1.
    """
    make_bidirectional_config(model.config)
    window = getattr(model.config, "sliding_window", None)
    for module in model.modules():
        # Layers keep copies of what they read from the config when they were built.
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False  # type: ignore[assignment]
        if isinstance(getattr(module, "sliding_window", None), int):
            module.sliding_window = window  # type: ignore[assignment]
        if window is None and getattr(module, "layer_type", None) == "sliding_attention":
            module.layer_type = "full_attention"  # type: ignore[assignment]
        if window is None and getattr(module, "has_sliding_layers", False) is True:
            module.has_sliding_layers = False  # type: ignore[assignment]


def require_bidirectional(model: PreTrainedModel) -> None:
    """Check a new model as `check_bidirectional` does: now, or in its first forward where only a GPU runs it."""
    if model.device.type == "meta":  # a plan's model, which has no weights
        return
    try:
        check_bidirectional(model)
    except (RuntimeError, NotImplementedError, ImportError) as error:
        if not torch.cuda.is_available():
            raise _unable_to_run(model, error) from error
        model.register_forward_pre_hook(_check_first)


def _check_first(model: nn.Module, _: Any) -> None:
    """The check of a model that is about to run for the first time, where it runs."""
    assert isinstance(model, PreTrainedModel)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _check_first:
            del model._forward_pre_hooks[key]
    try:
        check_bidirectional(model)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ImportError) as error:
        raise _unable_to_run(model, error) from error


def _unable_to_run(model: PreTrainedModel, error: Exception) -> OptionError:
    name, device = model.config._attn_implementation, model.device.type
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    rule = f"does not run on the {'GPU' if device == 'cuda' else device.upper()} ({reason:.80})"
    return OptionError("backbone.attn_implementation", name, rule, "set it to sdpa, or train where it runs")


@torch.no_grad()
def check_bidirectional(model: PreTrainedModel) -> None:
    """Check that each text's first token sees its last one, in every layer, and that neither sees padding.

    Runs tiny forward passes of two texts of unlike length, so that the path with padding is the one tested. A layer is
    then called again, alone, with another state of the last token: no later layer can hide that it is causal.

    Raises:
        OptionError: If a layer is causal still, or padding changes a state.
    """
    ids_NL = trial_ids(model, 2, 12)
    attention_NL = torch.ones_like(ids_NL)
    attention_NL[1, 9:] = 0
    changed_NL = ids_NL.clone()
    changed_NL[[0, 1], [11, 8]] = int(model.config.vocab_size) - 1
    with evaluating(model):
        with _recorded(model) as calls:
            first_NH = _states(model, ids_NL, attention_NL)[:, 0]
        moved_N = (_states(model, changed_NL, attention_NL)[:, 0] - first_NH).abs().amax(dim=1)
        alone_LH = _states(model, ids_NL[1:, :9], attention_NL[1:, :9])[0]
        causal = sorted({call.layer for call in calls if _is_causal(call)})
    name = f"{type(model).__name__} with {model.config._attn_implementation} attention"
    if float(moved_N.min()) == 0.0:
        rule = "cannot take effect: the first token does not see the last one"
        raise OptionError("backbone.bidirectional", name, rule, _FIX)
    if causal:
        rule = f"cannot take effect: {_named(model, causal)} read from left to right"
        raise OptionError("backbone.bidirectional", name, rule, "take a decoder with attention in every layer")
    spread = relative_difference(first_NH[1], alone_LH[0])
    if not spread <= tolerated_difference(model):
        raise OptionError("backbone.bidirectional", name, f"lets padding change a state (by {spread:.1e})", _FIX)


def trial_ids(model: PreTrainedModel, num_texts: int, length: int) -> Tensor:
    """Ids of the short texts that a model is tried with, (N, L) int64 on its device."""
    ids = torch.arange(num_texts * length, device=model.device) % (int(model.config.vocab_size) - 4) + 3
    return ids.view(num_texts, length)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors of states, over the largest state expected; NaN where a state is."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def tolerated_difference(model: PreTrainedModel) -> float:
    """How far two ways to the same states may differ by rounding."""
    is_exact = model.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(model.device.type)
    return 1e-3 if is_exact else 0.1


class _Call(NamedTuple):
    """One call of a layer, or of a part of it, with the states of the check's two texts."""

    layer: int
    part: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[list[_Call]]:
    """Inside, the calls of each layer and of its direct parts: a mixer may stay causal beside an attention."""
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

    def moved(*indices: int) -> Tensor:
        """How far each state moves, (2, 12, H), where those of one token of each text are turned."""
        turned_NLH = states.clone()
        # No change of sign: a gate times a value would not notice it.
        for text, index in enumerate(indices):
            turned_NLH[text, index] = states[text, index].roll(1)
        args = [turned_NLH if value is states else value for value in call.args]
        kwargs = {name: turned_NLH if value is states else value for name, value in call.kwargs.items()}
        again = _tensor(call.part(*args, **kwargs))
        assert again is not None
        return (again - before).abs()

    # Little is enough to see a later token, but rounding: a few huge numbers of a state must not hide the others.
    # To see an earlier one takes more, which experts that compute their tokens together do not reach by rounding.
    by_last = moved(11, 8) > 1e-6 * before.abs()
    sees_later = bool(by_last[0, :11].any()) and bool(by_last[1, :8].any())
    return not sees_later and bool((moved(0, 0)[:, 1:9] > 1e-3 * before.abs().max()).any())


def _tensor(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) else None


def _named(model: PreTrainedModel, causal: list[int]) -> str:
    """The layers, and what the config says that they are."""
    kinds = getattr(model.config, "layer_types", None) or []
    found = sorted({str(kinds[index]) for index in causal if index < len(kinds)})
    shown = ", ".join(map(str, causal[:4])) + (" …" if len(causal) > 4 else "")
    kind = " and ".join(found).replace("_", " ") if found else type(list(layers(model))[causal[0]]).__name__
    return f"layers {shown} ({kind})" if len(causal) > 1 else f"layer {shown} ({kind})"


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Check that a text's first token does not see its last one: what a model is to predict would be given away."""
    if model.device.type == "meta":
        return
    ids_NL = trial_ids(model, 1, 12)
    changed_NL = ids_NL.clone()
    changed_NL[0, -1] = int(model.config.vocab_size) - 1
    with evaluating(model):
        first_H, other_H = (_states(model, ids, torch.ones_like(ids))[0, 0] for ids in (ids_NL, changed_NL))
    if float((first_H - other_H).abs().max()) > 1e-5 * float(first_H.abs().max()):
        rule = "needs a causal mask: here the first token sees the last one"
        raise OptionError("model.objective", "causal", rule, "take a decoder that was saved with its mask, or mntp")


def _states(model: PreTrainedModel, ids_NL: Tensor, attention_NL: Tensor) -> Tensor:
    # A cache would hand a layer that is called again the tokens of its first call.
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
