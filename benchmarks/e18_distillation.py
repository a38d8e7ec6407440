"""E18: a student of three layers trains on the docstring corpus alone, or with distillation from a teacher.

The teacher is all-MiniLM-L6-v2 after 100 steps; its vectors are computed once. The student starts from three of the
teacher's six layers and trains on 3,200 pairs with up to three hard negatives each. Its loss is InfoNCE alone, or with
distillation of the teacher's in-batch similarities, of its score margins, or of its hidden states layer by layer.
"""

import json
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.docstring_trials import MODEL, Workspace, fit, optimisation, save_layers, score
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
from benchmarks.workloads import read_json_lines
from embeddings.callbacks import ExportModel
from embeddings.common.io import atomic_path
from embeddings.data import BlendedBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE, MarginMSE, SimilarityDistillation
from embeddings.mining import encode_pairs
from embeddings.models import BackboneConfig, Embedder, MeanPooling
from embeddings.modules import LayerDistillation, NVEmbedModule

NUM_NEGATIVES, STUDENT_LAYERS, TEACHER_SEED, TEACHER_STEPS = 3, 3, 1000, 100
PAGES = ("held-out packages", "held-out functions")
Teaching = Literal["alone", "similarities", "margins", "states"]


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a student is trained.

    Args:
        teaching: What is distilled from the teacher.
        num_rows: Approximate number of training pairs.
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
    """The corpora, the teacher, its vectors, and the student before training; existing files are reused."""

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
        """Train the teacher, make the student from its layers, and encode the training pairs."""
        self.select(recipe)
        # Without vectors: the teacher computes them below.
        source = replace(self.pairs(recipe), surrogate_vectors=None)
        if not self.teacher.exists():
            training = replace(recipe, num_steps=1 if self.tiny else TEACHER_STEPS)
            module = NVEmbedModule(BackboneConfig(self.model), MeanPooling, **options(training, TEACHER_SEED))
            data = data_of(training, source, TEACHER_SEED)
            fit(self, module, data, training.num_steps, [ExportModel(self.teacher)])
        save_layers(self.teacher, STUDENT_LAYERS, self.student)
        embedder = Embedder.from_pretrained(self.teacher)
        embedder.text = recipe.text
        encoder = Encoder(embedder, show_progress=not self.tiny)
        encode_pairs(encoder, open_cached(source), str(self.pairs(recipe).surrogate_vectors), negatives=True)

    def select(self, recipe: Recipe) -> None:
        """Write the training pairs if they are missing."""
        if not self.rows(recipe).exists():
            rows = read_json_lines(self.training_file)
            selected = [row for row in rows[:: max(1, len(rows) // recipe.num_rows)] if row.get("negatives")]
            with atomic_path(self.rows(recipe)) as temporary:
                temporary.write_text("".join(json.dumps(_as_texts(row)) + "\n" for row in selected), encoding="utf-8")

    def rows(self, recipe: Recipe) -> Path:
        """The file of training pairs."""
        return self.folder / f"distillation-{recipe.num_rows}.jsonl"


def _as_texts(row: dict[str, Any]) -> dict[str, Any]:
    """Query, positive and a few negatives as texts, the hardest level first."""
    negatives = sorted(row["negatives"], key=lambda entry: int(entry["level"]))
    return {
        "query": row["query"],
        "positive": row["positive"],
        "negatives": [entry["text"] for entry in negatives[:NUM_NEGATIVES]],
    }


def options(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Optimiser, schedule, loss and seed of a recipe, for teacher and student."""
    return {
        **optimisation(recipe.learning_rate, recipe.num_steps),
        "loss": loss_of(recipe.teaching),
        "seed": seed,
    }


def loss_of(teaching: Teaching) -> InfoNCE:
    """InfoNCE, with a distillation term for similarities and margins."""
    if teaching == "similarities":
        return SimilarityDistillation(temperature=0.05, teacher_temperature=0.05)
    return MarginMSE(temperature=0.05, alpha=10.0) if teaching == "margins" else InfoNCE(temperature=0.05)


def data_of(recipe: Recipe, source: SourceConfig, seed: int) -> EmbeddingDataModule:
    """The batches: the same rows in the same order for all recipes with the same seed."""
    return EmbeddingDataModule([source], recipe.text, recipe.batch_size, NUM_NEGATIVES, BlendedBatchSampler, seed=seed)


def run(chosen: Namespace, recipes: Mapping[str, Recipe]) -> list[Scores]:
    """Train and score each recipe with each seed; the trials without training also score the teacher."""
    recipes = sized(chosen, recipes)
    workspace = DistillationWorkspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
        workspace.make(replace(recipes["student alone"], teaching="alone"))
    return run_recipes(chosen, "E18", recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train a student by the trial's recipe and score it; without training steps, score the teacher too."""
    workspace, recipe = DistillationWorkspace(work, tiny), Recipe(**trial.settings)  # type: ignore[arg-type]
    start = time.perf_counter()
    distillation = LayerDistillation(str(workspace.teacher)) if recipe.teaching == "states" else None
    backbone = BackboneConfig(str(workspace.student))
    module = NVEmbedModule(backbone, MeanPooling, distillation=distillation, **options(recipe, trial.seed))
    if recipe.num_steps:
        fit(workspace, module, data_of(recipe, workspace.pairs(recipe), trial.seed), recipe.num_steps)
        extra = {"training seconds": time.perf_counter() - start}
    else:
        teacher = Embedder.from_pretrained(workspace.teacher)
        teacher.text = recipe.text
        extra = {f"teacher, {name}": value for name, value in score(workspace, teacher).items()}
    module.embedder.text = recipe.text
    return {**score(workspace, module.embedder), **extra}


def main() -> None:
    """Train a student with each loss; print the table and the gain of each kind of distillation."""
    chosen = trial_options(__doc__)
    before, alone, *distilled = run(chosen, RECIPES)
    print(f"E18, nDCG@10\n{table([before, alone, *distilled], PAGES)}")
    print(f"teacher ({MODEL}, trained): " + ", ".join(f"{x} {before.values(f'teacher, {x}')[0]:.4f}" for x in PAGES))
    for page in PAGES:
        for student in distilled:
            print(difference(student, alone, page))


if __name__ == "__main__":
    main()
