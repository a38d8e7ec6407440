"""The instructions of the CPU, and linear layers in int8 or half precision."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Precision = Literal["auto", "float32", "bfloat16", "int8"]


def has_int8_products() -> bool:
    """Whether an x86 CPU accumulates products of 8-bit numbers in 32 bits."""
    return has_instructions("avx512_vnni", "avx_vnni", "amx_int8")


def has_instructions(*names: str) -> bool:
    """Whether the CPU has one of some sets of instructions; False outside Linux, where none was measured."""
    known = torch.cpu.get_capabilities() if platform.system() == "Linux" else {}
    return any(known.get(name) for name in names)


_MIN_SCALE = 1e-12
# The integer that the largest absolute value in a row of a weight maps to.
_WEIGHT_STEPS = 127

Product = Callable[[Tensor], Tensor]


class QuantisedInput:
    """A cache of the last quantised input, for layers of a module that read the same tensor (query, key, value).

    The largest absolute value of a token maps to 127 (`steps`), or 63 on a CPU that sums products in 16 bits.
    """

    def __init__(self) -> None:
        self.steps = 127 if has_int8_products() else 63
        self._owner: nn.Module | None = None
        self._input: Tensor | None = None
        self._quantised: tuple[Tensor, Tensor] | None = None

    def of(self, owner: nn.Module, input_I: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (..., I) of layers of `owner` as uint8 with zero at `steps` + 1, and each token's maximum."""
        if self._quantised is None or self._input is not input_I or self._owner is not owner:
            self._owner, self._input, self._quantised = owner, input_I, self.quantise(input_I)
        return self._quantised

    def clear(self) -> None:
        self._owner = self._input = self._quantised = None

    def quantise(self, input_I: Tensor) -> tuple[Tensor, Tensor]:
        # Two vectorised passes are faster than one over `abs`.
        maximum_1, minimum_1 = input_I.amax(dim=-1, keepdim=True), input_I.amin(dim=-1, keepdim=True)
        size_1 = torch.maximum(maximum_1, minimum_1.neg_()).clamp_min_(_MIN_SCALE)
        step_I = input_I.mul(self.steps / size_1).round_().to(torch.int8)
        # oneDNN is fast only with unsigned inputs; the sum wraps around where a step was negative.
        return step_I.view(torch.uint8).add_(self.steps + 1), size_1


def linear_product(layer: nn.Linear, owner: nn.Module, inputs: QuantisedInput) -> Product:
    """A function that runs a layer of `owner` in int8 with a copy of its weights; a model's layers share `inputs`."""
    weight_OI, bias_O = layer.weight.detach().float(), None if layer.bias is None else layer.bias.detach().float()
    scale_O = weight_OI.abs().amax(dim=1).clamp_min(_MIN_SCALE).div(_WEIGHT_STEPS)
    packed: Any = torch.ops.onednn.qlinear_prepack(weight_OI.div(scale_O[:, None]).round_().to(torch.int8), None)
    zero_O = torch.zeros(len(scale_O), dtype=torch.int32)
    to_float32: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")

    def product(input_I: Tensor) -> Tensor:
        """The outputs, (..., O). oneDNN supports one input scale only, so the scale of each token is applied here."""
        bytes_I, size_1 = inputs.of(owner, input_I)
        output_O: Tensor = torch.ops.onednn.qlinear_pointwise(
            bytes_I, 1 / inputs.steps, inputs.steps + 1, packed, scale_O, zero_O, *to_float32
        )
        return output_O.mul_(size_1) if bias_O is None else torch.addcmul(bias_O, output_O, size_1, out=output_O)

    return product


class Products:
    """Other products of the linear layers of a model's backbones, including adapters; weights do not change.

    `make` makes the function that runs a layer, from the layer and the module that owns it.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Linear, nn.Module], Product]) -> None:
        backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        owners = {
            layer: owner
            for backbone in backbones
            for owner in backbone.modules()
            for layer in owner.children()
            if type(layer) is nn.Linear
        }
        self._products: list[tuple[Any, Product]] = [(layer, make(layer, owner)) for layer, owner in owners.items()]

    @contextmanager
    def on(self) -> Iterator[None]:
        for layer, product in self._products:
            layer.forward = product
        try:
            yield
        finally:
            for layer, _ in self._products:
                del layer.forward


class Int8Products(Products):
    """Products in int8. Each row of a weight has a fixed scale, and each token one of its own; the rest is float32."""

    def __init__(self, model: nn.Module) -> None:
        self._inputs = QuantisedInput()
        super().__init__(model, lambda layer, owner: linear_product(layer, owner, self._inputs))

    @contextmanager
    def on(self) -> Iterator[None]:
        try:
            with super().on():
                yield
        finally:
            self._inputs.clear()


class HalfProducts(Products):
    """Products under autocast to `dtype` with weights that are cast once: autocast itself casts them in each call.

    For one short text this takes longer than its products. The values are the same.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        def make(layer: nn.Linear, _: nn.Module) -> Product:
            weights = (None if weight is None else weight.detach().to(dtype) for weight in (layer.weight, layer.bias))
            return partial(nn.functional.linear, **dict(zip(("weight", "bias"), weights, strict=True)))

        super().__init__(model, make)
