"""Published checkpoints: config.json, tensors, tokenizer, and the key map to a model of this library."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.common.errors import shown
from embeddings.common.io import check_file
from embeddings.common.text import LENGTHS, one_line
from embeddings.models.backbone import load_model, num_positions, quiet_transformers, read_tokenizer
from embeddings.models.directory import read_model_directory
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel
from embeddings.models.model_files import UNDAMAGED, read_json, weight_files
from embeddings.models.pooling import MeanPooling

_ONE_SOURCE, _WHOLE_COPY = "use config.json and weights of one checkpoint", "use a complete copy of the checkpoint"
# The type of the usual value determines the type of the result.
Number = TypeVar("Number", int, float)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Assumed:
    """Numbers that a model needs but no file of its checkpoint contains: the user's, else the published models'."""

    def __init__(self, options: Mapping[str, float] | None = None) -> None:
        self._options = dict(options or {})
        self.values: dict[str, float] = {}

    def take(self, name: str, usual: Number) -> Number:
        """The number of this name, > 0, with the type of the usual value."""
        value = self._options.get(name, usual)
        if name in self._options and (not value > 0 or (isinstance(usual, int) and value != int(value))):
            kind = "an integer" if isinstance(usual, int) else "a number"
            raise OptionError(f"assume.{name}", value, f"must be {kind} > 0", f"the published models have {usual}")
        self.values[name] = converted = type(usual)(value)
        return converted

    def check_all_taken(self) -> None:
        for name in self._options.keys() - self.values.keys():
            rule = "is set by the checkpoint, or unknown"
            fix = f"the checkpoint needs {', '.join(self.values)}" if self.values else "leave it out"
            raise OptionError(f"assume.{name}", self._options[name], rule, fix)


class ReleasedConfig:
    """The fields of a published config.json, or of the object inside it that `prefix` names.

    A missing or invalid field is an `InputError`. `assumed` supplies numbers that the file does not contain.
    """

    def __init__(
        self, path: Path, fields: dict[str, Any] | None = None, prefix: str = "", assumed: Assumed | None = None
    ) -> None:
        self.path = path
        self.assumed = Assumed() if assumed is None else assumed
        self.fields: dict[str, Any] = read_json(path) if fields is None else fields
        self._prefix = prefix

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
        """A number of the file; if the file does not contain it, the user's, else the published models' value."""
        if self.fields.get(name) is None:
            return self.assumed.take(name, usual)
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
    """The tensors of a checkpoint's safetensors files, or of `file`: shapes are read at once, values on demand."""

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path in weight_files(folder) if file is None else [folder / file]:
            if not path.is_file():
                pickles = sorted(found.name for pattern in _PICKLES for found in folder.glob(pattern))
                pickle = f", and {pickles[0]} is a pickle, which could run code when it is read" if pickles else ""
                problem = f"contains no {path.name}{pickle}"
                raise InputError(str(folder), problem, "use a complete copy with safetensors")
            check_file(path, UNDAMAGED)
            try:
                with safe_open(path, framework="pt") as tensors:
                    shapes = {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                problem = f"is damaged ({one_line(str(error), 160)})"
                raise InputError(str(path), problem, _WHOLE_COPY) from error
            self.shapes |= shapes
            self._files |= dict.fromkeys(shapes, path)

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def released_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a published folder, from its tokenizer.json if there is one."""
    # The class that a tokenizer names may rebuild it from the vocabulary, and tokenise some texts differently.
    is_fast = (folder / "tokenizer.json").is_file()
    return read_tokenizer(folder, PreTrainedTokenizerFast if is_fast else AutoTokenizer)


@dataclass(frozen=True)
class Published:
    """The published tensor of one of ours; words in braces are replaced by what they matched in our name.

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
        """Our tensor, extracted from the published one; a part is copied."""
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
    missing = sorted(used.keys() - weights.shapes.keys())
    if missing:
        problem = f"lacks {len(missing)} of the {len(used)} tensors of {family}, such as {missing[0]}"
        raise InputError(str(weights.folder), problem, _WHOLE_COPY)
    unused, ignored_patterns = sorted(weights.shapes.keys() - used.keys()), list(map(_pattern, ignored))
    unknown = [name for name in unused if not any(pattern.fullmatch(name) for pattern in ignored_patterns)]
    if unknown:
        problem = f"has {len(unknown)} tensors that {family} does not have, such as {unknown[0]}"
        raise InputError(str(weights.folder), problem, "import a checkpoint of only this family")
    shapes = {ours: tuple(tensor.shape) for ours, tensor in expected.items()}
    for ours, source in sources.items():
        shape, expected_shape = weights.shapes[source.name], source.shape(shapes[ours])
        if shape != expected_shape:
            problem = f"{source.name} has shape {shape}, but {expected_shape} in config.json"
            raise InputError(str(weights.folder), problem, _ONE_SOURCE)
    state = {ours: source.take(weights.tensor(source.name), shapes[ours]) for ours, source in sources.items()}
    return state, KeyReport(used, unused)


def _pattern(name: str) -> re.Pattern[str]:
    """The regular expression of a name with words in braces."""
    parts = re.split(r"\{(\w+)\}", name)
    texts, words = parts[::2], parts[1::2]
    groups = [rf"(?P<{word}>{'[0-9]+' if word == 'n' else '.+'})" for word in words]
    return re.compile("".join(re.escape(text) + group for text, group in zip(texts, [*groups, ""], strict=True)))


class Imported(NamedTuple):
    """A published checkpoint as a model of this library, with the report of its tensors.

    `used_as` names the published model (see `importer.USAGES`) whose card the model follows.
    """

    family: str
    model: Embedder | LanguageModel
    report: KeyReport
    used_as: str | None = None
    assumed: Mapping[str, float] = MappingProxyType({})


def empty_model(config: PretrainedConfig, auto_class: Any = AutoModel) -> PreTrainedModel:
    """The model of a config on the meta device (names and shapes without values); `auto_class` chooses its class."""
    with torch.device("meta"), quiet_transformers():
        model = auto_class.from_config(config)
    assert isinstance(model, PreTrainedModel)
    return model


def filled_model(empty: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model of `empty_model` with the weights of `state`, in evaluation mode and the dtype of the first of them."""
    model_class: Any = type(empty)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    with quiet_transformers():
        # Also computes the rotary tables, which no checkpoint contains.
        model = model_class.from_pretrained(None, config=empty.config, state_dict=state, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
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
    published, unused = ReleasedWeights(folder).shapes, list[str]()
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
    `prompts` are added to the folder's own; `longest` limits the maximum lengths.
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
