"""What the experiments on a pretrained decoder share: training SmolLM2-135M with LoRA, and scoring.

`lightning_configs/own_pairs_decoder.yaml` says how to install the decoder. A tiny run needs no package: a small
decoder with random weights trains on invented pairs. Each trial keeps the score of every query in the work folder, for
intervals of differences over the same queries.
"""

import fcntl
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
import numpy.typing as npt

from benchmarks.decoder_data import (
    RETRIEVAL,
    SENTENCES,
    SIMILARITY,
    TESTS,
    Floats,
    HeldOut,
    Records,
    item_scores,
    metrics_of,
    split,
)
from benchmarks.docstring_trials import MODEL, optimisation
from benchmarks.harness import Ratio, record
from benchmarks.mgh_trials import Losses
from benchmarks.trials import Metrics, Scores, TrainingRecipe, Trial, replaced
from benchmarks.workloads import read_json_lines, small_embedder
from embeddings.callbacks import ExportLanguageModel, ExportModel
from embeddings.cli.main import main as command_line
from embeddings.cli.trainer import mixed_precision
from embeddings.common import TextSettings
from embeddings.common.io import atomic_path, write_text
from embeddings.data import BlendedBatchSampler, CurriculumBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.data.samplers.curriculum import LevelOrder
from embeddings.data.text_datamodule import TextDataModule, TextSource
from embeddings.evaluation import paired_bootstrap
from embeddings.evaluation.bootstrap import Difference, bootstrap
from embeddings.evaluation.folders import spearman
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    Embedder,
    FromScratch,
    LanguageModel,
    LastTokenPooling,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
)
from embeddings.models.language_model import load_language_model
from embeddings.modules import MaskedLMModule, NVEmbedModule
from embeddings.modules.masked_lm import Masking

DECODER = "SmolLM2-135M"
LORA = LoraSettings(rank=16, alpha=32, dropout=0.0)
# Masked next-token prediction: rows of tokens, tokens per row, share of masked tokens, learning rate.
MNTP_ROWS, MNTP_LENGTH, MNTP_SHARE, MNTP_RATE = 16, 64, 0.2, 5e-4
NUM_SETS = len(RETRIEVAL) + 1
TINY_DECODER: dict[str, bool | int | float | str | None] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        backbone: The name of a model.
        query_length: Maximum tokens of a query, in training and scoring.
        bidirectional: Whether the decoder's causal mask is removed.
        pooling: The pooling; with `last`, texts end with the end-of-sequence token.
        mntp_steps: Steps of masked next-token prediction that precede, with the mask removed.
        temperature: Temperature of the loss.
        num_pairs: Training pairs.
        negatives: Hard negatives per pair; kept rows have False and True for 0 and 1. MiniLM mines those of the
            retrieval sets; a pair of sentences has one.
        in_batch: Whether documents of other pairs are negatives; with two stages, in the second one.
        first_steps: How many of the steps are a first stage on the retrieval sets alone, with in-batch negatives.
    """

    num_steps: int = 40
    max_length: int = 32
    learning_rate: float = 5e-4
    backbone: str = DECODER
    query_length: int = 24
    bidirectional: bool = False
    pooling: Literal["last", "mean", "latent", "anchor"] = "mean"
    mntp_steps: int = 0
    temperature: float = 0.05
    num_pairs: int = 1280
    negatives: int = False
    in_batch: bool = True
    first_steps: int = 0

    @property
    def text(self) -> TextSettings:
        """The maximum text lengths as text settings."""
        return TextSettings(self.query_length, self.max_length, append_eos=self.pooling == "last")

    @property
    def mining(self) -> tuple[str, ...]:
        """Options of `mine` for the negatives of the training pairs; empty for none."""
        return ("--num-negatives", str(int(self.negatives))) if self.negatives else ()

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        steps = {"mntp_steps": min(1, self.mntp_steps), "first_steps": min(1, self.first_steps)}
        return replace(super().tiny(), query_length=12, num_pairs=40, **steps)


@dataclass(frozen=True)
class LevelsRecipe(Recipe):
    """A recipe on the retrieval sets alone, with mined negatives of four levels.

    Args:
        order: The order of the levels, or None for no hard negatives.
    """

    order: LevelOrder | None = None

    @property
    def mining(self) -> tuple[str, ...]:
        """Options of `mine` for the negatives of the training pairs."""
        return ("--levels", "quantiles", "--num-negatives", "4")


@dataclass(frozen=True)
class StagesRecipe(Recipe):
    """A recipe of two stages whose second one has its own learning rate.

    Args:
        second_rate: Learning rate of the second stage.
    """

    second_rate: float = 5e-4


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, score the model, and keep the score of each query."""
    # A recipe's key depends on its fields, so that new ones are in classes of their own.
    classes: dict[str, type[Recipe]] = {"order": LevelsRecipe, "second_rate": StagesRecipe}
    recipe_class = next((kind for name, kind in classes.items() if name in trial.settings), Recipe)
    workspace, recipe = Workspace(work, tiny), recipe_class(**trial.settings)  # type: ignore[arg-type]
    # What later trials share is not counted in this one's seconds.
    workspace.prepare(recipe)
    start, losses, training = time.process_time(), Losses(), {}
    embedder = train(workspace, recipe, trial.seed, losses, f"{trial.variant}, seed {trial.seed}")
    if recipe.num_steps:
        training = {"last training loss": losses.last_mean, "training CPU seconds": time.process_time() - start}
    embedder.text = recipe.text
    held_out = HeldOut.load(tiny)
    scores = item_scores(Encoder(embedder), held_out)
    workspace.keep(trial, scores)
    training |= workspace.mntp_losses(recipe)
    return {**metrics_of(scores, held_out), **training, "CPU seconds": time.process_time() - start}


