"""CDE: two encoder stages that embed each text together with documents of its batch as context."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from embeddings.common import ContrastiveBatch, LossOutput, OptionError, Representations, TokenBatch, require_minimum
from embeddings.common.distributed import is_distributed, mean_over_ranks
from embeddings.common.process import logger
from embeddings.common.random import RandomState, derive_seed, run_seed
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE
from embeddings.losses.prediction import WordPrediction
from embeddings.models import BackboneConfig, ContextualEmbedder, load_backbone
from embeddings.models.compilation import set_compilation
from embeddings.models.contextual import check_dropout, truncated
from embeddings.models.pooling import plain_backbone
from embeddings.modules.base import ContrastiveModule, OptimizerFactory, initial_text
from embeddings.training.gradcache import attach_gradient
from embeddings.training.optim import Schedule
from embeddings.training.strategy import training_strategy

Phase = Literal["words", "frozen", "joint"]

# Optimiser steps between two measurements of the context's influence, and the number of texts for each.
MEASURED_EVERY = 50
MEASURED_TEXTS = 8
# Below this spread the context vectors are almost equal.
COLLAPSED_SPREAD = 0.05
_COLLAPSED = (
    "step %d: the context has collapsed: the cosine between two of its vectors is %.3f, so texts' vectors hardly "
    "depend on it; train the first stage on words first and then freeze it, "
    "model.first_stage_training={word_steps: N, frozen_steps: null}, or lower the learning rate"
)


@dataclass(frozen=True)
class ContextSettings:
    """The context of a text, in training and in the saved model.

    Args:
        num_context: Number of context documents, J. The paper uses 512, and 64 in its small setting (§5).
        max_length: Maximum tokens of a context document, in training and in the model; None for the data's lengths.
        include_negatives: Whether a batch's hard negatives may be context documents too, as released.
        dropout_fraction: Probability that a null vector replaces a context vector, drawn for each text (§5: 0.005).
        num_soft_prompts: Number of soft-prompt vectors: 8 as released, 0 for the paper's model.
        residual_projection: Whether a residual projection follows the pooling, as released; the paper has none.
    """

    num_context: int = 512
    max_length: int | None = None
    include_negatives: bool = True
    dropout_fraction: float = 0.005
    num_soft_prompts: int = 8
    residual_projection: bool = True

    def __post_init__(self) -> None:
        require_minimum("model.context.max_length", self.max_length, 1, "leave it out for no limit", optional=True)
        if not 0.0 <= self.dropout_fraction <= 1.0:
            name = "model.context.dropout_fraction"
            raise OptionError(name, self.dropout_fraction, "must be in [0, 1]", "the paper uses 0.005")


@dataclass(frozen=True)
class FirstStageTraining:
    """Training of the first stage. The default is the paper's: together with the second stage, at the same rate.

    The contrastive loss can make all context vectors equal before the second stage has learned to use them. Our remedy:
    only the first stage is trained at first, to predict the words of a text; then it is frozen or trained more slowly.

    Args:
        word_steps: Initial optimiser steps that train only the first stage, to predict each text's words from its
            vector (`WordPrediction`). Their learning rate rises to the optimiser's during the first tenth and then
            decays to zero; the schedule starts after these steps.
        frozen_steps: Optimiser steps after `word_steps` in which the first stage is frozen; None for the rest of the
            run.
        learning_rate_factor: Factor of the first stage's learning rate while both stages are trained.
    """

    word_steps: int = 0
    frozen_steps: int | None = 0
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate_factor < float("inf"):
            name, fix = "model.first_stage_training.learning_rate_factor", "frozen_steps: null freezes the first stage"
            raise OptionError(name, self.learning_rate_factor, "must be > 0 and finite", fix)
        for name, steps in (("word_steps", self.word_steps), ("frozen_steps", self.frozen_steps)):
            require_minimum(f"model.first_stage_training.{name}", steps, 0, "0 leaves them out", optional=True)

    def phase(self, step: int) -> Phase:
        """The phase of step `step`, from 0: `words` trains the first stage, `frozen` the second, `joint` both."""
        if step < self.word_steps:
            return "words"
        is_frozen = self.frozen_steps is None or step < self.word_steps + self.frozen_steps
        return "frozen" if is_frozen else "joint"


class CDEModule(ContrastiveModule):
    """Contextual document embeddings on any Hugging Face encoder, or a decoder without its causal mask.

    The first stage embeds J documents of the batch. The second stage embeds every query and document with those J
    vectors in front (§4.2, Eq. 5 and 6). The context of a step is the first J of the batch's documents in random order,
    the same for all texts of the step. The sampler puts similar texts into one batch (§4.1).

    Args:
        backbone: The second stage's encoder. The paper starts both stages from NomicBERT.
        first_stage_backbone: The first stage's encoder, with the same tokenizer; None for another copy of `backbone`.
            Not with `initial_model`, from which both stages start.
        context: Which documents are context, and how the model encodes them.
        first_stage_training: Objective, steps and learning rate of the first stage; by default as in the paper.
        loss: InfoNCE. The paper: temperature 0.02 and a false-negative filter (Eq. 4).
        optimizer: Makes the optimiser. The paper: Adam with a learning rate of 2e-5.
        schedule: The paper: 1,000 warm-up steps, then linear decay to zero.
        initial_model: A model directory from which both stages start, such as the unsupervised phase's; its
            architecture must match `context`, and without a null vector there is no context dropout.
        normalize: Whether vectors have unit norm. The loss uses cosines in both cases.
        seed: Seed of initial weights, of dropout, and of each step's context; None for `seed_everything`'s.

    Metrics: `train/context_spread`, one minus the mean cosine between the context vectors of a step; a value below 0.05
        causes one warning. Every 50th step, unless weights are sharded, `train/context_sensitivity`, one minus the mean
        cosine between texts' vectors with this step's context and with the previous step's.
    Distributed: each rank uses its own documents as context, as released. A model can learn to tell candidates of other
        ranks by their context, so `gather_across_devices: false` is advisable, as in the paper.
    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 and §5. Differs: queries and documents of a step share one
        permutation of the context (the release does so with GradCache only); a smaller batch uses all of its documents,
        with null vectors for the rest.
    """

    title = "contextual document embeddings (CDE, Morris and Rush 2024, arXiv:2410.02525)"
    backbones = ("backbone", "first_stage_backbone")
    stand_in_limits: ClassVar = {
        "schedule.warmup_steps": 2,
        "first_stage_training.word_steps": 2,
        "context.num_context": 4,
    }
    made_for = ("ClusteredBatchSampler", "batches and contexts mix topics; run `cluster` and set the sampler")
    embedder: ContextualEmbedder
    read_batch: ContrastiveBatch

    def __init__(
        self,
        backbone: BackboneConfig,
        first_stage_backbone: BackboneConfig | None = None,
        context: ContextSettings = ContextSettings(),
        first_stage_training: FirstStageTraining = FirstStageTraining(),
        loss: InfoNCE | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = Schedule(warmup_steps=1000),  # noqa: B008 - frozen
        initial_model: str | None = None,
        normalize: bool = True,
        seed: int | None = None,
    ) -> None:
        if first_stage_backbone is not None and initial_model is not None:
            rule, fix = "has no effect with initial_model, from which both stages start", "set it to null"
            raise OptionError("model.first_stage_backbone", first_stage_backbone.name, rule, fix)
        first_stage = first_stage_backbone or backbone
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run_seed(seed))
            if initial_model is None:
                first, (second, tokenizer) = load_backbone(first_stage)[0], load_backbone(backbone)
                embedder = ContextualEmbedder(
                    first,
                    second,
                    tokenizer,
                    num_context=context.num_context,
                    num_soft_prompts=context.num_soft_prompts,
                    residual_projection=context.residual_projection,
                    context_dropout=context.dropout_fraction,
                    normalize=normalize,
                    text=initial_text(backbone, second, tokenizer),
                )
            else:
                embedder = ContextualEmbedder.from_config(replace(backbone, name=initial_model, revision=None))
                _check_architecture(embedder, context, initial_model)
        limit = embedder.longest_context_document
        if limit is not None and context.max_length is not None and context.max_length > limit:
            rule = f"must be <= {limit}, the positions that the first stage has"
            raise OptionError("model.context.max_length", context.max_length, rule, "lower it")
        embedder.unpad(backbone.unpadded, first_stage.unpadded)
        for config, model in ((backbone, embedder.backbone), (first_stage, embedder.first_stage.backbone)):
            set_compilation(model, config.compile)
        embedder.slots.dropout_fraction = context.dropout_fraction
        embedder.first_stage.max_length = context.max_length
        optimizer = optimizer or partial(torch.optim.Adam, lr=2e-5)
        super().__init__(embedder, loss or InfoNCE(), optimizer, schedule, seed)
        self.context = context
        self.first_stage_training = first_stage_training
        self._phase: Phase = "joint"
        self._words: WordPrediction | None = None
        if first_stage_training.word_steps:
            words: Any = plain_backbone(embedder.backbone).get_input_embeddings()
            # A copy, since a strategy may shard the table.
            self._words = WordPrediction(words.weight, embedder.tokenizer.all_special_ids)
        if first_stage_training.phase(0) == "frozen" and first_stage_training.frozen_steps is None:
            embedder.first_stage.requires_grad_(False)
        # The context vectors of this step and of the one before.
        self._context_MH: Tensor | None = None
        self._previous_context_MH: Tensor | None = None
        self._has_warned = False

    @property
    def trains_context(self) -> bool:
        return self._phase != "frozen"

    def parts_of_own_rate(self) -> Mapping[str, nn.Module]:
        return {} if self.first_stage_training == FirstStageTraining() else {"first_stage": self.embedder.first_stage}

    def rate_factor(self, part: str | None, step: int, total_steps: int) -> float:
        """Fraction of the peak learning rate: 0 if frozen; the schedule starts at the first contrastive step."""
        training = self.first_stage_training
        phase, num_words = training.phase(step), training.word_steps
        is_first_stage = part == "first_stage"
        if phase == "words":
            return Schedule(warmup_steps=num_words // 10).factor(step, num_words) if is_first_stage else 0.0
        if is_first_stage and phase == "frozen":
            return 0.0
        factor = self._schedule.factor(step - num_words, total_steps - num_words)
        return factor * training.learning_rate_factor if is_first_stage else factor

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        """The first stage's vectors of all documents in input order, (M, H) float32; no gradient while it is frozen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_context):
            return self.embedder.embed_context(tokens)

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The vectors of all texts with context vectors (M, H), M <= J, or null vectors."""
        if self._phase == "words":
            return Representations(self.embed_context(tokens))
        self._context_MH = None if context is None else context.detach()
        return Representations(self.embedder(tokens, context))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """The contrastive loss of a full batch or, in the first `word_steps`, the word-prediction loss."""
        if self._phase != "words":
            output = super().loss_from_representations(query, candidate, batch)
            # All ranks log the same terms, and a rank has at least as many documents as queries.
            if self._context_MH is None or min(len(batch), self.embedder.num_context) < 2:
                return output
            return LossOutput(output.loss, {**output.terms, "context_spread": context_spread(self._context_MH)})
        assert self._words is not None
        fields, groups = ("input_ids_T", "pooling_mask_T", "lengths_N"), (batch.query, batch.candidate)
        texts = TokenBatch(*(torch.cat([getattr(group, field) for group in groups]) for field in fields))
        loss: Tensor = self._words(torch.cat([query.vector_ND, candidate.vector_ND]), texts.moved(batch.device))
        return LossOutput(loss, {"word_loss": loss.detach()})

    def training_step(self, batch: ContrastiveBatch, batch_idx: int) -> Tensor:
        """The loss of a batch, (): of the first stage's words, or of the texts with their context documents."""
        self._phase = self.first_stage_training.phase(self.global_step)
        if self._phase == "words":
            query, candidate = self._documents(batch.query), self._documents(batch.candidate)
            self.read_batch = replace(batch, query=query, candidate=candidate)
        else:
            context, num_extra = self.choose_context(batch, batch_idx), self.embedder.num_extra_tokens
            self.read_batch = replace(batch, context=context, num_extra_tokens=num_extra)
        loss = super().training_step(self.read_batch, batch_idx)
        if self._phase != "words":
            self._watch_context(batch)
        if is_distributed() and not training_strategy(self.trainer.strategy).is_sharded:
            # DDP expects a gradient of every parameter.
            loss = attach_gradient(loss, [loss], [torch.ones_like(loss)], self._frozen_parameters())
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Remove the gradients of a frozen stage, so that neither weight decay nor optimiser state changes it."""
        for parameter in self._frozen_parameters():
            parameter.grad = None
        super().on_before_optimizer_step(optimizer)

    def choose_context(self, batch: ContrastiveBatch, batch_idx: int) -> TokenBatch:
        """The context of a step: at most J of the batch's documents in random order."""
        seed = derive_seed(self._seed, "context", self.current_epoch, batch_idx, self.global_rank)
        num_documents = len(batch.candidate if self.context.include_negatives else batch.query)
        order = torch.randperm(num_documents, generator=torch.Generator().manual_seed(seed))
        return self._documents(batch.candidate, order[: self.embedder.num_context])

    def _documents(self, tokens: TokenBatch, rows: Tensor | None = None) -> TokenBatch:
        """The texts at `rows`, or all texts, truncated for the first stage."""
        if self.context.max_length is None:
            return tokens if rows is None else take_texts(tokens, rows)
        return truncated(tokens, torch.arange(len(tokens)) if rows is None else rows, self.context.max_length)

    def _frozen_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that the current step does not change."""
        if self._phase == "joint":
            return []
        first = set(self.embedder.first_stage.parameters())
        return [p for p in self.parameters() if p.requires_grad and (p in first) == (self._phase == "frozen")]

    def _check_schedule(self, trainer: L.Trainer, steps: int | None, is_exact: bool = False) -> None:
        super()._check_schedule(trainer, steps, is_exact)
        num_words, total_steps = self.first_stage_training.word_steps, self._schedule.total_steps or steps
        if trainer.fast_dev_run or total_steps is None or not num_words:  # type: ignore[attr-defined]
            return
        if num_words + self._schedule.num_warmup_steps(total_steps - num_words) >= total_steps:
            rule = f"plus the schedule's warm-up steps must be < {total_steps}, the optimiser steps of the run"
            raise OptionError("model.first_stage_training.word_steps", num_words, rule, "lower it or train longer")

    @torch.no_grad()
    def _watch_context(self, batch: ContrastiveBatch) -> None:
        """Measure the influence of the context at regular steps, and warn once if it has collapsed."""
        context_MH, previous_MH = self._context_MH, self._previous_context_MH
        self._previous_context_MH = context_MH
        is_measured = (self.global_step + 1) % MEASURED_EVERY == 0
        if not is_measured or context_MH is None or min(len(batch), self.embedder.num_context) < 2:
            return
        metrics = {"spread": context_spread(context_MH)}
        if previous_MH is not None and not training_strategy(self.trainer.strategy).is_sharded:
            metrics["context_sensitivity"] = self._sensitivity(batch, context_MH, previous_MH)
        metrics = mean_over_ranks(metrics)
        spread = float(metrics.pop("spread"))
        self.log_dict({f"train/{name}": value for name, value in metrics.items()}, batch_size=len(batch))
        if not self._has_warned and spread < COLLAPSED_SPREAD:
            self._has_warned = True
            logger.warning(_COLLAPSED, self.global_step, 1.0 - spread)

    def _sensitivity(self, batch: ContrastiveBatch, context_MH: Tensor, other_MH: Tensor) -> Tensor:
        """One minus the mean cosine between some texts' vectors with one context and with another, ()."""
        tokens = take_texts(batch.query, torch.arange(min(len(batch), MEASURED_TEXTS))).moved(batch.device)
        state = RandomState(context_MH.device)
        own_ND = self.embed(tokens, context_MH).vector_ND
        with state.replayed():
            other_ND = self.embed(tokens, other_MH).vector_ND
        return 1.0 - F.cosine_similarity(own_ND.float(), other_ND.float(), dim=-1).mean()


def context_spread(context_MH: Tensor) -> Tensor:
    """One minus the mean cosine between two different vectors of (M, H), () float32: 0 if all directions are equal."""
    unit_MH = F.normalize(context_MH.float(), dim=-1)
    num_vectors = len(unit_MH)
    # |sum of unit vectors|^2 contains each pair twice and each vector's product with itself.
    others = unit_MH.sum(dim=0).square().sum() - unit_MH.square().sum()
    return 1.0 - others / (num_vectors * (num_vectors - 1))


def _check_architecture(embedder: ContextualEmbedder, context: ContextSettings, initial_model: str) -> None:
    architecture = {
        "num_context": embedder.num_context,
        "num_soft_prompts": embedder.soft_prompt.num_soft_prompts,
        "residual_projection": embedder.residual is not None,
    }
    for name, value in architecture.items():
        if (option := getattr(context, name)) != value:
            rule = f"must equal that of {initial_model}: {value}"
            raise OptionError(f"model.context.{name}", option, rule, "set the same value")
    check_dropout(context.dropout_fraction, embedder.slots.has_null, "model.context.dropout_fraction")
