"""Autograd graphs: what they reach, what they hold, and how to hand them a gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attach_gradient(
    value: Tensor, outputs: Sequence[Tensor], gradients: Sequence[Tensor], untouched: Sequence[Tensor] = ()
) -> Tensor:
    """A scalar that has a given value, and given gradients with respect to given tensors.

    GradCache's surrogate: no sum of products is made, so nothing can overflow in half precision, and a loss scale
    multiplies the gradients in float32 before they take the outputs' dtype.

    Args:
        value: Its value, ().
        outputs: Tensors with a graph behind them, or leaves.
        gradients: For each output its gradient, of its shape.
        untouched: Leaves that its backward reaches with a gradient of zero, which takes no memory.
    """
    attached: Tensor = _AttachGradient.apply(  # type: ignore[no-untyped-call]
        value.detach(), len(outputs), *gradients, *outputs, *untouched
    )
    return attached


class _AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, num_outputs: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:num_outputs])
        ctx.untouched = [(leaf.dtype, leaf.device, leaf.shape) for leaf in tensors[2 * num_outputs :]]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, ...] = ctx.saved_tensors
        scaled = [(gradient * factor).to(gradient.dtype) for gradient in gradients]
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for dtype, device, shape in ctx.untouched]
        return (None, None, *(None for _ in gradients), *scaled, *zeros)


def graph_leaves(root: Tensor) -> list[Tensor]:
    """The leaves that require a gradient and that the graph of `root` reaches, each once."""
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    leaves, seen, pending = [], {root.grad_fn}, [root.grad_fn]
    while pending:
        node = pending.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves


class GraphMemory:
    """Bytes that graphs built while `measured` was active keep alive.

    Attributes:
        num_bytes: The bytes, complete once the context is left.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def measured(self, device: torch.device, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Measure the graphs built inside.

        On a CUDA device it is what the allocator hands out and does not get back. Elsewhere it is the storages that
        autograd saves, each once, parameters left out; a checkpointed layer's input is not seen there.

        Args:
            device: Where the graph lives.
            parameters: Tensors that live anyway.
        """
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield
            self.num_bytes += torch.cuda.memory_allocated(device) - before
            return
        seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

        def count(tensor: Tensor) -> Tensor:
            """Add a saved tensor's storage, once."""
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.num_bytes += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield
