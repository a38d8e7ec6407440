"""What the experiments on MGH share: training on the docstring corpus with its four levels of negatives, and scoring.

A row's negatives are a function of another package (level 4), of the same package (3), of the same module (2) and of
the same class or module's top level (1). If a row lacks a level, its nearest coarser level is used. The held-out data
are whole packages, each searched separately, and functions of the training packages.
"""

import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L

from benchmarks.docstring_trials import MODEL, Workspace, fit, optimisation, score
from benchmarks.trials import Metrics, Scores, TrainingRecipe, Trial, run_recipes, sized
from embeddings.data import BlendedBatchSampler, CurriculumBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.data.samplers.curriculum import LevelOrder
from embeddings.losses import InfoNCE
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    LastTokenPooling,
    LatentAttentionPooling,
    MeanPooling,
    SelfAttentionPooling,
)
from embeddings.modules import MGHCurriculumModule

PoolingName = Literal["mean", "last", "latent", "self-attention", "anchor, key axis", "anchor, query axis"]
PAGES = ("held-out packages", "held-out functions")


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        backbone: A model directory, or a name.
        bidirectional: Whether a decoder's causal mask is disabled.
        pooling: The pooling. With a causal mask, "anchor, key axis" divides a token's weight by the number of queries
            that attend to it.
        order: The order of the levels, or None for no hard negatives.
        level: The level of the order `fixed`.
        temperature: Temperature of the loss.
    """

    backbone: str = MODEL
    bidirectional: bool = False
    pooling: PoolingName = "anchor, key axis"
    order: LevelOrder | None = "coarse_to_fine"
    level: int | None = None
    temperature: float = 0.05


def run(chosen: Namespace, experiment: str, recipes: Mapping[str, Recipe]) -> list[Scores]:
    """Train and score each recipe with each seed; arguments as in `run_recipes`."""
    recipes = sized(chosen, recipes)
    workspace = Workspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
    return run_recipes(chosen, experiment, recipes, run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, and score the model."""
    workspace, recipe = Workspace(work, tiny), Recipe(**trial.settings)  # type: ignore[arg-type]
    start = time.perf_counter()
    module, training = module_of(workspace, recipe, trial.seed), {}
    if recipe.num_steps:
        training = {"last training loss": train(workspace, recipe, trial.seed, module)}
        training["training seconds"] = time.perf_counter() - start
    module.embedder.text = recipe.text
    return {**score(workspace, module.embedder), **training}


def train(workspace: Workspace, recipe: Recipe, seed: int, module: MGHCurriculumModule) -> float:
    """Train a model by a recipe; returns the mean loss of its last ten steps."""
    losses = Losses()
    fit(workspace, module, data_of(recipe, workspace.training_file, seed), recipe.num_steps, [losses])
    return losses.last_mean


def data_of(recipe: Recipe, pairs: Path, seed: int) -> EmbeddingDataModule:
    """The batches of a recipe: the same rows in the same order for all recipes with the same seed."""
    source = SourceConfig("docstrings", str(pairs))
    if recipe.order is None:
        return EmbeddingDataModule([source], recipe.text, recipe.batch_size, 0, BlendedBatchSampler, seed=seed)
    sampler = partial(CurriculumBatchSampler, order=recipe.order, level=recipe.level, missing_level="coarser")
    return EmbeddingDataModule([source], recipe.text, recipe.batch_size, 1, sampler, seed=seed)


def module_of(workspace: Workspace, recipe: Recipe, seed: int) -> MGHCurriculumModule:
    """The model of a recipe before training."""
    return MGHCurriculumModule(
        BackboneConfig(
            workspace.model if recipe.backbone == MODEL else recipe.backbone, bidirectional=recipe.bidirectional
        ),
        pooling=pooling_of(recipe),
        loss=InfoNCE(temperature=recipe.temperature),
        **optimisation(recipe.learning_rate, recipe.num_steps),
        seed=seed,
    )


def pooling_of(recipe: Recipe) -> Any:
    """The class or function that makes the pooling of a recipe from the hidden size."""
    is_encoder = recipe.backbone == MODEL
    makers: dict[PoolingName, Any] = {
        "mean": MeanPooling,
        "last": LastTokenPooling,
        "latent": partial(LatentAttentionPooling, num_latents=64, num_heads=4),
        "self-attention": partial(SelfAttentionPooling, num_heads=4),
        "anchor, key axis": partial(AnchorTokenPooling, by_visible_queries=not (is_encoder or recipe.bidirectional)),
        "anchor, query axis": partial(AnchorTokenPooling, axis="query"),
    }
    return makers[recipe.pooling]


class Losses(L.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @property
    def last_mean(self) -> float:
        """The mean loss of the last ten steps."""
        return sum(self.values[-10:]) / len(self.values[-10:])

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))
