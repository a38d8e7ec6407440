"""Writes and reads sentence-transformers directories.

A directory uses sentence-transformers' own modules if they compute the same vectors. Otherwise it contains the code for
its pooling: `portable.py`, the pooling's file with its siblings, and a `poolings.py` with only that pooling. A user's
pooling is copied as `own_pooling.py`.
"""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import tokenizers.normalizers
import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_imports

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.common.errors import shown
from embeddings.common.io import write_json
from embeddings.common.own_folder import replaced_folder
from embeddings.common.process import logger, quiet_transformers
from embeddings.common.text import INSTRUCTION_TEMPLATE, Similarity
from embeddings.models.backbone import has_pooling_layer, num_positions
from embeddings.models.context_layers import CONTEXT_FOLDER, CONTEXT_SETTINGS, RESIDUAL_FOLDER, ContextParts
from embeddings.models.lora import merged_state_dict
from embeddings.models.model_files import load_weights, read_json
from embeddings.models.pooling import Pooling, plain_backbone
from embeddings.models.poolings import OWN_FILE, POOLINGS, own_pooling_source, pooling_class, pooling_name
from embeddings.models.portable import TEXT_FILE, pooling_settings, save_layer

# The key of config_sentence_transformers.json for the trained widths; sentence-transformers ignores it.
WIDTHS_KEY = "matryoshka_dimensions"
# The key there for `TextSettings.instruction_template`, unless it is the default.
TEMPLATE_KEY = "instruction_template"
# The key there for `TextSettings.default_prompt_name`.
DEFAULT_PROMPT_KEY = "default_prompt_name"
# Our names to those of sentence-transformers. Only the first two do not depend on whether a prompt is pooled.
_PROMPT_BLIND = {"cls": "cls_token", "last_token": "lasttoken"}
_STANDARD = _PROMPT_BLIND | {"mean": "mean_tokens", "weighted_mean": "weightedmean_tokens"}
_LIBRARY = "sentence_transformers.models."
# In the name of its file of lengths; early releases had one for each architecture.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TABLE = '''"""The pooling of this model.

This file travels inside model directories: it imports only a sibling.
"""

from .{module} import {kind}

POOLINGS = {{"{name}": {kind}}}
'''
_EXPORT_AGAIN = "export the model again"
# The epsilon of sentence-transformers' LayerNorm module, which is not configurable.
_EPSILON = 1e-5
_CONTEXTUAL = ("ContextualTransformer", "ResidualHead")


@dataclass(frozen=True)
class ContextForm:
    """Options in which contextual models differ; the defaults are those of the paper and the released training."""

    adds_pooled: bool = True  # the residual projection adds the pooled states to its output; not in cde-small-v1
    has_positions: bool = False  # context vectors have positions 0 to J - 1 and windows; in cde-small-v2
    has_null: bool = True  # a null vector fills empty slots; not in cde-small-v2, whose input becomes shorter
    pools_prompt: bool = False  # the first stage always pools a context document's prompt; in cde-small-v2


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model directory except backbone and tokenizer; `context` only for a contextual model.

    `trained_widths` are the widths that vectors may be truncated to, the widest first; `norm` precedes the head.
    """

    pooling: Pooling
    head: nn.Linear | None
    normalize: bool
    text: TextSettings
    context: ContextParts | None = None
    trained_widths: tuple[int, ...] = ()
    norm: nn.LayerNorm | None = None
    similarity: Similarity = "cosine"


