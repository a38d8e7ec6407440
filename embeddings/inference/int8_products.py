"""Linear layers whose products a processor takes in int8: weights once, each token's numbers as they come."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from embeddings.inference.precision import has_int8_products

_LEAST = 1e-12


class Int8Products:
    """The linear layers of a model's backbones, which `on` runs in int8; the model's own weights stay as they are.

    Adapters are among them: `lora_A` and `lora_B` run in int8 as the layers beneath them do.

    A weight's row has one scale, chosen once, and each token's numbers have one, chosen as they come. Everything else
    (attention, norms, pooling, a sparse model's experts) stays in float32.

    Args:
        model: The model, in float32 on a processor. Changes of its weights afterwards are not seen.

    Memory: a byte for each weight beside the model's own.
    Precision: products of 8-bit numbers summed in int32, scaled in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        layers = {layer for backbone in backbones for layer in backbone.modules() if type(layer) is nn.Linear}
        with warnings.catch_warnings():
            # torch announces another package for quantised tensors, whose kernels need a compiler.
            warnings.simplefilter("ignore")
            self._products: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
                (layer, _product(layer)) for layer in layers
            ]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._products)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run the layers in int8 until left."""
        for layer, product in self._products:
            layer.forward = product
        try:
            yield
        finally:
            for layer, _ in self._products:
                del layer.forward


@torch.no_grad()
def _product(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What the layer computes, in int8."""
    weight_OI, bias_O = layer.weight.detach().float(), None if layer.bias is None else layer.bias.detach().float()
    scale_O = weight_OI.abs().amax(dim=1).clamp_min(_LEAST).div(127)
    zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
    packed = torch.ops.quantized.linear_prepack(
        torch.quantize_per_channel(weight_OI, scale_O.double(), zero_O, 0, torch.qint8), None
    )
    # Without products of its own a processor adds pairs of them in 16 bits, which 8 bits of both would overflow.
    reduce_range = not has_int8_products()

    def product(input_I: Tensor) -> Tensor:
        """Each token is scaled to a largest number of 1 first: the kernel knows one scale for all tokens."""
        largest_1, least_1 = input_I.amax(dim=-1, keepdim=True), input_I.amin(dim=-1, keepdim=True)
        scale_1 = torch.maximum(largest_1, least_1.neg_()).clamp_min_(_LEAST)
        output_O: Tensor = torch.ops.quantized.linear_dynamic(input_I / scale_1, packed, reduce_range)
        return output_O.mul_(scale_1) if bias_O is None else torch.addcmul(bias_O, output_O, scale_1, out=output_O)

    return product
