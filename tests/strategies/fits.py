"""Training steps of every method on two ranks under any strategy, compared with a single process."""

import logging
import os
import socket
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from embeddings.callbacks import GradCacheCallback
from embeddings.callbacks.checkpoints import make_checkpoints_durable
from embeddings.common import ContrastiveBatch, TokenBatch
from embeddings.common.types import Prediction, take_texts
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, LoraSettings, Upcycling
from embeddings.modules import (
    CDEModule,
    ContextSettings,
    FirstStageTraining,
    MaskedLMModule,
    MGHCurriculumModule,
    MoEEmbedModule,
    NVEmbedModule,
)
from embeddings.strategies import ZeroStrategy
from embeddings.training.optim import Schedule
from tests.helpers.contrastive import batch_of, random_records
from tests.helpers.runs import backbone_folder, quiet_trainer
from tests.models.language_models import language_model_folder
from tests.modules.moe_modules import dense_folder

# So large that the initial weights are negligible, and the new weights are the gradient.
RATE = 1e5
CONTEXT = ContextSettings(num_context=5)

Make = Callable[[], L.LightningModule]
State = dict[str, Tensor]


class SharedContext(CDEModule):
    """Uses one context on all ranks, so that two ranks of B pairs equal one of 2B."""

    def choose_context(self, batch: ContrastiveBatch, batch_idx: int) -> TokenBatch:
        """Five documents of the global batch."""
        return take_texts(batches("cde", None)[0].candidate, torch.arange(5))


class WordsOnly(SharedContext):
    """Its only step predicts words; the schedule check would reject such a run."""

    def _check_schedule(self, trainer: L.Trainer, steps: int | None, is_exact: bool = False) -> None:
        """Accepts any schedule: these tests run a single step."""


def write_models(folder: Path) -> None:
    """Write the models that `methods` loads."""
    backbone_folder(folder / "bert")
    backbone_folder(folder / "mistral", "mistral")
    dense_folder(folder / "dense")
    language_model_folder(folder / "causal", "mistral")


def methods(folder: Path) -> dict[str, Make]:
    """Every method with a tiny model from the folder."""
    bert, mistral, dense, causal = (str(folder / name) for name in ("bert", "mistral", "dense", "causal"))
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=RATE),
        "schedule": Schedule(warmup_steps=0, decay="constant"),
        "seed": 0,
    }
    contrastive = options | {"loss": InfoNCE(temperature=0.1, gather_across_devices=True)}
    decoder, lora = BackboneConfig(mistral, bidirectional=True), LoraSettings(rank=4, dropout=0.0)
    recomputed, contextual = replace(decoder, gradient_checkpointing=True), contrastive | {"context": CONTEXT}
    words, frozen = FirstStageTraining(word_steps=1), FirstStageTraining(frozen_steps=1)
    return {
        "nv-embed": partial(NVEmbedModule, decoder, lora=lora, **contrastive),
        "nv-embed, whole backbone": partial(NVEmbedModule, recomputed, **contrastive),
        "mgh": partial(MGHCurriculumModule, decoder, lora=lora, **contrastive),
        "moe": partial(MoEEmbedModule, BackboneConfig(dense), upcycling=Upcycling(num_experts=4), **contrastive),
        "cde": partial(SharedContext, BackboneConfig(bert), **contextual),
        "cde, words": partial(WordsOnly, BackboneConfig(bert), first_stage_training=words, **contextual),
        "cde, frozen": partial(SharedContext, BackboneConfig(bert), first_stage_training=frozen, **contextual),
        "language model": partial(MaskedLMModule, "causal", BackboneConfig(causal), **options),
    }


def batches(method: str, rank: int | None) -> list[Any]:
    """Two batches: the rank's half of each (rank 1 has longer texts), or all rows for rank None."""
    result: list[Any] = []
    for seed in (5, 7):
        if method == "language model":
            ids_NL = torch.randint(10, 300, (4, 12), generator=torch.Generator().manual_seed(seed))
            ids_NL = ids_NL if rank is None else ids_NL[2 * rank : 2 * rank + 2]
            place_P = torch.arange(ids_NL.numel()).view(ids_NL.shape)[:, :-1].flatten()
            label_P, row_N = ids_NL[:, 1:].flatten(), torch.arange(len(ids_NL))
            result.append(Prediction(ids_NL, torch.zeros_like(ids_NL), place_P, label_P, False, row_N))
        else:
            records = random_records(4, 1, seed=seed) + random_records(4, 1, seed=seed + 1, longest=25)
            result.append(batch_of(records if rank is None else records[4 * rank : 4 * rank + 4]))
    return result


def one_update(make: Make, data: list[Any], strategy: Any, devices: int, cached: bool) -> State:
    """The weights after one update from two accumulated batches, on every rank."""
    callbacks: list[L.Callback] = [GradCacheCallback(mini_batch_tokens=60, kept_fraction=0.4)] if cached else []
    options = {"callbacks": callbacks, "accumulate_grad_batches": 2}
    return train(make, data, strategy, devices, 1, **options)


def train(
    make: Make,
    data: list[Any],
    strategy: Any,
    devices: int,
    steps: int,
    start: Path | None = None,
    output: Path | None = None,
    **options: Any,
) -> State:
    """The weights after some steps, on every rank. Resumes checkpoint `start`, and writes checkpoint `output`."""
    torch.manual_seed(0)
    module = make().train()
    options |= {"devices": devices, "strategy": strategy, "max_steps": steps, "use_distributed_sampler": False}
    trainer = quiet_trainer(**options)
    make_checkpoints_durable(trainer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You defined a `validation_step`")
        trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=start)
    if output is not None:
        trainer.save_checkpoint(output)
    with trainer.strategy.full_weights() if isinstance(trainer.strategy, ZeroStrategy) else nullcontext():
        weights = {name: value.detach() for name, value in module.named_parameters()}
        return {name: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for name, w in weights.items()}


def relative_error(actual: State, expected: State, start: State) -> float:
    """The error of an update relative to the expected update."""
    assert actual.keys() == expected.keys()
    moved = sum(float((expected[name] - start[name]).double().square().sum()) for name in expected)
    error = sum(float((actual[name] - expected[name]).double().square().sum()) for name in expected)
    return (error / moved) ** 0.5


def be_launched(rank: int) -> None:
    """Make Lightning treat this process as one rank of an external launcher."""
    ranks = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ.update(ranks | {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    port = [_free_port() if rank == 0 else 0]
    dist.broadcast_object_list(port)
    os.environ["MASTER_PORT"] = str(port[0])


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