class Workspace:
    """The pairs, decoders and scores, in a subfolder of the work folder; existing files are reused.

    Args:
        work: The work folder.
        tiny: Whether to use invented pairs and small models.
    """

    def __init__(self, work: Path, tiny: bool) -> None:
        self.folder, self.tiny = (work / ("tiny" if tiny else "") / "decoder").absolute(), tiny

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes that prepare it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def model(self, name: str) -> str:
        """The model of a name; if tiny, a small one with random weights."""
        if not self.tiny:
            return name
        folder = self.folder / name
        if not folder.is_dir() and name == DECODER:
            model, tokenizer = load_language_model(FromScratch(MODEL, settings=TINY_DECODER), "causal")
            tokenizer.eos_token = tokenizer.sep_token
            LanguageModel(model, tokenizer, causal=True).save_pretrained(folder)
        elif not folder.is_dir():
            small_embedder().save_pretrained(folder)
        return str(folder)

    def prepare(self, recipe: Recipe) -> None:
        """Make what a recipe needs."""
        self.backbone(recipe)
        if recipe.num_steps:
            self.pairs(recipe)

    def backbone(self, recipe: Recipe) -> BackboneConfig:
        """The backbone of a recipe; it is adapted by masked next-token prediction if no earlier trial did that."""
        name = self.model(recipe.backbone)
        if recipe.mntp_steps:
            folder, pairs = self.adapted(recipe), self.pairs(Recipe(num_pairs=recipe.num_pairs))
            with self.locked():
                if not folder.is_dir():
                    adapt(self, name, recipe.mntp_steps, pairs, folder)
            name = str(folder)
        is_decoder = recipe.backbone == DECODER
        return BackboneConfig(
            name, bidirectional=recipe.bidirectional, dtype=decoder_dtype() if is_decoder else "float32"
        )

    def adapted(self, recipe: Recipe) -> Path:
        """The directory of the decoder after masked next-token prediction."""
        return self.folder / f"mntp-{recipe.mntp_steps}-{recipe.num_pairs}"

    def mntp_losses(self, recipe: Recipe) -> Metrics:
        """The mean losses of the first and the last ten steps of masked next-token prediction; empty without them."""
        if not recipe.mntp_steps:
            return {}
        path = self.adapted(recipe).with_name(f"{self.adapted(recipe).name}.json")
        losses: Metrics = json.loads(path.read_text(encoding="utf-8"))
        return losses

    def pairs(self, recipe: Recipe, retrieval_only: bool = False) -> Path:
        """The file of a recipe's training pairs, or of those of the retrieval sets."""
        retrieval_only |= isinstance(recipe, LevelsRecipe)
        mined = "mined" if recipe.negatives == 1 else f"mined{recipe.negatives}"
        kind = "levels" if "--levels" in recipe.mining else mined if recipe.mining else "pairs"
        path = self.folder / f"{kind}-{recipe.num_pairs}{'-retrieval' if retrieval_only else ''}.jsonl"
        with self.locked():
            if not path.exists():
                number = recipe.num_pairs // NUM_SETS
                rows = [row for name in RETRIEVAL for row in split(name, self.tiny)[0][:number]]
                rows = self._mined(rows, path, recipe.mining) if recipe.mining else rows
                if not retrieval_only:
                    rows += split(SENTENCES, self.tiny)[0][:number]
                keys = ("query", "positive", *(("negatives",) if recipe.mining else ()))
                write_lines(path, [{key: row[key] for key in keys} for row in rows])
        return path

    def _mined(self, rows: Records, path: Path, options: Sequence[str]) -> Records:
        """The records with negatives that MiniLM finds; those without any are left out."""
        source, mined = (path.with_name(f"{kind}-{path.name}") for kind in ("to-mine", "output"))
        write_lines(source, [{key: row[key] for key in ("query", "positive")} for row in rows])
        words = ["mine", "--model", self.model(MODEL), "--input", str(source), "--output", str(mined), *options]
        # Random weights give all documents of a tiny run nearly the same score.
        words += ["--margin", "null"] if self.tiny else []
        if not mined.exists() and command_line(words):
            raise RuntimeError(f"{source}: mining failed")
        return [row for row in read_json_lines(mined) if row["negatives"]]

    def keep(self, trial: Trial, scores: Mapping[str, Floats]) -> None:
        """Write the score of each query of a trial."""
        path = self.scores_file(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **scores)  # type: ignore[arg-type]

    def scores_file(self, trial: Trial) -> Path:
        """The file with the score of each query of a trial."""
        return self.folder / "scores" / f"{trial.key}-{trial.seed}.npz"


