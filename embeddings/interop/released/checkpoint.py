"""Published checkpoints: config.json, tensors, tokenizer, and the key map to a model of this library."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from embeddings.common import InputError, TextSettings
from embeddings.common.errors import shown
from embeddings.common.io import check_file
from embeddings.common.process import quiet_transformers
from embeddings.common.text import LENGTHS, one_line
from embeddings.models.backbone import load_model, num_positions, read_tokenizer
from embeddings.models.directory import read_model_directory
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel
from embeddings.models.model_files import UNDAMAGED, read_json, weight_files
from embeddings.models.pooling import MeanPooling

_ONE_SOURCE, _WHOLE_COPY = "use config.json and weights of one checkpoint", "use a complete copy of the checkpoint"
# The type of the usual value determines the type of the result.
Number = TypeVar("Number", int, float)


class ReleasedConfig:
    """The fields of a published config.json, or of the object inside it that `prefix` names.

    `assumed` collects the numbers that the file does not contain.
    """

    def __init__(
        self,
        path: Path,
        fields: dict[str, Any] | None = None,
        prefix: str = "",
        assumed: dict[str, float] | None = None,
    ) -> None:
        self.path, self._prefix = path, prefix
        self.assumed: dict[str, float] = {} if assumed is None else assumed
        self.fields: dict[str, Any] = read_json(path) if fields is None else fields

    def part(self, name: str) -> "ReleasedConfig":
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise self._error(name, "an object")
        return ReleasedConfig(self.path, value, f"{self._prefix}{name}.", self.assumed)

    def integer(self, name: str, minimum: int = 1, default: int | None = None) -> int:
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self._error(name, f"an integer >= {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._error(name, "a number")
        return value

    def assume(self, name: str, usual: Number, minimum: int = 1) -> Number:
        """A number of the file; if the file does not contain it, the published models' value."""
        if self.fields.get(name) is None:
            self.assumed[name] = usual
            return usual
        return type(usual)(self.integer(name, minimum) if isinstance(usual, int) else self.number(name))

    def require(self, **values: Any) -> None:
        """Check that fields that affect the computation are missing or have the only supported value."""
        for name, supported in values.items():
            value = self.fields.get(name, supported)
            # A disabled switch may be null.
            if value != supported and (value is not None or supported):
                problem = f"has {self._prefix}{name} {shown(value)}, but only {supported!r} is supported"
                raise InputError(str(self.path), problem, "import another checkpoint")

    def _error(self, name: str, expected: str) -> InputError:
        problem = f"has {self._prefix}{name} {shown(self.fields.get(name))}, expected {expected}"
        return InputError(str(self.path), problem, _ONE_SOURCE)


class ReleasedWeights:
    """The tensors of a checkpoint's safetensors files, or of `file`, mapped from disk."""

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        for path in weight_files(folder) if file is None else [folder / file]:
            if not path.is_file():
                problem = f"contains no {path.name} (pickles are not read, since they could run code)"
                raise InputError(str(folder), problem, "use a complete copy with safetensors")
            check_file(path, UNDAMAGED)
            try:
                self.tensors |= load_file(path)
            except (OSError, SafetensorError) as error:
                problem = f"is damaged ({one_line(str(error), 160)})"
                raise InputError(str(path), problem, _WHOLE_COPY) from error


