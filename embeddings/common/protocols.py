"""The protocols between a method and its training, and the conversion of an object's arguments to a config."""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
    """A module's requirements on its batches, which the data module uses to plan and check them."""

    in_batch_negatives: Literal["source", "on", "off"] = "source"  # candidates of other queries as negatives
    gathers_candidates: bool = True  # whether the loss gathers the candidates of all ranks
    sampler: str | None = None  # the batch sampler that the method needs, None for any
    without_sampler: str = ""  # the warning for another sampler: its disadvantage, and a hint
    # Tokenises texts in a role for the module's teacher.
    teacher_tokens: Callable[[Sequence[str], TextRole], TokenBatch] | None = None
    masks_text: bool = True  # whether candidates with the query's text are masked
    masks_class: bool = True  # whether candidates with the query's label are masked
    only_hard_negatives: bool = False  # whether the loss is 0 without hard negatives
    compares_documents: bool = False  # whether the loss also compares documents with the queries of others


@runtime_checkable
class NeedsBatches(Protocol):
    @property
    def batch_needs(self) -> BatchNeeds: ...


class RunData(ABC):
    """What callbacks and modules can read of a run's training data; the library's data modules inherit it."""

    batch_size: int  # entries in one rank's batch
    text: TextSettings | None = None  # as configured, None for packed rows; see `text_for`
    row_length: int | None = None  # tokens of a packed row, None for texts
    has_surrogates: bool = False  # whether batches contain vectors of a surrogate model
    has_scores: bool | None = False  # whether they contain a teacher's scores; None before the sources are opened

    def text_for(self, model: TextSettings) -> TextSettings:
        """The text settings of a model that starts with the settings `model` and is trained on this data."""
        return model if self.text is None else self.text.following(model)

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
        """Group rows of batches (`row_B`, `row_N`) by source name, numbered within the source from 0."""

    @abstractmethod
    def expect_state(self, state_dict: dict[str, Any]) -> None:
        """Store the state that the run resumes from: `prepare_data` then refuses a different plan."""


def run_data(trainer: Any) -> RunData | None:
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, RunData) else None


@runtime_checkable
class TokenizedModule(Protocol):
    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...


@runtime_checkable
class TextModule(TokenizedModule, Protocol):
    @property
    def text(self) -> TextSettings: ...


@runtime_checkable
class RowTaskModule(TokenizedModule, Protocol):
    """A module whose `task` turns packed rows into training batches in the data workers."""

    task: Callable[[PackedRows], Any]


@runtime_checkable
class ContrastiveStep(Protocol):
    """The two functions from which the plain step and GradCache are built, with the same gradient."""

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """Vectors of all texts of `tokens`, in order, and statistics summed over them."""
        ...

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """The loss of a batch; all interaction between texts happens here."""
        ...


@runtime_checkable
class SharesCasts(Protocol):
    """A step with weights that can be cast to autocast's dtype once for all mini-batches."""

    def shared_casts(self) -> AbstractContextManager[object]: ...


@runtime_checkable
class ContextualStep(ContrastiveStep, Protocol):
    """A step of two stages; vectors may depend on other texts only through the context."""

    @property
    def trains_context(self) -> bool: ...

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        """The first stage's vectors of all documents of `tokens`, (M, H) float, in order."""
        ...


@runtime_checkable
class ChecksRun(Protocol):
    """A module, data module or callback that checks a run before data is read, ranks start or files are written."""

    def check_run(self, trainer: Any, module: Any, data: Any) -> None:
        """Raises a `UserError` with a hint."""
        ...


@runtime_checkable
class ChecksBeforeModel(Protocol):
    """A data module or callback with checks that need no model: `fit` makes them before it loads the model.

    Its `check_run` makes them too, for runs that begin in another way.
    """

    def check_before_model(self, trainer: Any) -> None:
        """Raises a `UserError` with a hint."""
        ...


# Values that a config contains as they are.
_PLAIN = (type(None), bool, int, float, str)
# Packages whose objects store their arguments as attributes.
_OPEN = ("embeddings.", "lightning.", "pytorch_lightning.")


class Given(NamedTuple):
    """Positional and named arguments; copies of their owner share them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __deepcopy__(self, memo: object) -> Self:
        return self


class KeepsArguments:
    """A class whose objects store their constructor arguments, so that a run's record can contain them."""

    given_arguments: Given

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        # A module's own `__setattr__` works only after its constructor.
        object.__setattr__(made, "given_arguments", Given(args, kwargs))
        return made


def as_config(value: Any) -> Any:
    """A value as in a config: an object becomes `class_path` and `init_args`, a function or data a description."""
    if isinstance(value, _PLAIN):
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
        return _component(value.func, value.args, value.keywords)
    if isinstance(value, KeepsArguments):
        return _component(type(value), *value.given_arguments, with_defaults=True)
    if is_dataclass(value):
        # A class with `given` has settings that are not set: their values depend on the run.
        settings = [field.name for field in fields(value) if field.init]
        chosen = getattr(value, "given", settings)
        return {name: as_config(getattr(value, name)) for name in settings if name in chosen}
    if inspect.isroutine(value) or isinstance(value, partial):
        return f"(function {getattr(value, '__qualname__', 'of parts')})"
    if type(value).__module__.startswith(_OPEN):
        names = inspect.signature(type(value)).parameters
        known = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _component(type(value), (), {name: item for name, item in known.items() if isinstance(item, _PLAIN)})
    return f"({type(value).__name__} in memory)"


def _component(
    kind: type, args: Sequence[Any], kwargs: Mapping[str, Any], with_defaults: bool = False
) -> dict[str, Any]:
    """A class and its arguments, on request with its defaults except functions."""
    signature = inspect.signature(kind)
    bound = signature.bind_partial(*args, **kwargs)
    given = set(bound.arguments)
    if with_defaults:
        bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, item in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= item
        elif name in given or isinstance(item, str) or not isinstance(as_config(item), str):
            arguments[name] = item
    config: dict[str, Any] = {"class_path": _path(kind)}
    return config | ({"init_args": as_config(arguments)} if arguments else {})


def _path(kind: type) -> str:
    """The import path of a class, from the shortest package that exports it."""
    parts = kind.__module__.split(".")
    for length in range(2, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
