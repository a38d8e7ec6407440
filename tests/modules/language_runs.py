"""Small runs of language modelling through the real command line."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.runs import WORDS, component, tiny_trainer
from tests.models.language_models import language_model_folder


def write_texts(path: Path, num_texts: int = 80) -> Path:
    """Documents of a few words that follow each other by a rule."""
    with open(path, "w", encoding="utf-8") as file:
        for row in range(num_texts):
            words = [WORDS[(row + 3 * place) % len(WORDS)] for place in range(8)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def language_config(folder: Path, objective: str, **model: Any) -> dict[str, Any]:
    """A config of a tiny run in `folder`: twelve steps of eight rows of 24 tokens."""
    bert = objective == "mlm"
    masking = {"probability": 0.5, "mask_fraction": 1.0, "random_fraction": 0.0}
    init_args: dict[str, Any] = {
        "objective": objective,
        "masking": None if objective == "causal" else masking | ({} if bert else {"mask_token": "_"}),
        "optimizer": component("torch.optim.AdamW", lr=1e-2),
        "schedule": {"warmup_steps": 1, "decay": "constant"},
    }
    if "from_scratch" not in model:
        name = language_model_folder(folder / "backbone", "bert" if bert else "mistral")
        init_args["backbone"] = {"name": name, "bidirectional": objective == "mntp"}
    return {
        "seed_everything": 0,
        "trainer": tiny_trainer(folder) | {"max_steps": 12, "num_sanity_val_steps": 0},
        "model": component("embeddings.modules.MaskedLMModule", **(init_args | model)),
        "data": component(
            "embeddings.data.TextDataModule",
            row_length=24,
            batch_size=8,
            cache_dir=str(folder / "cache"),
            sources=[{"name": "texts", "path": str(write_texts(folder / "texts.jsonl"))}],
            validation_sources=[{"name": "held", "path": str(write_texts(folder / "held.jsonl", 21))}],
        ),
    }
