"""What the experiments share: the docstring corpus, its clusters, training and scoring.

All training starts from all-MiniLM-L6-v2, which is also the surrogate model for clusters and filters. The held-out data
are whole packages. Each package is a domain and is searched separately.
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
from benchmarks.workloads import data_folder, read_json_lines, small_embedder
from embeddings.callbacks import ExportModel, GradCacheCallback
from embeddings.cli.trainer import mixed_precision
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
# With near-copies, one in `COPY_STRIDE` pairs is used.
COPY_STRIDE = 4
CONTEXTS = ("matched", "foreign", "no")
OTHER_DOMAINS = ("cranfield",)
TINY_PACKAGES, TINY_HELD_OUT = ["click"], ["jinja2", "packaging"]
TINY_SIZES = {"validation_documents": 10, "validation_queries": 5, "in_domain_documents": 20, "in_domain_queries": 10}
TINY_SIZES |= {"held_out_documents": 30, "held_out_queries": 10}


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        contextual: Whether it is a contextual model; else a bi-encoder with the same backbone.
        cluster_size: Mean rows per cluster, or None for random batches.
        order: Order of the clusters when batches are filled.
        copies: Whether every training pair has a planted near-copy; only a quarter of the pairs is then used.
        filter_margin: Margin of the surrogate's false-negative filter, or None for no filter.
        warmup_steps: Steps on random batches before; all seeds and variants share the result.
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
    """A contextual recipe whose first stage learns word prediction before the contrastive steps and is then frozen.

    Args:
        word_steps: Additional steps of word prediction; with a warm-up, they are part of the warm-up.
    """

    word_steps: int = 60

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(super().tiny(), word_steps=1)

    @property
    def own_word_steps(self) -> int:
        """Word-prediction steps of this training: 0 if a warm-up has run them."""
        return 0 if self.warmup_steps else self.word_steps


def run(
    chosen: Namespace, experiment: str, recipes: Mapping[str, Recipe], others: Sequence[str] = OTHER_DOMAINS
) -> list[Scores]:
    """Train and score each recipe with each seed; arguments as in `run_recipes` and `score`."""
    recipes = sized(chosen, recipes)
    workspace = Workspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare(list(recipes.values()))
    return run_recipes(chosen, experiment, recipes, partial(run_trial, others=others))


def run_trial(trial: Trial, work: Path, tiny: bool, others: Sequence[str] = OTHER_DOMAINS) -> Metrics:
    """Train by the trial's recipe, and score the model."""
    recipe_class = WordsFirst if "word_steps" in trial.settings else Recipe
    workspace, recipe = Workspace(work, tiny), recipe_class(**trial.settings)  # type: ignore[arg-type]
    start = time.perf_counter()
    module = train(workspace, recipe, trial.seed)
    seconds = time.perf_counter() - start
    scores = score(workspace, module.embedder, others)
    return {**scores, "batch difficulty": batch_difficulty(workspace, recipe, trial.seed), "training seconds": seconds}


