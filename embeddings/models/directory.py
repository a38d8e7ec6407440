"""A model on disk: a sentence-transformers directory, written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers.normalizers
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.common.io import file_lock
from embeddings.common.text import INSTRUCTION_TEMPLATE
from embeddings.models.backbone import quiet_transformers
from embeddings.models.context_directory import CONTEXTUAL_FILES, ContextParts, write_context
from embeddings.models.lora import merged_state_dict, plain_backbone
from embeddings.models.model_card import CURVES_FILE, is_own_card
from embeddings.models.model_files import IMPORT_FILE, load_weights, read_json, write_json
from embeddings.models.pooling import Pooling
from embeddings.models.portable import POOLINGS, TEXT_FILE, save_pooling
from embeddings.models.vector_layers import read_head, read_norm, write_head, write_norm

# What a directory with modules of our own carries; each imports nothing but torch, transformers and the others.
PORTABLE_FILES = (
    "portable.py",
    "anchor_fused.py",
    "anchor_kernels.py",
    "anchor_token.py",
    "anchor_weights.py",
    "attention_tap.py",
    "latent_attention.py",
    "pooling.py",
    "self_attention.py",
)

# The key of config_sentence_transformers.json that lists them; that library reads past it.
WIDTHS_KEY = "matryoshka_dimensions"
# The key there of `TextSettings.instruction_template`, where it is not the default.
TEMPLATE_KEY = "instruction_template"

# What a sparse encoder's own code is; transformers copies it beside the weights.
MOE_FILES = ("expert_passes.py", "experts.py", "moe_layer.py", "moe_router.py", "rotary_moe.py")

# Ours to the names of sentence-transformers. Only the first two pool the same with and without a prompt.
_PROMPT_BLIND = {"cls": "cls_token", "last_token": "lasttoken"}
_STANDARD = _PROMPT_BLIND | {"mean": "mean_tokens", "weighted_mean": "weightedmean_tokens"}
_OTHER_FLAGS = ("max_tokens", "mean_sqrt_len_tokens")
_LIBRARY = "sentence_transformers.models."
_MODEL_FILES = (
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    CURVES_FILE,
    IMPORT_FILE,
)
# Where a directory may have the LoRA matrices that are merged into its weights.
ADAPTER_FOLDER = "adapter"
_MODULE_FOLDERS = ("Context", "Dense", "LayerNorm", "Normalize", "Pooling", "ResidualHead")
_MODEL_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "token*", "vocab*", "merges.txt", "special_tokens*")


@dataclass(frozen=True)
class ModelParts:
    """What a model directory holds beside the backbone and its tokenizer; `context` in a contextual model's alone.

    `trained_widths` are the widths that vectors may be cut to, the widest first; `norm` stands before the head.
    """

    pooling: Pooling
    head: nn.Linear | None
    normalize: bool
    text: TextSettings
    context: ContextParts | None = None
    trained_widths: tuple[int, ...] = ()
    norm: nn.LayerNorm | None = None


def write_model_directory(
    folder: str | os.PathLike[str], backbone: nn.Module, tokenizer: PreTrainedTokenizerBase, parts: ModelParts
) -> None:
    """Write a model as a sentence-transformers directory, whole or not at all.

    Adapters are merged into the written weights; the backbone itself is not touched. The library's own modules are
    named where they give the same vectors; else the directory carries `PORTABLE_FILES` and asks for
    `trust_remote_code=True`. A model that lay there is replaced, other files of the folder stay.

    Raises:
        OptionError: If the pooling is none that a directory can carry, or the path leads to a file.
    """
    name = pooling_name(parts.pooling)
    portable = parts.context is not None or needs_own_code(parts.pooling, parts.text)
    with replaced_folder(Path(folder)) as new, quiet_transformers():
        plain_backbone(backbone).save_pretrained(new, state_dict=merged_state_dict(backbone))
        tokenizer.save_pretrained(new)
        (new / "1_Pooling").mkdir()
        if portable:
            modules = [("portable.TextTransformer", ""), ("portable.MaskedPooling", "1_Pooling")]
            save_pooling(new / "1_Pooling", name, parts.pooling)
            tapped = {"tapped_layers": list(layers)} if (layers := parts.pooling.tapped_layers) else {}
            write_json(new / TEXT_FILE, {**_without(parts.text.to_dict(), "prompts", TEMPLATE_KEY), **tapped})
            for file in PORTABLE_FILES if parts.context is None else (*PORTABLE_FILES, *CONTEXTUAL_FILES):
                shutil.copyfile(Path(__file__).with_name(file), new / file)
        else:
            modules = [(f"{_LIBRARY}Transformer", ""), (f"{_LIBRARY}Pooling", "1_Pooling")]
            write_json(new / "1_Pooling" / "config.json", _standard_pooling_config(name, parts))
            write_json(new / "sentence_bert_config.json", _standard_lengths(parts.text))
        if parts.context is not None:
            modules = write_context(new, modules, parts.context)
        if parts.norm is not None:
            modules.append((f"{_LIBRARY}LayerNorm", f"{len(modules)}_LayerNorm"))
            write_norm(new / modules[-1][1], parts.norm)
        if parts.head is not None:
            modules.append((f"{_LIBRARY}Dense", f"{len(modules)}_Dense"))
            write_head(new / modules[-1][1], parts.head)
        if parts.normalize:
            modules.append((f"{_LIBRARY}Normalize", f"{len(modules)}_Normalize"))
            (new / modules[-1][1]).mkdir()
        write_json(
            new / "modules.json",
            [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)],
        )
        versions = {"transformers": transformers.__version__, "pytorch": torch.__version__}
        common = {"default_prompt_name": None, "similarity_fn_name": "cosine", "__version__": versions}
        widths = {WIDTHS_KEY: list(parts.trained_widths)} if parts.trained_widths else {}
        template = parts.text.instruction_template
        own = {TEMPLATE_KEY: template} if template != INSTRUCTION_TEMPLATE else {}
        prompts = {"prompts": parts.text.prompts, **own}
        write_json(new / "config_sentence_transformers.json", {**prompts, **widths, **common})


def read_model_directory(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, contextual: bool = False
) -> ModelParts:
    """What a sentence-transformers directory holds beside its backbone; no code of the directory runs.

    Args:
        folder: The directory.
        model: Its backbone, of the second stage in a contextual model.
        tokenizer: Its tokenizer.
        contextual: Whether the caller reads a contextual model's own parts (see `context_directory`).

    Raises:
        InputError: If it is no such directory, a file of it is damaged, or it has a module that an `Embedder` has not.
    """
    if not (folder / "modules.json").is_file():
        raise InputError(str(folder), "has no modules.json, so it is no embedding model", "export one, or train it")
    entries = read_json(folder / "modules.json", list)
    pooling: Pooling | None = None
    norm, head, normalize, include_prompt = None, None, False, True
    for entry in entries:
        kind, path = _module_entry(folder, entry)
        if kind == "Pooling":
            pooling, include_prompt = _read_standard_pooling(path)
        elif kind == "MaskedPooling":
            pooling = _read_portable_pooling(path)
        elif kind == "LayerNorm" and (head is not None or normalize):
            what = "has a LayerNorm behind its head or Normalize"
            raise InputError(str(folder / "modules.json"), what, "use a model that has it right behind the pooling")
        elif kind == "LayerNorm":
            norm = read_norm(path)
        elif kind == "Dense":
            head = read_head(path)
        elif kind == "Normalize":
            normalize = True
        elif kind in ("ContextualTransformer", "ResidualHead") and not contextual:
            raise InputError(str(folder), "is a contextual model", "load it with embeddings.models.load_embedder")
        elif contextual and kind in ("ContextualTransformer", "ResidualHead"):
            continue
        elif kind not in ("Transformer", "TextTransformer"):
            raise InputError(str(folder / "modules.json"), f"{kind} is no module of ours", "use another model")
    if pooling is None:
        raise InputError(str(folder / "modules.json"), "names no pooling", "use a model with a pooling module")
    text = _read_text(folder, model, tokenizer, include_prompt)
    width = pooling.hidden_size if head is None else head.out_features
    return ModelParts(pooling, head, normalize, text, trained_widths=_read_widths(folder, width), norm=norm)


def pooling_name(pooling: Pooling) -> str:
    """The name that a directory and a config know this pooling by.

    Raises:
        OptionError: If it is none of the library's.
    """
    for name, kind in POOLINGS.items():
        if type(pooling) is kind:
            return name
    rule = "is none that a model directory can carry"
    raise OptionError("pooling", type(pooling).__name__, rule, f"use one of {', '.join(POOLINGS)}")


def needs_own_code(pooling: Pooling, text: TextSettings) -> bool:
    """Whether sentence-transformers' own modules cannot pool so, or not these texts."""
    name = pooling_name(pooling)
    excludes_prompt = not text.pool_prompt and any(text.prompts.values()) and name not in _PROMPT_BLIND
    excludes_start = not text.pool_start and name not in _PROMPT_BLIND
    closes = text.append_eos or bool(text.suffix)
    has_rule = text.pooling_rule not in (None, "exact")
    return name not in _STANDARD or closes or excludes_prompt or excludes_start or has_rule


