"""The contract between a method and everything that trains it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from embeddings.common.text import TextRole, TextSettings
from embeddings.common.types import ContrastiveBatch, LossOutput, PackedRows, Representations, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BatchNeeds:
    """What a module says of the batches that it trains on, for the data module to plan and to check by.

    Attributes:
        in_batch_negatives: Whether other queries' candidates are negatives: as each source says, or for all alike.
        gathers_candidates: Whether the candidates of all ranks compete with each other.
        sampler: Name of the batch sampler that the method is made for, None where any serves.
        without_sampler: What the method loses by another, and what to do, for a warning.
        teacher_tokens: Tokenises texts in a role for a teacher that the module runs; None where it runs none.
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
    def batch_needs(self) -> BatchNeeds:
        """What the module needs."""
        ...


class RunData(ABC):
    """What a run knows of its training data. The library's data modules inherit it; a run may also have another one.

    Attributes:
        batch_size: Entries of one rank's batch.
        text: How texts become tokens, None where documents are packed into rows.
        row_length: Tokens of a packed row, None where texts are not packed.
        has_surrogates: Whether batches carry another model's vectors.
        has_scores: Whether batches carry a teacher's scores; None as long as the sources are not open.
    """

    batch_size: int
    text: TextSettings | None = None
    row_length: int | None = None
    has_surrogates: bool = False
    has_scores: bool | None = False

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int:
        """Batches of one rank in an epoch of the plan; `setup` comes first."""

    @property
    @abstractmethod
    def source_rows(self) -> dict[str, int]:
        """The number of rows of each source, by its name; `setup` comes first."""

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
    """A module that brings the tokenizer of its texts."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """A fast tokenizer."""
        ...


@runtime_checkable
class TextModule(TokenizedModule, Protocol):
    """A module that starts from a model with text settings of its own."""

    @property
    def text(self) -> TextSettings:
        """The model's settings."""
        ...


@runtime_checkable
class RowTaskModule(TokenizedModule, Protocol):
    """A module that trains on what its task makes of packed rows; the data workers call the task."""

    task: Callable[[PackedRows], Any]


@runtime_checkable
class ContrastiveStep(Protocol):
    """Two functions from which the plain step and GradCache are both built.

    The plain step is `loss_from_representations(embed(query), embed(candidate), batch)`. GradCache is the same two
    functions in another order, so a method written once trains both ways with the same gradient.
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
    """A step of two stages: what the first makes of a batch's `context` is what the second reads every text beside.

    The plain step is `context = embed_context(batch.context)`, then `ContrastiveStep`'s with
    `embed(tokens, context)`. GradCache runs each stage in mini-batches of its own, so a text's vector may depend on
    other texts through the context and in no other way.
    """

    @property
    def trains_context(self) -> bool:
        """Whether the first stage gets a gradient."""
        ...

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        """The first stage's vectors of all documents of `tokens`, (M, H) float, in their order."""
        ...


@runtime_checkable
class ChecksRun(Protocol):
    """A module, data module or callback that checks a run before data are read, ranks start or files are written."""

    def check_run(self, trainer: Any, module: Any, data: Any) -> None:
        """Check this part against the trainer and the other parts.

        Raises:
            UserError: If the run cannot work; the message says what to change.
        """
        ...
