"""The step that GradCache reproduces in mini-batches: every text embedded at once, every graph whole."""

from embeddings.common import ContextualStep, ContrastiveBatch, ContrastiveStep, LossOutput
from embeddings.models.experts import shared_casts
from embeddings.training.mini_batch_plan import has_context


def plain_step(step: ContrastiveStep, batch: ContrastiveBatch) -> LossOutput:
    """The loss of a whole batch, with the graphs of all encoders behind it.

    Where the batch has a context, its documents are embedded once and both towers read the same vectors.

    Args:
        step: The method, a `ContextualStep` where the batch has a context.
        batch: The batch.

    Related: `GradCache`, the same loss and gradient within the memory of one mini-batch.
    """
    context = None
    with shared_casts():
        if has_context(batch):
            assert isinstance(step, ContextualStep), "a batch with a context needs a step that embeds it"
            assert batch.context is not None
            context = step.embed_context(batch.context)
        query, candidate = step.embed(batch.query, context), step.embed(batch.candidate, context)
    return step.loss_from_representations(query, candidate, batch)
