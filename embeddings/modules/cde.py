"""CDE: two stages, where every text is embedded beside documents of its own batch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embeddings.common import ContrastiveBatch, OptionError, Representations, TokenBatch
from embeddings.common.mini_batches import take_texts
from embeddings.common.randomness import derive_seed, run_seed
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, ContextualEmbedder, load_backbone
from embeddings.models.layers import compile_layers
from embeddings.modules.base import ContrastiveModule, OptimizerFactory
from embeddings.training.schedule import Schedule


@dataclass(frozen=True)
class ContextSettings:
    """What a text is embedded beside, in training and in the model.

    Args:
        num_context: Context documents, J. The paper uses 512, and 64 in its small setting (§5).
        max_length: Most tokens of a context document, in training and in the saved model; None leaves documents as
            long as the data config does.
        include_negatives: Whether a batch's hard negatives may be context too, as released; they have no part in it
            where a batch has none.
        dropout_fraction: Probability of a null vector in place of a context vector, for each text anew (§5: 0.005).
        num_soft_prompts: Soft-prompt vectors: 8 as released, 0 for the paper's model.
        residual_projection: Whether a residual projection follows the pooling, as released; the paper has none.

    Raises:
        OptionError: If `max_length` is not positive.
    """

    num_context: int = 512
    max_length: int | None = None
    include_negatives: bool = True
    dropout_fraction: float = 0.005
    num_soft_prompts: int = 8
    residual_projection: bool = True

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise OptionError("model.context.max_length", self.max_length, "must be >= 1", "leave it out for no limit")


class CDEModule(ContrastiveModule):
    """Contextual document embeddings on any Hugging Face encoder, or a decoder without its causal mask.

    The first stage embeds J documents of the batch, the second every query and document behind their vectors (§4.2,
    Eq. 5 and 6); queries and documents share the weights, the stages do not. The context of a step is the batch's own
    documents in a random order, the first J of them, and one context serves all texts of the step. Where a batch has
    fewer, null vectors fill the other places. That neighbours share a batch is the sampler's part (§4.1).

    Determinism: a step's context follows from (seed, epoch, batch, rank), with GradCache or without.
    Distributed: each rank's context is its own documents, as released. Candidates that are gathered from other ranks
        were embedded beside another context, which a model can learn to tell (§10.3), so a loss for several ranks
        does well with `gather_across_devices: false`, as the paper did (§1).

    Args:
        backbone: The second stage's encoder. The paper starts both stages from NomicBERT.
        first_stage_backbone: The first stage's encoder, of the same tokenizer; None for another copy of `backbone`.
        context: Which documents are context, and how the model reads them.
        loss: InfoNCE. The paper uses a temperature of 0.02, and a false-negative filter (Eq. 4).
        optimizer: Makes the optimiser. CDE: Adam with a learning rate of 2e-5.
        schedule: CDE: 1,000 warm-up steps, then linear decay to zero.
        initial_model: A model directory to start from, such as the unsupervised phase's; it replaces the weights of
            both stages, and must have the architecture that `context` asks for.
        normalize: Whether vectors have unit norm. The loss takes cosines either way.
        seed: Seed of random initial weights, of dropout, and of each step's context,
            None for the run's (`seed_everything`).

    Attributes:
        read_batch: The batch of the last training step with the context that it was read beside.

    Raises:
        OptionError: If the backbones do not fit together, the first one has fewer positions than the context's
            `max_length`, or `initial_model` is of another architecture.
    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 and §5. Differs: queries and documents of a step read one
        permutation of the context (without GradCache the release draws one for each tower; with it, as here, the
        queries' serves both); all documents of a smaller batch are taken, with null vectors for the rest.
    """

    made_for = ("ClusteredBatchSampler", "batches and contexts are of no one topic; run `cluster` and set the sampler")
    embedder: ContextualEmbedder
    read_batch: ContrastiveBatch

    def __init__(
        self,
        backbone: BackboneConfig,
        first_stage_backbone: BackboneConfig | None = None,
        context: ContextSettings = ContextSettings(),
        loss: InfoNCE | None = None,
        optimizer: OptimizerFactory = lambda params: torch.optim.Adam(params, lr=2e-5),
        schedule: Schedule = Schedule(warmup_steps=1000),  # noqa: B008 - frozen
        initial_model: str | None = None,
        normalize: bool = True,
        seed: int | None = None,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run_seed(seed))
            if initial_model is None:
                embedder = _new_embedder(backbone, first_stage_backbone or backbone, context, normalize)
            else:
                embedder = ContextualEmbedder.from_config(replace(backbone, name=initial_model, revision=None))
                _check_architecture(embedder, context, initial_model)
        _check_max_length(embedder, context.max_length)
        if backbone.compile:
            compile_layers(embedder.backbone)
        if (first_stage_backbone or backbone).compile:
            compile_layers(embedder.first_stage.backbone)
        embedder.slots.dropout_fraction = context.dropout_fraction
        embedder.first_stage.max_length = context.max_length
        super().__init__(embedder, loss or InfoNCE(), optimizer, schedule, seed)
        self.context = context

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        """The first stage's vectors of all documents in their order, (M, H) float32."""
        return self.embedder.embed_context(tokens.padded(pad_token_id=self.embedder.pad_token_id))

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """Vectors of all texts beside a context, (M, H) with M <= J, or beside null vectors where it is None."""
        return Representations(self.embedder(tokens.padded(pad_token_id=self.embedder.pad_token_id), context))

    def training_step(self, batch: ContrastiveBatch, batch_idx: int) -> Tensor:
        """The loss of one batch beside its own documents."""
        context, num_extra = self.choose_context(batch, batch_idx), self.embedder.num_extra_tokens
        self.read_batch = replace(batch, context=context, num_extra_tokens=num_extra)
        return super().training_step(self.read_batch, batch_idx)

    def choose_context(self, batch: ContrastiveBatch, batch_idx: int) -> TokenBatch:
        """The context of a step: at most J of the batch's documents, in random order."""
        seed = derive_seed(self._seed, "context", self.current_epoch, batch_idx, self.global_rank)
        num_documents = len(batch.candidate if self.context.include_negatives else batch.query)
        order = torch.randperm(num_documents, generator=torch.Generator().manual_seed(seed))
        documents = take_texts(batch.candidate, order[: self.embedder.num_context], self.context.max_length)
        return documents if self.context.max_length is None else _pool_somewhere(documents)


def _pool_somewhere(tokens: TokenBatch) -> TokenBatch:
    """The texts with their last tokens pooled, since one that was cut within its prompt would have none."""
    pooling_mask_T = tokens.pooling_mask_T.clone()
    last_N = torch.cumsum(tokens.lengths_N, 0)[tokens.lengths_N > 0] - 1
    pooling_mask_T[last_N.to(tokens.device)] = True
    return TokenBatch(tokens.input_ids_T, pooling_mask_T, tokens.lengths_N)


def _new_embedder(
    backbone: BackboneConfig, first_stage_backbone: BackboneConfig, context: ContextSettings, normalize: bool
) -> ContextualEmbedder:
    first, _ = load_backbone(first_stage_backbone)
    second, tokenizer = load_backbone(backbone)
    return ContextualEmbedder(
        first,
        second,
        tokenizer,
        num_context=context.num_context,
        num_soft_prompts=context.num_soft_prompts,
        residual_projection=context.residual_projection,
        context_dropout=context.dropout_fraction,
        normalize=normalize,
    )


def _check_architecture(embedder: ContextualEmbedder, context: ContextSettings, initial_model: str) -> None:
    for name, found in (
        ("num_context", embedder.num_context),
        ("num_soft_prompts", embedder.soft_prompt.num_soft_prompts),
        ("residual_projection", embedder.residual is not None),
    ):
        if (asked := getattr(context, name)) != found:
            rule = f"must be what {initial_model} was trained with: {found}"
            raise OptionError(f"model.context.{name}", asked, rule, "repeat that value")


def _check_max_length(embedder: ContextualEmbedder, max_length: int | None) -> None:
    limit = embedder.longest_context_document
    if limit is not None and max_length is not None and max_length > limit:
        rule = f"must be <= {limit}, the positions that the first stage has"
        raise OptionError("model.context.max_length", max_length, rule, "lower it")
