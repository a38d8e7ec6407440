"""E18: a student of three layers learns the docstring corpus alone, or from a teacher's scores.

The teacher is all-MiniLM-L6-v2 after a hundred steps, its vectors are computed once. The student starts as three of its
six layers, and trains on 3,200 pairs with up to three hard negatives each. It learns by InfoNCE alone, with the
teacher's rows of in-batch similarities, with the margins of its scores, or with its states layer by layer.
"""

import gzip
import json
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmarks.docstring_trials import MODEL, Workspace, fit, score
from benchmarks.trials import (
    Metrics,
    Scores,
    TrainingRecipe,
    Trial,
    difference,
    run_recipes,
    sized,
    table,
    trial_options,
)
from embeddings.callbacks import ExportModel
from embeddings.common.io import atomic_path
from embeddings.data import BlendedBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE, MarginMSE, SimilarityDistillation
from embeddings.mining import encode_pairs
from embeddings.models import BackboneConfig, Embedder, MeanPooling, keep_layers
from embeddings.modules import LayerDistillation, NVEmbedModule
from embeddings.training.optim import Schedule

NUM_NEGATIVES, STUDENT_LAYERS, TEACHER_SEED, TEACHER_STEPS = 3, 3, 1000, 100
PAGES = ("held-out packages", "held-out functions")
Teaching = Literal["alone", "similarities", "margins", "states"]


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a student is trained.

    Args:
        teaching: What it learns from its teacher.
        num_rows: Pairs of the training set.
    """

    num_steps: int = 50
    teaching: Teaching = "alone"
    num_rows: int = 3200


RECIPES = {
    "before training": Recipe(num_steps=0),
    "student alone": Recipe(),
    "similarities": Recipe(teaching="similarities"),
    "margins": Recipe(teaching="margins"),
    "states of layers": Recipe(teaching="states"),
}


class DistillationWorkspace(Workspace):
    """The corpora, the teacher, its vectors, and the student before training; what is there already is kept."""

    @property
    def teacher(self) -> Path:
        """The teacher's model directory."""
        return self.folder / "distillation-teacher"

    @property
    def student(self) -> Path:
        """The model directory that students start from."""
        return self.folder / "distillation-student"

    def pairs(self, recipe: Recipe) -> SourceConfig:
        """The training pairs, with the teacher's vectors."""
        vectors = str(self.folder / f"distillation-{recipe.num_rows}.vectors")
        return SourceConfig("docstrings", str(self.rows(recipe)), surrogate_vectors=vectors)

    def make(self, recipe: Recipe) -> None:
        """Train the teacher, encode by it, and take its layers."""
        self.select(recipe)
        if not self.teacher.exists():
            # Read alone, not its vectors, which this teacher makes.
            source = replace(self.pairs(recipe), surrogate_vectors=None)
            taught = replace(recipe, num_steps=1 if self.tiny else TEACHER_STEPS)
            module = NVEmbedModule(BackboneConfig(self.model), MeanPooling, **options(taught, TEACHER_SEED))
            fit(self, module, data_of(taught, source, TEACHER_SEED), taught.num_steps, [ExportModel(self.teacher)])
        if not self.student.exists():
            student = Embedder.from_pretrained(self.teacher)
            # A stand-in has two layers.
            keep_layers(student.backbone, min(STUDENT_LAYERS, student.backbone.config.num_hidden_layers))  # type: ignore[arg-type, union-attr]
            student.save_pretrained(self.student)
        embedder = Embedder.from_pretrained(self.teacher)
        embedder.text = recipe.text
        source = replace(self.pairs(recipe), surrogate_vectors=None)
        encoder = Encoder(embedder, show_progress=not self.tiny)
        encode_pairs(encoder, open_cached(source), str(self.pairs(recipe).surrogate_vectors), negatives=True)

    def select(self, recipe: Recipe) -> None:
        """Write the training pairs where they are not there."""
        if not self.rows(recipe).exists():
            with gzip.open(self.folder / "corpus" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
            kept = [row for row in rows[:: max(1, len(rows) // recipe.num_rows)] if row.get("negatives")]
            with atomic_path(self.rows(recipe)) as temporary:
                temporary.write_text("".join(json.dumps(_plain(row)) + "\n" for row in kept), encoding="utf-8")

    def rows(self, recipe: Recipe) -> Path:
        """The file of training pairs."""
        return self.folder / f"distillation-{recipe.num_rows}.jsonl"


def _plain(row: dict[str, object]) -> dict[str, object]:
    """Query, positive and a few negatives as texts, the hardest first, as the levels say."""
    negatives: list[dict[str, object]] = sorted(row["negatives"], key=lambda one: int(one["level"]))  # type: ignore[call-overload]
    return {
        "query": row["query"],
        "positive": row["positive"],
        "negatives": [one["text"] for one in negatives[:NUM_NEGATIVES]],
    }


def options(recipe: Recipe, seed: int) -> dict[str, object]:
    """What all modules of a recipe are trained with."""
    return {
        "optimizer": partial(torch.optim.AdamW, lr=recipe.learning_rate, weight_decay=0.01),
        "schedule": Schedule(warmup_steps=recipe.num_steps // 10, decay="linear"),
        "loss": loss_of(recipe.teaching),
        "seed": seed,
    }


def loss_of(teaching: Teaching) -> InfoNCE:
    """The loss, with the teacher's part where it has one."""
    if teaching == "similarities":
        return SimilarityDistillation(temperature=0.05, teacher_temperature=0.05)
    return MarginMSE(temperature=0.05, alpha=10.0) if teaching == "margins" else InfoNCE(temperature=0.05)


def data_of(recipe: Recipe, source: SourceConfig, seed: int) -> EmbeddingDataModule:
    """The batches, the same rows in the same order for all recipes of a seed."""
    return EmbeddingDataModule([source], recipe.text, recipe.batch_size, NUM_NEGATIVES, BlendedBatchSampler, seed=seed)


def run(chosen: Namespace, recipes: Mapping[str, Recipe]) -> list[Scores]:
    """Train and score by each recipe with each seed; the teacher's scores are those of seed 0 without training."""
    recipes = sized(chosen, recipes)
    workspace = DistillationWorkspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
        workspace.make(replace(recipes["student alone"], teaching="alone"))
    return run_recipes(chosen, "E18", recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train a student by the trial's recipe, and score it; the teacher too, once."""
    workspace, recipe = DistillationWorkspace(work, tiny), Recipe(**trial.settings)  # type: ignore[arg-type]
    start = time.perf_counter()
    follows = LayerDistillation(str(workspace.teacher)) if recipe.teaching == "states" else None
    backbone = BackboneConfig(str(workspace.student))
    module = NVEmbedModule(backbone, MeanPooling, distillation=follows, **options(recipe, trial.seed))
    found = {}
    if recipe.num_steps:
        fit(workspace, module, data_of(recipe, workspace.pairs(recipe), trial.seed), recipe.num_steps)
        found["training seconds"] = time.perf_counter() - start
    else:
        teacher = Embedder.from_pretrained(workspace.teacher)
        teacher.text = recipe.text
        found = {f"teacher, {name}": value for name, value in score(workspace, teacher).items()}
    module.embedder.text = recipe.text
    return {**score(workspace, module.embedder), **found}


def main() -> None:
    """Train students in each way; print the table and what each way of teaching adds."""
    chosen = trial_options(__doc__)
    before, alone, *taught = run(chosen, RECIPES)
    print(f"E18, nDCG@10\n{table([before, alone, *taught], PAGES)}")
    print(f"teacher ({MODEL}, trained): " + ", ".join(f"{x} {before.values(f'teacher, {x}')[0]:.4f}" for x in PAGES))
    for page in PAGES:
        for one in taught:
            print(difference(one, alone, page))


if __name__ == "__main__":
    main()
