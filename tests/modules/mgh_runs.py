"""Runs of MGH through the real command line, on tiny stand-ins."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.runs import WORDS, component, run_config


def mgh_config(folder: Path, kind: str = "mistral", dropout: float = 0.0, **sampler: Any) -> dict[str, Any]:
    """Eight steps of eight pairs, each with one hard negative of the step's level."""
    config = run_config(folder, kind, dropout)
    config["trainer"]["max_steps"] = 8
    config["model"]["class_path"] = "embeddings.modules.MGHCurriculumModule"
    config["model"]["init_args"]["pooling"] = {"class_path": "embeddings.models.AnchorTokenPooling"}
    config["data"]["init_args"]["num_negatives"] = 1
    config["data"]["init_args"]["sampler"] = component(
        "embeddings.data.CurriculumBatchSampler", inner={"class_path": "embeddings.data.BlendedBatchSampler"}, **sampler
    )
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for row, record in enumerate(records):
        texts = {level: f"{WORDS[(row + 5 * level) % len(WORDS)]} {row}" for level in range(1, 5)}
        record["negatives"] = [{"text": text, "level": level} for level, text in texts.items()]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return config
