"""The contract between a method and everything that trains it."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from embeddings.common.types import ContrastiveBatch, LossOutput, Representations, TokenBatch


@dataclass(frozen=True)
class BatchNeeds:
    """What a module says of the batches that it trains on, for the data module to plan and to check by.

    Attributes:
        in_batch_negatives: Whether other queries' candidates are negatives: as each source says, or for all alike.
        gathers_candidates: Whether the candidates of all ranks compete with each other.
        sampler: Name of the batch sampler that the method is made for, None where any serves.
        without_sampler: What the method loses by another, and what to do, for a warning.
    """

    in_batch_negatives: Literal["source", "on", "off"] = "source"
    gathers_candidates: bool = True
    sampler: str | None = None
    without_sampler: str = ""


@runtime_checkable
class NeedsBatches(Protocol):
    """A module that says what its batches are to be like; of others nothing is asked."""

    @property
    def batch_needs(self) -> BatchNeeds:
        """What the module needs."""
        ...


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
