"""NV-Embed: a decoder without its causal mask, latent-attention pooling, two-stage instruction tuning."""

from functools import partial

import torch

from embeddings.common.random import run_seed
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, LatentAttentionPooling, LoraSettings
from embeddings.modules.base import ContrastiveModule, OptimizerFactory, PoolingFactory, build_embedder
from embeddings.modules.distillation import LayerDistillation, LayerTeacher, WidthMaps, num_layers
from embeddings.training.optim import Schedule


class NVEmbedModule(ContrastiveModule):
    """NV-Embed on any Hugging Face decoder or encoder.

    A decoder's causal mask is disabled (§3.1), and a latent-attention block pools its states (§3.2, Eq. 1). InfoNCE
    with hard negatives trains LoRA matrices and the full pooling block. Stage 2 is a second run that starts from stage
    1's model directory (`initial_model`), without in-batch negatives (§3.3).

    Args:
        backbone: The model, and whether its causal mask is disabled.
        pooling: Makes the pooling from the hidden size: any pooling class of `embeddings.models`.
        lora: LoRA settings, or None to train all weights. NV-Embed: rank 16, alpha 32, dropout 0.1 (Table 11).
        loss: InfoNCE. The paper states no temperature; our default is 0.02.
        optimizer: Makes the optimiser. NV-Embed: Adam with weight decay 0.03 (we read it as decoupled), learning rate
            2e-5 in stage 1 and 1.5e-5 in stage 2.
        schedule: NV-Embed: 50 warm-up steps, then linear decay to zero.
        initial_model: A model directory to start from, such as stage 1's, instead of `backbone`'s weights. Its LoRA
            matrices are already merged; new ones are added.
        normalize: Whether vectors have unit norm. The loss uses cosines in both cases.
        seed: Seed of initial weights and of dropout; None for `seed_everything`'s.
        distillation: Distils a teacher's hidden states (Appendix A); None for no teacher. The teacher runs without
            gradients, twice per step under GradCache. Every rank has a full copy.

    Metrics: with a teacher `train/contrastive` and `train/distillation`, both before weighting by alpha.
    Source: Lee et al. 2024, arXiv:2405.17428, §3 and Appendix C. Differs: the paper does not state whether stage 2
        continues stage 1's LoRA matrices; here they are merged and new ones are trained.
    """

    title = "NV-Embed (Lee et al. 2024, arXiv:2405.17428)"

    def __init__(
        self,
        backbone: BackboneConfig,
        pooling: PoolingFactory = LatentAttentionPooling,
        lora: LoraSettings | None = None,
        loss: InfoNCE | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - frozen
        initial_model: str | None = None,
        normalize: bool = True,
        seed: int | None = None,
        distillation: LayerDistillation | None = None,
    ) -> None:
        usual = "NV-Embed uses 512 latents and 8 heads"
        embedder = build_embedder(backbone, pooling, lora, initial_model, normalize, seed, usual)
        optimizer = optimizer or partial(torch.optim.AdamW, lr=2e-5, weight_decay=0.03)
        super().__init__(embedder, loss or InfoNCE(), optimizer, schedule, seed)
        if not isinstance(embedder.pooling, LatentAttentionPooling):
            self.title = f"contrastive training with {type(embedder.pooling).__name__}"
        self.distillation = distillation
        if distillation is not None and distillation.teacher_width is not None:
            pairs = distillation.layers
            number = num_layers(embedder) if pairs is None else len(pairs) + 1
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(run_seed(seed))
                self.width_maps = WidthMaps(number, embedder.hidden_size, distillation.teacher_width)

    def load_teachers(self) -> None:
        super().load_teachers()
        if self.distillation is not None and self.layer_teacher is None:
            self.layer_teacher = LayerTeacher(self.distillation, self.embedder)