def write_model_directory(
    folder: str | os.PathLike[str], backbone: nn.Module, tokenizer: PreTrainedTokenizerBase, parts: ModelParts
) -> None:
    """Write a model as a sentence-transformers directory, atomically."""
    name, text, context = pooling_name(parts.pooling), parts.text, parts.context
    with replaced_folder(Path(folder)) as new, quiet_transformers():
        plain_backbone(backbone).save_pretrained(new, state_dict=merged_state_dict(backbone))
        (new / "1_Pooling").mkdir()
        plain = plain_tokenizer(parts.pooling, text, tokenizer) if context is None else None
        (plain or tokenizer).save_pretrained(new)
        if plain is None:
            first, second = _write_own_pooling(new, name, parts)
        else:
            first, second = _write_standard_pooling(new, name, parts, plain_backbone(backbone).config)
        modules = [(first, ""), (second, "1_Pooling")]
        if context is not None:
            first_stage = context.first_stage.backbone
            weights = merged_state_dict(first_stage)
            plain_backbone(first_stage).save_pretrained(new / CONTEXT_FOLDER, state_dict=weights)
            context.save(new / CONTEXT_FOLDER)
            if context.residual is not None:
                modules.append(("context_layers.ResidualHead", RESIDUAL_FOLDER))
                (new / RESIDUAL_FOLDER).mkdir()
                save_layer(context.residual, context.residual.settings(), new / RESIDUAL_FOLDER)
        if parts.norm is not None:
            modules.append((f"{_LIBRARY}LayerNorm", f"{len(modules)}_LayerNorm"))
            write_norm(new / modules[-1][1], parts.norm)
        if parts.head is not None:
            modules.append((f"{_LIBRARY}Dense", f"{len(modules)}_Dense"))
            write_head(new / modules[-1][1], parts.head)
        if parts.normalize:
            modules.append((f"{_LIBRARY}Normalize", f"{len(modules)}_Normalize"))
            (new / modules[-1][1]).mkdir()
        rows = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
        write_json(new / "modules.json", rows)
        config: dict[str, Any] = {"prompts": text.prompts}
        config |= {TEMPLATE_KEY: text.instruction_template} if text.instruction_template != INSTRUCTION_TEMPLATE else {}
        config |= {WIDTHS_KEY: list(parts.trained_widths)} if parts.trained_widths else {}
        config |= {"default_prompt_name": text.default_prompt_name, "similarity_fn_name": parts.similarity}
        config |= {"__version__": {"transformers": transformers.__version__, "pytorch": torch.__version__}}
        write_json(new / "config_sentence_transformers.json", config)


