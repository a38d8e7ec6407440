"""What the experiments on mixtures of experts share: upcycling of a small rotary encoder, training and scoring.

All models start from all-MiniLM-L6-v2 with rotary positions instead of its learned ones. That changes its hidden
states, so the dense model is first trained on the docstring corpus; every variant and seed starts from the result.
There are two corpora: the docstrings, and question-paragraph pairs in several languages, scored on XQuAD.
"""

import csv
import json
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from lightning.pytorch.loggers import CSVLogger

from benchmarks.docstring_trials import WARMUP_SEED, Workspace, fit, optimisation
from benchmarks.trials import Metrics, Scores, TrainingRecipe, Trial, run_recipes, sized
from benchmarks.workloads import data_folder, read_json_lines
from embeddings.callbacks import ExportModel
from embeddings.callbacks.run_health import RoutingStatistics
from embeddings.common.io import write_text
from embeddings.data import BlendedBatchSampler, EmbeddingDataModule, HomogeneousBatchSampler, SourceConfig
from embeddings.evaluation import RetrievalFolder, read_retrieval_folder, score_retrieval
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE, MatryoshkaInfoNCE
from embeddings.losses.load_balancing import LoadBalancing
from embeddings.models import BackboneConfig, Embedder
from embeddings.models.moe.upcycling import Upcycling, parameter_counts, write_rotary_model
from embeddings.modules import MoEEmbedModule

# Steps after which the entropy of the experts' load is recorded.
ENTROPY_STEPS = (1, 5, 10, 20, 40)
PAIRS = ("multilingual_pairs/train.jsonl.gz", "covid_faq_pairs/train.jsonl")
TRAINED_LANGUAGES, FURTHER_LANGUAGES = ("ar", "zh"), ("de", "es")


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        top_k: Experts per token, or None for the dense model.
        mode: Whether upcycling preserves the dense model's outputs or copies the released model.
        num_experts: Experts in each of the three sparse layers.
        coefficient: Coefficient of the load-balancing loss.
        widths: Dimensions of the Matryoshka loss, or None for InfoNCE on the full vector only.
        corpus: The corpus for training and scoring.
        warmup_steps: Steps of the dense model on docstrings before; all seeds and variants share the result.
    """

    top_k: int | None = None
    mode: Literal["preserving", "release"] = "preserving"
    num_experts: int = 8
    coefficient: float = 1.0
    widths: tuple[int, ...] | None = None
    corpus: Literal["docstrings", "languages"] = "docstrings"
    warmup_steps: int = 100

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(super().tiny(), warmup_steps=1, num_experts=2)


def run(chosen: Namespace, experiment: str, recipes: Mapping[str, Recipe]) -> list[Scores]:
    """Train and score each recipe with each seed; arguments as in `run_recipes`."""
    recipes = sized(chosen, recipes)
    workspace = Workspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
        for recipe in recipes.values():
            make_start(workspace, recipe)
        if any(recipe.corpus == "languages" for recipe in recipes.values()):
            _split_by_language(workspace)
    return run_recipes(chosen, experiment, recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, and score the model."""
    widths: Any = trial.settings["widths"]
    workspace = Workspace(work, tiny)
    recipe = Recipe(**{**trial.settings, "widths": None if widths is None else tuple(widths)})  # type: ignore[arg-type]
    start, module = time.perf_counter(), module_of(workspace, recipe, trial.seed)
    counts = parameter_counts(module.embedder.backbone)
    metrics: Metrics = {"total parameters": counts.total, "active parameters": counts.active}
    if recipe.num_steps:
        data = data_of(workspace, recipe, trial.seed)
        metrics |= train(workspace, trial, module, data, recipe.num_steps)
        metrics["training seconds"] = time.perf_counter() - start
    module.embedder.text = recipe.text
    return {**score(workspace, recipe, module.embedder), **metrics}


def train(
    workspace: Workspace, trial: Trial, module: MoEEmbedModule, data: EmbeddingDataModule, num_steps: int
) -> Metrics:
    """Train a model and log its metrics in the trial's run folder; return the load entropies and idle experts."""
    folder = workspace.run_folder(trial)
    # The file of an interrupted run could have different columns.
    (folder / "metrics.csv").unlink(missing_ok=True)
    logger = CSVLogger(folder.parent, folder.name, version="", flush_logs_every_n_steps=1)
    fit(workspace, module, data, num_steps, [RoutingStatistics(1)] if module.moe_layers else [], logger)
    if not module.moe_layers:
        return {}
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("routing/load_entropy")]
    entropies = {int(row["step"]): float(row["routing/load_entropy"]) for row in rows}
    idle = {"idle experts at the end": float(rows[-1]["routing/idle_experts"])}
    return {f"load entropy after {step}": entropies[step] for step in ENTROPY_STEPS if step in entropies} | idle


