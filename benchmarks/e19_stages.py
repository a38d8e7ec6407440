"""E19: NV-Embed's two stages and its labels by example, in miniature (arXiv:2405.17428, Tables 4 and 5).

MiniLM trains on questions with passages and mined negatives (`squad_sentence_pairs`, `nq_pairs`), on classification
(`banking77`, `trec_questions`), clustering (`searchsnippets`, `stackoverflow_titles`) and similarity (`stsb`), all in
the folder EMBED_DATA. Every variant has the same number of steps. TREC's six classes are always represented by label
texts, as the paper does for sets with few classes. The other labelled sets use examples or label texts.
"""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from benchmarks.docstring_trials import Workspace, fit, optimisation
from benchmarks.trials import (
    Metrics,
    Scores,
    TrainingRecipe,
    Trial,
    difference,
    replaced,
    run_recipes,
    sized,
    table,
    trial_options,
)
from benchmarks.workloads import data_folder, read_json_lines
from embeddings.common.io import write_text
from embeddings.data import BlendedBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.evaluation import EvaluationFolder, evaluate_folder, read_evaluation_folder
from embeddings.evaluation.folders import clustering
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE
from embeddings.mining import NegativeRules, Teachers, mine_negatives
from embeddings.models import BackboneConfig, Embedder, MeanPooling
from embeddings.modules import NVEmbedModule

Stage = Literal["retrieval in-batch", "all in-batch", "all in-batch masked", "all own"]
Labels = Literal["examples", "texts"]
RETRIEVAL, CLUSTERING = ("squad_sentence_pairs", "nq_pairs"), ("searchsnippets", "stackoverflow_titles")
# Approximate rows of a set of pairs and of a scored clustering set; hard negatives per query.
NUM_PAIRS, NUM_CLUSTERED, NUM_NEGATIVES = 1500, 2000, 4
# Texts for labels that are not words: those of `searchsnippets` in the order of their numbers, and those of TREC.
DOMAINS = ("business", "computers", "culture and arts", "education and science", "engineering", "health", "politics")
DOMAINS = (*DOMAINS, "sports")
QUESTIONS = {"ABBR": "abbreviation", "DESC": "description", "ENTY": "entity", "HUM": "human being"}
QUESTIONS |= {"LOC": "location", "NUM": "numeric value"}
SCORED = {
    "retrieval": ("cranfield", "xquad/en"),
    "classification": ("banking77", "trec_questions"),
    "clustering": CLUSTERING,
    "similarity": ("stsb",),
}


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        num_steps: Total steps of all stages.
        stages: Each stage's training sets, and its negatives: in-batch, or only the query's own.
        labels: What represents a class: examples or label texts. TREC always uses label texts.
    """

    num_steps: int = 32
    stages: tuple[Stage, ...] = ("retrieval in-batch", "all own")
    labels: Labels = "examples"


BEFORE = {"before training": Recipe(num_steps=0)}
RECIPES = {
    "two stages": Recipe(),
    "reversed": Recipe(stages=("all own", "retrieval in-batch")),
    "single stage, in-batch": Recipe(stages=("all in-batch",)),
    "single stage, in-batch, masked": Recipe(stages=("all in-batch masked",)),
    "single stage, own negatives": Recipe(stages=("all own",)),
    "two stages, label texts": Recipe(labels="texts"),
}


class StagesWorkspace(Workspace):
    """The training sets with mined negatives."""

    def pairs(self, name: str) -> Path:
        """The mined pairs of a set."""
        return self.folder / "stages" / f"{name}.jsonl"

    def half(self, name: str) -> Path:
        """The half of a clustering set that is used for training."""
        return self.folder / "stages" / f"{name}-half.jsonl"

    def make(self, recipe: Recipe) -> None:
        """Mine negatives for the pairs, and write the training half of the clustering sets."""
        for name in CLUSTERING:
            write_text(self.half(name), _lines(_rows(name, "test")[:: 40 if self.tiny else 2]))
        embedder = Embedder.from_pretrained(self.model)
        embedder.text = recipe.text
        teachers = Teachers([self.model], lambda _: Encoder(embedder))
        rules = NegativeRules(NUM_NEGATIVES)
        for name in (*RETRIEVAL, "stsb"):
            rows, num_pairs = _rows(name, "train"), 60 if self.tiny else NUM_PAIRS
            selected = rows if name == "stsb" and not self.tiny else rows[:: len(rows) // num_pairs]
            source = self.folder / "stages" / f"{name}-bare.jsonl"
            write_text(source, _lines(selected))
            config = SourceConfig(name, str(source), "sts" if name == "stsb" else "pairs")
            mine_negatives(config, self.pairs(name), teachers, rules)

    def sources(self, stage: Stage, labels: Labels) -> list[SourceConfig]:
        """The training sets of a stage."""
        sources = [SourceConfig(name, str(self.pairs(name))) for name in RETRIEVAL]
        if stage.startswith("retrieval"):
            return sources
        banking = sorted({row["label"] for row in _rows("banking77", "train")})
        texts = {
            "banking77": {label: label.replace("_", " ") for label in banking},
            "trec_questions": QUESTIONS,
            "searchsnippets": {str(number): text for number, text in enumerate(DOMAINS, 1)},
            "stackoverflow_titles": {},
        }
        for name, label_texts in texts.items():
            path = str(self.half(name) if name in CLUSTERING else _file(name, "train"))
            options: dict[str, Any] = {"conversion": "class_by_example"}
            if labels == "texts" or name == "trec_questions":
                options = {"conversion": "class_by_label", "label_texts": label_texts}
            sources.append(SourceConfig(name, path, num_negatives=NUM_NEGATIVES, **options))
        return [*sources, SourceConfig("stsb", str(self.pairs("stsb")))]

    def scored(self, name: str) -> EvaluationFolder:
        """The evaluation data of a set; for clustering, rows that are not in the training half."""
        if name not in CLUSTERING:
            return read_evaluation_folder(data_folder() / name)
        held_out = _rows(name, "test")[1::2]
        rows = held_out[:: len(held_out) // NUM_CLUSTERED]
        return clustering([row["text"] for row in rows], [row["label"] for row in rows])


def _file(name: str, split: str) -> Path:
    """The file of a set's split, compressed or not."""
    (path,) = (data_folder() / name).glob(f"{split}.jsonl*")
    return path


