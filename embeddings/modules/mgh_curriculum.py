"""MGH: hard negatives of four granularities, from easy to hard, and pooling weighted by attention."""

from functools import partial

import torch

from embeddings.losses import InfoNCE
from embeddings.models import AnchorTokenPooling, BackboneConfig, LoraSettings
from embeddings.modules.base import ContrastiveModule, OptimizerFactory, PoolingFactory, build_embedder
from embeddings.training.optim import Schedule


class MGHCurriculumModule(ContrastiveModule):
    """Multi-granularity hard negatives and anchor-token-aware pooling on any Hugging Face decoder or encoder.

    A decoder's causal mask is disabled, and its last states are averaged with the weights of Eq. 3 to 5. InfoNCE (Eq.
    1) uses the candidates of the batch and each query's own hard negative as negatives. `CurriculumBatchSampler` in the
    data config chooses the granularity of that negative, from N4, the easiest, to N1; it is logged as `train/level`.

    Args:
        backbone: The model, with its causal mask disabled. The paper: Mistral-7B-Instruct-v0.2 after LLM2Vec's masked
            next-token training with its adapter merged (§3.2): set a directory with those weights.
        pooling: Makes the pooling from the hidden size: any pooling class of `embeddings.models`.
        lora: LoRA settings, or None to train all weights. The paper: rank 16, alpha 32 (Table 5).
        loss: InfoNCE. The paper prints a factor of 1 before the cosine (Eq. 1), which is `temperature: 1`. With it the
            loss of 128 candidates cannot fall below log(1 + 127 e^-2) = 2.90, so our default is 0.02.
        optimizer: Makes the optimiser. The paper: Adam with a learning rate of 2e-5 (Table 5).
        schedule: The paper: 300 warm-up steps of 1,600, or 200 of 600 with synthetic data only (Table 5). Linear decay
            to zero is our choice.
        initial_model: A model directory to start from instead of `backbone`'s weights; new LoRA matrices are added.
        normalize: Whether vectors have unit norm. The loss uses cosines in both cases.
        seed: Seed of initial weights and of dropout; None for `seed_everything`'s.

    Source: MGH (Negative Matters), §2.1, §2.2, §3.2, Tables 5 and 7. Differs: the temperature (see `loss`), and the
        axis that the pooling sums over (see `AnchorTokenPooling`).
    """

    title = "multi-granularity hard negatives with a curriculum (MGH, Negative Matters)"
    made_for = ("CurriculumBatchSampler", "there is no curriculum; use negatives of {text, level} and set the sampler")

    def __init__(
        self,
        backbone: BackboneConfig,
        pooling: PoolingFactory = AnchorTokenPooling,
        lora: LoraSettings | None = None,
        loss: InfoNCE | None = None,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = Schedule(warmup_steps=300),  # noqa: B008 - frozen
        initial_model: str | None = None,
        normalize: bool = True,
        seed: int | None = None,
    ) -> None:
        usual = "MGH uses AnchorTokenPooling without arguments"
        embedder = build_embedder(backbone, pooling, lora, initial_model, normalize, seed, usual)
        optimizer = optimizer or partial(torch.optim.Adam, lr=2e-5)
        super().__init__(embedder, loss or InfoNCE(), optimizer, schedule, seed)
