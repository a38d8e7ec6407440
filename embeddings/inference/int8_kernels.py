"""One linear layer's products in int8, by oneDNN."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from embeddings.inference.precision import has_int8_products

_LEAST = 1e-12
# The largest number of a weight's row becomes this many steps.
_WEIGHT_STEPS = 127

Product = Callable[[Tensor], Tensor]


class QuantisedInput:
    """The input that was quantised last, for layers beside each other that read the same tensor (query, key, value).

    It is known again as the same object, read by layers of one module: what a module changes in place between two of
    its layers must not be the input of both.

    Attributes:
        steps: What the largest number of a token becomes: 127, or 63 where the processor sums pairs of products in 16
            bits, which more would overflow.
    """

    def __init__(self) -> None:
        self.steps = 127 if has_int8_products() else 63
        self._owner: nn.Module | None = None
        self._input: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None

    def of(self, owner: nn.Module, input_I: Tensor) -> tuple[Tensor, Tensor]:
        """What layers of `owner` multiply.

        Args:
            owner: The module that the layer belongs to.
            input_I: Inputs, (..., I) float32.

        Returns:
            The inputs in steps of their token's scale, (..., I) uint8 with zero at `steps` + 1; the largest size of
            each token's numbers, (..., 1) float32.
        """
        if self._found is None or self._input is not input_I or self._owner is not owner:
            self._owner, self._input, self._found = owner, input_I, self._quantised(input_I)
        return self._found

    def forget(self) -> None:
        """Hold no tensor any more."""
        self._owner = self._input = self._found = None

    def _quantised(self, input_I: Tensor) -> tuple[Tensor, Tensor]:
        # Two passes that the processor does at once beat one over `abs`.
        largest_1, least_1 = input_I.amax(dim=-1, keepdim=True), input_I.amin(dim=-1, keepdim=True)
        size_1 = torch.maximum(largest_1, least_1.neg_()).clamp_min_(_LEAST)
        step_I = input_I.mul(self.steps / size_1).round_().to(torch.int8)
        # oneDNN is fast with unsigned inputs alone; the sum wraps around where a step was negative.
        return step_I.view(torch.uint8).add_(self.steps + 1), size_1


def linear_product(layer: nn.Linear, owner: nn.Module, inputs: QuantisedInput) -> Product:
    """What the layer computes, in int8.

    Args:
        layer: The layer, whose weights are read now.
        owner: The module that it belongs to.
        inputs: What the layers of one model quantise by.

    Returns:
        Inputs (..., I) float32 to outputs (..., O) float32.
    """
    weight_OI, bias_O = layer.weight.detach().float(), None if layer.bias is None else layer.bias.detach().float()
    scale_O = weight_OI.abs().amax(dim=1).clamp_min(_LEAST).div(_WEIGHT_STEPS)
    packed: Any = torch.ops.onednn.qlinear_prepack(weight_OI.div(scale_O[:, None]).round_().to(torch.int8), None)
    zero_O = torch.zeros(len(scale_O), dtype=torch.int32)
    to_float32: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")

    def product(input_I: Tensor) -> Tensor:
        """The outputs, (..., O): oneDNN knows one scale for all tokens, so each token's own is multiplied in here."""
        bytes_I, size_1 = inputs.of(owner, input_I)
        output_O: Tensor = torch.ops.onednn.qlinear_pointwise(
            bytes_I, 1 / inputs.steps, inputs.steps + 1, packed, scale_O, zero_O, *to_float32
        )
        return output_O.mul_(size_1) if bias_O is None else torch.addcmul(bias_O, output_O, size_1, out=output_O)

    return product
