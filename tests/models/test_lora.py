"""The LoRA layer: peft's function and gradients, and no cast of an activation to float32 under autocast."""

from typing import Any

import pytest
import torch
from peft.tuners import lora as peft_layers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from embeddings.models import LoraSettings, add_lora, lora
from tests.helpers.tiny import tiny_mistral

WIDTHS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def adapted(settings: LoraSettings, dtype: torch.dtype, with_peft_alone: bool = False) -> nn.Module:
    """A small decoder in training mode with adapters that are not zero, whose layers are this library's or peft's."""
    with pytest.MonkeyPatch.context() as patch:
        if with_peft_alone:
            patch.setattr(lora, "_lean_linear", lambda: peft_layers.Linear)
        model = add_lora(tiny_mistral().to(dtype), settings).train()
    assert {type(each) is peft_layers.Linear for each in lora_layers(model)} == {with_peft_alone}
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator).to(weight.dtype) / 10
    return model


def lora_layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, peft_layers.LoraLayer)]


def step(model: nn.Module, autocast: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The last states of some texts, and the gradients of the adapters."""
    ids_NL = torch.arange(3, 27).view(2, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        state_NLH = model(input_ids=ids_NL).last_hidden_state
    state_NLH.double().square().sum().backward()
    return state_NLH, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("dtype", "autocast"), [("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)]
)
def test_outputs_and_gradients_are_those_of_peft_to_the_bit(dtype: str, autocast: bool) -> None:
    # alpha / rank is a power of two, by which products are exact in any order.
    settings = LoraSettings(rank=4, alpha=8, dropout=0.0)
    ours, theirs = (step(adapted(settings, WIDTHS[dtype], alone), autocast) for alone in (False, True))
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    assert len(ours[1]) > 10
    assert all(torch.equal(gradient, theirs[1][name]) for name, gradient in ours[1].items())


def test_any_scale_gives_the_function_of_peft_in_float64() -> None:
    settings = LoraSettings(rank=3, alpha=5, dropout=0.0)
    models = [adapted(settings, torch.float64, alone).double() for alone in (False, True)]
    (ours, our_gradients), (theirs, their_gradients) = (step(model, False) for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-10, atol=1e-12)


class Casts(TorchDispatchMode):
    """Counts the casts of activations between precisions; weights have two dimensions, activations three."""

    def __init__(self) -> None:
        super().__init__()
        self.num_casts = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten._to_copy.default and result.dim() == 3:
            self.num_casts += result.dtype != arguments[0].dtype
        return result


def test_under_autocast_no_layer_casts_its_input() -> None:
    counts = {}
    for alone in (False, True):
        model = adapted(LoraSettings(rank=4, alpha=8, dropout=0.0), torch.bfloat16, alone)
        num_layers = len(lora_layers(model))
        with Casts() as casts:
            step(model, True)
        counts[alone] = casts.num_casts
    # peft casts to float32 and autocast back, and the backward pass does both again, but for the input of the first
    # three layers, the frozen embeddings.
    assert counts[True] - counts[False] == 4 * num_layers - 2 * 3


def test_dropout_merging_and_switching_off_are_peft() -> None:
    model = adapted(LoraSettings(rank=4, alpha=8, dropout=0.5), torch.float32)
    ids_NL = torch.arange(3, 27).view(2, 12)
    assert not torch.equal(model(input_ids=ids_NL)[0], model(input_ids=ids_NL)[0])
    model.eval()
    given = model(input_ids=ids_NL)[0]
    with model.disable_adapter():
        base = model(input_ids=ids_NL)[0]
    assert not torch.allclose(given, base, atol=1e-3)
    assert torch.equal(base, tiny_mistral()(input_ids=ids_NL)[0])
    torch.testing.assert_close(model.merge_and_unload()(input_ids=ids_NL)[0], given, rtol=1e-4, atol=1e-5)