def _rows(name: str, split: str) -> list[dict[str, Any]]:
    return read_json_lines(_file(name, split))


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def loss_of(stage: Stage) -> InfoNCE:
    """The loss of a stage: the paper's single stage does not mask false negatives by text or class."""
    masks = stage != "all in-batch"
    in_batch: Literal["on", "off"] = "off" if stage == "all own" else "on"
    return InfoNCE(0.05, in_batch_negatives=in_batch, mask_same_text=masks, mask_same_class=masks)


def train(workspace: StagesWorkspace, recipe: Recipe, seed: int) -> Embedder:
    """Train the stages in sequence, each from the previous stage's model with a new optimiser and schedule."""
    steps = recipe.num_steps // len(recipe.stages)
    trained: Embedder | None = None
    for number, stage in enumerate(recipe.stages):
        module = NVEmbedModule(
            BackboneConfig(workspace.model),
            MeanPooling,
            loss=loss_of(stage),
            **optimisation(recipe.learning_rate, steps),
            seed=seed,
        )
        if trained is not None:
            module.embedder.load_state_dict(trained.state_dict())
        trained = module.embedder
        sampler = partial(BlendedBatchSampler, proportions="uniform")
        sources = workspace.sources(stage, recipe.labels)
        # Each stage has its own data seed, so that the second stage sees other rows of shared sets.
        data_seed = seed + 1000 * number
        data = EmbeddingDataModule(sources, recipe.text, recipe.batch_size, NUM_NEGATIVES, sampler, seed=data_seed)
        if steps:
            fit(workspace, module, data, steps)
    assert trained is not None
    trained.text = recipe.text
    return trained


def score(workspace: StagesWorkspace, embedder: Embedder) -> Metrics:
    """The main metric of each set, the mean of each kind's sets, and the mean of the kinds."""
    encoder, sets, kinds = Encoder(embedder), {}, {}
    # A tiny run scores similarity only: loading mteb for classification and clustering would take longer than the run.
    for kind, names in SCORED.items() if not workspace.tiny else [("similarity", SCORED["similarity"])]:
        for name in names:
            result = evaluate_folder(encoder, workspace.scored(name))
            sets[name] = result.metrics[result.main_metric]
        kinds[kind] = mean(sets[name] for name in names)
    return {**sets, **kinds, "mean of the kinds": mean(kinds.values())}


def run(chosen: Namespace, recipes: Mapping[str, Recipe]) -> list[Scores]:
    """Prepare the sets, train and score; arguments as in `run_recipes`."""
    recipes = sized(chosen, recipes)
    workspace = StagesWorkspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
        workspace.make(next(iter(recipes.values())))
    return run_recipes(chosen, "E19", recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, and score the model."""
    workspace = StagesWorkspace(work, tiny)
    recipe = Recipe(**{**trial.settings, "stages": tuple(trial.settings["stages"])})  # type: ignore
    return score(workspace, train(workspace, recipe, trial.seed))


def main() -> None:
    """Train each variant of stages and labels; print the table and the gain of two stages over each."""
    chosen = trial_options(__doc__)
    if not all((data_folder() / name).is_dir() for name in ("banking77", *RETRIEVAL, *CLUSTERING)):
        print("E19 skipped: its training sets are missing; set EMBED_DATA to their folder")
        return
    # Before training, the model does not depend on the seed.
    (before,) = run(replaced(chosen, seeds=1), BEFORE)
    two_stages, *others = run(chosen, RECIPES)
    metrics = [name for name in (*SCORED, "mean of the kinds") if name in before.metrics]
    print(f"E19\n{table([before, two_stages, *others], metrics)}")
    for metric in metrics:
        for other in others:
            print(difference(two_stages, other, metric))


if __name__ == "__main__":
    main()
