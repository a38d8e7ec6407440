"""The small files of a model directory: JSON, and weights as safetensors."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from embeddings.common import InputError
from embeddings.common.errors import shown
from embeddings.common.text import one_line

# What `import` writes beside a model: which published tensor each of its own came from.
IMPORT_FILE = "import.json"
_TAKE_ANOTHER = "take a whole copy of the model"


def read_json(path: Path, kind: type = dict, fix: str = _TAKE_ANOTHER) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        kind: The type that its value must have.
        fix: The way out where it is damaged.

    Raises:
        InputError: If it cannot be read, or holds another kind of value.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"is no readable JSON ({one_line(str(error), 160)})"
        raise InputError(str(path), what, fix) from error
    if not isinstance(value, kind):
        raise InputError(str(path), f"holds no {kind.__name__}", fix)
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON into a folder that is not yet in its place."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_weights(module: nn.Module, file: Path, prefix: str = "") -> None:
    """Write a module's weights as safetensors, `prefix` before their names."""
    state = {f"{prefix}{name}": tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, file, metadata={"format": "pt"})


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's weights: the shards that its index names, or the one file there is.

    Raises:
        InputError: If the index is damaged, or names other files than safetensors beside it.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    for name in shards.values() if isinstance(shards, dict) else [shards]:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise InputError(str(index), f"names the shard {shown(name)}", "name .safetensors files beside it alone")
    return [folder / name for name in sorted(set(shards.values()))]


def load_weights(module: nn.Module, file: Path, prefix: str = "") -> None:
    """Load a safetensors file into a module, its tensors' names less `prefix`, in the dtype of the file.

    Raises:
        InputError: If the file is missing or damaged, or does not fit the module.
    """
    try:
        state = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
        module.load_state_dict(state, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = one_line(str(error), 160)
        raise InputError(str(file), f"cannot be loaded: {reason}", "take a whole copy of the model") from error


def weights_checksum(folder: Path) -> str:
    """A checksum of a folder's weights by their names, whatever files they lie in.

    Raises:
        InputError: If a file is missing or damaged.
    """
    found: dict[str, str] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                    tensor = opened.get_tensor(name)
                    checksum = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
                    checksum.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
                    found[name] = checksum.hexdigest()
        except (OSError, SafetensorError) as error:
            raise InputError(str(file), f"cannot be read: {one_line(str(error), 100)}", _TAKE_ANOTHER) from error
    return xxhash.xxh3_128_hexdigest(json.dumps(found, sort_keys=True).encode())
