"""The NV-Embed method files as they are, run one after the other on a tiny Mistral: stage 2 starts where 1 ended."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from embeddings.cli.fit import run_trainer
from embeddings.common import instruction_prompt
from embeddings.inference import Encoder
from embeddings.models import LatentAttentionPooling
from embeddings.modules import NVEmbedModule
from tests.configs.test_nv_embed_tables import CONFIGS
from tests.helpers.runs import backbone_folder, write_config, write_pairs


def fit(stage: int, learning_rate: float) -> Any:
    """A run of base + method + what the scale and data files hold; only what must be small is changed."""
    files = (str(CONFIGS / "base.yaml"), str(CONFIGS / "methods" / f"nv_embed_stage{stage}.yaml"), "small.yaml")
    config = [part for file in files for part in ("--config", file)]
    optimizer = f"--model.init_args.optimizer.init_args.lr={learning_rate}"
    return run_trainer(["fit", *config, optimizer, "--model.init_args.schedule.warmup_steps=1"])


def write_small(folder: Path) -> None:
    small = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 3,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
        },
        "model": {"init_args": {"backbone": {"name": backbone_folder(folder / "backbone", "mistral")}}},
        "data": {
            "class_path": "embeddings.data.EmbeddingDataModule",
            "init_args": {
                "text": {"query_max_length": 48, "document_max_length": 24, "append_eos": True},
                "batch_size": 4,
                "num_negatives": 2,
                "cache_dir": "cache",
                "sources": [
                    {
                        "name": "pairs",
                        "path": str(write_pairs(folder / "pairs.jsonl", num_pairs=12)),
                        "instruction": "Find the passage",
                    }
                ],
            },
        },
    }
    write_config(folder, small, "small.yaml")


def test_the_second_stage_starts_from_what_the_first_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both methods name their outputs, and stage 2 its start, relative to the working directory.
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    first = fit(1, learning_rate=1e-2)
    exported = tmp_path / "checkpoints" / "nv_embed_stage1"
    merged = load_file(exported / "model.safetensors")
    untrained = load_file(tmp_path / "backbone" / "model.safetensors")
    projection = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[projection], untrained[projection].bfloat16())

    second = fit(2, learning_rate=1.5e-5)
    for cli, in_batch_negatives in ((first, "source"), (second, "off")):
        assert isinstance(cli.model, NVEmbedModule)
        assert cli.trainer.global_step == 3
        assert torch.isfinite(cli.trainer.callback_metrics["train/loss"])
        assert cli.model.loss.in_batch_negatives == in_batch_negatives
        assert isinstance(cli.model.embedder.pooling, LatentAttentionPooling)
        assert cli.model.embedder.pooling.latents.shape == (512, 32)
    # LoRA leaves the backbone's own weights alone, so after training they still are what stage 2 started from.
    state = second.model.embedder.backbone.state_dict()
    frozen = {name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name in state}
    assert merged.keys() <= frozen.keys()
    assert all(torch.equal(state[frozen[name]], weight) for name, weight in merged.items())
    assert any("lora_B" in name and value.any() for name, value in state.items())

    encoder = Encoder.from_pretrained(str(tmp_path / "checkpoints" / "nv_embed_stage2"), precision="float32")
    assert encoder.embedder.text.prompts["query"] == instruction_prompt("Find the passage")
    vectors = encoder.encode(["the quick fox", "a lazy dog"], role="query")
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
