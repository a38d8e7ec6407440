"""What the experiments on contextual embeddings share: the docstring corpus, its clusters, training and scoring.

Everything starts from all-MiniLM-L6-v2, which also is the surrogate that clusters and filters. Held out are whole
packages, each searched separately: a package is a domain.
"""

import fcntl
import gzip
import json
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger

from benchmarks.trials import Metrics, Scores, TrainingRecipe, Trial, run_recipes, sized
from benchmarks.workloads import data_folder, small_embedder
from embeddings.callbacks import ExportModel, GradCacheCallback
from embeddings.common.io import atomic_path
from embeddings.data import BlendedBatchSampler, ClusteredBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.data.docstrings import prepare_docstrings
from embeddings.data.store import open_cached
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.evaluation import Qrels, RetrievalFolder, read_retrieval_folder, score_retrieval
from embeddings.inference import Context, Encoder, sample_context
from embeddings.losses import InfoNCE, SurrogateFilter
from embeddings.mining import ClusterSettings, VectorFeatures, cluster_pairs, encode_pairs
from embeddings.models import BackboneConfig, Embedder, MeanPooling, keep_layers
from embeddings.modules import CDEModule, ContextSettings, FirstStageTraining, NVEmbedModule
from embeddings.modules.base import ContrastiveModule
from embeddings.modules.cde import context_spread
from embeddings.training.optim import Schedule

MODEL = "all-MiniLM-L6-v2"
WARMUP_SEED = 1000
# Of so many pairs one is taken with its near-copy.
COPIED = 4
CONTEXTS = ("matched", "foreign", "no")
OTHER_DOMAINS = ("cranfield",)
TINY_PACKAGES, TINY_HELD_OUT = ["click"], ["jinja2", "packaging"]


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        contextual: Whether it is a contextual model, or a bi-encoder with the same backbone.
        cluster_size: Mean rows of a cluster, or None for random batches.
        order: How the clusters are laid end to end.
        copies: Whether every training pair has a planted near-copy; a quarter of the pairs is enough for it.
        filter_margin: Margin of the surrogate's filter of false negatives, or None for no filter.
        warmup_steps: Steps on random batches before, the same model for all seeds and variants.
        num_context: Context documents.
    """

    contextual: bool = False
    cluster_size: int | None = None
    order: Literal["nearest", "random"] = "nearest"
    copies: bool = False
    filter_margin: float | None = None
    warmup_steps: int = 0
    num_context: int = 32

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(
            super().tiny(),
            num_steps=1,
            cluster_size=None if self.cluster_size is None else 4,
            warmup_steps=min(self.warmup_steps, 1),
            num_context=2,
        )


@dataclass(frozen=True)
class WordsFirst(Recipe):
    """A contextual recipe whose first stage learns words before its first contrastive step, and is frozen from then on.

    Args:
        word_steps: Steps of word prediction, beside the others; the warm-up has them where there is one.
    """

    word_steps: int = 60

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(super().tiny(), word_steps=1)

    @property
    def own_word_steps(self) -> int:
        """The steps of word prediction of this training: none behind a warm-up."""
        return 0 if self.warmup_steps else self.word_steps


def run(
    chosen: Namespace, experiment: str, recipes: Mapping[str, Recipe], others: Sequence[str] = OTHER_DOMAINS
) -> list[Scores]:
    """Train and score by each recipe with each seed; arguments as of `run_recipes` and `score`."""
    recipes = sized(chosen, recipes)
    workspace = Workspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare(list(recipes.values()))
    return run_recipes(chosen, experiment, recipes, partial(run_trial, others=others))


def run_trial(trial: Trial, work: Path, tiny: bool, others: Sequence[str] = OTHER_DOMAINS) -> Metrics:
    """Train by the trial's recipe, and score the model."""
    kind = WordsFirst if "word_steps" in trial.settings else Recipe
    workspace, recipe = Workspace(work, tiny), kind(**trial.settings)  # type: ignore[arg-type]
    start = time.perf_counter()
    module = train(workspace, recipe, trial.seed)
    seconds = time.perf_counter() - start
    scores = score(workspace, module.embedder, others)
    return {**scores, "batch difficulty": batch_difficulty(workspace, recipe, trial.seed), "training seconds": seconds}


