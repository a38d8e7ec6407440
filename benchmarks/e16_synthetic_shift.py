"""E16: does a contextual model learn which words are ubiquitous in a corpus? Synthetic domains, against a bi-encoder.

Each domain draws 8 of 60 words as its ubiquitous words. A document has four of the other words and four ubiquitous
ones. A query has two of its document's other words and three ubiquitous ones. Which words distinguish documents
therefore depends on the domain, and a single text does not show it. Models have two layers, width 64 and random initial
weights. They train on a new domain in every step and are scored on 20 unseen domains: with 16 context documents of the
domain, with 16 of another domain, and without context.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning as L
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

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
from embeddings.common import ContrastiveBatch
from embeddings.common.random import derive_seed
from embeddings.data.records import Example
from embeddings.data.tokenize import ContrastiveCollator, TextTokenizer
from embeddings.evaluation import Qrels, RetrievalFolder, score_retrieval
from embeddings.inference import Encoder, sample_context
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, Embedder, MeanPooling
from embeddings.modules import CDEModule, ContextSettings, FirstStageTraining, NVEmbedModule
from embeddings.modules.base import ContrastiveModule
from embeddings.training.optim import Schedule

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
NUM_UBIQUITOUS, WIDTH = 8, 64
NUM_DOMAINS, DOCUMENTS_OF_A_DOMAIN = 20, 60
CONTEXTS = ("matched", "foreign", "no")
# One minus the cosine: between two context vectors, and between a text's vectors with two contexts.
CONTEXT_EFFECT = ("context spread", "context sensitivity")


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        contextual: Whether it is a contextual model; else a bi-encoder with the second stage's architecture.
        first_stage: Arguments of `FirstStageTraining`.
        num_context: Context documents.
        warmup_steps: Warm-up steps of the schedule.
    """

    num_steps: int = 3000
    batch_size: int = 24
    max_length: int = 16
    learning_rate: float = 2e-3
    contextual: bool = False
    first_stage: Mapping[str, Any] = field(default_factory=dict)
    num_context: int = 16
    warmup_steps: int = 100

    def tiny(self) -> Self:
        """The recipe with two contrastive steps."""
        words = {"word_steps": 1} if self.first_stage else {}
        return replace(
            self, num_steps=2, batch_size=4, num_context=3, warmup_steps=0, first_stage={**self.first_stage, **words}
        )


WORDS_FIRST = {"word_steps": 1600, "frozen_steps": None}
RECIPES = {
    "bi-encoder": Recipe(),
    "contextual, first stage on words, then frozen": Recipe(contextual=True, first_stage=WORDS_FIRST),
    "contextual, as in the paper": Recipe(contextual=True),
}


class Shift(Dataset[ContrastiveBatch]):
    """One batch per step, each from a new domain."""

    def __init__(self, collate: ContrastiveCollator, num_steps: int, batch_size: int, seed: int) -> None:
        self.collate, self.num_steps, self.batch_size, self.seed = collate, num_steps, batch_size, seed

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> ContrastiveBatch:
        pairs = domain(derive_seed(self.seed, "domain", step), self.batch_size)
        rows = [Example(row, row, 0, query, (document,)) for row, (query, document) in enumerate(pairs)]
        return self.collate(rows)


def domain(seed: int, num_documents: int) -> list[tuple[str, str]]:
    """The pairs of query and document of a new domain."""
    generator = np.random.default_rng(seed)
    ubiquitous = generator.choice(len(WORDS), NUM_UBIQUITOUS, replace=False)
    others = np.setdiff1d(np.arange(len(WORDS)), ubiquitous)
    pairs = []
    for _ in range(num_documents):
        own = generator.choice(others, 4, replace=False)
        document = np.concatenate([own, generator.choice(ubiquitous, 4, replace=False)])
        query = np.concatenate(
            [generator.choice(own, 2, replace=False), generator.choice(ubiquitous, 3, replace=False)]
        )
        pairs.append((_text(generator.permutation(query)), _text(generator.permutation(document))))
    return pairs


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, and score the model on unseen domains, the same for all trials."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    recipe = Recipe(**trial.settings)  # type: ignore[arg-type]
    start = time.perf_counter()
    module = module_of(recipe, work / ("tiny" if tiny else "shift"), trial.seed)
    num_steps = recipe.num_steps + int(recipe.first_stage.get("word_steps", 0))
    collate = ContrastiveCollator(TextTokenizer(module.tokenizer, recipe.text), num_negatives=0)
    effect = _LastContextEffect()
    L.Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[effect],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=work,
    ).fit(module, DataLoader(Shift(collate, num_steps, recipe.batch_size, trial.seed), batch_size=None))
    module.embedder.text = recipe.text
    scores = score(module.embedder, NUM_DOMAINS if not tiny else 2)
    return {**scores, **effect.values, "training seconds": time.perf_counter() - start}