class Workspace:
    """The corpora and what is made from them, in a subfolder of the work folder; existing files are reused.

    Args:
        work: The work folder.
        tiny: Whether to use a corpus of three small packages and a small model.
    """

    def __init__(self, work: Path, tiny: bool) -> None:
        self.folder, self.tiny = (work / ("tiny" if tiny else "docstrings")).absolute(), tiny

    @property
    def model(self) -> str:
        """The model that training starts from: MiniLM; if tiny, a small model with random weights."""
        return str(self.folder / "model") if self.tiny else MODEL

    @property
    def training_file(self) -> Path:
        """The training pairs of the docstring corpus, with negatives of four levels by namespace."""
        return self.folder / "corpus" / "train.jsonl.gz"

    @property
    def evaluation_root(self) -> Path:
        """The folder of the corpus's evaluation folders."""
        return self.folder / "corpus" / "eval"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes that prepare it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def prepare(self, recipes: list[Recipe]) -> None:
        """Make what these recipes need, with all threads, before their trials run in parallel."""
        if self.tiny:
            prepare_docstrings(self.folder / "corpus", TINY_PACKAGES, TINY_HELD_OUT, sizes=TINY_SIZES)
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
        """The model directory that a recipe with a warm-up starts from; None without a warm-up."""
        if not recipe.warmup_steps:
            return None
        kind = "contextual" if recipe.contextual else "biencoder"
        words = f"-words-{recipe.word_steps}" if isinstance(recipe, WordsFirst) else ""
        size = f"-context-{recipe.num_context}" if recipe.contextual else ""
        return str(self.folder / f"start-{kind}-{recipe.warmup_steps}-{recipe.learning_rate}{words}{size}")

    def domains(self) -> dict[str, RetrievalFolder]:
        """The held-out packages, each as a separate corpus with its queries."""
        return split_by_package(read_retrieval_folder(self.evaluation_root / "held_out"))

    def in_domain(self) -> RetrievalFolder:
        """Held-out functions of the training packages."""
        return read_retrieval_folder(self.evaluation_root / "in_domain")

    def runs_folder(self, experiment: str) -> Path:
        """The folder of an experiment's runs."""
        return self.folder / "runs" / experiment

    def run_folder(self, trial: Trial) -> Path:
        """The folder with the metrics of a trial's run."""
        return self.runs_folder(trial.experiment) / f"{trial.variant.replace(' ', '_')}-seed{trial.seed}"

    def _pairs(self, copies: bool) -> Path:
        return self.folder / "with-copies.jsonl.gz" if copies else self.training_file

    def _plant_copies(self, copies: bool) -> None:
        if copies and not self._pairs(copies).exists():
            rows = read_json_lines(self.training_file)[::COPY_STRIDE]
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
            # The paper's setting, 100 iterations and the best of 3 runs, would take an hour for the small clusters.
            settings = ClusterSettings(cluster_size=recipe.cluster_size, num_iterations=20, num_runs=1)
            cluster_pairs(VectorFeatures(vectors), source, self.clusters(recipe), settings)

    def _warm_up(self, recipe: Recipe) -> None:
        start = self.start(recipe)
        if start is not None and not Path(start).exists():
            warmup = replace(
                recipe,
                cluster_size=None,
                copies=False,
                filter_margin=None,
                num_steps=recipe.warmup_steps,
                warmup_steps=0,
            )
            train(self, warmup, WARMUP_SEED, export=start)


def split_by_package(folder: RetrievalFolder) -> dict[str, RetrievalFolder]:
    """One folder per package; a document's package is the first part of its id."""
    packages = np.array([name.split(".")[0] for name in folder.document_ids])
    qrels = folder.qrels
    folders = {}
    for package in sorted(set(packages.tolist())):
        documents = np.flatnonzero(packages == package)
        is_own_J = np.isin(qrels.document_J, documents)
        queries = np.unique(qrels.query_J[is_own_J])
        folders[package] = RetrievalFolder(
            [folder.documents[row] for row in documents.tolist()],
            [folder.document_ids[row] for row in documents.tolist()],
            [folder.queries[row] for row in queries.tolist()],
            [folder.query_ids[row] for row in queries.tolist()],
            Qrels(
                np.searchsorted(queries, qrels.query_J[is_own_J]),
                np.searchsorted(documents, qrels.document_J[is_own_J]),
                qrels.relevance_J[is_own_J],
                len(queries),
                len(documents),
            ),
            0,
        )
    return folders


def near_copy(pair: dict[str, str]) -> dict[str, str]:
    """The pair as a vendored copy: with a prefix on the name, without the last line, and with a changed query."""
    lines = pair["positive"].splitlines()
    copied = [f"vendored.{lines[0]}", *lines[1 : max(2, len(lines) - 1)]]
    words = pair["query"].split()
    return {"query": " ".join(words[:-1] if len(words) > 3 else [*words, "again"]), "positive": "\n".join(copied)}


