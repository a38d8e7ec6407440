"""The contract between a method and everything that trains it."""

from typing import Any, Protocol, runtime_checkable

from embeddings.common.types import ContrastiveBatch, LossOutput, Representations, TokenBatch


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