class Workspace:
    """The corpora in a folder of work; what is there already is kept.

    Args:
        work: The folder.
        tiny: Whether to take two small packages.
    """

    def __init__(self, work: Path, tiny: bool) -> None:
        self.folder, self.tiny = (work / ("tiny" if tiny else "docstrings")).absolute(), tiny

    @property
    def model(self) -> str:
        """What everything starts from; a small stand-in with random weights where tiny."""
        return str(self.folder / "model") if self.tiny else MODEL

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process makes anything in the folder, and keep others out meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def prepare(self, recipes: list[Recipe]) -> None:
        """Make what these recipes need, with all threads, before their trials run side by side."""
        if self.tiny:
            prepare_docstrings(self.folder / "corpus", TINY_PACKAGES, TINY_HELD_OUT, 0, 10, 5, 20, 10, 30, 10)
            if not Path(self.model).exists():
                small_embedder().save_pretrained(self.model)
        else:
            prepare_docstrings(self.folder / "corpus")
        for recipe in recipes:
            self._plant_copies(recipe.copies)
            self._cluster(recipe)
            self._warm_up(recipe)

    def source(self, copies: bool) -> SourceConfig:
        """The training pairs, with their surrogate vectors."""
        vectors = str(self.folder / f"vectors-{_kind(copies)}")
        return SourceConfig("docstrings", str(self._pairs(copies)), surrogate_vectors=vectors)

    def clusters(self, recipe: Recipe) -> Path:
        """The folder of a recipe's clusters."""
        return self.folder / f"clusters-{_kind(recipe.copies)}-{recipe.cluster_size}"

    def start(self, recipe: Recipe) -> str | None:
        """The model directory that a recipe starts from, or None for MiniLM itself."""
        if not recipe.warmup_steps:
            return None
        kind = "contextual" if recipe.contextual else "biencoder"
        words = f"-words-{recipe.word_steps}" if isinstance(recipe, WordsFirst) else ""
        size = f"-context-{recipe.num_context}" if recipe.contextual else ""
        return str(self.folder / f"start-{kind}-{recipe.warmup_steps}-{recipe.learning_rate}{words}{size}")

    def domains(self) -> dict[str, RetrievalFolder]:
        """The held-out packages, each a corpus of its own with its queries."""
        return split_by_package(read_retrieval_folder(self.folder / "corpus" / "eval" / "held_out"))

    def in_domain(self) -> RetrievalFolder:
        """Held-out functions of the training packages."""
        return read_retrieval_folder(self.folder / "corpus" / "eval" / "in_domain")

    def runs_folder(self, experiment: str) -> Path:
        """The folder of an experiment's runs."""
        return self.folder / "runs" / experiment

    def run_folder(self, trial: Trial) -> Path:
        """The folder with the metrics of a trial's run."""
        return self.runs_folder(trial.experiment) / f"{trial.variant.replace(' ', '_')}-seed{trial.seed}"

    def _pairs(self, copies: bool) -> Path:
        return self.folder / "corpus" / "train.jsonl.gz" if not copies else self.folder / "with-copies.jsonl.gz"

    def _plant_copies(self, copies: bool) -> None:
        if copies and not self._pairs(copies).exists():
            with gzip.open(self._pairs(False), "rt", encoding="utf-8") as file:
                rows = [json.loads(line) for line in file][::COPIED]
            with atomic_path(self._pairs(copies)) as temporary, gzip.open(temporary, "wt", encoding="utf-8") as file:
                for row in rows:
                    pair = {"query": row["query"], "positive": row["positive"]}
                    file.write(f"{json.dumps(pair)}\n{json.dumps(near_copy(pair))}\n")

    def _cluster(self, recipe: Recipe) -> None:
        source = open_cached(self.source(recipe.copies))
        embedder = Embedder.from_pretrained(self.model)
        embedder.text = recipe.text
        encoder = Encoder(embedder, show_progress=not self.tiny)
        vectors = encode_pairs(encoder, source, self.folder / f"vectors-{_kind(recipe.copies)}")
        if recipe.cluster_size is not None:
            # The paper's 100 iterations, best of 3, would take an hour here for the small clusters.
            settings = ClusterSettings(cluster_size=recipe.cluster_size, num_iterations=20, num_runs=1)
            cluster_pairs(VectorFeatures(vectors), source, self.clusters(recipe), settings)

    def _warm_up(self, recipe: Recipe) -> None:
        start = self.start(recipe)
        if start is not None and not Path(start).exists():
            before = replace(
                recipe,
                cluster_size=None,
                copies=False,
                filter_margin=None,
                num_steps=recipe.warmup_steps,
                warmup_steps=0,
            )
            train(self, before, WARMUP_SEED, export=start)