def plain_tokenizer(
    pooling: Pooling, text: TextSettings, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The tokenizer with which sentence-transformers' own modules compute the same vectors; None if there is none.

    These modules tokenise a prompt separately. They exclude it from a mean correctly for the rule `prompt_length`, or
    if no token can span the end of a prompt and the start of a text.
    """
    name = pooling_name(pooling)
    prompts = [] if text.pool_prompt or name in _PROMPT_BLIND else [p for p in text.prompts.values() if p]
    has_eos = not text.append_eos or tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    fits = text.pooling_rule == "prompt_length" or not prompts or (has_eos and _splits_after(prompts, tokenizer))
    fits &= text.pooling_rule in (None, "exact", "prompt_length") and name in _STANDARD and not text.suffix
    if not fits or not (text.pool_start or name in _PROMPT_BLIND):
        return None
    if has_eos:
        return tokenizer
    return None if tokenizer.eos_token is None else _appending_eos(tokenizer)


def _splits_after(prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt always has the same tokens: words are split at spaces, as in BERT, and truncation keeps it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = [(backend[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer")]
    return (
        tokenizer.truncation_side == "right"
        and kinds[0] in (None, "BertNormalizer")
        and kinds[1] == "BertPreTokenizer"
        and all(p[-1:].isspace() for p in prompts)
    )


def _appending_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """A copy that appends the end-of-sequence token to every text, also truncated; None if a saved copy would not."""
    changed, eos = copy.deepcopy(tokenizer), tokenizer.eos_token
    if {"add_bos_token", "add_eos_token"} & set(changed.init_kwargs):  # loading builds the post-processor from these
        changed.init_kwargs["add_eos_token"] = changed.add_eos_token = True
    else:
        backend = changed.backend_tokenizer
        state = json.loads(backend.to_str())
        outer = state["post_processor"] or {"type": "Sequence", "processors": []}
        steps = outer["processors"] if outer["type"] == "Sequence" else [outer]
        templates = [step for step in steps if step["type"] == "TemplateProcessing"]
        if not templates:
            sequences = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
            templates = [{"single": sequences[:1], "pair": sequences, "special_tokens": {}}]
            steps = [*steps, {"type": "TemplateProcessing", **templates[0]}]
        last = {"SpecialToken": {"id": eos, "type_id": 0}}
        for form in ("single", "pair"):
            templates[-1][form].append(last)
        templates[-1]["special_tokens"][eos] = {"id": eos, "ids": [tokenizer.eos_token_id], "tokens": [eos]}
        state["post_processor"] = {"type": "Sequence", "processors": steps}
        backend.post_processor = Tokenizer.from_str(json.dumps(state)).post_processor
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        changed.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder)
    for text in ("a", "", "Hello, world: 7", "one two three four five six seven eight nine ten"):
        expected = tokenizer(text, truncation=True, max_length=7)["input_ids"] + [tokenizer.eos_token_id]
        if loaded(text, truncation=True, max_length=8)["input_ids"] != expected:
            return None
    return changed


def _write_own_pooling(folder: Path, name: str, parts: ModelParts) -> tuple[str, str]:
    """Write pooling and text settings with our code for them; returns the classes of the first two modules."""
    pooling = parts.pooling
    settings = _without(parts.text.to_dict(), "prompts", TEMPLATE_KEY, DEFAULT_PROMPT_KEY)
    first = "portable.TextTransformer" if parts.context is None else "context_layers.ContextualTransformer"
    if pooling.captured_layers:
        first, settings["tapped_layers"] = "attention_capture.CapturingTransformer", list(pooling.captured_layers)
    save_layer(pooling, pooling_settings(name, pooling), folder / "1_Pooling")
    write_json(folder / TEXT_FILE, settings)
    module, kind = type(pooling).__module__.rpartition(".")[2], type(pooling).__name__
    source = own_pooling_source(pooling)
    if source is not None:
        module = OWN_FILE
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
    for file in _with_siblings(["portable", "pooling" if source else module, first.partition(".")[0]]):
        shutil.copyfile(Path(__file__).with_name(f"{file}.py"), folder / f"{file}.py")
    (folder / "poolings.py").write_text(_TABLE.format(module=module, kind=kind, name=name), encoding="utf-8")
    return first, "portable.MaskedPooling"


def _with_siblings(modules: Iterable[str]) -> set[str]:
    """Modules of this package and all that they import from it, except `poolings`."""
    names: set[str] = set()
    pending = list(modules)
    while pending:
        name = pending.pop()
        if name not in names and name != "poolings":
            names.add(name)
            pending += get_relative_imports(Path(__file__).with_name(f"{name}.py"))
    return names


def _write_standard_pooling(folder: Path, name: str, parts: ModelParts, config: PretrainedConfig) -> tuple[str, str]:
    """Write pooling and lengths for sentence-transformers' own modules; returns the classes of the first two."""
    text, modes = parts.text, (*_STANDARD.values(), "max_tokens", "mean_sqrt_len_tokens")
    flags = {f"pooling_mode_{mode}": mode == _STANDARD[name] for mode in modes}
    include_prompt = text.pool_prompt or name in _PROMPT_BLIND
    pooling = {"word_embedding_dimension": parts.pooling.hidden_size, **flags, "include_prompt": include_prompt}
    lengths: dict[str, Any] = {"max_seq_length": text.document_max_length, "do_lower_case": False}
    if has_pooling_layer(config):  # without this, loading warns about an unused layer
        lengths["model_args"] = {"add_pooling_layer": False}
    if text.query_max_length != text.document_max_length:
        lengths |= {"query_length": text.query_max_length, "document_length": text.document_max_length}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", lengths)
    return f"{_LIBRARY}Transformer", f"{_LIBRARY}Pooling"


def require_modules(folder: Path) -> Path:
    """The file that lists the modules of an embedding model; an error if a directory has none."""
    path = folder / "modules.json"
    if not path.is_file():
        raise InputError(str(folder), "has no modules.json, so it is not an embedding model", "export one, or train it")
    return path


def read_model_directory(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, contextual: bool = False
) -> ModelParts:
    """Read the parts of a sentence-transformers directory except the backbone, without running code from it."""
    path = require_modules(folder)
    pooling: Pooling | None = None
    norm, head, normalize, include_prompt = None, None, False, True
    for kind, place in _modules(path):
        if kind == "Pooling":
            pooling, include_prompt = _read_standard_pooling(place)
        elif kind == "MaskedPooling":
            pooling = _read_own_pooling(place)
        elif (kind == "LayerNorm" and head is not None) or (kind in ("LayerNorm", "Dense") and normalize):
            what = f"has a {kind} after its {'Normalize' if normalize else 'head'}"
            raise InputError(str(path), what, "use a model with the order pooling, LayerNorm, Dense, Normalize")
        elif kind == "LayerNorm":
            norm = read_norm(place)
        elif kind == "Dense":
            layer = read_head(place)
            head = layer if head is None else _merged_layers(head, layer, place)
        elif kind == "Normalize":
            normalize = True
        elif kind in _CONTEXTUAL and not contextual:
            raise InputError(str(folder), "is a contextual model", "load it with embeddings.models.load_embedder")
        elif kind not in ("Transformer", "TextTransformer", "CapturingTransformer", *_CONTEXTUAL):
            raise InputError(str(path), f"has the unknown module {kind}", "use another model")
    if pooling is None:
        raise InputError(str(path), "does not name a pooling", "use a model with a pooling module")
    config, fields = _read_config(folder)
    text = _read_text(config, fields, model, tokenizer, include_prompt)
    width = pooling.hidden_size if head is None else head.out_features
    widths = fields.get(WIDTHS_KEY, [])
    if not isinstance(widths, list) or not all(type(value) is int and 0 < value <= width for value in widths):
        rule = f"{WIDTHS_KEY} must list widths from 1 to {width}, got {widths!r}"
        raise InputError(str(config), rule, _EXPORT_AGAIN)
    similarity: Any = fields.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        rule = f"has similarity_fn_name {shown(similarity)}, supported are {', '.join(get_args(Similarity))}"
        raise InputError(str(config), rule, "use a model that compares vectors by one of these")
    trained_widths = tuple(sorted(set(widths), reverse=True))
    return ModelParts(pooling, head, normalize, text, None, trained_widths, norm, similarity)


def read_text_settings(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TextSettings | None:
    """The text settings of a model directory, whatever its other parts; None for a folder of only a backbone."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    places = [place for kind, place in _modules(path) if kind == "Pooling"]
    include_prompt = all(read_json(place / "config.json").get("include_prompt", True) for place in places)
    return _read_text(*_read_config(folder), model, tokenizer, include_prompt)


def _modules(path: Path) -> Iterator[tuple[str, Path]]:
    """The class name and the folder of each module, which must be inside the model's folder."""
    folder = path.parent
    for entry in read_json(path, list):
        with _valid(path, "list of modules"):
            place = folder / str(entry.get("path", ""))
            kind = str(entry.get("type", "")).rsplit(".", 1)[-1]
        if not place.resolve().is_relative_to(folder.resolve()):
            what = f"path {entry['path']!r} is outside the model's folder"
            raise InputError(str(path), what, "do not use this model")
        yield kind, place


def _read_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "config_sentence_transformers.json"
    return path, read_json(path) if path.is_file() else {}


@contextmanager
def _valid(path: Path, what: str) -> Iterator[None]:
    """Report values of another type or range in a file."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(str(path), f"is not a valid {what} ({error})", _EXPORT_AGAIN) from error


def _read_text(
    path: Path, fields: dict[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, include_prompt: bool
) -> TextSettings:
    """The text settings of a directory; adds lower-casing to the tokenizer if the directory asks for it."""
    prompts = _read_prompts(path, fields)
    common: dict[str, Any] = {"prompts": prompts, TEMPLATE_KEY: fields.get(TEMPLATE_KEY, INSTRUCTION_TEMPLATE)}
    # The prompt may be empty: such prompts are not stored.
    default = fields.get(DEFAULT_PROMPT_KEY)
    common |= {DEFAULT_PROMPT_KEY: default} if default in prompts else {}
    path = path.with_name(TEXT_FILE)
    if path.is_file():
        settings = {**_without(read_json(path), "tapped_layers"), **common}
    else:
        names = [path.with_name(f"sentence_{kind}_config.json") for kind in _KINDS]
        path = next((each for each in names if each.is_file()), names[0])
        with _valid(path, "file of lengths"):
            settings = {**_read_lengths(path, model, tokenizer), **common, "pool_prompt": include_prompt}
        if prompts and not include_prompt and not _splits_after(prompts.values(), tokenizer):
            settings["pooling_rule"] = "prompt_length"
    with _valid(path, "file of text settings"):
        text = TextSettings(**settings)
    limit, query, document = num_positions(model), text.query_max_length, text.document_max_length
    if limit is not None and max(query, document) > limit:
        line = "%s has the length %d, the model has %d positions: texts are truncated to these"
        logger.warning(line, path, max(query, document), limit)
        text = replace(text, query_max_length=min(query, limit), document_max_length=min(document, limit))
    return text


def _read_lengths(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The lengths that sentence-transformers' own module truncates texts to."""
    settings = read_json(path) if path.is_file() else {}
    if settings.get("do_lower_case"):
        backend = tokenizer.backend_tokenizer
        steps = [tokenizers.normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = tokenizers.normalizers.Sequence(steps)
    positions = num_positions(model) or getattr(model.config, "max_position_embeddings", None) or 512
    given = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    length = given.get("model_max_length") or settings.get("max_seq_length")
    length = length or min(tokenizer.model_max_length, positions)
    return {f"{role}_max_length": int(settings.get(f"{role}_length") or length) for role in ("query", "document")}


def _read_prompts(path: Path, fields: dict[str, Any]) -> dict[str, str]:
    with _valid(path, "file of prompts"):
        saved = {name: prompt for name, prompt in (fields.get("prompts") or {}).items() if prompt}
        for prompt in saved.values():
            prompt.encode("utf-8")  # a surrogate has no encoding
    for role, words in _SYNONYMS.items():
        name = next((name for name in saved if words & {*name.lower().split("_")}), None)
        if name is not None and role not in saved:
            line = "%s: the prompt %s is used only where it is asked for by name, since it is not named %s"
            logger.warning(line, path, shown(name), role)
    return saved


# Words in names of prompts, such as `search_query`, that mean a role.
_SYNONYMS = {
    "query": {"query", "queries", "question", "questions"},
    "document": {"document", "documents", "doc", "docs", "passage", "passages", "corpus"},
}


def _read_standard_pooling(path: Path) -> tuple[Pooling, bool]:
    config = read_json(path / "config.json")
    width = config.get("word_embedding_dimension") or config.get("embedding_dimension")
    flags = [flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
    modes = [flag.removeprefix("pooling_mode_") for flag in flags]
    if "pooling_mode" in config:
        value = config["pooling_mode"]
        values = list(value) if isinstance(value, list | tuple) else [value]
        modes = [{"cls": "cls_token", "lasttoken": "lasttoken"}.get(mode, f"{mode}_tokens") for mode in values]
    names = [name for name, mode in _STANDARD.items() if [mode] == modes]
    if not names or not isinstance(width, int):
        what = f"has the unknown pooling {'+'.join(modes)}" if modes else "has a pooling without a mode"
        raise InputError(str(path / "config.json"), what, f"use a model with pooling {' or '.join(_STANDARD)}")
    return POOLINGS[names[0]](width), bool(config.get("include_prompt", True))


def _read_own_pooling(path: Path) -> Pooling:
    config = read_json(path / "config.json")
    with _valid(path / "config.json", "pooling"):
        pooling = pooling_class(str(config["name"]))(config["hidden_size"], **config["arguments"])
    if pooling.state_dict():
        load_weights(pooling, path / "model.safetensors")
    return pooling


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


# The layers between pooling and unit length, as sentence-transformers' own modules.


def write_norm(folder: Path, norm: nn.LayerNorm) -> None:
    """Write a layer norm into a new folder; a norm without weights is written with ones and zeros."""
    if norm.eps != _EPSILON:
        rule = f"must be {_EPSILON}, the only value that a model directory supports"
        raise OptionError("norm.eps", norm.eps, rule, "build the norm with it")
    folder.mkdir()
    written = nn.LayerNorm(norm.normalized_shape)
    written.load_state_dict(norm.state_dict(), strict=False)
    save_layer(written, {"dimension": norm.normalized_shape[0]}, folder, prefix="norm.")


def read_norm(folder: Path) -> nn.LayerNorm:
    """The layer norm of a folder; if its weights are ones and zeros, it has no parameters and is not trained."""
    with _valid(folder / "config.json", "layer norm"):
        width = read_json(folder / "config.json")["dimension"]
        norm = nn.LayerNorm(width)
    load_weights(norm, folder / "model.safetensors", prefix="norm.")
    is_plain = torch.equal(norm.weight, torch.ones_like(norm.weight)) and not bool(norm.bias.any())
    return nn.LayerNorm(width, elementwise_affine=False) if is_plain else norm


def write_head(folder: Path, head: nn.Linear) -> None:
    folder.mkdir()
    identity = "torch.nn.modules.linear.Identity"
    shape = {"in_features": head.in_features, "out_features": head.out_features, "bias": head.bias is not None}
    save_layer(head, {**shape, "activation_function": identity}, folder, prefix="linear.")


def read_head(folder: Path) -> nn.Linear:
    """The linear head of a folder; one with an activation or a residual is refused."""
    config = read_json(folder / "config.json")
    if not str(config.get("activation_function", "")).endswith("Identity") or config.get("use_residual"):
        what = "is not a purely linear head"
        raise InputError(str(folder / "config.json"), what, "use a model with a linear head")
    with _valid(folder / "config.json", "head"):
        head = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    load_weights(head, folder / "model.safetensors", prefix="linear.")
    return head


def _merged_layers(first: nn.Linear, second: nn.Linear, folder: Path) -> nn.Linear:
    """One linear layer equal to two consecutive ones, as in EmbeddingGemma; the weights are multiplied in float64."""
    if second.in_features != first.out_features:
        what = f"has {second.in_features} inputs, the previous layer has {first.out_features} outputs"
        raise InputError(str(folder / "config.json"), what, "take a complete copy of the model")
    has_bias = any(layer.bias is not None for layer in (first, second))
    merged = nn.Linear(first.in_features, second.out_features, bias=has_bias)
    with torch.no_grad():
        merged.weight.copy_(second.weight.double() @ first.weight.double())
        if has_bias:
            merged.bias.copy_(second(first(torch.zeros(first.in_features))))
    return merged


# Files of a contextual model: first stage, context layers, residual projection.


def is_contextual(folder: Path) -> bool:
    return (folder / CONTEXT_FOLDER / CONTEXT_SETTINGS).is_file()


def read_context_options(folder: Path) -> dict[str, Any]:
    """The arguments of `ContextualEmbedder` in a contextual model's directory."""
    if not is_contextual(folder):
        raise InputError(str(folder), "is not a contextual model", "load it with embeddings.models.load_embedder")
    path = folder / CONTEXT_FOLDER / CONTEXT_SETTINGS
    with _valid(path, "file of settings"):
        settings = read_json(path)
        names = ("num_context", "num_soft_prompts", "context_dropout", "context_max_length")
        options = {name: settings[name] for name in names}
        flags = {name: settings[name] for name in ("has_positions", "has_null", "pools_prompt")}
    has_residual = any(kind == "ResidualHead" for kind, _ in _modules(folder / "modules.json"))
    residual = read_json(folder / RESIDUAL_FOLDER / "config.json") if has_residual else {}
    form = ContextForm(adds_pooled=residual.get("adds_pooled") is not False, **flags)
    return {**options, "residual_projection": has_residual, "form": form}
