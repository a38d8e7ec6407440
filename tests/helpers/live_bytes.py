"""The bytes of the tensors that are alive on a device, counted at every operation; "meta" stands in for a GPU."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors made inside it on a device, from their creation until they are freed.

    Attributes:
        now: Bytes that are alive.
        peak: Most bytes that were alive at once.
        at_peak: Bytes at the peak of each shape and dtype, the largest first.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device, self.now, self.peak = torch.device(device), 0, 0
        self._alive: dict[int, tuple[int, str]] = {}
        self._shapes_at_peak: list[tuple[int, str]] = []

    @property
    def at_peak(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for size, shape in self._shapes_at_peak:
            sums[shape] = sums.get(shape, 0) + size
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device.type:
                self._watch(leaf, given)
        return result

    def _watch(self, tensor: Tensor, given: set[int]) -> None:
        """Count a tensor, unless it is a view of an argument: that one is counted, or was made outside."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in given or not size:
            return
        shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self._alive[key] = (size, shape)
        weakref.finalize(storage, self._free, key)
        self.now += size
        if self.now > self.peak:
            self.peak, self._shapes_at_peak = self.now, list(self._alive.values())

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]
