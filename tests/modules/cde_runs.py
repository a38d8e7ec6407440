"""Runs of CDE through the real command line, on tiny stand-ins."""

from pathlib import Path
from typing import Any

from tests.helpers.runs import run_config

CONTEXT = {"num_context": 6, "num_soft_prompts": 2}
# A fixed memory budget: the default depends on the machine's free memory during a test.
CACHE = {
    "class_path": "embeddings.callbacks.GradCacheCallback",
    "init_args": {"mini_batch_tokens": 80, "kept_gib": 0.1},
}


def cde_config(folder: Path, dropout: float = 0.0, **context: Any) -> dict[str, Any]:
    """Four steps of eight pairs with two hard negatives each."""
    config = run_config(folder, dropout=dropout)
    config["model"]["class_path"] = "embeddings.modules.CDEModule"
    init_args = config["model"]["init_args"]
    del init_args["pooling"], init_args["lora"], init_args["backbone"]["bidirectional"]
    init_args["context"] = {**CONTEXT, "dropout_fraction": dropout, **context}
    return config
