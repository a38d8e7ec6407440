"""The path between a starting model and what training made of it: weights (1 - t) start + t trained.

Weights between the two ends often keep most of the gain on the trained task and lose less on others.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import InputError, OptionError
from embeddings.common.errors import shown
from embeddings.common.io import check_disk_space, check_file, scratch_folder, write_json
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.common.progress import progress_bar
from embeddings.common.text import one_line
from embeddings.evaluation import RetrievalFolder, evaluate_folder
from embeddings.inference import Encoder, Precision
from embeddings.inference.encoder import IRRELEVANT_FIELDS, module_sha256
from embeddings.interop.golden import add_golden
from embeddings.models.backbone import load_tokenizer, model_without_weights, read_config
from embeddings.models.directory import ModelParts, is_contextual, read_model_directory
from embeddings.models.embedder import Embedder
from embeddings.models.model_card import plain, shown_name, stated_licence, table, write_model_card
from embeddings.models.model_files import (
    CARD_FILE,
    GOLDEN_FILE,
    IMPORT_FILE,
    SCORES_FILE,
    UNDAMAGED,
    quantization_of,
    read_json,
    resolve_model,
    weight_files,
)
from embeddings.models.poolings import pooling_name

# The places on the path that are compared.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# The place on the path where nothing is measured.
DEFAULT_SHARE = 0.5
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAME_OF = {dtype: name for name, dtype in _FLOATS.items()}
_COPIED = ("*.json", "*.txt", "*.model", "*.py", "LICENSE*", "LICENCE*", "NOTICE*")
_NOT_COPIED = {"manifest.json", "training_run.json", CARD_FILE, GOLDEN_FILE, IMPORT_FILE, SCORES_FILE}
# Settings that must agree; lengths may differ, and are the trained model's.
_TEXT_SETTINGS = ("append_eos", "pool_prompt", "suffix", "pool_start", "instruction_template", "pooling_rule")
_SAME_KIND = "give a model and what was trained from it"


@dataclass(frozen=True)
class _Directory:
    """A model directory without its weights."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    parts: ModelParts

    @classmethod
    def read(cls, name: str | PathLike[str]) -> "_Directory":
        folder = resolve_model(fspath(name))
        if is_contextual(folder):
            raise InputError(str(folder), "is a contextual model, which has no path", "give a plain embedding model")
        # Refuses an adapter without its base model.
        config = read_config(folder)
        if quantization_of(folder) is not None:
            raise InputError(str(folder), "has quantised weights", "give the model before its quantisation")
        model = model_without_weights(folder, config)
        tokenizer = load_tokenizer(folder, model)
        return cls(folder, model, tokenizer, read_model_directory(folder, model, tokenizer))

    def facts(self) -> dict[str, Any]:
        """What must be equal in both models, by its name for messages."""
        parts, text = self.parts, self.parts.text
        facts: dict[str, Any] = {"architecture": type(self.model).__name__}
        # Dropout and the options of training differ without effect on vectors.
        ignored = (*IRRELEVANT_FIELDS, "gradient_checkpointing", "_name_or_path")
        for name, value in sorted(self.model.config.to_dict().items()):
            if name not in ignored and "drop" not in name and value is not None:
                facts[f"config.json: {name}"] = value
        facts["tokenizer"] = module_sha256(nn.Module(), self.tokenizer, {})[:12]
        facts["pooling"] = pooling_name(parts.pooling)
        facts["pooling's arguments"] = parts.pooling.arguments()
        facts["layer norm"] = parts.norm is not None
        facts["head"] = None if parts.head is None else tuple(parts.head.weight.shape)
        facts["normalisation"] = parts.normalize
        facts["similarity"] = parts.similarity
        facts["set of prompts"] = text.prompts
        facts["default prompt"] = text.default_prompt_name
        return facts | {name: getattr(text, name) for name in _TEXT_SETTINGS}

    def places(self) -> list[str]:
        """The folders of the modules after the backbone."""
        entries = read_json(self.folder / "modules.json", list)
        return [str(entry["path"]) for entry in entries if entry.get("path") and (self.folder / entry["path"]).is_dir()]

    def weights(self) -> dict[str, list[Path]]:
        """The safetensors files of each part: of the backbone under the empty name, and of each module."""
        modules = {place: [self.folder / place / "model.safetensors"] for place in self.places()}
        return {
            "": weight_files(self.folder),
            **{place: files for place, files in modules.items() if files[0].exists()},
        }