def compare(
    chosen: Namespace, scores: Sequence[Scores], trials: Sequence[Trial], gains: Sequence[tuple[str, str]]
) -> None:
    """Record the differences between pairs of finished variants, with intervals over the queries."""
    workspace, done = Workspace(chosen.work, chosen.tiny), {score.variant for score in scores}
    held_out = HeldOut.load(chosen.tiny)
    for better, than in gains:
        if not {better, than} <= done:
            continue
        files = [[workspace.scores_file(each) for each in trials if each.variant == name] for name in (better, than)]
        if not all(path.is_file() for path in (*files[0], *files[1])):
            continue
        ours, theirs = ([dict(np.load(path)) for path in paths] for paths in files)
        for name in (*TESTS, SIMILARITY):
            if name == SIMILARITY:
                gain = spearman_gain(
                    *(np.stack([each[name] for each in kept]) for kept in (ours, theirs)),
                    held_out.similarity_N,
                    num_resamples=20 if chosen.tiny else 2000,
                )
            else:
                gain = paired_bootstrap(*(np.mean([each[name] for each in kept], axis=0) for kept in (ours, theirs)))
            row = Ratio(*gain, float("nan"))
            record(
                replaced(chosen, threads=1),
                f"{trials[0].experiment} gain on {name}, {better} over {than}",
                row,
                "score",
                "none",
            )


def spearman_gain(score_SN: Floats, baseline_SN: Floats, similarity_N: Floats, num_resamples: int) -> Difference:
    """The difference of the correlations, means over S seeds, and its 95 % interval over resampled pairs of texts."""

    def gain(drawn_N: npt.NDArray[np.int64]) -> float:
        means = [
            np.mean([spearman(each_N[drawn_N], similarity_N[drawn_N]) for each_N in each_SN])
            for each_SN in (score_SN, baseline_SN)
        ]
        return float(means[0] - means[1])

    return bootstrap(gain, len(similarity_N), num_resamples)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records as JSON Lines."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def decoder_dtype() -> Literal["bfloat16", "float32"]:
    """The dtype of the decoder's frozen weights: float32 on a CPU that would emulate bfloat16."""
    return "bfloat16" if mixed_precision("cpu") == "bf16-mixed" else "float32"


