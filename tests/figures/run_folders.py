"""Folders of runs as `fit` writes them, without training."""

import json
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "seed_everything": 7,
    "ckpt_path": None,
    "trainer": {
        "max_steps": -1,
        "max_epochs": 2,
        "accumulate_grad_batches": 4,
        "callbacks": [
            {"class_path": "embeddings.callbacks.ExportModel", "init_args": {"output": "checkpoints/small"}},
            {"class_path": "embeddings.callbacks.RunHealth", "init_args": None},
        ],
    },
    "model": {
        "class_path": "embeddings.modules.NVEmbedModule",
        "init_args": {
            "backbone": {"name": "some/backbone", "revision": None},
            "pooling": {"class_path": "embeddings.models.LatentAttentionPooling", "init_args": {"num_latents": 64}},
            "lora": None,
            "loss": {"class_path": "embeddings.losses.InfoNCE", "init_args": {"temperature": 0.05, "widths": None}},
        },
    },
    "data": {
        "class_path": "embeddings.data.EmbeddingDataModule",
        "init_args": {
            "batch_size": 32,
            "num_negatives": 3,
            "sources": [
                {"name": "first", "path": "first.jsonl", "weight": 2.0},
                {"name": "second", "path": ["a.jsonl", "b.jsonl"]},
            ],
        },
    },
}
RECORD: dict[str, Any] = {
    "method": "NV-Embed (Lee et al. 2024, arXiv:2405.17428)",
    "command": "python main.py fit --config a.yaml",
    "commit": "0123456789abcdef+",
    "world_size": 2,
    "precision": "bf16-mixed",
    "versions": {"python": "3.11.4", "torch": "2.11.0"},
    "hardware": "4 x Some CPU",
    "started": "2026-03-01T10:00:00+00:00",
    "parameters": {"total": 2000, "active": 1500, "trained": 500},
    "source_rows": {"first": 1200, "second": 34},
    "end": {"time": "2026-03-01T11:05:30+00:00", "step": 20, "how": "finished", "why": ""},
}
METRICS = "step,epoch,train/loss,val/ndcg_at_10,throughput/padding,throughput/pairs_per_second\n" + "".join(
    f"{step},0,{4 - step / 10},,,\n" for step in range(20)
)
METRICS += "0,0,,0.25,,\n10,0,,0.75,0.125,100.0\n20,1,,0.5,0.25,300.0\n"


def write_run(
    folder: Path,
    config: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    metrics: str | None = METRICS,
) -> Path:
    """Write a run's folder; the arguments replace keys of `CONFIG` and `RECORD`; None writes no metrics."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **(config or {})}), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({**RECORD, **(record or {})}), encoding="utf-8")
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics, encoding="utf-8")
    return folder
