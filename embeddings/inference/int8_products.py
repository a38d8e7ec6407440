"""Linear layers whose products a processor takes in int8: weights once, each token's numbers as they come."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from embeddings.inference.int8_kernels import Product, QuantisedInput, linear_product


class Int8Products:
    """The linear layers of a model's backbones, which `on` runs in int8; the model's own weights stay as they are.

    Adapters are among them: `lora_A` and `lora_B` run in int8 as the layers beneath them do.

    A weight's row has one scale, chosen once, and each token's numbers have one, chosen as they come: layers of one
    module that read the same tensor share the token's. Everything else (attention, norms, pooling, a sparse model's
    experts) stays in float32.

    Args:
        model: The model, in float32 on a processor. Changes of its weights afterwards are not seen.

    Memory: a byte for each weight beside the model's own.
    Precision: products of 8-bit numbers summed in int32, scaled in float32; inputs have 7 bits where the
    processor has no such products.
    """

    def __init__(self, model: nn.Module) -> None:
        backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        owners = {
            layer: owner
            for backbone in backbones
            for owner in backbone.modules()
            for layer in owner.children()
            if type(layer) is nn.Linear
        }
        self._inputs = QuantisedInput()
        self._products: list[tuple[Any, Product]] = [
            (layer, linear_product(layer, owner, self._inputs)) for layer, owner in owners.items()
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
            self._inputs.forget()
            for layer, _ in self._products:
                del layer.forward