def split_by_package(folder: RetrievalFolder) -> dict[str, RetrievalFolder]:
    """One folder for each package, a document's package being the first part of its id."""
    packages = np.array([name.split(".")[0] for name in folder.document_ids])
    judged = folder.qrels
    found = {}
    for package in sorted(set(packages.tolist())):
        documents = np.flatnonzero(packages == package)
        is_own_J = np.isin(judged.document_J, documents)
        queries = np.unique(judged.query_J[is_own_J])
        found[package] = RetrievalFolder(
            [folder.documents[row] for row in documents.tolist()],
            [folder.document_ids[row] for row in documents.tolist()],
            [folder.queries[row] for row in queries.tolist()],
            [folder.query_ids[row] for row in queries.tolist()],
            Qrels(
                np.searchsorted(queries, judged.query_J[is_own_J]),
                np.searchsorted(documents, judged.document_J[is_own_J]),
                judged.relevance_J[is_own_J],
                len(queries),
                len(documents),
            ),
            0,
        )
    return found


def near_copy(pair: dict[str, str]) -> dict[str, str]:
    """The pair as a vendored copy would have it: another name of the package, a line less, a word of the query less."""
    lines = pair["positive"].splitlines()
    kept = [f"vendored.{lines[0]}", *lines[1 : max(2, len(lines) - 1)]]
    words = pair["query"].split()
    return {"query": " ".join(words[:-1] if len(words) > 3 else [*words, "again"]), "positive": "\n".join(kept)}


def train(workspace: Workspace, recipe: Recipe, seed: int, export: str | None = None) -> ContrastiveModule:
    """Train a model by a recipe; with `export` it is written there as a model directory."""
    module = module_of(workspace, recipe, seed)
    callbacks = [] if export is None else [ExportModel(export)]
    num_steps = recipe.num_steps + (recipe.own_word_steps if isinstance(recipe, WordsFirst) else 0)
    fit(workspace, module, data_of(workspace, recipe, seed), num_steps, callbacks)
    return module


def fit(
    workspace: Workspace,
    module: ContrastiveModule,
    data: EmbeddingDataModule,
    num_steps: int,
    callbacks: Sequence[L.Callback] = (),
    logger: Logger | None = None,
) -> None:
    """Train a model for some steps, in bfloat16 and with GradCache, quietly."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[GradCacheCallback(mini_batch_tokens=1024 if not workspace.tiny else 256, kept_gib=4), *callbacks],
        logger=logger or False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=workspace.folder,
    ).fit(module, data)


def save_layers(model: str | Path, num_layers: int, folder: str | Path) -> None:
    """Write a model with only `num_layers` of another model's layers, unless the folder exists."""
    if Path(folder).exists():
        return
    embedder = Embedder.from_pretrained(model)
    # The model of a tiny run has only two layers.
    keep_layers(embedder.backbone, min(num_layers, embedder.backbone.config.num_hidden_layers))  # type: ignore[arg-type, union-attr]
    embedder.save_pretrained(folder)


def data_of(workspace: Workspace, recipe: Recipe, seed: int) -> EmbeddingDataModule:
    """The batches of a recipe."""
    if recipe.cluster_size is None:
        sampler: Any = partial(BlendedBatchSampler)
    else:
        folder = {"docstrings": str(workspace.clusters(recipe))}
        sampler = partial(ClusteredBatchSampler, clusters=folder, order=recipe.order)
    return EmbeddingDataModule([workspace.source(recipe.copies)], recipe.text, recipe.batch_size, 0, sampler, seed=seed)


