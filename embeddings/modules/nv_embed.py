"""NV-Embed: a decoder without its causal mask, latent-attention pooling, two-stage instruction tuning."""

import torch

from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, LatentAttentionPooling, LoraSettings
from embeddings.modules.base import ContrastiveModule, OptimizerFactory, PoolingFactory, build_embedder
from embeddings.training.optim import Schedule


class NVEmbedModule(ContrastiveModule):
    """NV-Embed on any Hugging Face decoder or encoder.

    A decoder's causal mask is switched off (§3.1), a latent-attention block pools its states (§3.2, Eq. 1), and InfoNCE
    with hard negatives trains LoRA matrices and all of the pooling block. Stage 1 uses in-batch negatives; stage 2
    starts from stage 1's model directory with a new optimiser and schedule and without in-batch negatives (§3.3): that
    is a second run with `initial_model` set, and each data source says whether in-batch negatives hold for it.

    Args:
        backbone: Which model, and whether its causal mask is switched off.
        pooling: Makes the pooling from the hidden size: any class of `embeddings.models` pooling.
        lora: LoRA settings, or None to train the full backbone. NV-Embed: rank 16, alpha 32, dropout 0.1 (Table 11).
        loss: InfoNCE. The paper states no temperature; 0.02 is our default.
        optimizer: Makes the optimiser. NV-Embed: Adam with weight decay 0.03 (decoupled is our reading), learning
            rate 2e-5 in stage 1 and 1.5e-5 in stage 2.
        schedule: NV-Embed: 50 warm-up steps, then linear decay to zero.
        initial_model: A model directory to start from, such as stage 1's; it replaces the weights of `backbone`
            and `pooling`, whose LoRA has been merged, and fresh LoRA matrices are added.
        normalize: Whether vectors have unit norm. The loss takes cosines either way.
        seed: Seed of random initial weights and of dropout, None for the run's (`seed_everything`).

    Raises:
        UserError: If the pooling is impossible, or differs from that of `initial_model`.
    Source: Lee et al. 2024, arXiv:2405.17428, §3 and Appendix C. Differs: whether stage 2 continues stage 1's LoRA
        matrices is not stated there; here they are merged and new ones begin.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        pooling: PoolingFactory = LatentAttentionPooling,
        lora: LoraSettings | None = None,
        loss: InfoNCE | None = None,
        optimizer: OptimizerFactory = lambda params: torch.optim.AdamW(params, lr=2e-5, weight_decay=0.03),
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        initial_model: str | None = None,
        normalize: bool = True,
        seed: int | None = None,
    ) -> None:
        usual = "NV-Embed uses 512 latents and 8 heads"
        embedder = build_embedder(backbone, pooling, lora, initial_model, normalize, seed, usual)
        super().__init__(embedder, loss or InfoNCE(), optimizer, schedule, seed)
