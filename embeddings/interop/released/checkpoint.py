"""What a published checkpoint consists of: config.json, tensors and tokenizer, read without running anything of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embeddings.common import InputError, OptionError
from embeddings.common.errors import shown
from embeddings.common.text import one_line
from embeddings.models.backbone import read_tokenizer
from embeddings.models.model_files import read_json, weight_files

_ONE_SOURCE = "take config.json and weights from one checkpoint"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Assumed:
    """The numbers that a model needs and no file of its checkpoint states.

    Args:
        given: What the user says they are, by name.

    Attributes:
        values: What was taken, by name: the user's, or else what the published models have.
    """

    def __init__(self, given: Mapping[str, float] | None = None) -> None:
        self._given = dict(given or {})
        self.values: dict[str, float] = {}

    def take(self, name: str, usual: float) -> float:
        """The number of a name, of the type of the usual one.

        Raises:
            OptionError: If the user's is none above 0, or not whole where the usual one is.
        """
        value = self._given.get(name, usual)
        if name in self._given and (not value > 0 or (isinstance(usual, int) and value != int(value))):
            kind = "a whole number" if isinstance(usual, int) else "a number"
            raise OptionError(f"assume.{name}", value, f"must be {kind} above 0", f"the published models have {usual}")
        self.values[name] = type(usual)(value)
        return self.values[name]

    def check_all_taken(self) -> None:
        """Refuse numbers that were given and not asked for.

        Raises:
            OptionError: If there is one.
        """
        for name in self._given.keys() - self.values.keys():
            rule = "is stated by the checkpoint, or unknown"
            fix = f"it leaves open {', '.join(self.values)}" if self.values else "it leaves no number open"
            raise OptionError(f"assume.{name}", self._given[name], rule, fix)


class ReleasedConfig:
    """The fields of a published config.json, or of an object inside it.

    Args:
        path: The file.
        fields: What it holds; None to read it.
        prefix: Where inside the file the fields are, for messages.
        assumed: Where `assume` notes what the file does not state; None for a note that nobody reads.

    Raises:
        InputError: If the file is missing or damaged.
    """

    def __init__(
        self, path: Path, fields: dict[str, Any] | None = None, prefix: str = "", assumed: Assumed | None = None
    ) -> None:
        self.path = path
        self.assumed = Assumed() if assumed is None else assumed
        self.fields: dict[str, Any] = read_json(path) if fields is None else fields
        self._prefix = prefix

    def part(self, name: str) -> "ReleasedConfig":
        """The fields of an object inside this one.

        Raises:
            InputError: If there is no such object.
        """
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise self._error(name, "an object")
        return ReleasedConfig(self.path, value, f"{self._prefix}{name}.", self.assumed)

    def integer(self, name: str, least: int = 1, default: int | None = None) -> int:
        """A field that is a whole number.

        Raises:
            InputError: If it is none, or below `least`.
        """
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(name, f"a whole number >= {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that is a number.

        Raises:
            InputError: If it is none.
        """
        value = self.fields.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._error(name, "a number")
        return value

    def assume(self, name: str, usual: int, least: int = 1) -> int:
        """A whole number that the file may leave open: then the user's, or what the published models have.

        Raises:
            InputError: If the file states none, or one below `least`.
            OptionError: If the user's is impossible.
        """
        if self.fields.get(name) is None:
            return int(self.assumed.take(name, usual))
        return self.integer(name, least)

    def assume_number(self, name: str, usual: float) -> float:
        """The same of any number."""
        return self.assumed.take(name, usual) if self.fields.get(name) is None else float(self.number(name))

    def require(self, **values: Any) -> None:
        """Check that fields which decide the arithmetic have the one value that is known here, or are left out.

        Raises:
            InputError: If one has another.
        """
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

    Args:
        folder: Where its files lie.
        file: A file of weights in place of those that belong to a model.

    Raises:
        InputError: If there is no such file, or one is damaged.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path in weight_files(folder) if file is None else [folder / file]:
            if not path.is_file():
                raise InputError(str(folder), _what_is_missing(folder, path), "take a whole copy with safetensors")
            try:
                with safe_open(path, framework="pt") as opened:
                    found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                what = f"is damaged ({one_line(str(error), 160)})"
                raise InputError(str(path), what, "take a whole copy of the checkpoint") from error
            self.shapes |= found
            self._files |= dict.fromkeys(found, path)

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the dtype of the file."""
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def released_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a published folder, as its tokenizer.json has it where there is one.

    The class that a published tokenizer names may build its own from the vocabulary, which splits some texts otherwise;
    its config.json may name classes that are not here.

    Raises:
        InputError: If there is none, or it cannot be read.
    """
    is_fast = (folder / "tokenizer.json").is_file()
    return read_tokenizer(folder, PreTrainedTokenizerFast if is_fast else AutoTokenizer)


def _what_is_missing(folder: Path, path: Path) -> str:
    pickles = sorted(found.name for pattern in _PICKLES for found in folder.glob(pattern))
    if pickles:
        return f"holds no {path.name}, and {pickles[0]} is a pickle, which could run code when it is read"
    return f"holds no {path.name}"
