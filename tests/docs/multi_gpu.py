"""The tables of docs/multi-gpu.md, from what `plan` prints today: `python -m tests.docs.multi_gpu`."""

import contextlib
import io
import os
from pathlib import Path

from embeddings.cli.main import main

ROOT = Path(__file__).parents[2]
NUM_GPUS = (8, 16)
# Decoders under LoRA, MGH's with its one GPU's batch on each, contextual encoders, and encoders with experts.
RECIPES = [
    "nv_embed_stage1_h100x8",
    "nv_embed_stage2_h100x8",
    "mgh_h100x1",
    "cde_unsupervised_h100x8",
    "cde_supervised_h100x8",
    "moe_pretrain_h100x16",
    "moe_finetune_h100x8",
]
SCALES = ["h100x8_fsdp2", "h100x16_zero3"]
_FILES = [f"--config=lightning_configs/{name}.yaml" for name in ("base", "methods/nv_embed_stage2")]
# The backbone trained whole, and what a data file would say.
_WHOLE = ["--model.lora=null", "--model.backbone.dtype=float32"]
_WHOLE += ["--data.num_negatives=7", "--data.sources", "[{name: a, path: a.jsonl}]"]


def planned(*words: str) -> dict[str, str]:
    """The table of a plan by the names of its rows, those of a block behind the block's first word."""
    os.environ.setdefault("EMBED_TRAIN_DATA", "data")
    text = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(text):
        assert main(["plan", *words]) == 0
    table: dict[str, str] = {}
    block = ""
    for line in text.getvalue().splitlines():
        name, _, value = line.strip().partition("  ")
        if line.startswith(" "):
            name = f"{block}: {name}"
        elif not value:
            block = name.split()[0]
        table[name] = value.strip()
    return table


def cells(*words: str) -> str:
    """A row of the page behind its title: memory, what is sent, seconds of both, share of the peak, the limit."""
    table = planned(*words)
    first = {name: value.split()[0] for name, value in table.items() if value}
    share = table["share of the peak"].split()
    most, least = share[0], share[-3]
    found = [
        first["memory: total"],
        first["sent: total"],
        first["arithmetic of a step, seconds"],
        first["sending it, seconds"],
    ]
    found += [most if most == least else f"{least} to {most}", table["limits the step"]]
    return " | ".join(found)


def recipe_cells(recipe: str, num_gpus: int) -> str:
    """The row of a recipe on some GPUs, each with the recipe's batch."""
    return cells("--recipe", recipe, "--gpus", str(num_gpus))


def strategy_cells(scale: str) -> str:
    """The row of NV-Embed's second stage under a scale file, with its backbone trained whole."""
    return cells(*_FILES, f"--config=lightning_configs/scales/{scale}.yaml", *_WHOLE)


def table(rows: dict[str, str]) -> list[str]:
    """The lines of a table; what has the same figures shares a line."""
    titles: dict[str, list[str]] = {}
    for title, found in rows.items():
        titles.setdefault(found, []).append(f"`{title}`")
    return [f"| {', '.join(names)} | {found} |" for found, names in titles.items()]


if __name__ == "__main__":
    for count in NUM_GPUS:
        print(f"\n{count} GPUs", *table({recipe: recipe_cells(recipe, count) for recipe in RECIPES}), sep="\n")
    print("\nstrategies", *table({scale: strategy_cells(scale) for scale in SCALES}), sep="\n")
