"""The contract between a method and everything that trains it, and the arguments of an object as a config has them."""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from embeddings.common.text import TextRole, TextSettings
from embeddings.common.types import ContrastiveBatch, LossOutput, PackedRows, Representations, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BatchNeeds:
    """What a module says of the batches that it trains on; the data module plans and checks by it.

    Attributes:
        in_batch_negatives: Whether other queries' candidates are negatives: as each source says, or for all alike.
        gathers_candidates: Whether the candidates of all ranks compete with each other.
        sampler: The batch sampler that the method is made for, None where any serves.
        without_sampler: A warning: what the method loses by another sampler, and what to do.
        teacher_tokens: Tokenises texts in a role for the module's teacher; None without one.
    """

    in_batch_negatives: Literal["source", "on", "off"] = "source"
    gathers_candidates: bool = True
    sampler: str | None = None
    without_sampler: str = ""
    teacher_tokens: Callable[[Sequence[str], TextRole], TokenBatch] | None = None


@runtime_checkable
class NeedsBatches(Protocol):
    """A module that says what its batches are to be like; of others nothing is asked."""

    @property
    def batch_needs(self) -> BatchNeeds: ...


class RunData(ABC):
    """What a run knows of its training data. The library's data modules inherit it; a run may also have another one.

    Attributes:
        batch_size: Entries of one rank's batch.
        text: How texts become tokens, None for packed rows.
        row_length: Tokens of a packed row, None for texts.
        has_surrogates: Whether batches carry another model's vectors.
        has_scores: Whether batches carry a teacher's scores; None before the sources are open.
    """

    batch_size: int
    text: TextSettings | None = None
    row_length: int | None = None
    has_surrogates: bool = False
    has_scores: bool | None = False

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int:
        """Batches of one rank in an epoch, after `setup`."""

    @property
    @abstractmethod
    def source_rows(self) -> dict[str, int]:
        """The number of rows of each source by its name, after `setup`."""

    @abstractmethod
    def located(self, rows: Iterable[int]) -> dict[str, list[int]]:
        """Rows of batches (`row_B`, `row_N`) by the name of their source, numbered within it from 0."""

    @abstractmethod
    def expect_state(self, state_dict: dict[str, Any]) -> None:
        """Note the state that the run is to resume from: `prepare_data` then refuses another plan."""


def run_data(trainer: Any) -> RunData | None:
    """The data of a trainer's run, None where it has none or one of another kind."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, RunData) else None


@runtime_checkable
class TokenizedModule(Protocol):
    """A module that brings the fast tokenizer of its texts."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...


@runtime_checkable
class TextModule(TokenizedModule, Protocol):
    """A module that starts from a model with text settings of its own."""

    @property
    def text(self) -> TextSettings: ...


@runtime_checkable
class RowTaskModule(TokenizedModule, Protocol):
    """A module that trains on what its task makes of packed rows; the data workers call the task."""

    task: Callable[[PackedRows], Any]


@runtime_checkable
class ContrastiveStep(Protocol):
    """Two functions of which the plain step and GradCache are both built, with the same gradient.

    The plain step is `loss_from_representations(embed(query), embed(candidate), batch)`.
    """

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """Vectors of all texts of `tokens`, in their order, and statistics summed over them."""
        ...

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """The loss of a whole batch; every coupling between texts is in here and nowhere else."""
        ...


@runtime_checkable
class ContextualStep(ContrastiveStep, Protocol):
    """A step of two stages: `context = embed_context(batch.context)`, then `embed(tokens, context)` of every text.

    GradCache cuts each stage into mini-batches, so a text's vector may depend on other texts only through the context.
    """

    @property
    def trains_context(self) -> bool: ...

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        """The first stage's vectors of all documents of `tokens`, (M, H) float, in their order."""
        ...


@runtime_checkable
class ChecksRun(Protocol):
    """A module, data module or callback that checks a run before data are read, ranks start or files are written."""

    def check_run(self, trainer: Any, module: Any, data: Any) -> None:
        """Check this part against the trainer and the other parts; a `UserError` says what to change."""
        ...


_PLAIN = (bool, int, float, str)
# The packages whose objects have their arguments as attributes.
_OPEN = ("embeddings.", "lightning.", "pytorch_lightning.")


class Given(NamedTuple):
    """Positional and named arguments; a copy of their owner shares them, since a factory may hold a parser."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __deepcopy__(self, memo: object) -> Self:
        return self


class KeepsArguments:
    """A class whose objects keep the arguments that they were made with, so that a run made in Python records them."""

    given_arguments: Given

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        # Not by the object's own way, which a module has only once it is made.
        object.__setattr__(made, "given_arguments", Given(args, kwargs))
        return made


def as_config(value: Any) -> Any:
    """A value as a config has it: a class, a `partial` or an object by `class_path` and `init_args`.

    A function, or data in memory, becomes a text in round brackets that says what it is.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_config(item) for item in value]
    if isinstance(value, type):
        return {"class_path": _path(value)}
    if isinstance(value, partial) and isinstance(value.func, type):
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords)
        return _component(value.func, _flat(value.func, bound.arguments))
    if isinstance(value, KeepsArguments):
        return _component(type(value), _arguments(value, value.given_arguments))
    if is_dataclass(value):
        return {field.name: as_config(getattr(value, field.name)) for field in fields(value) if field.init}
    if inspect.isroutine(value) or isinstance(value, partial):
        return f"(function {getattr(value, '__qualname__', 'of parts')})"
    if type(value).__module__.startswith(_OPEN):
        names = inspect.signature(type(value)).parameters
        known = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _component(type(value), {name: item for name, item in known.items() if _is_plain(item)})
    return f"({type(value).__name__} in memory)"


def _arguments(value: object, given: Given) -> dict[str, Any]:
    """The arguments that were given, and the defaults that are plain, by name."""
    kind = type(value)
    bound = inspect.signature(kind).bind(*given.args, **given.kwargs)
    chosen = set(bound.arguments)
    bound.apply_defaults()
    known = {name: item for name, item in bound.arguments.items() if name in chosen or _is_plain(as_config(item))}
    return _flat(kind, known)


def _flat(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters
    found: dict[str, Any] = {}
    for name, item in arguments.items():
        found |= item if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: item}
    return found


def _component(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"class_path": _path(kind)}
    return config | ({"init_args": as_config(arguments)} if arguments else {})


def _path(kind: type) -> str:
    """The path of a class, by the package that offers it where one does."""
    parts = kind.__module__.split(".")
    for length in range(2, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(value: Any) -> bool:
    """Whether a value is made of plain types only, and says so in full."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    is_text_of_object = isinstance(value, str) and value.startswith("(function ")
    return (value is None or isinstance(value, _PLAIN)) and not is_text_of_object
