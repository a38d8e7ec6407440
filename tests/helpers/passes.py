"""Counts the kernels of eager torch and the bytes that they read and write, without computing anything."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They allocate, return their argument under another name, or read its properties.
_NO_KERNELS = {"prim::device", "detach", "alias", "expand"}
_NO_KERNELS |= {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
# They read as much of their first argument as they write.
_GATHERS = {"index_select", "embedding"}
# In place, and without reading the argument.
_OVERWRITE = {"copy_", "fill_", "zero_", "scatter_"}


class Passes(TorchDispatchMode):
    """Counts operators that read or write memory; one operator of eager torch is one kernel at least.

    Attributes:
        kernels: The number of operators, by name.
        bytes_of: Bytes that they read and write, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if not function.is_view and name not in _NO_KERNELS:
            self.kernels[name] += 1
            self.bytes_of[name] += _moved(name, args, kwargs, result)
        return result


def _moved(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operator reads and writes."""
    if name in _GATHERS:
        args = (result.new_empty(result.shape), *args[1:])
    tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
    # An operator in place returns its argument.
    again = [result] if name.endswith("_") and name not in _OVERWRITE else []
    return sum(each.numel() * each.itemsize for each in [*tensors.values(), *again])


class SavedBytes:
    """The bytes that autograd saves, by dtype, each memory once, without those of the parameters."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.sizes: dict[int, tuple[torch.dtype, int]] = {}

    def counted(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.parameters:
            self.sizes[storage._cdata] = tensor.dtype, storage.nbytes()
        return tensor

    def of(self, dtype: torch.dtype | None = None) -> int:
        return sum(size for kind, size in self.sizes.values() if dtype in (None, kind))


def counted_step(model: torch.nn.Module, run: Callable[[], Tensor]) -> tuple[int, int, int, int]:
    """Kernels, their bytes, saved bytes and saved bytes in float32 of a forward and a backward under bfloat16 autocast.

    Runs in a `FakeTensorMode`.
    """
    saved = SavedBytes(model.parameters())
    with Passes() as passes:
        with saved.counted(), torch.autocast("cpu", torch.bfloat16):
            output = run()
        output.backward(torch.ones_like(output))
    return passes.kernels.total(), passes.bytes_of.total(), saved.of(), saved.of(torch.float32)


def of_a_layer(build: Callable[[int], torch.nn.Module], run: Callable[[Any], Tensor]) -> tuple[int, ...]:
    """What one layer adds to `counted_step`: the difference of a model of two layers and of one."""
    found = []
    for num_layers in (1, 2):
        with FakeTensorMode():
            model = build(num_layers)
            found.append(counted_step(model, lambda model=model: run(model)))  # type: ignore[misc]
    return tuple(two - one for one, two in zip(*found, strict=True))