def module_of(recipe: Recipe, folder: Path, seed: int) -> ContrastiveModule:
    """The model of a recipe before training; both stages start with the same random weights."""
    backbone = folder / f"bert-{seed}"
    if not (backbone / "config.json").exists():
        make_backbone(backbone, seed)
    options: dict[str, Any] = {
        "backbone": BackboneConfig(str(backbone)),
        "loss": InfoNCE(temperature=0.05),
        "optimizer": partial(torch.optim.Adam, lr=recipe.learning_rate),
        "schedule": Schedule(warmup_steps=recipe.warmup_steps, decay="linear"),
        "seed": seed,
    }
    if not recipe.contextual:
        return NVEmbedModule(pooling=MeanPooling, **options)
    context, training = ContextSettings(num_context=recipe.num_context), FirstStageTraining(**recipe.first_stage)
    return CDEModule(context=context, first_stage_training=training, **options)


def make_backbone(folder: Path, seed: int) -> None:
    """Write a BERT with two layers and random weights, with one token per word."""
    vocabulary = {token: row for row, token in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=32,
        # 2.5 times the default: with the default, attention of so small a model starts to learn after a thousand steps.
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def score(embedder: Embedder, num_domains: int) -> Metrics:
    """Mean nDCG@10 over the domains, for a contextual model with each kind of context."""
    encoder = Encoder(embedder)
    folders = [
        _folder(domain(derive_seed(0, "unseen", number), DOCUMENTS_OF_A_DOMAIN)) for number in range(num_domains)
    ]
    scores: Metrics = {}
    for kind in CONTEXTS if encoder.num_context else ("no",):
        values = []
        for number, folder in enumerate(folders):
            source = folder if kind == "matched" else folders[(number + 1) % len(folders)]
            context = None if kind == "no" else sample_context(encoder, source.documents, seed=0)
            values.append(score_retrieval(encoder, folder, context=context).metrics["ndcg_at_10"])
        scores[f"{kind} context"] = float(np.mean(values))
    return scores


def _text(rows: Any) -> str:
    return " ".join(WORDS[row] for row in rows)


def _folder(pairs: list[tuple[str, str]]) -> RetrievalFolder:
    ids, rows = [str(row) for row in range(len(pairs))], np.arange(len(pairs))
    qrels = Qrels(rows, rows, np.ones(len(pairs)), len(pairs), len(pairs))
    return RetrievalFolder([document for _, document in pairs], ids, [query for query, _ in pairs], ids, qrels, 0)


class _LastContextEffect(L.Callback):
    """Keeps the last logged values of the metrics of `CONTEXT_EFFECT`."""

    def __init__(self) -> None:
        self.values: Metrics = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        for name in CONTEXT_EFFECT:
            key = f"train/{name.replace(' ', '_')}"
            if key in trainer.callback_metrics:
                self.values[name] = float(trainer.callback_metrics[key])


def main() -> None:
    """Run the models with each seed; print the table and the gain of the context."""
    chosen = trial_options(__doc__)
    plain, *contextual = run_recipes(chosen, "E16", sized(chosen, RECIPES), run_trial)
    print(f"E16, nDCG@10 on unseen domains\n{table([plain], ['no context'])}")
    print(table(contextual, [f"{kind} context" for kind in CONTEXTS]))
    # Context sensitivity is measured every 50 steps, so a tiny run has none.
    effects = [name for name in CONTEXT_EFFECT if all(name in model.metrics for model in contextual)]
    print(f"One minus the cosine between contexts, and between outputs with two contexts\n{table(contextual, effects)}")
    for model in contextual:
        for other, kind in ((plain, "no"), (model, "foreign"), (model, "no")):
            matched = {seed: {"nDCG@10": metrics["matched context"]} for seed, metrics in model.by_seed.items()}
            baseline = {seed: {"nDCG@10": metrics[f"{kind} context"]} for seed, metrics in other.by_seed.items()}
            names = f"{model.variant}, matched", f"{other.variant}, {kind} context"
            print(difference(Scores(names[0], matched), Scores(names[1], baseline), "nDCG@10"))


if __name__ == "__main__":
    main()
