"""Language modelling on packed rows of plain text: masked tokens, masked next tokens, or next tokens."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import LossOutput, OptionError
from embeddings.common.distributed import gather_counts
from embeddings.common.protocols import RunData
from embeddings.common.random import derive_seed, run_seed
from embeddings.common.types import PackedRows, Prediction
from embeddings.losses.prediction import token_cross_entropy
from embeddings.models import BackboneConfig, LoraSettings
from embeddings.models.backbone import num_positions
from embeddings.models.bidirectional import check_causal
from embeddings.models.compilation import set_compilation
from embeddings.models.language_model import (
    FromScratch,
    HeadKind,
    HeadSettings,
    LanguageModel,
    check_separation,
    load_language_model,
    window,
)
from embeddings.models.model_files import FrozenBase, resolve_model
from embeddings.models.pooling import plain_backbone
from embeddings.models.stand_in import stand_in_scratch
from embeddings.modules.base import BaseModule, OptimizerFactory
from embeddings.training.optim import Schedule
from embeddings.training.plan import LossSize, Setting, Texts, trace

Objective = Literal["mlm", "mntp", "causal"]


@dataclass(frozen=True)
class Masking:
    """How tokens are masked: each token is chosen as a target with the same probability.

    Args:
        probability: Probability that a token is chosen, above 0 and below 1. BERT: 0.15; LLM2Vec: 0.8 for Mistral.
        mask_fraction: Fraction of the chosen tokens that are replaced by the mask token. BERT: 0.8; LLM2Vec: 1.
        random_fraction: Fraction replaced by a random token; the rest are unchanged. BERT: 0.1; LLM2Vec: 0.
        mask_token: Token of the vocabulary to use as mask token; None for the tokenizer's mask token, which decoders
            lack. LLM2Vec uses "_".

    Source: Devlin et al. 2019, arXiv:1810.04805, §3.1; BehnamGhader et al. 2024, arXiv:2404.05961, the released
        `run_mntp.py` and its configs.
    """

    probability: float = 0.15
    mask_fraction: float = 0.8
    random_fraction: float = 0.1
    mask_token: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            rule, fix = "must be above 0 and below 1", "BERT uses 0.15"
            raise OptionError("model.masking.probability", self.probability, rule, fix)
        fractions = (self.mask_fraction, self.random_fraction)
        if min(fractions) < 0 or sum(fractions) > 1 + 1e-9:
            rule, fix = "must be >= 0 and at most 1 together with random_fraction", "BERT: 0.8 and 0.1"
            raise OptionError("model.masking.mask_fraction", self.mask_fraction, rule, fix)


@dataclass(frozen=True)
class LanguageTask:
    """Converts packed rows to the model's input and targets.

    - `mlm`: a masked token is predicted from the state at its own position (Devlin et al. 2019).
    - `mntp`, masked next-token prediction: a masked token is predicted from the state one position before it, as in a
      decoder's pre-training (BehnamGhader et al. 2024, §2.2).
    - `causal`: no token is masked, and every token is predicted from the state one position before it.

    Special tokens, padding and tokens equal to the mask token are never masked. With `mntp` and `causal` the first
    token of a row (with `separate_documents`, of a document) is not a target, since no state precedes it. A row's
    targets depend on the seed and the row only.

    Source: BehnamGhader et al. 2024, arXiv:2404.05961, §2.2 and the released `run_mntp.py`. Differs: the release may
        mask the first token of a row, which it never predicts.
    """

    objective: Objective
    masking: Masking | None
    mask_id: int
    ordinary_ids_V: Tensor
    separate_documents: bool = False
    seed: int = 0

    def __call__(self, rows: PackedRows) -> Prediction:
        shift = 0 if self.objective == "mlm" else 1
        input_ids_NL, document_NL = rows.input_ids_NL, rows.document_NL
        target_NL = document_NL >= 0
        if shift:
            # The state that predicts a token must be in the same row (and document).
            target_NL[:, 0] = False
            if self.separate_documents:
                target_NL[:, 1:] &= document_NL[:, 1:] == document_NL[:, :-1]
        if self.masking is not None:
            target_NL &= ~rows.special_NL & (input_ids_NL != self.mask_id)
            input_ids_NL, target_NL = self._mask(rows, target_NL, self.masking)
        target_P = target_NL.flatten().nonzero().flatten()
        label_P = rows.input_ids_NL.flatten()[target_P]
        has_padding = bool((document_NL < 0).any())
        return Prediction(input_ids_NL, document_NL, target_P - shift, label_P, has_padding, rows.row_N)

    def _mask(self, rows: PackedRows, maskable_NL: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
        """Token ids after masking, (N, L), and the chosen positions."""
        masked_NL, chosen_NL = rows.input_ids_NL.clone(), torch.zeros_like(maskable_NL)
        length = masked_NL.shape[1]
        for row, draw in enumerate(rows.draw_N.tolist()):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", draw))
            chosen_L = (torch.rand(length, generator=generator) < masking.probability) & maskable_NL[row]
            kind_L = torch.rand(length, generator=generator)
            random_L = self.ordinary_ids_V[torch.randint(len(self.ordinary_ids_V), (length,), generator=generator)]
            becomes_mask_L = chosen_L & (kind_L < masking.mask_fraction)
            becomes_random_L = chosen_L & ~becomes_mask_L & (kind_L < masking.mask_fraction + masking.random_fraction)
            masked_NL[row][becomes_mask_L] = self.mask_id
            masked_NL[row][becomes_random_L] = random_L[becomes_random_L]
            chosen_NL[row] = chosen_L
        return masked_NL, chosen_NL


class MaskedLMModule(BaseModule):
    """Trains an encoder or a decoder to predict tokens of plain texts, which `TextDataModule` packs into rows.

    - `mntp` on a decoder without its causal mask, with LoRA: LLM2Vec's first step. MGH starts from the exported
      directory, in which the LoRA matrices are merged.
    - `mlm` on an encoder, all weights: adapts XLM-R to rotary positions and longer texts before MoE training.
    - `causal` with `from_scratch`: pre-trains a small decoder for experiments.

    Args:
        objective: `mlm`, `mntp` or `causal` (see `LanguageTask`).
        backbone: The checkpoint; `mntp` needs `bidirectional: true`.
        from_scratch: An architecture with random weights; set either this or `backbone`.
        masking: How tokens are masked; None for BERT's settings (`causal` does not mask).
        lora: LoRA settings of the backbone, or None to train all weights.
        head: Origin of the language-model head, and its tile size.
        separate_documents: Whether documents of a row do not attend to each other and each starts at position 0;
            otherwise a row is one text, as in the published recipes. It needs sdpa or eager attention.
        optimizer: Makes the optimiser. LLM2Vec: AdamW with a learning rate of 5e-5 and no weight decay.
        schedule: Learning-rate schedule in optimiser steps.
        seed: Seed of initial weights, masking and dropout; None for `seed_everything`'s.

    Metrics: `train/` and `val/` `loss` (mean cross-entropy in nats over the predicted tokens), `perplexity`,
        `accuracy`. The masked tokens of a validation row are the same in every epoch.
    Source: BehnamGhader et al. 2024 (LLM2Vec), arXiv:2404.05961, §2.2 and the released `run_mntp.py`; Nussbaum and
        Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.1. Differs: see `LanguageTask`; LLM2Vec's script trains
        the head and discards it, while here LoRA freezes it.
    """

    title = "masked language modelling, to adapt a backbone"
    row_unit = "rows"

    @classmethod
    def head_kind(cls, arguments: Any) -> HeadKind:
        return _head_kind(arguments.objective)

    @classmethod
    def stand_in_arguments(cls, arguments: Any, folder: Path) -> dict[str, Any]:
        scratch = arguments.get("from_scratch")
        if scratch is None:
            return {}
        tokenizer, settings = stand_in_scratch(scratch.settings, folder)
        return {"from_scratch.tokenizer": tokenizer, "from_scratch.settings": settings}

    @classmethod
    def tokenizer_arguments(cls, arguments: Any) -> dict[str, Any]:
        if arguments.get("masking") is None:
            return {}
        # A decoder's stand-in tokenizer has no mask token.
        return {"masking.mask_token": "_" if arguments.objective == "mntp" else None}

    def planned_step(
        self, data: Any, setting: Setting, query_tokens: int | None, document_tokens: int | None
    ) -> tuple[list[Texts], LossSize]:
        length, model = int(data.row_length), self.language_model
        for option, tokens in (("query_tokens", query_tokens), ("document_tokens", document_tokens)):
            if tokens is not None:
                raise OptionError(option, tokens, "has no effect on rows of plain text", "set data.row_length")

        def states(count: int) -> Tensor:
            ids_NL = torch.zeros(count, length, dtype=torch.int64)
            states_TH: Tensor = model(ids_NL, ids_NL, self.task.separate_documents, False)
            return states_TH

        masking = self.task.masking
        num_targets = round((1.0 if masking is None else masking.probability) * data.batch_size * length)
        texts = Texts("rows", data.batch_size, length, trace(model, states, setting.half_products))
        tile = self._tile_positions * model.vocab_size
        return [texts], LossSize(num_targets, model.vocab_size, int(model.model.config.hidden_size), tile)

    def __init__(
        self,
        objective: Objective,
        backbone: BackboneConfig | None = None,
        from_scratch: FromScratch | None = None,
        masking: Masking | None = None,
        lora: LoraSettings | None = None,
        head: HeadSettings = HeadSettings(),  # noqa: B008 - frozen
        separate_documents: bool = False,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        seed: int | None = None,
    ) -> None:
        optimizer = optimizer or partial(torch.optim.AdamW, lr=5e-5, weight_decay=0.0)
        super().__init__(optimizer, schedule, seed)
        seed = run_seed(seed)
        source = _source(objective, backbone, from_scratch, masking)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, tokenizer = load_language_model(source, _head_kind(objective), head.new, has_lora=lora is not None)
            causal, backbone_model = objective == "causal", model.base_model
            assert isinstance(backbone_model, PreTrainedModel)
            if causal:
                check_causal(backbone_model)
            if separate_documents:
                check_separation(backbone_model, causal)
            self.language_model = LanguageModel(model, tokenizer, causal, lora)
        if backbone is not None and lora is not None:
            self.frozen_base = FrozenBase(backbone.name, resolve_model(backbone.name, backbone.revision))
        if backbone is not None:
            set_compilation(self.language_model.backbone, backbone.compile)
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
        return self.language_model.tokenizer

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        if data is not None and data.row_length is not None:
            self._check_row_length(data.row_length)
        super().check_run(trainer, module, data)

    def sharded_parts(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """The language model; its head runs right after its forward pass, while the weights are gathered."""
        return [(self.language_model, ())]

    def training_step(self, batch: Prediction, batch_idx: int) -> Tensor:
        """The mean cross-entropy of one batch's targets."""
        counts = gather_counts(len(batch), self.device)
        output = self.score(batch, num_targets=sum(counts) / len(counts))
        means = self.check_loss(output)
        self.log_step({**means, "perplexity": means["loss"].exp()}, max(1, len(batch)))
        return output.loss

    def score(self, batch: Prediction, num_targets: float | None = None) -> LossOutput:
        """The cross-entropy of a batch's targets (see `token_cross_entropy`)."""
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
        """Log the means over all targets of all ranks, at the current optimiser step."""
        sums = torch.tensor(self._sums, dtype=torch.float64)
        sums = self.trainer.strategy.reduce(sums.to(self.device), reduce_op="sum")
        loss, accuracy = (sums[:2] / sums[2].clamp(min=1.0)).unbind()
        means = {"val/loss": loss, "val/perplexity": loss.exp(), "val/accuracy": accuracy}
        values = {name: value.float() for name, value in means.items()}
        # Lightning would log them at the previous step, so they are sent to the loggers directly.
        for logger in [] if self.trainer.sanity_checking else self.trainer.loggers:
            logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.trainer.global_step)
        self.log_dict(values, sync_dist=True, logger=False)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory with LoRA matrices merged (see `LanguageModel.save_pretrained`)."""
        self.language_model.save_pretrained(folder)

    def _check_row_length(self, row_length: int) -> None:
        limit = num_positions(self.language_model.backbone)
        if limit is not None and row_length > limit:
            rule = f"must be <= {limit}, the positions that the backbone has"
            raise OptionError("data.row_length", row_length, rule, "lower it")
        size = window(plain_backbone(self.language_model.backbone).config)
        if self.task.separate_documents and size is not None and size < row_length:
            rule = f"must be <= {size}, the window of the sliding attention layers, with separate_documents"
            raise OptionError("data.row_length", row_length, rule, "lower it, or set separate_documents: false")


def _head_kind(objective: Objective) -> HeadKind:
    return "masked" if objective == "mlm" else "causal"


def _source(
    objective: Objective, backbone: BackboneConfig | None, from_scratch: FromScratch | None, masking: Masking | None
) -> BackboneConfig | FromScratch:
    """The checkpoint or architecture, after checks that do not need the model."""
    if (backbone is None) == (from_scratch is None):
        value = "both" if backbone is not None else "neither"
        raise OptionError("model.backbone", value, "or model.from_scratch must be set", "set exactly one of the two")
    source = backbone or from_scratch
    assert source is not None
    if objective == "causal" and masking is not None:
        raise OptionError("model.masking", masking, "has no effect on objective causal", "leave it out")
    if source.bidirectional != (objective == "mntp"):
        fix = "set it to true for mntp only"
        raise OptionError("bidirectional", source.bidirectional, f"does not fit objective {objective}", fix)
    return source


def _mask_id(tokenizer: PreTrainedTokenizerBase, masking: Masking) -> int:
    name = masking.mask_token if masking.mask_token is not None else tokenizer.mask_token
    if name is None:
        rule = "must be set: the tokenizer has no mask token"
        raise OptionError("model.masking.mask_token", None, rule, 'LLM2Vec uses "_"')
    token_id = tokenizer.get_vocab().get(name)
    if token_id is None:
        raise OptionError("model.masking.mask_token", name, "must be a token of the vocabulary", "set another token")
    return int(token_id)
