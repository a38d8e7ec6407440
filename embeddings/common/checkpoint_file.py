"""The checkpoint file format: safetensors, with all content that is not a tensor as JSON in the header.

Reading it runs no code. Checksums of each tensor and of the JSON detect truncation and changes. Any safetensors reader
lists the tensors under their paths (`state_dict/embedder.backbone…`, `optimizer_states/0/state/0/exp_avg`).
"""

import base64
import errno
import json
import math
import os
import shutil
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from embeddings.common.errors import InputError
from embeddings.common.io import (
    Stage,
    atomic_path,
    check_disk_space,
    check_regular,
    disk_full_message,
    remove_abandoned,
    unnoticed,
)

FORMAT, VERSION = "embeddings checkpoint", 1

# Maximum nesting of lists and mappings, which Python can read back within its recursion limit.
MAX_LEVELS = 100

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"!dict": dict, "!OrderedDict": OrderedDict, "!Counter": Counter}
_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}


@dataclass(frozen=True)
class PackedContent:
    """A checkpoint's content as JSON, and its tensors by path; types that JSON lacks are tagged: `{"!tuple": […]}`."""

    tree: Any
    tensors: dict[str, Tensor]

    def copied(self, earlier: "PackedContent | None" = None) -> "PackedContent":
        """A copy with its tensors in main memory; reuses the memory of `earlier` if shapes and dtypes are equal."""
        memory = earlier.tensors if earlier is not None else {}
        copies = {}
        for name, tensor in self.tensors.items():
            buffer = memory.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[name] = buffer.copy_(tensor)
        return PackedContent(self.tree, copies)


def pack(content: Any) -> PackedContent:
    """Separate a content into JSON and tensors; no tensor is copied.

    None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict and Counter (keys: str and int), dense tensors
    and numpy arrays are restored bit for bit. Tied weights stay one tensor; other views that share memory become
    separate tensors. An `InputError` names the path of a value of any other type.
    """
    packer = _Packer()
    return PackedContent(packer.pack(content, ()), packer.tensors)


def unpack(packed: PackedContent) -> Any:
    """The inverse of `pack`; a `ValueError` for a tree that `pack` cannot produce."""
    try:
        return _unpacked(packed.tree, packed.tensors)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Hashable, str] = {}

    def pack(self, value: Any, path: tuple[str, ...]) -> Any:
        """A value as JSON types; its tensors go into `tensors`. Subclasses of plain types are refused."""
        kind = type(value)
        if len(path) > MAX_LEVELS:
            raise _refusal(path[:3], f"is nested more than {MAX_LEVELS} levels deep")
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"!float": repr(value)}
        if kind is bytes:
            return {"!bytes": base64.b64encode(value).decode("ascii")}
        if kind in (list, tuple):
            items = [self.pack(item, (*path, str(index))) for index, item in enumerate(value)]
            return items if kind is list else {"!tuple": items}
        if kind in _TAGS:
            return self._pack_mapping(value, path)
        if kind in (Tensor, nn.Parameter):
            return {"!tensor": self._add(value, path)}
        if kind is np.ndarray and value.dtype.kind in "biuf" and value.dtype.isnative:
            return {"!array": self._add(torch.from_numpy(value), path)}
        raise _refusal(path, f"is a {kind.__module__}.{kind.__qualname__}, which is not a plain type")

    def _pack_mapping(self, mapping: dict[Any, Any], path: tuple[str, ...]) -> Any:
        items = []
        for key, item in mapping.items():
            if type(key) not in (str, int):
                raise _refusal(path, f"has the key {key!r}, which is neither a string nor an integer")
            items.append([key, self.pack(item, (*path, str(key)))])
        if type(mapping) is dict and all(type(key) is str and not key.startswith("!") for key, _ in items):
            return dict(items)
        return {_TAGS[type(mapping)]: items}

    def _add(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise _refusal(path, "is a tensor that is not dense")
        identity: Hashable = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr())
        if identity in self._names:
            return self._names[identity]
        name = "/".join(path)
        while name in self.tensors or name == "__metadata__":  # {"a": {"b": …}, "a/b": …}
            name += "'"
        self.tensors[name] = tensor.detach()
        if tensor.numel():
            self._names[identity] = name
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
    decoders: dict[str, Callable[[Any], Any]] = {
        "!tuple": lambda items: tuple(_unpacked(item, tensors) for item in items),
        "!float": float,
        "!bytes": base64.b64decode,
        "!tensor": tensors.__getitem__,
        "!array": lambda name: tensors[name].numpy(),
    }
    return decoders[tag](tree[tag])


