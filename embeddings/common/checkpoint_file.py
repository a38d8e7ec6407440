"""The checkpoint file: what `torch.save` writes, with a checksum of all bytes in the comment of its zip archive.

Reading it runs no code: it contains only tensors and plain types. `torch.load(FILE, weights_only=True)` reads it too.
"""

import os
import shutil
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import xxhash
from torch import Tensor, nn

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_path, check_disk_space, check_regular, file_hash, fsync_path, remove_abandoned

# The comment: this mark, and the checksum of all bytes before the comment as 32 hex digits.
MARK = b"embeddings checkpoint 2, xxh3_128 "
_COMMENT_BYTES = len(MARK) + 32
_SCALARS = (type(None), bool, int, float, str, bytes)
_MAPPINGS = (dict, OrderedDict, Counter)


Place = tuple[str, ...]


def plain(
    value: Any,
    replace: Callable[[Tensor, Place], Tensor] = lambda tensor, _: tensor.detach(),
    place: Place = (),
    kinds: tuple[type, ...] = (Tensor, nn.Parameter),
) -> Any:
    """A copy of a checkpoint's content with each tensor replaced; an `InputError` names a value of another type.

    `replace` gets each tensor and its place in the content; tensors have exactly one of the types `kinds`.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return kind(plain(item, replace, (*place, str(index)), kinds) for index, item in enumerate(value))
    if kind in _MAPPINGS:
        items = [(key, plain(item, replace, (*place, str(key)), kinds)) for key, item in value.items()]
        if all(type(key) in (str, int) for key, _ in items):
            return kind(dict(items))
    if kind in kinds:
        return replace(value, place)
    what = f"is a {kind.__module__}.{kind.__qualname__}, which is not a plain type"
    if kind in _MAPPINGS:
        what = "has a key that is neither a string nor an integer"
    hint = "save only tensors, numbers, strings, and lists and dicts of them"
    raise InputError(f"checkpoint[{']['.join(place)}]", what, hint)


def copied(content: Any) -> Any:
    """A copy of a content with its tensors in main memory; tied weights stay one tensor."""
    copies: dict[Hashable, Tensor] = {}

    def copy(tensor: Tensor, place: Place) -> Tensor:
        identity = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr())
        if identity not in copies:
            copies[identity] = tensor.detach().to("cpu", copy=True)
        return copies[identity]

    return plain(content, copy)


def add_own_path(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Add a checkpoint's path to its list of the run's checkpoints, which was made before the path was known."""
    written = content.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("written_checkpoints")
    if written is not None:
        written.append(os.path.abspath(path))