def interpolate_models(
    start: str | PathLike[str],
    trained: str | PathLike[str],
    output: str | PathLike[str],
    share: float = DEFAULT_SHARE,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the model directory at one place of the path between two models of one architecture.

    Its weights are (1 - t) start + t trained. All other files are the trained model's; its maximum lengths may differ
    from the start's. LoRA matrices need no treatment: an exported directory has merged them.

    Args:
        start: The model that training started from, a directory or Hub id.
        trained: The directory of the trained model.
        output: The directory to write; an existing one is replaced once the new one is complete.
        share: The place t, from 0 (the start) to 1 (the trained model).
        facts: Further rows of the card's section on the weights.

    Shape/precision: sums in float32; each tensor is written in the wider of its two dtypes. One tensor of each model is
        in memory, and afterwards the new model, for its golden vectors.
    Raises:
        InputError: If the models differ in architecture, tokenizer, pooling, prompts or shapes.
    Source: Wortsman et al. 2022 (WiSE-FT), arXiv:2109.01903.
    """
    require_replaceable(output)
    if not 0 <= share <= 1:
        raise OptionError("share", share, "must be from 0 to 1", "0 is the start, 1 the trained model")
    first, second = _same_kind(start, trained)
    rows: dict[str, object] = {"start": shown_name(fspath(start)), "trained": shown_name(fspath(trained))}
    rows["share of the trained weights"] = f"{share:g}"
    section = table(("", ""), [(name, plain(value)) for name, value in {**rows, **(facts or {})}.items()])
    licence = stated_licence(second.folder) or stated_licence(first.folder)
    location = Path(output).expanduser()
    with replaced_folder(location) as new:
        _write_model(first, second, share, new)
        add_golden(new)
        embedder = Embedder.of_parts(new, second.model, second.tokenizer, second.parts)
        text = f"Each weight is (1 - t) start + t trained, with t the share of the trained weights.\n\n{section}"
        sections = {"Weights between two models": text}
        write_model_card(new, embedder, licence=licence, location=location, base=fspath(start), sections=sections)


def check_path(start: str | PathLike[str], trained: str | PathLike[str]) -> None:
    """Refuse models that differ in architecture, tokenizer, pooling or prompts with an `InputError`."""
    _same_kind(start, trained)


def path_scores(
    start: str | PathLike[str],
    trained: str | PathLike[str],
    folder: RetrievalFolder,
    work: str | PathLike[str],
    *,
    shares: Iterable[float] = SHARES,
    precision: Precision = "auto",
    name: str | None = None,
) -> dict[float, float]:
    """nDCG@10 on validation queries of the models at places of the path, by their share of the trained weights.

    Args:
        start: See `interpolate_models`.
        trained: See `interpolate_models`.
        folder: The validation queries, with their corpus.
        work: A path beside which the models between the ends are written, one at a time, and removed.
        shares: The places.
        precision: Precision of matrix products.
        name: Name of the folder, by which a model with prompts for tasks chooses one.
    """
    first, second = _same_kind(start, trained)
    scores: dict[float, float] = {}
    for share in shares:
        with scratch_folder(Path(work)) as scratch:
            _write_model(first, second, share, scratch)
            encoder = Encoder.from_pretrained(str(scratch), precision=precision, show_progress=True)
            scores[share] = evaluate_folder(encoder, folder, name=name).metrics["ndcg_at_10"]
    return scores


def best_share(scores: Mapping[float, float]) -> float:
    """The share with the highest score; of equal ones the smallest, and one half where nothing was measured."""
    if not scores:
        return DEFAULT_SHARE
    return max(sorted(scores), key=lambda share: scores[share])


def _same_kind(start: str | PathLike[str], trained: str | PathLike[str]) -> tuple[_Directory, _Directory]:
    """Both directories; an `InputError` if they are models of different kinds."""
    first, second = _Directory.read(start), _Directory.read(trained)
    old, new = first.facts(), second.facts()
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            what = f"has another {name} than {start}: {shown(new.get(name))}, not {shown(old.get(name))}"
            raise InputError(str(trained), what, _SAME_KIND)
    return first, second


def _write_model(first: _Directory, second: _Directory, share: float, new: Path) -> None:
    """Write all files of a model directory but manifest, card and golden vectors."""
    for pattern in _COPIED:
        for path in second.folder.glob(pattern):
            if path.is_file() and path.name not in _NOT_COPIED:
                shutil.copyfile(path, new / path.name)
    old, weights = first.weights(), second.weights()
    # Modules are numbered by their places, which are equal where the kinds are.
    missing = [place for place in weights if place not in old]
    if missing:
        raise InputError(str(first.folder), f"has no weights in {missing[0]}", _SAME_KIND)
    for place in second.places():
        shutil.copytree(second.folder / place, new / place, ignore=shutil.ignore_patterns("*.safetensors"))
    widest: set[torch.dtype] = set()
    for place, files in weights.items():
        tensors = _Tensors(old[place])
        prefix = _prefix(tensors.names, _Tensors(files).names, first.folder, second.folder)
        for file in files:
            dtypes = _write_file(tensors, _Tensors([file]), prefix, share, new / place / file.name)
            widest |= dtypes if not place else set()
    if len(widest) == 1:
        # transformers loads a model in the dtype that its config states.
        fields = read_json(new / "config.json")
        fields.pop("torch_dtype", None)
        write_json(new / "config.json", {**fields, "dtype": str(widest.pop()).removeprefix("torch.")})
    index = new / "model.safetensors.index.json"
    if index.is_file():
        fields, size = read_json(index), sum(file.stat().st_size for file in new.glob("*.safetensors"))
        write_json(index, {**fields, "metadata": {"total_size": size}})


class _Tensors:
    """The tensors of safetensors files, read one at a time."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.names: dict[str, Path] = {}
        for file in files:
            check_file(file, UNDAMAGED)
            try:
                with safe_open(file, framework="pt") as opened:
                    self.names |= dict.fromkeys(opened.keys(), file)
            except (OSError, SafetensorError) as error:
                what = f"cannot be read: {one_line(str(error), 100)}"
                raise InputError(str(file), what, "take a complete copy of the model") from error

    def kind(self, name: str) -> tuple[str, list[int]]:
        """The dtype, as safetensors names it, and the shape of a tensor."""
        with safe_open(self.names[name], framework="pt") as opened:
            part = opened.get_slice(name)
            return str(part.get_dtype()), list(part.get_shape())

    def read(self, name: str) -> Tensor:
        with safe_open(self.names[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor


def _prefix(old: Mapping[str, Path], new: Mapping[str, Path], start: Path, trained: Path) -> str:
    """What stands before each of the trained model's names in the start's file, such as `bert.`; often nothing."""
    name = next(iter(new))
    prefixes = sorted((each.removesuffix(name) for each in old if each.endswith(name)), key=len)
    for prefix in prefixes:
        if all(prefix + each in old for each in new):
            return prefix
    absent = next((each for each in new if each not in old), name)
    what = f"has no tensor {absent}, which {trained} has"
    raise InputError(str(start), what, "write it again with the command import, or give another start")


def _write_file(old: _Tensors, new: _Tensors, prefix: str, share: float, path: Path) -> set[torch.dtype]:
    """Write one safetensors file, tensor by tensor; returns the dtypes of its floating-point tensors.

    The format is the length of a JSON header, the header, and the bytes of all tensors without gaps.
    """
    kinds: dict[str, tuple[str, list[int]]] = {}
    for name in new.names:
        (dtype, shape), (old_dtype, old_shape) = new.kind(name), old.kind(prefix + name)
        if shape != old_shape or (dtype in _FLOATS) != (old_dtype in _FLOATS):
            what = f"{name} is {dtype} of shape {shape}, in the start {old_dtype} of shape {old_shape}"
            raise InputError(str(new.names[name]), what, _SAME_KIND)
        if dtype in _FLOATS:
            dtype = _NAME_OF[torch.promote_types(_FLOATS[dtype], _FLOATS[old_dtype])]
        kinds[name] = dtype, shape
    # Wide dtypes first, so that each tensor begins at a multiple of its item's size.
    names = sorted(kinds, key=lambda name: (-_item_size(kinds[name][0]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name in names:
        dtype, shape = kinds[name]
        start, stop = stop, stop + _item_size(dtype) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    check_disk_space(path.parent, stop)
    with open(path, "wb") as file, progress_bar(stop, f"writing {path.name}", "B", unit_scale=True) as bar:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            tensor = _between(old.read(prefix + name), new.read(name), share, kinds[name][0])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            bar.update(tensor.nbytes)
    return {_FLOATS[dtype] for dtype, _ in kinds.values() if dtype in _FLOATS}


def _item_size(dtype: str) -> int:
    return next((bits // 8 for bits in (64, 32, 16) if dtype.endswith(str(bits))), 1)


def _between(old: Tensor, new: Tensor, share: float, dtype: str) -> Tensor:
    if dtype not in _FLOATS:
        return new
    wide = torch.promote_types(_FLOATS[dtype], torch.float32)
    # Exact at both ends.
    mixed = new if share == 1 else old if share == 0 else (1 - share) * old.to(wide) + share * new.to(wide)
    return mixed.to(_FLOATS[dtype])