def module_of(workspace: Workspace, recipe: Recipe, seed: int) -> MoEEmbedModule:
    """The model of a recipe before training."""
    common = {"temperature": 0.05}
    loss = InfoNCE(**common) if recipe.widths is None else MatryoshkaInfoNCE(recipe.widths, **common)
    sparse = recipe.top_k is not None
    return MoEEmbedModule(
        BackboneConfig(str(start_folder(workspace, recipe))),
        upcycling=Upcycling(recipe.mode, recipe.num_experts, recipe.top_k or 1) if sparse else None,
        load_balancing=LoadBalancing(recipe.coefficient) if sparse else None,
        loss=loss,
        **optimisation(recipe.learning_rate, recipe.num_steps),
        seed=seed,
    )


def data_of(workspace: Workspace, recipe: Recipe, seed: int) -> EmbeddingDataModule:
    """The batches of a recipe: the same rows in the same order for all recipes with the same seed."""
    if recipe.corpus == "languages":
        sources = [SourceConfig(path.stem, str(path)) for path in sorted(_languages_folder(workspace).glob("*.jsonl"))]
        sampler: Any = partial(HomogeneousBatchSampler, temperature=0.5)
    else:
        sources = [SourceConfig("docstrings", str(workspace.training_file))]
        sampler = BlendedBatchSampler
    return EmbeddingDataModule(sources, recipe.text, recipe.batch_size, 0, sampler, seed=seed)


def score(workspace: Workspace, recipe: Recipe, embedder: Embedder) -> Metrics:
    """nDCG@10 on the docstring corpus, with truncated vectors too if the model is dense; or on each language."""
    if recipe.corpus == "languages":
        encoder = Encoder(embedder)
        scores = {name: _ndcg(encoder, {name: folder}) for name, folder in languages().items()}
        for name, members in (("trained languages", TRAINED_LANGUAGES), ("further languages", FURTHER_LANGUAGES)):
            scores[name] = sum(scores[member] for member in members) / len(members)
        return scores
    packages, functions = workspace.domains(), {"functions": workspace.in_domain()}
    scores = {
        "held-out packages": _ndcg(Encoder(embedder), packages),
        "held-out functions": _ndcg(Encoder(embedder), functions),
    }
    for width in (256, 128, 64) if recipe.top_k is None else ():
        scores[f"held-out packages, width {width}"] = _ndcg(Encoder(embedder, dimensions=width), packages)
    return scores


def languages() -> dict[str, RetrievalFolder]:
    """The XQuAD folders of the scored languages."""
    root = data_folder() / "xquad"
    return {name: read_retrieval_folder(root / name) for name in (*TRAINED_LANGUAGES, *FURTHER_LANGUAGES)}


def start_folder(workspace: Workspace, recipe: Recipe) -> Path:
    """The folder of the dense model that a recipe starts from."""
    return workspace.folder / f"start-rotary-{recipe.warmup_steps}-{recipe.learning_rate}-{recipe.max_length}"


def make_start(workspace: Workspace, recipe: Recipe) -> None:
    """Train the initial model, MiniLM with rotary positions, for its warm-up steps if it is missing."""
    folder, rotary = start_folder(workspace, recipe), workspace.folder / "rotary"
    if folder.exists():
        return
    if not rotary.exists():
        write_rotary_model(workspace.model, rotary, num_positions=512, keep_head=False)
    dense = replace(recipe, top_k=None, widths=None, corpus="docstrings", num_steps=recipe.warmup_steps)
    module = MoEEmbedModule(
        BackboneConfig(str(rotary)),
        load_balancing=None,
        loss=InfoNCE(temperature=0.05),
        **optimisation(recipe.learning_rate, dense.num_steps),
        seed=WARMUP_SEED,
    )
    fit(workspace, module, data_of(workspace, dense, WARMUP_SEED), dense.num_steps, [ExportModel(str(folder))])


def _languages_folder(workspace: Workspace) -> Path:
    return workspace.folder / "languages"


def _split_by_language(workspace: Workspace) -> None:
    """Write the multilingual pairs, one file per data set and language, so that each batch has one language."""
    by_name: dict[str, list[str]] = {}
    for name in PAIRS:
        path = data_folder() / name
        for row in read_json_lines(path):
            pair = json.dumps({"query": row["query"], "positive": row["positive"]})
            by_name.setdefault(f"{path.parent.name}-{row['lang']}", []).append(pair)
    for name, lines in by_name.items():
        write_text(_languages_folder(workspace) / f"{name}.jsonl", "\n".join(lines) + "\n")


def _ndcg(encoder: Encoder, folders: Mapping[str, RetrievalFolder]) -> float:
    """nDCG@10 over the queries of all folders, each searched separately."""
    scores = [
        (score_retrieval(encoder, folder).metrics["ndcg_at_10"], len(folder.queries)) for folder in folders.values()
    ]
    return sum(value * weight for value, weight in scores) / sum(weight for _, weight in scores)
