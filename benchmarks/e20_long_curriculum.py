"""E20: the curriculum over ten times the steps of E4, with levels by namespace and with levels that a teacher assigns.

Three layers of MiniLM train 400 steps of 4 pairs with at most 32 tokens per text; E4 has 40 steps of 32 pairs. The
teacher is MiniLM. Of a pair's 100 nearest documents and 100 random ones, those below 0.95 of the positive's score are
candidates. They are divided into quarters by similarity (`mine --levels quantiles`); the nearest document of each
quarter is that level's negative. Held-out functions are scored every 100 steps (as in the paper's Figure 3).
"""

import csv
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from lightning.pytorch.loggers import CSVLogger

from benchmarks.docstring_trials import Recipe as VectorsRecipe
from benchmarks.docstring_trials import Workspace, fit, save_layers, score
from benchmarks.mgh_trials import PAGES, Losses, Recipe, data_of, module_of
from benchmarks.trials import Metrics, Scores, Trial, difference, run_recipes, sized, table, trial_options
from embeddings.callbacks import RetrievalEvaluation
from embeddings.common import TextSettings
from embeddings.inference import Encoder
from embeddings.mining import LevelRules, NegativeRules, Teachers, mine_negatives
from embeddings.models import Embedder

SCORED_EVERY, NUM_LAYERS = 100, 3


@dataclass(frozen=True)
class LongRecipe(Recipe):
    """How a model is trained.

    Args:
        levels: What assigns the levels of the hard negatives.
    """

    num_steps: int = 400
    batch_size: int = 4
    max_length: int = 32
    levels: Literal["namespace", "teacher"] = "namespace"

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(super().tiny(), batch_size=2)


NAMESPACE = {
    "namespace, coarse to fine": LongRecipe(),
    "namespace, reverse": LongRecipe(order="reverse"),
    "namespace, random order": LongRecipe(order="random"),
    "no hard negatives": LongRecipe(order=None),
}
TEACHER = {
    "teacher, coarse to fine": LongRecipe(levels="teacher"),
    "teacher, reverse": LongRecipe(levels="teacher", order="reverse"),
    "teacher, random order": LongRecipe(levels="teacher", order="random"),
}


class CurriculumWorkspace(Workspace):
    """The corpora, the teacher's levels, and an initial model with few layers; existing files are reused."""

    @property
    def model(self) -> str:
        """The model that training starts from."""
        return str(self.folder / f"layers-{NUM_LAYERS}")

    @property
    def teacher(self) -> str:
        """The model that assigns the levels."""
        return super().model

    @property
    def graded(self) -> Path:
        """The training pairs with the teacher's levels."""
        return self.folder / "graded.parquet"

    def grade(self, text: TextSettings) -> None:
        """Mine one negative per level for the training pairs."""

        def load(name: str) -> Encoder:
            embedder = Embedder.from_pretrained(name)
            embedder.text = text
            return Encoder(embedder)

        source, rules = self.source(copies=False), NegativeRules(num_negatives=4, margin=0.95)
        levels, vectors = LevelRules("quantiles"), source.surrogate_vectors
        mine_negatives(source, self.graded, Teachers([self.teacher], load), rules, levels=levels, vectors=vectors)


def run(chosen: Namespace, recipes: Mapping[str, LongRecipe]) -> list[Scores]:
    """Train and score each recipe with each seed; arguments as in `run_recipes`."""
    recipes = sized(chosen, recipes)
    vectors_recipe = VectorsRecipe().tiny() if chosen.tiny else VectorsRecipe()
    workspace = CurriculumWorkspace(chosen.work, chosen.tiny)
    with workspace.locked():
        is_graded = any(recipe.levels == "teacher" for recipe in recipes.values())
        # The model of `Workspace` is the teacher; similarities are computed from its vectors of the pairs.
        Workspace(chosen.work, chosen.tiny).prepare([vectors_recipe] if is_graded else [])
        save_layers(workspace.teacher, NUM_LAYERS, workspace.model)
        if is_graded:
            workspace.grade(vectors_recipe.text)
    return run_recipes(chosen, "E20", recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe; score the model during training and at the end."""
    workspace, recipe = CurriculumWorkspace(work, tiny), LongRecipe(**trial.settings)  # type: ignore[arg-type]
    start, every = time.perf_counter(), 2 if tiny else SCORED_EVERY
    pairs = workspace.training_file if recipe.levels == "namespace" else workspace.graded
    module, losses = module_of(workspace, recipe, trial.seed), Losses()
    module.embedder.text = recipe.text
    evaluation = RetrievalEvaluation(str(workspace.evaluation_root / "validation"), every, at_start=False)
    folder = workspace.run_folder(trial)
    path = folder / "metrics.csv"
    path.unlink(missing_ok=True)
    logger = CSVLogger(folder.parent, folder.name, version="")
    fit(workspace, module, data_of(recipe, pairs, trial.seed), recipe.num_steps, [losses, evaluation], logger)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/ndcg_at_10")]
    validation = {f"validation after {row['step']}": float(row["val/ndcg_at_10"]) for row in rows}
    seconds = time.perf_counter() - start
    return {
        **score(workspace, module.embedder),
        **validation,
        "last training loss": losses.last_mean,
        "seconds": seconds,
    }


def main() -> None:
    """Train with each order of each kind of levels; print the scores, and each curriculum's gain over other orders."""
    chosen = trial_options(__doc__)
    for recipes in (NAMESPACE, TEACHER):
        curriculum, *others = scores = run(chosen, recipes)
        print(f"E20, nDCG@10\n{table(scores, PAGES)}")
        steps = sorted(
            (name for name in curriculum.metrics if name.startswith("validation")),
            key=lambda name: int(name.split()[-1]),
        )
        print(f"nDCG@10 on held-out functions during training\n{table(scores, steps)}")
        for page in PAGES:
            for other in others:
                print(difference(curriculum, other, page))


if __name__ == "__main__":
    main()
