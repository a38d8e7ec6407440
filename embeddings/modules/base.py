"""Base modules of all methods: optimiser, schedule, checks of a run, checkpoints, and the contrastive training step."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import (
    BatchNeeds,
    ContextualStep,
    ContrastiveBatch,
    InputError,
    LossOutput,
    NumericError,
    OptionError,
    Representations,
    TextSettings,
    TokenBatch,
    UserError,
)
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.common.distributed import mean_over_ranks
from embeddings.common.errors import run_checks
from embeddings.common.process import logger
from embeddings.common.protocols import KeepsArguments, RunData, as_config, run_data
from embeddings.common.random import derive_seed, run_seed
from embeddings.data.datamodule import PlannedDataModule
from embeddings.data.samplers.base import accumulated_batches, batches_since_step, run_steps
from embeddings.inference.encoder import has_native_bfloat16
from embeddings.losses import InfoNCE
from embeddings.losses.info_nce import scores_at_once
from embeddings.models import BackboneConfig, Embedder, LoraSettings, Pooling, add_lora, load_backbone
from embeddings.models.compilation import check_compiler, set_compilation
from embeddings.models.directory import read_model_directory, read_text_settings
from embeddings.models.language_model import HeadKind
from embeddings.models.lora import frozen_weights, is_four_bit
from embeddings.models.model_files import FrozenBase, resolve_model
from embeddings.models.moe.experts import Experts, shared_casts
from embeddings.models.stand_in import TINY
from embeddings.modules.checkpoint import configured_module, reopen_epoch, rewind, set_weights
from embeddings.modules.distillation import LayerTeacher, VectorTeacher, WidthMaps
from embeddings.training.gradcache import GradCache, plain_step
from embeddings.training.optim import Schedule, parameter_groups, replaced_options, scale_rates, state_per_weight
from embeddings.training.plan import LossSize, Setting, Texts, trace_embedder
from embeddings.training.strategy import has_plain_weights, shard, time_left, training_strategy

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
PoolingFactory = Callable[[int], Pooling]

# Checkpoint keys of weights: under `WeightAveraging` those of the average, and the model's own.
_WEIGHTS = ("state_dict", "current_model_state")
# Batches after which a run stops if none had a negative.
FIRST_BATCHES = 10


class BaseModule(KeepsArguments, L.LightningModule):
    """Base class of all trained modules: optimiser, schedule, seeds of the steps, checks of a run, checkpoints."""

    # The method and its paper, for the report of a run.
    title = ""
    # Arguments that are a `BackboneConfig`.
    backbones: ClassVar[tuple[str, ...]] = ("backbone",)
    # Upper limits of arguments in a stand-in run.
    stand_in_limits: ClassVar[Mapping[str, int]] = {"schedule.warmup_steps": 2}
    # What the data module's rows are, in a plan.
    row_unit: ClassVar[str] = "pairs"

    @classmethod
    def head_kind(cls, arguments: Any) -> HeadKind | None:
        """The language modelling head that the backbone needs, if any."""
        return None

    @classmethod
    def stand_in_arguments(cls, arguments: Any, folder: Path) -> dict[str, Any]:
        """Arguments of a stand-in run, with dotted names, besides those of the backbones; may write to a folder."""
        return {}

    @classmethod
    def tokenizer_arguments(cls, arguments: Any) -> dict[str, Any]:
        """Arguments, with dotted names, that depend on the tokenizer, for that of a stand-in."""
        return {}

    def planned_step(
        self, data: Any, setting: Setting, query_tokens: int | None, document_tokens: int | None
    ) -> tuple[list[Texts], LossSize]:
        """The texts of a rank's batch with their cost, and the size of its loss, for `plan` on the meta device."""
        raise OptionError("model", type(self).__name__, "is not planned", "use a contrastive or a language model")

    def __init__(self, optimizer: OptimizerFactory, schedule: Schedule, seed: int | None) -> None:
        super().__init__()
        # A method's default is not in its signature: the parser would merge its arguments into a user's optimiser.
        # Callbacks that average weights deep-copy the module. A config's factory refers to its parser, which cannot be
        # copied; a deep copy shares the lambda instead.
        self._optimizer: OptimizerFactory = lambda groups: optimizer(groups)
        self._schedule = schedule
        self._seed = run_seed(seed)
        self.frozen_base: FrozenBase | None = None
        # The peak learning rate that a `LearningRateFinder` set.
        self.lr: float | None = None

    def optimizer_config(self) -> dict[str, Any]:
        """The optimiser's class and arguments in the form of a config."""
        optimizer = self._make_optimizer()
        names = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
        return dict(as_config(partial(type(optimizer), **{name: optimizer.defaults[name] for name in sorted(names)})))

    @classmethod
    def check_arguments(cls, arguments: Any, trainer: L.Trainer) -> None:
        """Check arguments in a config against the trainer before the model is loaded: the schedule."""
        given, names = arguments.get("schedule"), {field.name for field in fields(Schedule)}
        # A module that is not ours may have a schedule of another kind.
        is_ours = given is not None and vars(given).keys() == names
        if is_ours and _has_known_length(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # Epochs may end the run earlier.
            Schedule(**vars(given)).check(max(0, trainer.max_steps) or None, trainer.max_epochs in (None, -1))

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        """Check optimiser, schedule, strategy, precision and compiler against the trainer and the data."""
        self._check_trainer(trainer)
        self._make_optimizer()
        if _has_known_length(trainer):
            self._check_schedule(trainer, max(0, trainer.max_steps) or None)

    def prepare_data(self) -> None:
        """Check the run, and the schedule against the length of the data, before any file of the run is written."""
        self.check_run(self.trainer, self, run_data(self.trainer))
        self._check_schedule(self.trainer, self._trainer_steps(), is_exact=True)

    def configure_model(self) -> None:
        """Shard the weights over the ranks if the strategy is FSDP2."""
        mesh = self.device_mesh
        product_dtype = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None
        for part, entries in self.sharded_parts():
            if mesh is not None and not isinstance(part, FSDPModule):
                shard(part, mesh["data_parallel"], entries, product_dtype)

    def sharded_parts(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """The modules to shard, each with the names of its methods other than `forward` that use its weights."""
        raise NotImplementedError

    def parts_of_own_rate(self) -> Mapping[str, nn.Module]:
        """Submodules with a separate learning rate (see `rate_factor`), by name."""
        return {}

    def rate_factor(self, part: str | None, step: int, total_steps: int) -> float:
        """Fraction of the peak learning rate at an optimiser step; `part` is a name of `parts_of_own_rate` or None."""
        return self._schedule.factor(step, total_steps)

    def on_fit_start(self) -> None:
        """Enable dropout: a loaded model is in evaluation mode, which Lightning does not change."""
        self.train()

    def on_train_start(self) -> None:
        """Set the gradient accumulation: Lightning sets it only when an epoch starts, which a resumed run skips."""
        self.trainer.accumulate_grad_batches = accumulated_batches(self.trainer, self.current_epoch)
        if self.lr is not None:
            # Lightning set the optimiser's rate only; the schedule would overwrite it at the next step.
            for config in self.trainer.lr_scheduler_configs:
                scale_rates(config.scheduler, self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the step's random choices from epoch, batch and rank, so that they do not depend on earlier steps."""
        progress: Any = self.trainer.fit_loop.epoch_progress
        if progress.current.ready == progress.current.processed:
            # Lightning 2.6 does not count an epoch that begins right after resuming from the end of another one. The
            # next checkpoint would then omit the loader's position.
            progress.increment_ready()
            progress.increment_started()
        torch.manual_seed(derive_seed(self._seed, "step", self.current_epoch, batch_idx, self.global_rank))

    def check_loss(self, output: LossOutput) -> dict[str, Tensor]:
        """The `loss` and its terms, as means over the ranks; raise on all ranks if the loss of any is not finite."""
        means = mean_over_ranks({"loss": output.loss, **output.terms})
        if torch.isfinite(means["loss"]):
            return means
        is_own = not torch.isfinite(output.loss)
        problem = f"loss is {output.loss.item()}" if is_own else "loss of another rank is NaN or infinite"
        raise NumericError(f"{problem} at step {self.global_step}: no update was made")

    def log_step(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Log a training step's values, which are equal on all ranks, as `train/NAME`."""
        results: Any = self.trainer._results
        for item in results.values():
            # Otherwise Lightning would repeat the last value of a name that this step does not log.
            if item.meta.fx == "training_step" and not item.meta.on_epoch:
                item.reset()
        for name, value in values.items():
            self.log(f"train/{name}", value, prog_bar=name in ("loss", "level"), batch_size=batch_size)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raise before the update if the gradient is NaN or infinite, unless a loss scaler or ZeRO checks it."""
        if self._loss_scaler() is not None or training_strategy(self.trainer.strategy).checks_gradients:
            return
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not torch.isfinite(norm):
            raise NumericError(f"gradient is {norm.item()} at step {self.global_step}: no update was made")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser of the trainable parameters, and its schedule, which advances once per optimiser step."""
        optimizer, left = self._make_optimizer(), partial(time_left, self.trainer)
        scheduler = self._schedule.scheduler(optimizer, self._trainer_steps(), self.rate_factor, left)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Omit the weights of a frozen base, and the batches since the last optimiser step."""
        reopen_epoch(checkpoint)
        omitted = self.frozen_names()
        # bitsandbytes stores the state of a 4-bit weight under names that begin with the weight's.
        prefixes = tuple(f"{name}." for name in omitted)
        for key in _WEIGHTS:
            if omitted and key in checkpoint:
                weights = checkpoint[key].items()
                checkpoint[key] = {n: value for n, value in weights if n not in omitted and not n.startswith(prefixes)}
        if self.frozen_base is not None and self.trainer.is_global_zero:
            checkpoint["frozen_base"] = self.frozen_base.to_dict()
        num_batches, data = batches_since_step(self.trainer), self.trainer.datamodule  # type: ignore[attr-defined]
        if num_batches and isinstance(data, PlannedDataModule):
            rewind(checkpoint, type(data).__qualname__, num_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weights of the frozen base from this module."""
        saved = checkpoint.get("frozen_base")
        if saved is not None and self.frozen_base is not None:
            self.frozen_base.check(saved)
            state = self.state_dict()
            own = {name: state[name] for name in self.frozen_names()}
            checkpoint |= {key: own | checkpoint[key] for key in _WEIGHTS if key in checkpoint}
        states = checkpoint.get("optimizer_states") if self._trainer is not None else None
        if states and (replaced := replaced_options(self._make_optimizer(), states[0])):
            logger.warning("the optimiser continues with the checkpoint's options: %s", "; ".join(replaced))

    def frozen_names(self) -> set[str]:
        return frozen_weights(self) if self.frozen_base is not None else set()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """The module of a checkpoint, with its weights; reading a checkpoint never executes code."""
        content, path = read_checkpoint(checkpoint_path), os.fspath(checkpoint_path)
        module = cls(**arguments) if arguments else configured_module(content, path)
        if not isinstance(module, cls):
            rule = f"contains a {type(module).__name__}, not a {cls.__name__}"
            raise InputError(path, rule, f"call {type(module).__name__}.load_from_checkpoint")
        set_weights(module, content, path, strict=strict is not False)
        return module if map_location is None else module.to(map_location)

    def state_per_weight(self) -> float:
        """Numbers in the optimiser's state per trained weight."""
        return state_per_weight(self._optimizer)

    def _check_trainer(self, trainer: L.Trainer) -> None:
        strategy, precision = trainer.strategy, str(trainer.precision)
        is_plain = has_plain_weights(strategy)
        if not is_plain and any(map(is_four_bit, self.parameters())):
            rule = "does not support 4-bit weights"
            raise OptionError("trainer.strategy", type(strategy).__name__, rule, "use ddp, or leave quantization out")
        scalars = [name for name, parameter in self.named_parameters() if parameter.ndim == 0]
        if not is_plain and scalars:
            rule, fix = f"cannot shard the scalar {scalars[0]}", "set learnable_temperature: false, or use ddp"
            raise OptionError("trainer.strategy", type(strategy).__name__, rule, fix)
        if precision.endswith("16-true") and scalars:
            raise OptionError("trainer.precision", precision, f"rounds updates of {scalars[0]} away", "set bf16-mixed")
        # bfloat16 rounds away updates below 1/512 of a weight: at a learning rate of 2e-5 most of them.
        trained = {str(weight.dtype).removeprefix("torch.") for weight in self.parameters() if weight.requires_grad}
        keeps_copy = training_strategy(strategy).keeps_float32_weights and precision != "32-true"
        if (half := trained & {"bfloat16", "float16"}) and not keeps_copy and not precision.endswith("16-true"):
            rule = "loses most updates of trained weights by rounding"
            fix = "set float32 with trainer.precision bf16-mixed, or add lora; bf16-true trains in bfloat16 anyway"
            raise OptionError("model.backbone.dtype", half.pop(), rule, fix)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning | StochasticWeightAveraging):
                rule, hint = "would not keep to the optimiser and its schedule", "use lora, or EMAWeightAveraging"
                raise OptionError("trainer.callbacks", type(callback).__name__, rule, hint)
        check_compiler(self, strategy.root_device)
        if precision.startswith("bf16") and not has_native_bfloat16(strategy.root_device):
            logger.warning("trainer.precision %s: this device emulates bfloat16, use 32-true", precision)

    def _loss_scaler(self) -> Any:
        plugin = self.trainer.precision_plugin
        return plugin.scaler if isinstance(plugin, MixedPrecision | FSDPPrecision) else None

    def _make_optimizer(self) -> Optimizer:
        groups = parameter_groups(self, self.parts_of_own_rate())
        try:
            optimizer = self._optimizer(groups)
        except ValueError as error:
            raise InputError("model.optimizer", str(error), "see the method configs for usual values") from error
        if optimizer.defaults.get("fused"):
            # Otherwise Lightning would leave unscaling to the fused optimiser and refuse gradient clipping.
            vars(optimizer)["_step_supports_amp_scaling"] = False
        return optimizer

    def _check_schedule(self, trainer: L.Trainer, steps: int | None, is_exact: bool = False) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._schedule.check(steps, is_exact)

    def _trainer_steps(self) -> int | None:
        """Optimiser steps of the run; None if the trainer has no limit."""
        data = run_data(self.trainer)
        return run_steps(self.trainer, None if data is None else data.batches_per_epoch)


def _has_known_length(trainer: L.Trainer) -> bool:
    """Whether the run's steps, or that they have no limit, are known without the number of rows."""
    return trainer.max_steps > 0 or trainer.max_epochs == -1


class ContrastiveModule(BaseModule):
    """Trains an `Embedder` with a contrastive loss; a method may override `embed` and `loss_from_representations`.

    The plain step is `loss(embed(queries), embed(candidates))`. If the GradCache callback sets `grad_cache`, the same
    two functions run in mini-batches with the same gradient. Both use Lightning's automatic optimisation.

    Args:
        embedder: The model to train and save.
        loss: The contrastive loss.
        optimizer: Makes the optimiser from groups of the trainable parameters.
        schedule: Learning-rate schedule in optimiser steps.
        seed: Seed of the random choices in each step; None for `seed_everything`'s.
    """

    # The batch sampler that a method needs, and the effect of any other (`BatchNeeds`); empty if any sampler works.
    made_for: tuple[()] | tuple[str, str] = ()

    def __init__(
        self,
        embedder: Embedder,
        loss: InfoNCE,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        seed: int | None = None,
    ) -> None:
        super().__init__(optimizer, schedule, seed)
        self.embedder = embedder
        self.frozen_base = embedder.frozen_base
        embedder.trained_widths = tuple(sorted(loss.widths, reverse=True))
        embedder.similarity = loss.similarity
        self.loss = loss
        self.vector_teacher: VectorTeacher | None = None
        self.layer_teacher: LayerTeacher | None = None
        # Maps of the states to the layer teacher's width.
        self.width_maps: WidthMaps | None = None
        has_experts = any(isinstance(part, Experts) for part in embedder.modules())
        self.shared_casts = shared_casts if has_experts else nullcontext
        self.grad_cache: GradCache | None = None
        self._first_useless: list[Tensor] | None = []
        self._num_first = FIRST_BATCHES

    @classmethod
    def stand_in_arguments(cls, arguments: Any, folder: Path) -> dict[str, Any]:
        widths = arguments.get("loss.init_args.widths")
        if not widths:
            return {}
        # Distinct, and the largest is the model's.
        return {
            "loss.init_args.widths": [TINY["hidden_size"] - sum(each > width for each in widths) for width in widths]
        }

    def planned_step(
        self, data: Any, setting: Setting, query_tokens: int | None, document_tokens: int | None
    ) -> tuple[list[Texts], LossSize]:
        queries = int(data.batch_size)
        documents = queries * (1 + int(data.num_negatives))
        text = TextSettings(**vars(data.text) if data.text else {}).following(self.text)
        lengths = int(query_tokens or text.query_max_length), int(document_tokens or text.document_max_length)
        texts = trace_embedder(self.embedder, queries, documents, *lengths, setting.half_products)
        width = sum(self.loss.widths or (self.embedder.embedding_dim,))
        gathers = self.batch_needs.gathers_candidates
        columns = documents * (setting.num_ranks if gathers else 1)
        # The plan may be for a GPU that this machine lacks.
        tile = scores_at_once(self.loss.tile_size, setting.device)
        return texts, LossSize(queries, columns, width, tile, queries + documents, columns if gathers else 0)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.embedder.tokenizer

    @property
    def batch_needs(self) -> BatchNeeds:
        gathers = self.loss.gather_across_devices and self.loss.in_batch_negatives != "off"
        sampler, without_sampler = self.made_for or (None, "")
        return BatchNeeds(
            self.loss.in_batch_negatives,
            gathers,
            sampler,
            without_sampler,
            teacher_tokens=None if self.vector_teacher is None else self.vector_teacher.tokens,
            masks_text=self.loss.mask_same_text,
            masks_class=self.loss.mask_same_class,
            only_hard_negatives=self.loss.only_hard_negatives,
            compares_documents=self.loss.directions == "both",
        )

    @property
    def text(self) -> TextSettings:
        return self.embedder.text

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        """As in `BaseModule`; also check loss, text lengths and teachers against the model and the data."""
        has_surrogates, has_scores = (False, False) if data is None else (data.has_surrogates, data.has_scores)
        text = None if data is None or data.text is None else data.text_for(self.text)
        run_checks(
            [
                lambda: self.loss.check_teacher(has_surrogates, has_scores),
                lambda: self.loss.check_width(self.embedder.embedding_dim),
                *([] if text is None else [partial(self.embedder.check_lengths, text)]),
                partial(super().check_run, trainer, module, data),
                self.load_teachers,
            ]
        )

    def load_teachers(self) -> None:
        """Load the frozen teacher models, once."""
        if self.loss.teacher is not None and self.vector_teacher is None:
            self.vector_teacher = VectorTeacher(self.loss.teacher)

    def sharded_parts(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        maps = [] if self.width_maps is None else [(self.width_maps, ())]
        return [(self.embedder, self.embedder.entries), *maps]

    def setup(self, stage: str) -> None:
        """Copy the data module's text settings, so that a saved model encodes as it was trained; load the teachers."""
        if stage == "fit":
            self._first_useless = []
            self.load_teachers()
        data = run_data(self.trainer)
        if data is not None and data.text is not None:
            text = data.text_for(self.text)
            if stage == "fit" and self.text.given and (changed := text.differences(self.text)):
                logger.info("text settings that differ from the initial model's: %s", "; ".join(changed))
            self.embedder.text = text

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The vectors of all texts in input order, (N, D) float32; with a layer teacher also its sums of errors."""
        if self.layer_teacher is not None:
            return self.layer_teacher.embed(self.embedder, tokens, self.width_maps)
        return Representations(self.embedder(tokens))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """The contrastive loss of a full batch, with the terms of teachers."""
        if self.vector_teacher is not None:
            batch = self.vector_teacher.with_vectors(batch)
        output: LossOutput = self.loss(query.vector_ND, candidate.vector_ND, batch)
        if self.layer_teacher is not None:
            return self.layer_teacher.with_distillation(output, query.statistics, candidate.statistics)
        return output

    def forward(
        self, tokens: TokenBatch, context: Any = None, is_context: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`embed`, or `embed_context`, with plain tensors as output: called by ZeRO's engine."""
        if is_context:
            assert isinstance(self, ContextualStep)
            return self.embed_context(tokens), {}
        representations = self.embed(tokens, context)
        return representations.vector_ND, representations.statistics

    def training_step(self, batch: ContrastiveBatch, batch_idx: int) -> Tensor:
        """The loss of one batch; under GradCache only the last mini-batch's backward pass is still to be run."""
        if self.grad_cache is None:
            output = plain_step(self, batch)
        else:
            if batch_idx % self.trainer.accumulate_grad_batches == 0:
                for optimizer in self.trainer.optimizers:
                    optimizer.zero_grad()
            strategy = training_strategy(self.trainer.strategy)
            output = strategy.gradcache_step(self.grad_cache, self, batch, self._backward_scale())
        means = self.check_loss(output)
        if self._first_useless is not None and "no_negative_fraction" in means:
            self._check_first_batches(self._first_useless, means)
        if batch.negative_level:
            means["level"] = torch.tensor(float(batch.negative_level))
        self.log_step(means, len(batch))
        return output.loss

    def _check_first_batches(self, useless: list[Tensor], means: Mapping[str, Tensor]) -> None:
        """Stop a run whose first batches train nothing, and warn if the teacher's term is 0 in all of them."""
        if not useless:
            self._num_first = min(FIRST_BATCHES, self._trainer_steps() or FIRST_BATCHES)
        has_distillation = means.get("distillation", torch.zeros_like(means["loss"])) != 0
        has_negatives = (means["no_negative_fraction"] < 1) & (means["loss"] != 0)
        useless.append(torch.stack([~(has_negatives | has_distillation), ~has_distillation]))
        if len(useless) < self._num_first:
            return
        self._first_useless = None
        is_useless, has_no_teacher = torch.stack(useless).all(dim=0).tolist()
        if self.loss.has_teacher and has_no_teacher:
            line = "in the first %d batches the term of the teacher is 0: the texts lack its scores or vectors"
            logger.warning(line, len(useless))
        if is_useless:
            what = (
                f"in the first {len(useless)} batches the loss is 0 or no query has a negative, so nothing is trained"
            )
            hint = "give records `negatives`, raise data.batch_size, or correct labels or queries that are all the same"
            raise InputError("data.sources", what, hint)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear gradients, except under GradCache, whose gradients exist before Lightning calls this method."""
        if self.grad_cache is None:
            optimizer.zero_grad()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["text_settings"] = self.embedder.text.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "text_settings" in checkpoint:
            text = TextSettings(**checkpoint["text_settings"])
            data = None if self._trainer is None else run_data(self.trainer)
            # A resumed run may have other settings.
            self.embedder.text = text if data is None else data.text_for(text)

    def _backward_scale(self) -> float:
        """The factor that Lightning applies to the returned loss; GradCache's own backward passes need it too."""
        scaler = self._loss_scaler()
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        return loss_scale / self.trainer.accumulate_grad_batches


def build_embedder(
    backbone: BackboneConfig,
    pooling: PoolingFactory,
    lora: LoraSettings | None,
    initial_model: str | None,
    normalize: bool,
    seed: int | None,
    usual_pooling: str,
    transform: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> Embedder:
    """The model of a method with one backbone and one pooling: new or from a model directory, with or without LoRA.

    `usual_pooling` is the hint of the error for an invalid pooling. `transform` changes the loaded backbone before
    adapters are added. The random state does not change.
    """
    source = backbone if initial_model is None else replace(backbone, name=initial_model, revision=None)
    options: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run_seed(seed))
        # Upcycling needs unquantised weights.
        model, tokenizer = load_backbone(source, has_lora=lora is not None and transform is None)
        # Not a whole embedder: with an attention-based pooling it would already add hooks to the backbone.
        initial = (
            None if initial_model is None else read_model_directory(resolve_model(initial_model), model, tokenizer)
        )
        text = initial_text(source, model, tokenizer) if initial is None else initial.text
        try:
            pooling_layer = pooling(model.config.hidden_size if initial is None else initial.pooling.hidden_size)
        except ValueError as error:
            raise UserError(f"model.{error}; {usual_pooling}") from error
        if initial is not None:
            # The directory of a run with bf16-true has all of them in bfloat16.
            given, pooling_layer = pooling_layer, initial.pooling.float()
            if type(given) is not type(pooling_layer) or given.arguments() != pooling_layer.arguments():
                rule = f"must equal that of {source.name}: {type(pooling_layer).__name__} {pooling_layer.arguments()}"
                value = f"{type(given).__name__} {given.arguments()}"
                raise OptionError("model.pooling", value, rule, "configure the same pooling")
            options = {name: part.float() for name in ("norm", "head") if (part := getattr(initial, name)) is not None}
        transformed = model if transform is None else transform(model)
        adapted = transformed if lora is None else add_lora(transformed, lora)
    embedder = Embedder(adapted, tokenizer, pooling_layer, normalize=normalize, text=text, **options)
    embedder.unpad(backbone.unpadded)
    if lora is not None and transformed is model:
        embedder.frozen_base = FrozenBase(source.name, resolve_model(source.name, source.revision))
    set_compilation(embedder.backbone, backbone.compile)
    return embedder


def initial_text(config: BackboneConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TextSettings:
    """The text settings of the model directory that a backbone comes from, if it comes from one."""
    folder = resolve_model(config.name, config.revision) if config.name else None
    return (None if folder is None else read_text_settings(folder, model, tokenizer)) or TextSettings()
