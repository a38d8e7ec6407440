"""A published checkpoint: config.json, tensors and tokenizer, and the key map to our model."""

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
from embeddings.common.text import one_line
from embeddings.models.backbone import load_model, quiet_transformers, read_tokenizer
from embeddings.models.directory import read_model_directory
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel
from embeddings.models.model_files import read_json, weight_files
from embeddings.models.pooling import MeanPooling

_ONE_SOURCE, _WHOLE_COPY = "take config.json and weights from one checkpoint", "take a complete copy of the checkpoint"
# The type of the usual value says which kind of number is meant.
Number = TypeVar("Number", int, float)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Assumed:
    """The numbers that a model needs but no file of its checkpoint states: the user's, or the published models'.

    `values` are those that were taken, by name; an impossible one is an `OptionError`.
    """

    def __init__(self, given: Mapping[str, float] | None = None) -> None:
        self._given = dict(given or {})
        self.values: dict[str, float] = {}

    def take(self, name: str, usual: Number) -> Number:
        """The number of a name, above 0 and of the type of the usual one."""
        value = self._given.get(name, usual)
        if name in self._given and (not value > 0 or (isinstance(usual, int) and value != int(value))):
            kind = "a whole number" if isinstance(usual, int) else "a number"
            raise OptionError(f"assume.{name}", value, f"must be {kind} above 0", f"the published models have {usual}")
        taken = type(usual)(value)
        self.values[name] = taken
        return taken

    def check_all_taken(self) -> None:
        for name in self._given.keys() - self.values.keys():
            rule = "is stated by the checkpoint, or unknown"
            fix = f"it leaves open {', '.join(self.values)}" if self.values else "it leaves no number open"
            raise OptionError(f"assume.{name}", self._given[name], rule, fix)


class ReleasedConfig:
    """The fields of a published config.json, or of an object inside it whose name is the `prefix`.

    Every method refuses a field that is missing or damaged by an `InputError` that names file, field and value;
    `assumed` notes what the file does not state.
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

    def integer(self, name: str, least: int = 1, default: int | None = None) -> int:
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(name, f"a whole number >= {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._error(name, "a number")
        return value

    def assume(self, name: str, usual: Number, least: int = 1) -> Number:
        """A number that the file may leave open: then the user's, or what the published models have."""
        if self.fields.get(name) is None:
            return self.assumed.take(name, usual)
        return type(usual)(self.integer(name, least) if isinstance(usual, int) else self.number(name))

    def require(self, **values: Any) -> None:
        """Check that fields which decide the arithmetic have the one value that is known here, or are left out."""
        for name, value in values.items():
            given = self.fields.get(name, value)
            # A switch that is off may be written as null.
            if given != value and (given is not None or value):
                what = f"has {self._prefix}{name} {shown(given)}, and only {value!r} is known here"
                raise InputError(str(self.path), what, "import another checkpoint")

    def _error(self, name: str, expected: str) -> InputError:
        what = f"has {self._prefix}{name} {shown(self.fields.get(name))}, expected {expected}"
        return InputError(str(self.path), what, _ONE_SOURCE)


class ReleasedWeights:
    """The tensors of a checkpoint's safetensors: names and shapes at once, values when they are asked for.

    `file` names a file of weights in place of those that belong to a model.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path in weight_files(folder) if file is None else [folder / file]:
            if not path.is_file():
                pickles = sorted(found.name for pattern in _PICKLES for found in folder.glob(pattern))
                pickle = f", and {pickles[0]} is a pickle, which could run code when it is read" if pickles else ""
                what = f"holds no {path.name}{pickle}"
                raise InputError(str(folder), what, "take a complete copy with safetensors")
            try:
                with safe_open(path, framework="pt") as opened:
                    found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                what = f"is damaged ({one_line(str(error), 160)})"
                raise InputError(str(path), what, _WHOLE_COPY) from error
            self.shapes |= found
            self._files |= dict.fromkeys(found, path)

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def released_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a published folder, from its tokenizer.json where there is one.

    The class that a published tokenizer names may rebuild it from the vocabulary and then split some texts otherwise.
    """
    is_fast = (folder / "tokenizer.json").is_file()
    return read_tokenizer(folder, PreTrainedTokenizerFast if is_fast else AutoTokenizer)


@dataclass(frozen=True)
class Published:
    """Where one of our tensors lies in a published checkpoint.

    Args:
        name: Its name there. Words in braces stand for what the same words matched in our name.
        part, parts: Which of how many equal parts along the first dimension ours is.
        stacked: Whether our first two dimensions are laid end to end there.
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
        """Our tensor, of its own memory, of the published one."""
        if self.parts > 1:
            tensor = tensor.chunk(self.parts)[self.part].clone()
        return tensor.view(ours)


@dataclass(frozen=True)
class KeyReport:
    """What became of a checkpoint's tensors: those used, each with ours that it went to, and those left out."""

    used: dict[str, list[str]]
    left: list[str]

    def __or__(self, other: "KeyReport") -> "KeyReport":
        """Of two checkpoints read one after the other."""
        return KeyReport(self.used | other.used, self.left + other.left)