def train(workspace: Workspace, recipe: Recipe, seed: int, export: str | None = None) -> ContrastiveModule:
    """Train a model by a recipe, and write it as a model directory to `export` unless that is None."""
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
    """Train a model on the CPU by `mixed_precision` with GradCache, without progress output."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.Trainer(
        accelerator="cpu",
        precision=mixed_precision("cpu"),
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


def optimisation(learning_rate: float, num_steps: int) -> dict[str, Any]:
    """Arguments of a module: AdamW, and a schedule with 10 % warm-up steps and linear decay."""
    return {
        "optimizer": partial(torch.optim.AdamW, lr=learning_rate, weight_decay=0.01),
        "schedule": Schedule(warmup_steps=num_steps // 10, decay="linear"),
    }


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
    """The model of a recipe before training."""
    margin = recipe.filter_margin
    surrogate_filter = None if margin is None else SurrogateFilter(margin)
    options: dict[str, Any] = {
        "backbone": BackboneConfig(workspace.model),
        "loss": InfoNCE(temperature=0.05, false_negative_filter=surrogate_filter),
        **optimisation(recipe.learning_rate, recipe.num_steps),
        "initial_model": workspace.start(recipe),
        "seed": seed,
    }
    if recipe.contextual:
        if isinstance(recipe, WordsFirst):
            options["first_stage_training"] = FirstStageTraining(word_steps=recipe.own_word_steps, frozen_steps=None)
        return CDEModule(context=ContextSettings(num_context=recipe.num_context), **options)
    return NVEmbedModule(pooling=MeanPooling, **options)


def batch_difficulty(workspace: Workspace, recipe: Recipe, seed: int) -> float:
    """Fraction of the run's queries for which the surrogate ranks another document of the batch first."""
    data = data_of(workspace, recipe, seed)
    data.setup()
    plan: Any = data.sampler(data.mixture.sizes, recipe.batch_size, seed, [source.weight for source in data.sources])
    plan.identify(data.mixture.identities)
    source = workspace.source(recipe.copies)
    vectors = SurrogateVectors(str(source.surrogate_vectors), open_cached(source).key)
    missed = []
    for step in range(recipe.num_steps):
        rows = plan.global_batch(0, step).tolist()
        query_BS = np.stack([vectors.query(row) for row in rows])
        document_BS = np.stack([vectors.positives(row)[0] for row in rows])
        score_BB = query_BS @ document_BS.T
        missed.append((score_BB.argmax(axis=1) != np.arange(len(rows))).mean())
    return float(np.mean(missed))


def score(workspace: Workspace, embedder: Embedder, others: Sequence[str] = ()) -> Metrics:
    """nDCG@10 of a model; for a contextual model, with context documents of the corpus, of another one, and without.

    Args:
        workspace: The corpora.
        embedder: The model.
        others: Names of retrieval folders of EMBED_DATA that are searched too if they exist.
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
            # The foreign context of a package is the next package, that of another collection the first package.
            scores[f"{name}, {kind} context"] = _mean_over(encoder, folders, kind, foreign)
        scores[name] = scores[f"{name}, {'matched' if encoder.num_context else 'no'} context"]
    return scores


def other_domains(names: Sequence[str]) -> dict[str, RetrievalFolder]:
    """The retrieval folders of EMBED_DATA with these names, if they exist."""
    folders = {name: data_folder() / name for name in names}
    return {name: read_retrieval_folder(folder) for name, folder in folders.items() if folder.is_dir()}


def _mean_over(encoder: Encoder, folders: dict[str, RetrievalFolder], kind: str, foreign: list[str]) -> float:
    """nDCG@10 over the queries of all folders, each searched separately with a kind of context."""
    names = list(folders)
    total = 0.0
    for index, name in enumerate(names):
        next_name = names[(index + 1) % len(names)]
        sources = {
            "matched": folders[name].documents,
            "foreign": folders[next_name].documents if next_name != name else foreign,
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