def _refusal(path: tuple[str, ...], what: str) -> InputError:
    hint = "save only tensors, numbers, strings, and lists and dicts of them"
    return InputError(f"checkpoint[{']['.join(path)}]", what, hint)


# The limit of safetensors readers.
MAX_HEADER_BYTES = 100_000_000

# First bytes of files of torch.save, in its new and its old format.
_PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    """A tensor in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return _DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()

    def checksum(self, content: memoryview) -> str:
        """The checksum of a tensor's dtype, shape and bytes."""
        checksum = xxhash.xxh3_64(f"{self.dtype}{list(self.shape)}".encode())
        checksum.update(content)
        return checksum.hexdigest()


def write_checkpoint(packed: PackedContent, path: str | os.PathLike[str], on_stage: Stage = unnoticed) -> None:
    """Write a checkpoint to a temporary file, flush it to disk, read it back, and only then rename it to `path`.

    After a crash or an `OSError` at any point `path` has either the old checkpoint or the complete new one. The disk
    must have space for 1.001 times the file. `on_stage` is called with the name of each next stage: "write", "header",
    and then the stages of `atomic_path`. An `InputError` names content that the file cannot store.
    """
    path = Path(path)
    entries = _entries(packed.tensors)
    header_bytes = len(_header(packed.tree, entries, dict.fromkeys(packed.tensors, "0" * 16)))
    num_bytes = header_bytes + sum(entry.num_bytes for entry in entries)
    # Partial files of killed processes take space.
    remove_abandoned(path.parent)
    needed = num_bytes + num_bytes // 1000
    check_disk_space(path, needed)
    try:
        with atomic_path(path, _verify, on_stage) as temporary:
            on_stage("write")
            _write(packed, entries, header_bytes, temporary, on_stage)
    except OSError as error:
        error.filename = str(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.strerror = disk_full_message(str(error.strerror), needed, shutil.disk_usage(path.parent).free)
        raise


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a checkpoint, its tensors in main memory; every byte is checked.

    An `InputError` refuses a file that is truncated, damaged, of a later version, or not a checkpoint of this library.
    """
    return _checked(Path(path), partial(_read, keep_tensors=True))


def inspect_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content with empty tensors, every byte checked; memory holds one tensor at a time."""
    return _checked(Path(path), partial(_read, keep_tensors=False))


def peek_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content with empty tensors; only the header is read and checked."""
    return _checked(Path(path), lambda file, path: _read_header(path)[2])


class _DamagedError(ValueError):
    """Its message is the `what` of an `InputError`."""


def _entries(tensors: Mapping[str, Tensor]) -> list[_Entry]:
    """The tensors in the order of the file: the widest dtypes first, so that each is aligned to its item size."""
    entries = []
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        if tensor.dtype not in _DTYPE_NAMES:
            raise InputError(f"checkpoint, tensor {name}", f"has the dtype {tensor.dtype}", "save it as another dtype")
        entries.append(_Entry(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
    return entries


def _header(tree: Any, entries: list[_Entry], checksums: Mapping[str, str]) -> bytes:
    """The file up to the first tensor; its length does not depend on the checksums."""
    content = json.dumps({"tree": tree, "xxh3_64": dict(checksums)}, separators=(",", ":"), allow_nan=False)
    checksum = xxhash.xxh3_64_hexdigest(content.encode())
    metadata = {"format": FORMAT, "version": str(VERSION), "xxh3_64": checksum, "content": content}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        what = f"has {len(text):,} bytes outside tensors, maximum {MAX_HEADER_BYTES:,}"
        raise InputError("checkpoint", what, "store large values as tensors")
    return struct.pack("<Q", len(text)) + text


def _write(packed: PackedContent, entries: list[_Entry], start: int, path: Path, on_stage: Stage) -> None:
    """Write the tensors from byte `start` on, and then the header, which contains their checksums."""
    checksums = {}
    handle = os.open(path, os.O_WRONLY)
    try:
        os.lseek(handle, start, os.SEEK_SET)
        for entry in entries:
            content = _bytes_of(packed.tensors[entry.name].cpu())
            checksums[entry.name] = entry.checksum(content)
            _write_all(handle, content)
        on_stage("header")
        os.lseek(handle, 0, os.SEEK_SET)
        _write_all(handle, memoryview(_header(packed.tree, entries, checksums)))
    finally:
        os.close(handle)


def _write_all(handle: int, content: memoryview) -> None:
    while content:
        content = content[os.write(handle, content) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes; a view if the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _verify(path: Path) -> None:
    """Check a file by reading it back from disk."""
    if hasattr(os, "posix_fadvise"):  # Linux: drop the page cache, so that the disk is read
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        inspect_checkpoint(path)
    except InputError as error:
        raise OSError(errno.EIO, "the disk returned different bytes than were written") from error


def _checked(path: Path, read: Callable[[BufferedReader, Path], PackedContent]) -> dict[str, Any]:
    check_regular(path)
    with open(path, "rb") as file:
        try:
            content = unpack(read(file, path))
            if not isinstance(content, dict):
                raise _DamagedError(f"contains a {type(content).__name__}, not a dict")
            return content
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            file.seek(0)
            what = "is not a complete checkpoint of this library"
            if isinstance(error, _DamagedError):
                what = str(error)
            elif file.read(4) in _PICKLES:
                what = "is a pickle, which could run code when loaded"
            raise InputError(str(path), what, "use a complete .ckpt file that `fit` wrote") from error


def _read_header(path: Path) -> tuple[list[_Entry], dict[str, str], PackedContent]:
    """The tensors' entries and checksums, and the content with empty tensors."""
    with safe_open(path, framework="numpy") as opened:
        metadata = opened.metadata() or {}
        slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
        entries = [_Entry(name, tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices]
    if metadata["format"] != FORMAT:
        raise _DamagedError(f"has format {metadata['format']!r}, expected {FORMAT!r}")
    if metadata["version"] != str(VERSION):
        raise _DamagedError(f"has format version {metadata['version']}, expected {VERSION}")
    if xxhash.xxh3_64_hexdigest(metadata["content"].encode()) != metadata["xxh3_64"]:
        raise _DamagedError("has a damaged header")
    content = json.loads(metadata["content"])
    empty = {entry.name: torch.empty(0, dtype=_DTYPES[entry.dtype]) for entry in entries}
    return entries, content["xxh3_64"], PackedContent(content["tree"], empty)


def _read(file: BufferedReader, path: Path, keep_tensors: bool) -> PackedContent:
    entries, checksums, content = _read_header(path)
    file.seek(8 + struct.unpack("<Q", file.read(8))[0])
    for entry in entries:
        tensor, start = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype]), file.tell()
        file.readinto(memory := _bytes_of(tensor))
        if entry.checksum(memory) != checksums[entry.name]:
            raise _DamagedError(f"is damaged in {entry.name}, bytes {start:,} to {file.tell():,}")
        if keep_tensors:
            content.tensors[entry.name] = tensor
    return content