def _standard_pooling_config(name: str, parts: ModelParts) -> dict[str, Any]:
    flags = {f"pooling_mode_{mode}": mode == _STANDARD[name] for mode in (*_STANDARD.values(), *_OTHER_FLAGS)}
    include_prompt = parts.text.pool_prompt or name in _PROMPT_BLIND
    return {"word_embedding_dimension": parts.pooling.hidden_size, **flags, "include_prompt": include_prompt}


def _standard_lengths(text: TextSettings) -> dict[str, Any]:
    lengths: dict[str, Any] = {"max_seq_length": text.document_max_length, "do_lower_case": False}
    if text.query_max_length != text.document_max_length:
        lengths |= {"query_length": text.query_max_length, "document_length": text.document_max_length}
    return lengths


def _read_text(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, include_prompt: bool
) -> TextSettings:
    """The text settings of a directory; a tokenizer that must lower-case first is made to."""
    path = folder / "config_sentence_transformers.json"
    template = read_json(path).get(TEMPLATE_KEY, INSTRUCTION_TEMPLATE) if path.is_file() else INSTRUCTION_TEMPLATE
    if not isinstance(template, str):
        raise InputError(str(path), f"has an {TEMPLATE_KEY} that is no text", "export the model again")
    known = {"prompts": _read_prompts(path), TEMPLATE_KEY: template}
    if (folder / TEXT_FILE).is_file():
        settings = _without(read_json(folder / TEXT_FILE), "tapped_layers")
        return _text_settings(folder / TEXT_FILE, {**settings, **known})
    path = folder / "sentence_bert_config.json"
    settings = read_json(path) if path.is_file() else {}
    if settings.get("do_lower_case"):
        backend = tokenizer.backend_tokenizer
        steps = [tokenizers.normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = tokenizers.normalizers.Sequence(steps)
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or 512)
    if not all(isinstance(limit, int | float) for limit in limits):
        what = f"has a model_max_length {tokenizer.model_max_length!r:.40}, expected a whole number"
        raise InputError(str(folder / "tokenizer_config.json"), what, "export the model again")
    length = settings.get("max_seq_length") or min(limits)
    lengths = {f"{role}_max_length": settings.get(f"{role}_length") or length for role in ("query", "document")}
    for value in lengths.values():
        if type(value) is not int:
            raise InputError(str(path), f"has a length {value!r}, expected a whole number", "export the model again")
    return _text_settings(path, {**lengths, **known, "pool_prompt": include_prompt})