def write_checkpoint(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically: after a crash `path` has the old checkpoint or the complete new one.

    An `InputError` names content that is not plain (see `plain`).
    """
    path, sizes = Path(path), dict[int, int]()

    def detached(tensor: Tensor, place: Place) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    content = plain(content, detached)
    remove_abandoned(path.parent)  # partial files of killed processes take space
    check_disk_space(path, sum(sizes.values()) * 1001 // 1000)
    aside = aside_of(path)
    try:
        with atomic_path(path) as temporary:
            with open(temporary, "w+b") as file:
                torch.save(content, file)
                # The archive ends with the length of its comment.
                file.seek(-2, os.SEEK_END)
                file.write(_COMMENT_BYTES.to_bytes(2, "little"))
                file.write(MARK + _checksum(file, file.tell()))
            if path.is_dir():  # a checkpoint of sharded weights
                os.replace(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        # torch raises an error of its own after one of the file.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        cause.filename = str(path)
        raise cause from None


_HINT = "use a complete .ckpt file that `fit` wrote"


def read_checkpoint(
    path: str | os.PathLike[str], device: Literal["cpu", "meta"] = "cpu", is_checked: bool = True
) -> dict[str, Any]:
    """The content of a checkpoint file or folder, every byte checked; on `meta` its tensors have no data."""
    path = Path(path)
    if not path.is_dir():
        return _read_file(path, device, is_checked)
    folder = read_folder(path, device)
    if is_checked:
        folder.check()
    return folder.content if device == "meta" else folder.load(empty_on_cpu, is_alone=True)


inspect_checkpoint = partial(read_checkpoint, device="meta")
# Does not read tensors at all.
peek_checkpoint = partial(read_checkpoint, device="meta", is_checked=False)


def _read_file(path: Path, device: str, is_checked: bool = True) -> dict[str, Any]:
    check_regular(path)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) - _COMMENT_BYTES
        file.seek(max(0, size))
        comment = file.read()
        if not comment.startswith(MARK):
            raise InputError(str(path), "is not a complete checkpoint of this library", _HINT)
        if is_checked and _checksum(file, size) != comment[len(MARK) :]:
            raise InputError(str(path), "is damaged: its bytes are not those that were written", _HINT)
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    # A damaged archive may raise many kinds of errors.
    except Exception as error:
        raise InputError(str(path), "is not a complete checkpoint of this library", _HINT) from error
    if not isinstance(content, dict):
        raise InputError(str(path), f"contains a {type(content).__name__}, not a dict", _HINT)
    return content


def _checksum(file: BinaryIO, size: int) -> bytes:
    """The checksum of the first bytes of a file, which stays at their end."""
    checksum = xxhash.xxh3_128()
    file.seek(0)
    for start in range(0, size, 2**20):
        checksum.update(file.read(min(size - start, 2**20)))
    return checksum.hexdigest().encode()


def empty_on_cpu(tensor: Tensor, place: Place) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


# The file in a folder of sharded tensors that holds everything else, and names the subfolder of the tensors' parts.
CONTENT = "content"


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint of sharded tensors (device `meta` in `content`), whose parts each rank wrote to files in `parts`."""

    parts: Path
    content: dict[str, Any]
    hashes: dict[str, str]

    def check(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Check the bytes of every `num_ranks`-th file."""
        for name, expected in sorted(self.hashes.items())[rank::num_ranks]:
            if not (self.parts / name).is_file() or file_hash(self.parts / name) != expected:
                what = f"is damaged: {self.parts.name}/{name} is missing or not as it was written"
                raise InputError(str(self.parts.parent), what, _HINT)

    def load(self, like: Callable[[Tensor, Place], Tensor], is_alone: bool) -> dict[str, Any]:
        """The content with its sharded tensors loaded into those that `like` makes; all ranks take part."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        targets: dict[str, Tensor] = {}

        def target(tensor: Tensor, place: Place) -> Tensor:
            if tensor.is_meta:
                tensor = targets["/".join(place)] = like(tensor, place)
            return tensor

        content: dict[str, Any] = plain(self.content, target)
        reader = HuggingFaceStorageReader(str(self.parts))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(targets, storage_reader=reader, no_dist=is_alone)
        return content


def read_folder(path: Path, device: str = "cpu") -> CheckpointFolder:
    """A checkpoint folder without the data of its sharded tensors; the bytes of its parts are not checked."""
    if not (path / CONTENT).exists():
        raise InputError(str(path), "is not a complete checkpoint of this library", _HINT)
    stored = _read_file(path / CONTENT, device)
    return CheckpointFolder(path / stored["parts"], stored["content"], stored["hashes"])


def write_folder(path: Path, parts: Path, content: dict[str, Any], hashes: dict[str, str]) -> None:
    """Complete a checkpoint folder, whose `parts` are on disk: they replace those of an earlier checkpoint."""
    fsync_path(parts)
    write_checkpoint({"parts": parts.name, "content": content, "hashes": hashes}, path / CONTENT)
    for other in path.iterdir():
        if other.is_dir() and other != parts:
            shutil.rmtree(other, ignore_errors=True)
    aside_of(path).unlink(missing_ok=True)


def aside_of(path: Path) -> Path:
    """Where a checkpoint of the other kind, file or folder, waits until the new one at `path` is complete."""
    return path.with_name(f"{path.stem}-replaced{path.suffix}")