def module_of(workspace: Workspace, recipe: Recipe, seed: int) -> ContrastiveModule:
    """The model of a recipe, untrained."""
    margin = recipe.filter_margin
    rule = None if margin is None else SurrogateFilter(margin)
    options: dict[str, Any] = {
        "backbone": BackboneConfig(workspace.model),
        "loss": InfoNCE(temperature=0.05, false_negative_filter=rule),
        "optimizer": partial(torch.optim.AdamW, lr=recipe.learning_rate, weight_decay=0.01),
        "schedule": Schedule(warmup_steps=recipe.num_steps // 10, decay="linear"),
        "initial_model": workspace.start(recipe),
        "seed": seed,
    }
    if recipe.contextual:
        if isinstance(recipe, WordsFirst):
            options["first_stage_training"] = FirstStageTraining(word_steps=recipe.own_word_steps, frozen_steps=None)
        return CDEModule(context=ContextSettings(num_context=recipe.num_context), **options)
    return NVEmbedModule(pooling=MeanPooling, **options)


def batch_difficulty(workspace: Workspace, recipe: Recipe, seed: int) -> float:
    """Share of queries in the run's batches for which the surrogate puts another document of the batch first."""
    data = data_of(workspace, recipe, seed)
    data.setup()
    plan: Any = data.sampler(data.mixture.sizes, recipe.batch_size, seed, [source.weight for source in data.sources])
    plan.identify(data.mixture.identities)
    source = workspace.source(recipe.copies)
    vectors = SurrogateVectors(str(source.surrogate_vectors), open_cached(source).folder.name)
    missed = []
    for step in range(recipe.num_steps):
        rows = plan.global_batch(0, step)[0].tolist()
        query_BS = np.stack([vectors.query(row) for row in rows])
        document_BS = np.stack([vectors.positives(row)[0] for row in rows])
        score_BB = query_BS @ document_BS.T
        missed.append((score_BB.argmax(axis=1) != np.arange(len(rows))).mean())
    return float(np.mean(missed))


def score(workspace: Workspace, embedder: Embedder, others: Sequence[str] = ()) -> Metrics:
    """nDCG@10 of a model, where it is contextual behind documents of the corpus, of another one, and behind none.

    Args:
        workspace: The corpora.
        embedder: The model.
        others: Collections of other kinds that are searched too, where the folder EMBED_DATA holds them.
    """
    encoder = Encoder(embedder)
    packages, functions = workspace.domains(), workspace.in_domain()
    scores = {"held-out functions": _ndcg(encoder, functions, functions.documents)}
    if encoder.num_context:
        vector_MH = sample_context(encoder, functions.documents, seed=0).vector_MH
        scores["context spread"] = float(context_spread(torch.from_numpy(vector_MH)))
    sets = {"held-out packages": packages}
    if not workspace.tiny:
        sets |= {name: {name: folder} for name, folder in other_domains(others).items()}
    foreign = next(iter(packages.values())).documents
    for name, folders in sets.items():
        for kind in CONTEXTS if encoder.num_context else ("no",):
            # A package's foreign context is of the next package, another collection's of a package.
            scores[f"{name}, {kind} context"] = _mean_over(encoder, folders, kind, foreign)
        scores[name] = scores[f"{name}, {'matched' if encoder.num_context else 'no'} context"]
    return scores


def other_domains(names: Sequence[str]) -> dict[str, RetrievalFolder]:
    """Real collections of other kinds, where the folder EMBED_DATA holds them."""
    folders = {name: data_folder() / name for name in names}
    return {name: read_retrieval_folder(folder) for name, folder in folders.items() if folder.is_dir()}


def _mean_over(encoder: Encoder, folders: dict[str, RetrievalFolder], kind: str, foreign: list[str]) -> float:
    """nDCG@10 over the queries of all folders, each searched behind its context."""
    names = list(folders)
    total = 0.0
    for place, name in enumerate(names):
        following = names[(place + 1) % len(names)]
        sources = {
            "matched": folders[name].documents,
            "foreign": folders[following].documents if following != name else foreign,
            "no": None,
        }
        total += _ndcg(encoder, folders[name], sources[kind]) * len(folders[name].queries)
    return total / sum(len(folder.queries) for folder in folders.values())


def _ndcg(encoder: Encoder, folder: RetrievalFolder, documents: list[str] | None) -> float:
    context: Context | None = None
    if encoder.num_context and documents is not None:
        context = sample_context(encoder, documents, seed=0)
    return score_retrieval(encoder, folder, context=context).metrics["ndcg_at_10"]


def _kind(copies: bool) -> str:
    return "copies" if copies else "plain"