def _read_prompts(path: Path) -> dict[str, str]:
    """The prompts of a directory that hold something."""
    saved = read_json(path).get("prompts") or {} if path.is_file() else {}
    if not isinstance(saved, dict):
        raise InputError(str(path), "has prompts that are no object", "export the model again")
    for name, prompt in saved.items():
        if prompt is not None and not isinstance(prompt, str):
            raise InputError(str(path), f"has a prompt {name!r} that is no text", "export the model again")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt or ""):
            raise InputError(str(path), f"has half of a character in prompt {name!r}", "export the model again")
    return {name: prompt for name, prompt in saved.items() if prompt}


def _read_widths(folder: Path, embedding_dim: int) -> tuple[int, ...]:
    """The widths that a directory says its vectors were trained at, the widest first; none where it says nothing."""
    path = folder / "config_sentence_transformers.json"
    widths = read_json(path).get(WIDTHS_KEY, []) if path.is_file() else []
    if not isinstance(widths, list) or not all(type(width) is int and 0 < width <= embedding_dim for width in widths):
        rule = f"{WIDTHS_KEY} must list widths from 1 to {embedding_dim}, got {widths!r}"
        raise InputError(str(path), rule, "export the model again")
    return tuple(sorted(set(widths), reverse=True))


def _text_settings(path: Path, fields: dict[str, Any]) -> TextSettings:
    try:
        return TextSettings.from_dict(fields)
    except (TypeError, OptionError) as error:
        raise InputError(str(path), str(error), "export the model again") from error


