"""Autograd graphs: what they reach, what they hold, and how to hand them a gradient."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


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
    return [node.variable for node in _nodes([root]) if hasattr(node, "variable")]


def _nodes(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graphs of some tensors, each once."""
    found: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    seen = set(found)
    for node in found:
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        new = list(dict.fromkeys(new))
        seen.update(new)
        found.extend(new)
    return found


class GraphMemory:
    """Bytes that graphs built while `measured` was active keep alive.

    Attributes:
        num_bytes: The bytes, complete once the context is left.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._storages: Counter[int] | None = None

    @contextmanager
    def measured(self, device: torch.device, parameters: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Measure the graphs built inside.

        On a CUDA device it is what the allocator hands out and does not get back. Elsewhere it is the storages that
        autograd saves, each once; a checkpointed layer's input is not seen there. Parameters are left out, and so is
        what a sharded layer's weights were gathered into, which has been freed by the end.

        Args:
            device: Where the graph lives.
            parameters: Gives the tensors that live anyway.
        """
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield
            self.num_bytes += torch.cuda.memory_allocated(device) - before
            return
        saved: dict[int, torch.UntypedStorage] = {}

        def remember(tensor: Tensor) -> Tensor:
            """Keep a saved tensor's storage, once."""
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            yield
        for parameter in parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            saved.pop(local.untyped_storage()._cdata, None)
        self._storages = Counter(storage.nbytes() for storage in saved.values())
        self.num_bytes += sum(storage.nbytes() for storage in saved.values())

    def leave_out_casts(self, roots: Iterable[Tensor]) -> None:
        """Take weights that were cast to another dtype off the bytes: under autocast all graphs of a step share them.

        Args:
            roots: What was computed while measured, with its graph.
        """
        for node in _nodes(roots):
            if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
                (made,) = node._input_metadata
                size = math.prod(made.shape) * made.dtype.itemsize
                if self._storages is not None:
                    # Not every cast is saved; a saved one is known by its size.
                    if self._storages[size] == 0:
                        continue
                    self._storages[size] -= 1
                self.num_bytes -= size
