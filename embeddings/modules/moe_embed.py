"""Nomic Embed v2: a mixture-of-experts encoder, InfoNCE, and a load-balancing loss over the full global batch."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from embeddings.common import ContrastiveBatch, LossOutput, OptionError, Representations, TokenBatch
from embeddings.common.distributed import sum_over_ranks
from embeddings.losses import InfoNCE
from embeddings.losses.load_balancing import LoadBalancing, load_balancing_loss, router_z_loss
from embeddings.models import BackboneConfig, LoraSettings, MeanPooling
from embeddings.models.moe.upcycling import (
    COUNTS,
    PROBABILITIES,
    SQUARED_LOGSUMEXP,
    BackendName,
    Upcycling,
    has_experts,
    moe_layers,
    read_routing,
    set_expert_backend,
    upcycle,
)
from embeddings.models.pooling import plain_backbone
from embeddings.modules.base import ContrastiveModule, OptimizerFactory, PoolingFactory, build_embedder
from embeddings.training.optim import Schedule


class MoEEmbedModule(ContrastiveModule):
    """A rotary encoder with experts in some of its MLPs, or its dense counterpart, trained with InfoNCE.

    The load-balancing loss covers the full global batch: it is computed from each expert's token counts and
    probabilities, summed over mini-batches (`Representations.statistics`) and ranks. Published code adds a loss per
    mini-batch, which multiplies the coefficient by their number.

    Args:
        backbone: A dense rotary encoder (`convert` makes one from XLM-R, `MaskedLMModule` adapts it), or a sparse one.
            The paper: XLM-R base, adapted at 2,048 tokens.
        pooling: Makes the pooling from the hidden size. The paper: the mean.
        lora: LoRA settings, or None to train all weights, as the paper does. With LoRA, routers and experts are not
            trained.
        upcycling: How to make a dense encoder sparse, or None to use the backbone unchanged.
        load_balancing: Weights and normalization of the router losses; None for a dense model. The paper's coefficient
            is 1 in pre-training, 0 in fine-tuning.
        expert_backend: Implementation of the experts' computation (see `set_expert_backend`).
        loss: InfoNCE. The paper: temperature 0.02.
        optimizer: Makes the optimiser. The paper: a learning rate of 8e-5, 2e-5 in fine-tuning; released: AdamW with
            weight decay 0.01.
        schedule: The paper: 1,000 warm-up steps and cosine decay; 400 and linear in fine-tuning.
        initial_model: A model directory to start from, such as pre-training's, instead of `backbone`'s weights.
        normalize: Whether vectors have unit norm. The loss uses cosines in both cases.
        seed: Seed of initial weights and of dropout; None for `seed_everything`'s.

    Metrics: `train/contrastive`, `train/load_balancing` and, if its coefficient is not 0, `train/router_z`: the losses
        without their coefficients.
    Source: Nussbaum and Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.3 and §4.5. Differs: padding is neither
        routed nor counted; there is one balancing loss for queries and documents, where the released code adds two.
    """

    title = "a sparse mixture of experts (Nomic Embed v2, Nussbaum and Duderstadt 2025, arXiv:2502.07972)"

    def __init__(
        self,
        backbone: BackboneConfig,
        pooling: PoolingFactory = MeanPooling,
        lora: LoraSettings | None = None,
        upcycling: Upcycling | None = None,
        load_balancing: LoadBalancing | None = LoadBalancing(),  # noqa: B008 - frozen
        expert_backend: BackendName = "grouped_mm",
        loss: InfoNCE | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = Schedule(warmup_steps=1000, decay="cosine"),  # noqa: B008 - frozen
        initial_model: str | None = None,
        normalize: bool = True,
        seed: int | None = None,
    ) -> None:
        def sparse(model: PreTrainedModel) -> PreTrainedModel:
            return model if upcycling is None else upcycle(model, upcycling)

        usual = "Nomic Embed v2 uses MeanPooling"
        embedder = build_embedder(backbone, pooling, lora, initial_model, normalize, seed, usual, sparse)
        if load_balancing is not None and not has_experts(embedder.backbone):
            rule = "has no effect on a model without experts"
            raise OptionError("model.load_balancing", load_balancing, rule, "set it to null, or set model.upcycling")
        set_expert_backend(embedder.backbone, expert_backend)
        optimizer = optimizer or partial(torch.optim.AdamW, lr=8e-5, weight_decay=0.01)
        super().__init__(embedder, loss or InfoNCE(), optimizer, schedule, seed)
        self.load_balancing = load_balancing
        self.moe_layers = moe_layers(embedder.backbone)
        self.routing: dict[str, Tensor] = {}

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The vectors of all texts, (N, D) float32, and the routing sums over their tokens."""
        with read_routing(self.embedder.backbone) as sums:
            vectors = super().embed(tokens, context).vector_ND
        return Representations(vectors, sums())

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """InfoNCE plus the router losses over all tokens of queries and candidates of all ranks."""
        output = super().loss_from_representations(query, candidate, batch)
        settings = self.load_balancing
        if settings is None:
            return output
        both = {name: value + candidate.statistics[name] for name, value in query.statistics.items()}
        if not settings.z_coefficient:
            del both[SQUARED_LOGSUMEXP]
        sums = {name: sum_over_ranks(value) for name, value in both.items()}
        self.routing = {name: value.detach() for name, value in sums.items()}
        top_k = int(plain_backbone(self.embedder.backbone).config.experts_per_token)
        balancing = load_balancing_loss(sums[COUNTS], sums[PROBABILITIES], top_k, settings.normalization)
        loss = output.loss + settings.coefficient * balancing if settings.coefficient else output.loss
        terms = {**output.terms, "contrastive": output.loss.detach(), "load_balancing": balancing.detach()}
        if settings.z_coefficient:
            z_loss = router_z_loss(sums[SQUARED_LOGSUMEXP], sums[COUNTS][0].sum() / top_k)
            loss = loss + settings.z_coefficient * z_loss
            terms["router_z"] = z_loss.detach()
        return LossOutput(loss, terms)