def _module_entry(folder: Path, entry: Any) -> tuple[str, Path]:
    """The class name and the folder of one module, which must lie inside the model's."""
    if not isinstance(entry, dict):
        raise InputError(str(folder / "modules.json"), "lists no modules", "take a whole copy of the model")
    kind, path = str(entry.get("type", "")), folder / str(entry.get("path", ""))
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(str(folder / "modules.json"), f"path {entry['path']!r} leads outside", "do not use this model")
    return kind.rsplit(".", 1)[-1], path


def _read_standard_pooling(path: Path) -> tuple[Pooling, bool]:
    config = read_json(path / "config.json")
    width = config.get("word_embedding_dimension") or config.get("embedding_dimension")
    modes = [
        flag.removeprefix("pooling_mode_") for flag, on in config.items() if flag.startswith("pooling_mode_") and on
    ]
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = [{"cls": "cls_token", "lasttoken": "lasttoken"}.get(m, f"{m}_tokens") for m in _as_list(named)]
    ours = [name for name, theirs in _STANDARD.items() if [theirs] == modes]
    if not ours or not isinstance(width, int):
        what = f"pooling {'+'.join(modes) or 'without a mode'} is none of ours"
        raise InputError(str(path / "config.json"), what, f"use a model that pools by one of {', '.join(_STANDARD)}")
    return POOLINGS[ours[0]](width), bool(config.get("include_prompt", True))


def _read_portable_pooling(path: Path) -> Pooling:
    config = read_json(path / "config.json")
    try:
        pooling = POOLINGS[config["name"]](config["hidden_size"], **config["arguments"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(str(path / "config.json"), f"names no pooling ({error})", "export the model again") from error
    if pooling.state_dict():
        load_weights(pooling, path / "model.safetensors")
    return pooling


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def require_folder_or_nothing(target: str | os.PathLike[str]) -> None:
    """Refuse to write a model where something else than a folder lies.

    Raises:
        OptionError: If there is a file, or a folder on the way there is none.
    """
    path = Path(target).expanduser()
    for place in (path, *path.parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise OptionError("output", str(path), f"leads to {place}, which is no folder", "name a new folder")
            return


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place on leaving without an error.

    At every moment either the old or the new model is whole on disk. What lay in the old folder and is no part of a
    model is carried over; where that fails, everything goes back to its place.
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
        _flush(new)
        # Of two that write one model at a time the second replaces the first one's, whole.
        lock = target.with_name(f".{target.name}.lock")
        with file_lock(lock):
            try:
                _exchange(new, target, old)
            finally:
                lock.unlink(missing_ok=True)
        exchanged = True
    finally:
        # Where even the way back failed, the only whole copy is in there: leave it.
        if exchanged or not os.path.lexists(old):
            shutil.rmtree(workplace, ignore_errors=True)


def _exchange(new: Path, target: Path, old: Path) -> None:
    """Put `new` in the place of `target`, which goes to `old`; after an error all is as before."""
    carried: list[str] = []
    if os.path.lexists(target):
        os.replace(target, old)
    try:
        os.replace(new, target)
        if os.path.lexists(old):
            for entry in list(old.iterdir()):
                if not _is_model_file(entry) and not (target / entry.name).exists():
                    os.replace(entry, target / entry.name)
                    carried.append(entry.name)
    except BaseException:
        for name in carried:
            os.replace(target / name, old / name)
        if os.path.lexists(old):
            if target.exists():
                os.replace(target, new)
            os.replace(old, target)
        raise


def _is_model_file(entry: Path) -> bool:
    if entry.is_dir():
        number, _, kind = entry.name.partition("_")
        return entry.name in ("onnx", ADAPTER_FOLDER) or (number.isdecimal() and kind in _MODULE_FOLDERS)
    known = (*_MODEL_FILES, *PORTABLE_FILES, *CONTEXTUAL_FILES, *MOE_FILES, TEXT_FILE)
    return is_own_card(entry) or entry.name in known or any(entry.match(pattern) for pattern in _MODEL_PATTERNS)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        with suppress(PermissionError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
