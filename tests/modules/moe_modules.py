"""Sparse modules of tiny encoders whose experts differ and whose routers have clear preferences."""

from pathlib import Path
from typing import Any

from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, RotaryMoeModel, Upcycling
from embeddings.modules import MoEEmbedModule
from tests.helpers.runs import component, run_config
from tests.helpers.tiny import save_backbone, wordpiece_tokenizer
from tests.models.moe import stirred, tiny_rotary


def dense_folder(folder: Path, dropout: float = 0.0) -> str:
    """A tiny dense rotary encoder with its tokenizer on disk."""
    return save_backbone(str(folder), tiny_rotary(dropout=dropout), wordpiece_tokenizer())


def moe_module(
    folder: str, checkpointing: bool = False, loss: InfoNCE | None = None, top_k: int = 2, **options: Any
) -> MoEEmbedModule:
    """A module whose last of two layers has four experts, in training mode."""
    module = MoEEmbedModule(
        BackboneConfig(folder, gradient_checkpointing=checkpointing),
        upcycling=Upcycling(num_experts=4, top_k=top_k),
        loss=loss or InfoNCE(temperature=0.1),
        seed=0,
        **options,
    )
    backbone = module.embedder.backbone
    assert isinstance(backbone, RotaryMoeModel)
    stirred(backbone)
    return module.train()


def moe_config(folder: Path) -> dict[str, Any]:
    """Four steps of eight pairs over an upcycled encoder, under GradCache, exported at the end."""
    config = run_config(folder)
    config["model"] = component(
        "embeddings.modules.MoEEmbedModule",
        backbone={"name": dense_folder(folder / "dense", dropout=0.1), "gradient_checkpointing": True},
        upcycling={"num_experts": 4},
        load_balancing={"coefficient": 1.0},
        optimizer=component("torch.optim.AdamW", lr=1e-2),
        schedule={"warmup_steps": 1, "decay": "cosine"},
    )
    config["trainer"]["callbacks"] = [
        component("GradCacheCallback", mini_batch_tokens=64),
        component("ExportModel", output=str(folder / "model")),
    ]
    return config