def released_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a published folder, from its tokenizer.json if there is one."""
    # The class that a tokenizer names may rebuild it from the vocabulary, and tokenise some texts differently.
    is_fast = (folder / "tokenizer.json").is_file()
    return read_tokenizer(folder, PreTrainedTokenizerFast if is_fast else AutoTokenizer)


@dataclass(frozen=True)
class Published:
    """The published tensor for a tensor of our model; words in braces are replaced by what they matched in our name.

    Ours is part number `part` of `parts` equal parts along the first dimension. `stacked` merges our first two.
    """

    name: str
    part: int = 0
    parts: int = 1
    stacked: bool = False

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        if self.stacked:
            return (ours[0] * ours[1], *ours[2:])
        return (ours[0] * self.parts, *ours[1:])

    def take(self, tensor: Tensor, ours: tuple[int, ...]) -> Tensor:
        if self.parts > 1:
            tensor = tensor.chunk(self.parts)[self.part].clone()
        return tensor.view(ours)


@dataclass(frozen=True)
class KeyReport:
    """The published tensors that were used, each with the names of our tensors, and those that were not (`left`)."""

    used: dict[str, list[str]]
    left: list[str]

    def __or__(self, other: "KeyReport") -> "KeyReport":
        return KeyReport(self.used | other.used, self.left + other.left)


def take_tensors(
    weights: ReleasedWeights,
    expected: Mapping[str, Tensor],
    family: str,
    key_map: Mapping[str, str | Published],
    ignored: Sequence[str] = (),
) -> tuple[dict[str, Tensor], KeyReport]:
    """The published tensors under our names, with the names and shapes of `expected`.

    `key_map` maps our names to published tensors. `{n}` matches a number, any other word in braces any text, and the
    first matching name applies. `ignored` are patterns of published tensors that are not used.
    """
    patterns = [(_pattern(ours), Published(name) if isinstance(name, str) else name) for ours, name in key_map.items()]
    sources: dict[str, Published] = {}
    used: dict[str, list[str]] = {}
    for ours in expected:
        matches = ((pattern.fullmatch(ours), source) for pattern, source in patterns)
        match, source = next((match, source) for match, source in matches if match)
        sources[ours] = replace(source, name=source.name.format(**match.groupdict()))
        used.setdefault(sources[ours].name, []).append(ours)
    missing = sorted(used.keys() - weights.tensors.keys())
    if missing:
        problem = f"lacks {len(missing)} of the {len(used)} tensors of {family}, such as {missing[0]}"
        raise InputError(str(weights.folder), problem, _WHOLE_COPY)
    unused, ignored_patterns = sorted(weights.tensors.keys() - used.keys()), list(map(_pattern, ignored))
    unknown = [name for name in unused if not any(pattern.fullmatch(name) for pattern in ignored_patterns)]
    if unknown:
        problem = f"has {len(unknown)} tensors that {family} does not have, such as {unknown[0]}"
        raise InputError(str(weights.folder), problem, "import a checkpoint of only this family")
    shapes = {ours: tuple(tensor.shape) for ours, tensor in expected.items()}
    for ours, source in sources.items():
        shape, expected_shape = tuple(weights.tensors[source.name].shape), source.shape(shapes[ours])
        if shape != expected_shape:
            problem = f"{source.name} has shape {shape}, but {expected_shape} in config.json"
            raise InputError(str(weights.folder), problem, _ONE_SOURCE)
    state = {ours: source.take(weights.tensors[source.name], shapes[ours]) for ours, source in sources.items()}
    return state, KeyReport(used, unused)


def _pattern(name: str) -> re.Pattern[str]:
    """The regular expression of a name with words in braces."""
    parts = re.split(r"\{(\w+)\}", name)
    texts, words = parts[::2], parts[1::2]
    groups = [rf"(?P<{word}>{'[0-9]+' if word == 'n' else '.+'})" for word in words]
    return re.compile("".join(re.escape(text) + group for text, group in zip(texts, [*groups, ""], strict=True)))


class Imported(NamedTuple):
    """A published checkpoint as a model of this library; `used_as` names the model in `importer.USAGES`."""

    family: str
    model: Embedder | LanguageModel
    report: KeyReport
    used_as: str | None = None
    assumed: Mapping[str, float] = MappingProxyType({})


def empty_model(config: PretrainedConfig, auto_class: Any = AutoModel) -> PreTrainedModel:
    """The model of a config on the meta device: names and shapes without values."""
    with torch.device("meta"), quiet_transformers():
        model: PreTrainedModel = auto_class.from_config(config)
    return model


def filled_model(empty: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model of `empty_model` with the weights of `state`, in evaluation mode and the dtype of the first of them."""
    model_class: Any = type(empty)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    with quiet_transformers():
        # Also computes the rotary tables, which no checkpoint contains.
        model: PreTrainedModel = model_class.from_pretrained(None, config=empty.config, state_dict=state, dtype=dtype)
    return model


def take_parts(
    weights: ReleasedWeights, parts: Mapping[str, nn.Module], *names: Any
) -> tuple[dict[str, dict[str, Tensor]], KeyReport]:
    """`take_tensors` for several modules; our names in the key map begin with a module's name in `parts`."""
    part_states = {part: module.state_dict() for part, module in parts.items()}
    expected = {f"{part}.{name}": tensor for part, tensors in part_states.items() for name, tensor in tensors.items()}
    state, report = take_tensors(weights, expected, *names)
    states: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name, tensor in state.items():
        part, _, inner = name.partition(".")
        states[part][inner] = tensor
    return states, report


def loaded_model(folder: Path, **options: Any) -> tuple[PreTrainedModel, KeyReport]:
    """The backbone of a folder that transformers can load, and the report of its tensors."""
    published, unused = ReleasedWeights(folder).tensors, list[str]()
    model = load_model(folder, unused=unused, **options)
    # In a checkpoint with a head, tensor names begin with the backbone's name.
    own, prefix = model.state_dict().keys(), f"{model.base_model_prefix}."
    used = [name for name in published if name not in unused]
    names = {name: [name if name in own else name.removeprefix(prefix)] for name in used}
    return model, KeyReport(names, sorted(unused))


def described_embedder(
    folder: Path,
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[str, str],
    longest: int | None = None,
) -> Embedder:
    """The embedding model of a backbone, with the pooling and text settings of a sentence-transformers directory.

    For any other folder: mean pooling of all tokens, unit norm, and the maximum length of tokenizer and positions.
    """
    if not (folder / "modules.json").is_file():
        limit = min(tokenizer.model_max_length, num_positions(backbone) or backbone.config.max_position_embeddings)
        text = TextSettings(limit, limit, dict(prompts), pool_prompt=True)
        return Embedder(backbone, tokenizer, MeanPooling(int(backbone.config.hidden_size)), text=text)
    parts = read_model_directory(folder, backbone, tokenizer)
    text = replace(parts.text, prompts={**prompts, **parts.text.prompts})
    if longest is not None:
        lengths = {name: min(getattr(text, name), longest) for name in LENGTHS}
        text = replace(text, **lengths)
    return Embedder.of_parts(folder, backbone, tokenizer, replace(parts, text=text))