def adapt(workspace: Workspace, model: str, num_steps: int, pairs: Path, output: Path) -> None:
    """Remove a decoder's causal mask, train it to predict masked tokens of the positives of pairs, and write it."""
    losses = Losses()
    module = MaskedLMModule(
        "mntp",
        BackboneConfig(model, bidirectional=True, dtype=decoder_dtype()),
        masking=Masking(MNTP_SHARE, 1.0, 0.0, mask_token="a" if workspace.tiny else "_"),
        lora=LORA,
        separate_documents=True,
        **optimisation(MNTP_RATE, num_steps),
        seed=0,
    )
    source = TextSource("positives", str(pairs), column="positive")
    data = TextDataModule([source], row_length=16 if workspace.tiny else MNTP_LENGTH, batch_size=MNTP_ROWS, seed=0)
    fit(
        workspace,
        module,
        data,
        num_steps,
        [losses, Pace(losses, f"{num_steps} steps of MNTP"), ExportLanguageModel(str(output))],
    )
    means = {
        name: sum(values) / len(values)
        for name, values in (("first", losses.values[:10]), ("last", losses.values[-10:]))
    }
    write_text(
        output.with_name(f"{output.name}.json"),
        json.dumps({f"MNTP loss, {name} ten steps": mean for name, mean in means.items()}),
    )


def train(workspace: Workspace, recipe: Recipe, seed: int, losses: Losses, title: str) -> Embedder:
    """Train a model by a recipe, in one stage or two."""
    backbone, initial = workspace.backbone(recipe), None
    last_rate = recipe.second_rate if isinstance(recipe, StagesRecipe) else recipe.learning_rate
    stages = [(recipe.num_steps - recipe.first_steps, recipe.in_batch, False, last_rate)]
    if recipe.first_steps:
        stages.insert(0, (recipe.first_steps, True, True, recipe.learning_rate))
    for number, (num_steps, in_batch, retrieval_only, learning_rate) in enumerate(stages, 1):
        module = NVEmbedModule(
            backbone,
            pooling_of(recipe),
            LORA if recipe.backbone == DECODER and recipe.num_steps else None,
            InfoNCE(temperature=recipe.temperature, in_batch_negatives="on" if in_batch else "off"),
            **optimisation(learning_rate, num_steps),
            initial_model=initial,
            seed=seed,
        )
        if not num_steps:
            break
        data = data_of(recipe, workspace.pairs(recipe, retrieval_only), seed)
        callbacks: list[L.Callback] = [losses, Pace(losses, title)]
        if number < len(stages):
            initial = str(workspace.folder / "first-stage" / f"{title}".replace(" ", "-"))
            callbacks.append(ExportModel(initial, replace=True))
        fit(workspace, module, data, num_steps, callbacks)
    return module.embedder


def data_of(recipe: Recipe, pairs: Path, seed: int) -> EmbeddingDataModule:
    """The batches of a recipe from a file of pairs."""
    order, sampler = recipe.order if isinstance(recipe, LevelsRecipe) else None, BlendedBatchSampler
    if order is not None:
        sampler = partial(CurriculumBatchSampler, order=order, missing_level="coarser")  # type: ignore[assignment]
    num_negatives = int(recipe.negatives or order is not None)
    source = SourceConfig("pairs", str(pairs))
    return EmbeddingDataModule([source], recipe.text, recipe.batch_size, num_negatives, sampler, seed=seed)


def pooling_of(recipe: Recipe) -> Any:
    """The class or function that makes the pooling of a recipe from the hidden size."""
    makers = {
        "last": LastTokenPooling,
        "mean": MeanPooling,
        "latent": partial(LatentAttentionPooling, num_latents=64, num_heads=4, zero_init_residual=True),
        # Under a causal mask, early tokens are seen by more queries.
        "anchor": partial(AnchorTokenPooling, by_visible_queries=not recipe.bidirectional),
    }
    return makers[recipe.pooling]


def fit(
    workspace: Workspace,
    module: L.LightningModule,
    data: L.LightningDataModule,
    num_steps: int,
    callbacks: Sequence[L.Callback],
) -> None:
    """Train a model on the CPU by `mixed_precision`, without progress bars; whole batches fit into memory."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.Trainer(
        accelerator="cpu",
        precision=mixed_precision("cpu"),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=list(callbacks),
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=workspace.folder,
    ).fit(module, data)


class Pace(L.Callback):
    """Prints step, loss and time left every tenth step."""

    def __init__(self, losses: Losses, title: str) -> None:
        self.losses, self.title, self.start = losses, title, time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        done, total = trainer.global_step, trainer.max_steps
        if done % 10 == 0 or done == total:
            left = (time.monotonic() - self.start) / done * (total - done)
            print(
                f"{self.title}: step {done} of {total}, loss {self.losses.values[-1]:.2f}, {left:.0f} s left",
                flush=True,
            )
