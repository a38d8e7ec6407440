"""The update of G13: ZeRO-2 with GradCache on one rank, against a plain step."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig

from benchmarks.workloads import synthetic_batch
from embeddings.callbacks import GradCacheCallback
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, MeanPooling
from embeddings.models.stand_in import write_stand_in
from embeddings.modules import NVEmbedModule
from embeddings.strategies import ZeroStrategy
from embeddings.training.optim import Schedule

# So large that the old weights are negligible: the new weights are the scaled gradient.
RATE = 1e5


def relative_error(folder: Path, device: torch.device, num_pairs: int) -> float:
    """The distance between the two updates, relative to the norm of the plain one.

    Args:
        folder: Where a small model is written.
        device: Where the steps run.
        num_pairs: Pairs in the batch; a mini-batch has the tokens of a quarter of them.
    """
    config = BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    write_stand_in(folder / "model", config)
    batch, length = synthetic_batch(num_pairs, 12, 60), 12
    start = _weights(_module(folder))
    plain = _updated(folder, batch, device, "auto", [])
    cache = GradCacheCallback(mini_batch_tokens=num_pairs * length // 4)
    zero = _updated(folder, batch, device, _strategy(device), [cache])
    difference = sum(float((zero[name] - plain[name]).square().sum()) for name in plain)
    update = sum(float((plain[name] - start[name]).square().sum()) for name in plain)
    return float((difference / update) ** 0.5)


def _strategy(device: torch.device) -> ZeroStrategy:
    if device.type == "cuda":
        return ZeroStrategy(stage=2)
    # Lightning refuses DeepSpeed on a CPU; the tests have a strategy that runs there.
    from tests.strategies.cpu_zero import CpuZero

    return CpuZero(stage=2, process_group_backend="gloo")


def _module(folder: Path) -> NVEmbedModule:
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=RATE), "seed": 0}
    options |= {"schedule": Schedule(warmup_steps=0, decay="constant"), "loss": InfoNCE(temperature=0.1)}
    torch.manual_seed(0)
    return NVEmbedModule(BackboneConfig(str(folder / "model"), dropout=0.0), pooling=MeanPooling, lora=None, **options)


def _weights(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().cpu().double().clone() for name, value in module.named_parameters()}


def _updated(
    folder: Path, batch: Any, device: torch.device, strategy: Any, callbacks: list[L.Callback]
) -> dict[str, Tensor]:
    """The weights after one update."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = _module(folder).train()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    trainer = L.Trainer(
        accelerator=accelerator, devices=1, strategy=strategy, callbacks=callbacks, max_steps=1, **off,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch], batch_size=None))
    return _weights(module)
