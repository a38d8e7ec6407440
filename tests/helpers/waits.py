"""Counts the host synchronisations of a step by code location, on a CPU that stands in for a GPU."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from embeddings.common import TokenBatch
from tests.docs.pages import ROOT

# Functions whose result needs a synchronisation with the device.
_READS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero", "numpy", "cpu"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose"),
}
_FACTORIES_OF_VALUES = {"tensor", "as_tensor", "new_tensor"}
# The location is the innermost frame of one of these packages.
_PACKAGES = ("embeddings", "transformers", "peft", "lightning")


class PretendedDevice(TorchFunctionMode):
    """Counts, by code location, the values that the host waits for and the tensors that it copies to the device.

    A tensor is on the host if it is created without a device, or only from host tensors. All others count as on the
    device, including parameters and a moved batch. `Tensor.to` moves a tensor to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function, and count its synchronisations and copies."""
        kwargs, name = kwargs or {}, func.__name__
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if not _is_host(tensor)]
        if on_device and _synchronises(name, args, kwargs):
            self.reads[_location()] += 1
        result = func(*args, **kwargs)
        has_device = _has_device(args, kwargs)
        if name in _FACTORIES_OF_VALUES and (has_device or on_device):
            self.copies[_location()] += 1
        if name in ("__getitem__", "__setitem__") and on_device and len(on_device) < len(tensors):
            self.copies[_location()] += 1
        if name == "to" and has_device and not on_device:
            self.copies[_location()] += 1
            # The CPU would return the same object, which is still marked as on the host.
            return args[0].detach().view(args[0].shape) if result is args[0] else result
        is_host = not on_device and not has_device
        for leaf in tree_leaves(result):
            if is_host and isinstance(leaf, Tensor):
                leaf._is_host = True  # type: ignore[attr-defined]
        return result


def of_host(batch: Any) -> None:
    """Mark the tensors of a batch that stay in host memory when it moves."""
    for name in batch.__dataclass_fields__:
        value = getattr(batch, name)
        if name in batch._ON_CPU:
            value._is_host = True
        elif isinstance(value, TokenBatch):
            of_host(value)


def _is_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_host", False)


def _synchronises(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function's result or its shape depends on values."""
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return any(isinstance(value, Tensor) for value in args[1:]) and kwargs.get("output_size") is None
    if name in ("__getitem__", "__setitem__"):
        index = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        has_mask = any(leaf.dtype == torch.bool and leaf.dim() > 0 for leaf in index)
        # Assigning a scalar by a mask needs no synchronisation.
        return has_mask and (name == "__getitem__" or isinstance(args[2], Tensor))
    return name in _READS


def _has_device(args: Any, kwargs: Any) -> bool:
    """Whether a function has a device argument."""
    return any(isinstance(value, torch.device) for value in (kwargs.get("device"), *args))


def _location() -> str:
    """The file and the function of the current call."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for package in _PACKAGES:
            if package in path.parts and "tests" not in path.parts:
                inside = path.parts[len(path.parts) - path.parts[::-1].index(package) :]
                within = "/".join(inside) if package == "embeddings" else f"{package}: {path.name}"
                return f"{within} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@contextmanager
def as_on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which the library computes as on a device that queues its work."""
    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("embeddings.") and "queues_work" in vars(module):
                patch.setattr(module, "queues_work", lambda device: True)
        yield


def declared(method: str, forwards: int = 1) -> Counter[str]:
    """The documented waits of a step of one method with `forwards` passes of a backbone over padded texts."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.split("## Host synchronisations\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (once|twice) a (step|forward) \|", section, re.MULTILINE)
    assert len(rows) == section.count("\n| `")
    times = {"once": 1, "twice": 2, "step": 1, "forward": forwards}
    named = [row for row in rows if row[1] == "all" or method in row[1].split("; ")]
    return Counter({place: times[often] * times[each] for place, _, often, each in named})