def take_tensors(
    weights: ReleasedWeights,
    expected: Mapping[str, Tensor],
    family: str,
    places: Mapping[str, str | Published],
    left: Sequence[str] = (),
) -> tuple[dict[str, Tensor], KeyReport]:
    """The published tensors under our names, of the shapes of those that are expected by name.

    `places` is the key map: our names, and where each lies. `{n}` matches a number, any other word in braces anything,
    and the first name that matches counts. `left` are tensors that are left out on purpose, written alike.
    """
    patterns = [(_pattern(ours), Published(at) if isinstance(at, str) else at) for ours, at in places.items()]
    found_at: dict[str, Published] = {}
    used: dict[str, list[str]] = {}
    for ours in expected:
        matches = ((pattern.fullmatch(ours), place) for pattern, place in patterns)
        match, place = next((match, place) for match, place in matches if match)
        found_at[ours] = replace(place, name=place.name.format(**match.groupdict()))
        used.setdefault(found_at[ours].name, []).append(ours)
    missing = sorted(used.keys() - weights.shapes.keys())
    if missing:
        what = f"lacks {len(missing)} of the {len(used)} tensors of {family}, {missing[0]} first"
        raise InputError(str(weights.folder), what, _WHOLE_COPY)
    others, on_purpose = sorted(weights.shapes.keys() - used.keys()), list(map(_pattern, left))
    unknown = [name for name in others if not any(pattern.fullmatch(name) for pattern in on_purpose)]
    if unknown:
        what = f"has {len(unknown)} tensors that {family} has no place for, {unknown[0]} first"
        raise InputError(str(weights.folder), what, "import a checkpoint of only this family")
    shapes = {ours: tuple(tensor.shape) for ours, tensor in expected.items()}
    for ours, place in found_at.items():
        found, shape = weights.shapes[place.name], place.shape(shapes[ours])
        if found != shape:
            what = f"{place.name} has shape {found}, by config.json it has {shape}"
            raise InputError(str(weights.folder), what, _ONE_SOURCE)
    state = {ours: place.take(weights.tensor(place.name), shapes[ours]) for ours, place in found_at.items()}
    return state, KeyReport(used, others)


def _pattern(name: str) -> re.Pattern[str]:
    """What a name with words in braces matches."""
    parts = re.split(r"\{(\w+)\}", name)
    texts, words = parts[::2], parts[1::2]
    groups = [rf"(?P<{word}>{'[0-9]+' if word == 'n' else '.+'})" for word in words]
    return re.compile("".join(re.escape(text) + group for text, group in zip(texts, [*groups, ""], strict=True)))


class Imported(NamedTuple):
    """A published checkpoint as a model of this library, and what became of its tensors.

    `used_as` is the published model whose card decides more than the files do; `assumed` are numbers that none states.
    """

    family: str
    model: Embedder | LanguageModel
    report: KeyReport
    used_as: str | None = None
    assumed: Mapping[str, float] = MappingProxyType({})


def empty_model(config: PretrainedConfig, auto_class: Any = AutoModel) -> PreTrainedModel:
    """The model of a config without values, names and shapes only; `auto_class` chooses its class."""
    with torch.device("meta"), quiet_transformers():
        model = auto_class.from_config(config)
    assert isinstance(model, PreTrainedModel)
    return model


def filled_model(empty: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model of `empty_model` with a tensor for each of its names, in evaluation mode and the first one's dtype."""
    kind: Any = type(empty)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    with quiet_transformers():
        # What no checkpoint holds (tables of rotation) is computed on the way.
        model = kind.from_pretrained(None, config=empty.config, state_dict=state, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def take_parts(
    weights: ReleasedWeights, parts: Mapping[str, nn.Module], *names: Any
) -> tuple[dict[str, dict[str, Tensor]], KeyReport]:
    """The tensors of a model in parts, by `take_tensors`; our names in the key map begin with the part's."""
    of_each = {part: module.state_dict() for part, module in parts.items()}
    expected = {f"{part}.{name}": tensor for part, tensors in of_each.items() for name, tensor in tensors.items()}
    taken, report = take_tensors(weights, expected, *names)
    states: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name, tensor in taken.items():
        part, _, inner = name.partition(".")
        states[part][inner] = tensor
    return states, report


def loaded_model(folder: Path, **options: Any) -> tuple[PreTrainedModel, KeyReport]:
    """The backbone of a folder whose tensors transformers itself renames, and what became of them."""
    published, unused = ReleasedWeights(folder).shapes, list[str]()
    model = load_model(folder, unused=unused, **options)
    # A checkpoint with a head has the backbone's name in front of its tensors, which the backbone does not have.
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
    """The embedding model around a backbone, with pooling and texts as a sentence-transformers directory says.

    Where the folder is none: the mean of all tokens, unit length, texts as long as tokenizer and positions allow.
    `prompts` are those that the folder need not name, `longest` a limit of length whatever the folder says.
    """
    if not (folder / "modules.json").is_file():
        limit = min(tokenizer.model_max_length, getattr(backbone.config, "max_position_embeddings", 512))
        text = TextSettings(limit, limit, dict(prompts), pool_prompt=True)
        return Embedder(backbone, tokenizer, MeanPooling(int(backbone.config.hidden_size)), text=text)
    parts = read_model_directory(folder, backbone, tokenizer)
    text = replace(parts.text, prompts={**prompts, **parts.text.prompts})
    if longest is not None:
        lengths = {name: min(getattr(text, name), longest) for name in ("query_max_length", "document_max_length")}
        text = replace(text, **lengths)
    return Embedder.of_parts(folder, backbone, tokenizer, replace(parts, text=text))
