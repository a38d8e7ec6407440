"""Language modelling on plain texts: masked tokens, masked next tokens, or the next token, in packed rows."""

import os
from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import LossOutput, OptionError
from embeddings.common.distributed import gather_counts
from embeddings.common.protocols import RunData
from embeddings.common.random import run_seed
from embeddings.common.types import Prediction
from embeddings.losses.prediction import token_cross_entropy
from embeddings.models import BackboneConfig, LoraSettings
from embeddings.models.backbone import compile_layers
from embeddings.models.bidirectional import check_causal
from embeddings.models.embedder import num_positions
from embeddings.models.language_model import (
    FromScratch,
    HeadKind,
    HeadSettings,
    LanguageModel,
    check_separation,
    load_language_model,
    window,
)
from embeddings.models.lora import plain_backbone
from embeddings.models.model_files import FrozenBase, resolve_model
from embeddings.modules.base import BaseModule, OptimizerFactory
from embeddings.training.language_task import LanguageTask, Masking, Objective
from embeddings.training.optim import Schedule


class MaskedLMModule(BaseModule):
    """Trains an encoder or a decoder to predict tokens of plain texts, which `TextDataModule` packs into rows.

    - `mntp` on a decoder without its causal mask, with LoRA: LLM2Vec's first step. The exported directory, with the
      matrices merged, is the `backbone` that MGH starts from.
    - `mlm` on an encoder, all weights: what adapts XLM-R to other positions and texts before *MoE* training.
    - `causal` with `from_scratch`: a small decoder with some pre-training for experiments that start from one.

    Args:
        objective: `mlm`, `mntp` or `causal` (see `LanguageTask`).
        backbone: Which checkpoint; `mntp` needs `bidirectional: true`.
        from_scratch: Which architecture with random weights; exactly one of the two is given.
        masking: How tokens are hidden; None for BERT's way (`causal` hides none).
        lora: LoRA settings of the backbone, or None to train all weights.
        head: Where the language-model head comes from, whether it is trained beside LoRA, and its tiles.
        separate_documents: Whether documents of a row do not attend to each other and each begins at position 0;
            otherwise a row is one text, as in the published recipes. It needs sdpa or eager attention.
        optimizer: Makes the optimiser. LLM2Vec: AdamW with a learning rate of 5e-5 and no weight decay.
        schedule: Learning-rate schedule in optimiser steps.
        seed: Seed of initial weights, of the choice of hidden tokens, and of dropout; None for `seed_everything`'s.

    Metrics: `train/` and `val/` `loss` (mean cross-entropy in nats over the predicted tokens), `perplexity`,
        `accuracy`. Hidden tokens of a validation row are the same in every epoch.
    Distributed: the loss is the mean over all ranks' targets, however many each has.
    Raises:
        OptionError: If an option is impossible, or has no effect.
        InputError: If the model cannot be loaded.
    Source: BehnamGhader et al. 2024 (LLM2Vec), arXiv:2404.05961, §2.2 and the released `run_mntp.py`; Nussbaum and
        Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.1. Differs: see `LanguageTask`; LLM2Vec's script leaves
        the head trainable and discards it, here it is frozen beside LoRA unless `head` says otherwise.
    """

    def __init__(
        self,
        objective: Objective,
        backbone: BackboneConfig | None = None,
        from_scratch: FromScratch | None = None,
        masking: Masking | None = None,
        lora: LoraSettings | None = None,
        head: HeadSettings = HeadSettings(),  # noqa: B008 - frozen
        separate_documents: bool = False,
        optimizer: OptimizerFactory = lambda params: torch.optim.AdamW(params, lr=5e-5, weight_decay=0.0),
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(optimizer, schedule, seed)
        seed = run_seed(seed)
        source = _source(objective, backbone, from_scratch, masking)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind: HeadKind = "masked" if objective == "mlm" else "causal"
            model, tokenizer = load_language_model(source, kind, head.new, has_lora=lora is not None)
            causal, backbone_model = objective == "causal", model.base_model
            assert isinstance(backbone_model, PreTrainedModel)
            if causal:
                check_causal(backbone_model)
            if separate_documents:
                check_separation(backbone_model, causal)
            self.language_model = LanguageModel(model, tokenizer, causal, lora, head.train_beside_lora)
        if backbone is not None and lora is not None:
            self.frozen_base = FrozenBase(backbone.name, resolve_model(backbone.name, backbone.revision))
        if backbone is not None and backbone.compile:
            compile_layers(self.language_model.backbone)
        if not causal and masking is None:
            masking = Masking()
        special = set(tokenizer.all_special_ids)
        ordinary = torch.tensor([token for token in sorted(tokenizer.get_vocab().values()) if token not in special])
        mask_id = -1 if masking is None else _mask_id(tokenizer, masking)
        self.task = LanguageTask(objective, masking, mask_id, ordinary, separate_documents, seed)
        self._tile_positions = max(1, head.tile_logits // self.language_model.vocab_size)
        self._sums: list[float] = [0.0, 0.0, 0.0]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, which the data module uses."""
        return self.language_model.tokenizer

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        """Check the length of the rows, the optimiser and the schedule."""
        if data is not None and data.row_length is not None:
            self._check_row_length(data.row_length)
        super().check_run(trainer, module, data)

    def sharded_parts(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """The language model; its head is used right after its forward, while the weights are gathered."""
        return [(self.language_model, ())]

    def training_step(self, batch: Prediction, batch_idx: int) -> Tensor:
        """The mean cross-entropy of one batch's targets."""
        counts = gather_counts(len(batch), self.device)
        output = self.score(batch, num_targets=sum(counts) / len(counts))
        self.check_loss(output.loss)
        size = max(1, len(batch))
        self.log("train/loss", output.loss.detach(), prog_bar=True, batch_size=size)
        self.log_dict({f"train/{name}": value for name, value in output.terms.items()}, batch_size=size)
        return output.loss

    def score(self, batch: Prediction, num_targets: float | None = None) -> LossOutput:
        """The cross-entropy of a batch's targets; logits are computed for targets only (see `token_cross_entropy`)."""
        states_NLH = self.language_model(
            batch.input_ids_NL, batch.document_NL, self.task.separate_documents, batch.has_padding
        )
        state_PH = states_NLH.flatten(0, 1).index_select(0, batch.read_P)
        return token_cross_entropy(state_PH, batch.label_P, self.language_model.head, self._tile_positions, num_targets)

    def on_validation_epoch_start(self) -> None:
        self._sums = [0.0, 0.0, 0.0]

    def validation_step(self, batch: Prediction, batch_idx: int) -> None:
        output = self.score(batch)
        means = (float(output.loss), float(output.terms["accuracy"]), 1.0)
        self._sums = [total + mean * len(batch) for total, mean in zip(self._sums, means, strict=True)]

    def on_validation_epoch_end(self) -> None:
        """Log the means over all targets of all ranks, under the number of optimiser steps made."""
        sums = torch.tensor(self._sums, dtype=torch.float64)
        sums = self.trainer.strategy.reduce(sums.to(self.device), reduce_op="sum")
        loss, accuracy = (sums[:2] / sums[2].clamp(min=1.0)).unbind()
        means = {"val/loss": loss, "val/perplexity": loss.exp(), "val/accuracy": accuracy}
        values = {name: value.float() for name, value in means.items()}
        # Lightning would file them under the step before, so they go to the loggers directly.
        for logger in [] if self.trainer.sanity_checking else self.trainer.loggers:
            logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.trainer.global_step)
        self.log_dict(values, sync_dist=True, logger=False)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as a Hugging Face directory, LoRA matrices merged (see `LanguageModel.save_pretrained`)."""
        self.language_model.save_pretrained(folder)

    def _check_row_length(self, row_length: int) -> None:
        limit = num_positions(self.language_model.backbone)
        if limit is not None and row_length > limit:
            rule = f"must be <= {limit}, the positions that the backbone has"
            raise OptionError("data.row_length", row_length, rule, "lower it")
        reach = window(plain_backbone(self.language_model.backbone).config)
        if self.task.separate_documents and reach is not None and reach < row_length:
            rule = f"must be <= {reach}, the window of some layer, where documents are separate"
            raise OptionError("data.row_length", row_length, rule, "lower it, or set separate_documents: false")


def _source(
    objective: Objective, backbone: BackboneConfig | None, from_scratch: FromScratch | None, masking: Masking | None
) -> BackboneConfig | FromScratch:
    """The checkpoint or architecture, after checks that need no model."""
    if (backbone is None) == (from_scratch is None):
        given = "both" if backbone is not None else "neither"
        raise OptionError("model.backbone", given, "or model.from_scratch must be given", "give exactly one of the two")
    source = backbone or from_scratch
    assert source is not None
    if backbone is not None and backbone.unpadded is True:
        rule = "has no effect here, where rows are packed"
        raise OptionError("model.backbone.unpadded", True, rule, "leave it out")
    if objective == "causal" and masking is not None:
        raise OptionError("model.masking", masking, "has no effect on objective causal", "leave it out")
    if source.bidirectional != (objective == "mntp"):
        fix = "only a decoder that learns mntp has its mask off"
        raise OptionError("bidirectional", source.bidirectional, f"does not fit objective {objective}", fix)
    return source


def _mask_id(tokenizer: PreTrainedTokenizerBase, masking: Masking) -> int:
    name = masking.mask_token if masking.mask_token is not None else tokenizer.mask_token
    if name is None:
        rule = "must be set: the tokenizer has no mask token"
        raise OptionError("model.masking.mask_token", None, rule, 'LLM2Vec takes "_"')
    found = tokenizer.get_vocab().get(name)
    if found is None:
        raise OptionError("model.masking.mask_token", name, "must be a token of the vocabulary", "name another")
    return int(found)
