"""Nested plain types and tensors, as a tree that JSON can hold and a table of tensors."""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embeddings.common.errors import InputError

# Lists and mappings inside each other; what Python reads back without exhausting its stack.
MOST_LEVELS = 100

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"!dict": dict, "!OrderedDict": OrderedDict, "!Counter": Counter}
_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}


@dataclass(frozen=True)
class PackedContent:
    """A content taken apart.

    Args:
        tree: The content as JSON can hold it. Values that JSON lacks are mappings with one key that begins with `!`,
            such as `{"!tuple": […]}` and `{"!tensor": NAME}`.
        tensors: The tensors by their path in the content, each once, wherever they lie.
    """

    tree: Any
    tensors: dict[str, Tensor]

    def copied(self, earlier: "PackedContent | None" = None) -> "PackedContent":
        """The same content with its tensors in main memory that nobody else writes to.

        Args:
            earlier: A copy that is not needed any more: its memory is used again where shapes and dtypes are equal.
        """
        memory = earlier.tensors if earlier is not None else {}
        return PackedContent(self.tree, {name: _copied(x, memory.get(name)) for name, x in self.tensors.items()})


def pack(content: Any) -> PackedContent:
    """Take a content apart; nothing is copied but the plain values.

    None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict and Counter (keys: str and int), dense tensors
    and numpy arrays come back as they were, bit for bit. Tensors that are one (tied weights) stay one; other views of
    one memory, and parameters, come back as tensors of their own.

    Raises:
        InputError: If anything else is there; the message names where.
    """
    packer = _Packer()
    return PackedContent(packer.pack(content, ()), packer.tensors)


def unpack(packed: PackedContent) -> Any:
    """The content that was taken apart.

    Raises:
        ValueError: If the tree is none that `pack` makes.
    """
    try:
        return _unpacked(packed.tree, packed.tensors)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Hashable, str] = {}

    def pack(self, value: Any, path: tuple[str, ...]) -> Any:
        """A value as JSON can hold it; its tensors go into the table. Subclasses of plain types are not plain."""
        kind = type(value)
        if len(path) > MOST_LEVELS:
            raise _refusal(path[:3], f"is nested more than {MOST_LEVELS} levels deep")
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"!float": repr(value)}
        if kind is bytes:
            return {"!bytes": base64.b64encode(value).decode("ascii")}
        if kind in (list, tuple):
            items = [self.pack(item, (*path, str(place))) for place, item in enumerate(value)]
            return items if kind is list else {"!tuple": items}
        if kind in _TAGS:
            return self._pack_mapping(value, path)
        if kind in (Tensor, nn.Parameter):
            return {"!tensor": self._add(value, path)}
        if kind is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative:
            return {"!array": self._add(torch.from_numpy(value), path)}
        raise _refusal(path, f"is a {kind.__module__}.{kind.__qualname__}, which is no plain type")

    def _pack_mapping(self, mapping: dict[Any, Any], path: tuple[str, ...]) -> Any:
        items = []
        for key, item in mapping.items():
            if type(key) not in (str, int):
                raise _refusal(path, f"has the key {key!r}, which is no string and no whole number")
            items.append([key, self.pack(item, (*path, str(key)))])
        if type(mapping) is dict and all(type(key) is str and not key.startswith("!") for key, _ in items):
            return dict(items)
        return {_TAGS[type(mapping)]: items}

    def _add(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise _refusal(path, "is a tensor that is not dense")
        place: Hashable = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr())
        if place in self._names:
            return self._names[place]
        name = "/".join(path)
        while name in self.tensors or name == "__metadata__":  # {"a": {"b": …}, "a/b": …}
            name += "'"
        self.tensors[name] = tensor.detach()
        if tensor.numel():
            self._names[place] = name
        return name


def _unpacked(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpacked(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next((key for key in tree if key.startswith("!")), None)
    if tag is None:
        return {key: _unpacked(item, tensors) for key, item in tree.items()}
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({key: _unpacked(item, tensors) for key, item in tree[tag]})
    makers: dict[str, Callable[[Any], Any]] = {
        "!tuple": lambda items: tuple(_unpacked(item, tensors) for item in items),
        "!float": float,
        "!bytes": base64.b64decode,
        "!tensor": tensors.__getitem__,
        "!array": lambda name: tensors[name].numpy(),
    }
    return makers[tag](tree[tag])


def _copied(tensor: Tensor, memory: Tensor | None) -> Tensor:
    if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    return memory.copy_(tensor)


def _refusal(path: tuple[str, ...], what: str) -> InputError:
    fix = "keep tensors, numbers, strings, lists and dicts of them in what is saved"
    return InputError(f"checkpoint[{']['.join(path)}]", what, fix)
