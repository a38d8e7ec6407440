"""E20: the curriculum over ten times the steps of E4, on levels by namespace and on levels that a teacher grades.

Three layers of MiniLM train 400 steps of 4 pairs with at most 32 tokens a text; E4 had 40 steps of 32 pairs. MiniLM is
the teacher: what is left of a pair's 100 nearest documents and 100 random ones below 0.95 of the positive's score is
cut into quarters of similarity (`mine --levels quantiles`), and the nearest document of each quarter is that level's
negative. The score on held-out functions is taken every 100 steps too (the paper's Figure 3).
"""

import csv
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from lightning.pytorch.loggers import CSVLogger

from benchmarks.docstring_trials import Recipe as VectorsOf
from benchmarks.docstring_trials import Workspace, fit, score
from benchmarks.mgh_trials import PAGES, Losses, Recipe, data_of, module_of, pairs_of
from benchmarks.trials import Metrics, Scores, Trial, difference, run_recipes, sized, table, trial_options
from embeddings.callbacks import RetrievalEvaluation
from embeddings.common import TextSettings
from embeddings.inference import Encoder
from embeddings.mining import LevelRules, NegativeRules, Teachers, mine_negatives
from embeddings.models import Embedder, keep_layers

SCORED_EVERY, NUM_LAYERS = 100, 3


@dataclass(frozen=True)
class LongRecipe(Recipe):
    """How a model is trained.

    Args:
        levels: What grades the hard negatives.
    """

    num_steps: int = 400
    batch_size: int = 4
    max_length: int = 32
    levels: Literal["namespace", "teacher"] = "namespace"

    def tiny(self) -> Self:
        """The same over a few short texts, to see that it works."""
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
    """The corpora, the levels of a teacher, and a start of few layers; what is there already is kept."""

    @property
    def model(self) -> str:
        """What training starts from."""
        return str(self.folder / f"layers-{NUM_LAYERS}")

    @property
    def teacher(self) -> str:
        """What grades the negatives."""
        return super().model

    @property
    def graded(self) -> Path:
        """The training pairs with the teacher's levels."""
        return self.folder / "graded.parquet"

    def make_start(self) -> None:
        """Take the teacher's layers for the start."""
        if not Path(self.model).exists():
            embedder = Embedder.from_pretrained(self.teacher)
            # A stand-in has two layers.
            keep_layers(embedder.backbone, min(NUM_LAYERS, embedder.backbone.config.num_hidden_layers))  # type: ignore[arg-type, union-attr]
            embedder.save_pretrained(self.model)

    def grade(self, text: TextSettings) -> None:
        """Mine negatives of four levels for the training pairs."""

        def load(name: str) -> Encoder:
            embedder = Embedder.from_pretrained(name)
            embedder.text = text
            return Encoder(embedder)

        source, rules = self.source(copies=False), NegativeRules(num_negatives=4, margin=0.95)
        levels, vectors = LevelRules("quantiles"), source.surrogate_vectors
        mine_negatives(source, self.graded, Teachers([self.teacher], load), rules, levels=levels, vectors=vectors)


def run(chosen: Namespace, recipes: Mapping[str, LongRecipe]) -> list[Scores]:
    """Train and score by each recipe with each seed; arguments as of `run_recipes`."""
    recipes, vectors_of = sized(chosen, recipes), sized(chosen, {"vectors": VectorsOf()})["vectors"]
    workspace = CurriculumWorkspace(chosen.work, chosen.tiny)
    with workspace.locked():
        is_graded = any(recipe.levels == "teacher" for recipe in recipes.values())
        # The vectors of the pairs, which the teacher's similarities are of.
        Workspace(chosen.work, chosen.tiny).prepare([vectors_of] if is_graded else [])
        workspace.make_start()
        if is_graded:
            workspace.grade(vectors_of.text)
    return run_recipes(chosen, "E20", recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, and score the model, along the way too."""
    workspace, recipe = CurriculumWorkspace(work, tiny), LongRecipe(**trial.settings)  # type: ignore[arg-type]
    start, every = time.perf_counter(), 2 if tiny else SCORED_EVERY
    pairs = pairs_of(workspace) if recipe.levels == "namespace" else workspace.graded
    module, losses = module_of(workspace, recipe, trial.seed), Losses()
    module.embedder.text = recipe.text
    evaluation = RetrievalEvaluation(str(workspace.folder / "corpus" / "eval" / "validation"), every, at_start=False)
    folder = workspace.run_folder(trial)
    path = folder / "metrics.csv"
    path.unlink(missing_ok=True)
    logger = CSVLogger(folder.parent, folder.name, version="")
    fit(workspace, module, data_of(recipe, pairs, trial.seed), recipe.num_steps, [losses, evaluation], logger)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/ndcg_at_10")]
    found = {f"validation after {row['step']}": float(row["val/ndcg_at_10"]) for row in rows}
    seconds = time.perf_counter() - start
    return {
        **score(workspace, module.embedder),
        **found,
        "last training loss": losses.last_mean,
        "seconds": seconds,
    }


def main() -> None:
    """Train with each order of each kind of levels; print the scores, and how far each curriculum lies above others."""
    chosen = trial_options(__doc__)
    for recipes in (NAMESPACE, TEACHER):
        curriculum, *others = scores = run(chosen, recipes)
        print(f"E20, nDCG@10\n{table(scores, PAGES)}")
        steps = sorted(
            (name for name in curriculum.metrics if name.startswith("validation")),
            key=lambda name: int(name.split()[-1]),
        )
        print(f"On held-out functions along the way\n{table(scores, steps)}")
        for page in PAGES:
            for other in others:
                print(difference(curriculum, other, page))


if __name__ == "__main__":
    main()
