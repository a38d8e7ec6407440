"""E21: experts against the dense model at equal active parameters, by the number of multilingual training pairs.

Nomic Embed v2 reports multilingual experts below the dense model after 100M pairs, and above it after 235M English
pairs and 65M in six languages (arXiv:2502.07972, §7.2). Here the pairs are Tatoeba sentences in 36 languages with their
English translations. Models train one pass over 1,024 to 28,544 pairs, the most that fill complete batches; larger sets
contain the smaller ones. The score is for retrieving a sentence's translation among the held-out English sentences.
Needs EMBED_DATA.
"""

import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from benchmarks.docstring_trials import Workspace
from benchmarks.moe_trials import Recipe, make_start, module_of, train
from benchmarks.trials import Metrics, Scores, Trial, difference, run_recipes, sized, table, trial_options
from benchmarks.workloads import data_folder, read_json_lines
from embeddings.common.io import text_hash, write_text
from embeddings.data import BlendedBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.evaluation import Qrels, RetrievalFolder, score_retrieval
from embeddings.inference import Encoder
from embeddings.models.moe.upcycling import parameter_counts

# One in `HELD_OUT` English sentences is held out, with all its translations.
HELD_OUT = 10
NUM_PAIRS = (1024, 2048, 4096, 8192, 16_384, 28_544)
# Languages in Latin script; the model's tokeniser needs few tokens for most of them.
LATIN = (
    *("afr", "deu", "est", "eus", "fin", "fra", "hun", "ind", "ita"),
    *("jav", "nld", "por", "spa", "swh", "tgl", "tur", "vie"),
)
PAGES = ("Latin letters", "other letters")


@dataclass(frozen=True)
class ScaledRecipe(Recipe):
    """How a model is trained: one pass over the pairs.

    Args:
        num_pairs: Number of training pairs.
    """

    max_length: int = 24
    num_pairs: int = 1024

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(super().tiny(), num_pairs=16)


class Translation(NamedTuple):
    """A sentence, its language, and its English translation."""

    language: str
    sentence: str
    english: str


def recipe_of(num_pairs: int, top_k: int | None) -> ScaledRecipe:
    """One pass over `num_pairs` pairs, with `top_k` experts per token, or with the dense model if it is None."""
    return ScaledRecipe(num_steps=num_pairs // ScaledRecipe.batch_size, num_pairs=num_pairs, top_k=top_k)


RECIPES = {
    f"{name}, {num_pairs} pairs": recipe_of(num_pairs, top_k)
    for num_pairs in NUM_PAIRS
    for name, top_k in (("dense", None), ("8 experts, top 1", 1))
}


def run(chosen: Namespace, recipes: Mapping[str, ScaledRecipe]) -> list[Scores]:
    """Train and score each recipe with each seed; arguments as in `run_recipes`."""
    recipes = sized(chosen, recipes)
    workspace = Workspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
        trained, _ = translations()
        for recipe in recipes.values():
            make_start(workspace, recipe)
            lines = [json.dumps({"query": row.sentence, "positive": row.english}) for row in trained]
            write_text(pairs_of(workspace, recipe), "\n".join(lines[: recipe.num_pairs]) + "\n")
    return run_recipes(chosen, "E21", recipes, run_trial)


def pairs_of(workspace: Workspace, recipe: ScaledRecipe) -> Path:
    """The file of a recipe's training pairs."""
    return workspace.folder / f"translations-{recipe.num_pairs}.jsonl"


def translations() -> tuple[list[Translation], list[Translation]]:
    """The training pairs and the pairs whose English sentence is held out, both in random order."""
    rows = []
    for path in sorted((data_folder() / "tatoeba").glob("*-eng.jsonl")):
        for pair in read_json_lines(path):
            rows.append(Translation(path.name[:3], pair["sentence1"], pair["sentence2"]))
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    is_held_out = [text_hash(row.english) % HELD_OUT == 0 for row in rows]
    return [rows[row] for row in order if not is_held_out[row]], [rows[row] for row in order if is_held_out[row]]


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe, and score the retrieval of held-out translations."""
    workspace, recipe = Workspace(work, tiny), ScaledRecipe(**trial.settings)  # type: ignore[arg-type]
    start, module = time.perf_counter(), module_of(workspace, recipe, trial.seed)
    counts = parameter_counts(module.embedder.backbone)
    source = SourceConfig("translations", str(pairs_of(workspace, recipe)))
    data = EmbeddingDataModule([source], recipe.text, recipe.batch_size, 0, BlendedBatchSampler, seed=trial.seed)
    metrics = train(workspace, trial, module, data, recipe.num_steps)
    metrics |= {"total parameters": counts.total, "active parameters": counts.active}
    metrics["training seconds"] = time.perf_counter() - start
    module.embedder.text = recipe.text
    held_out = translations()[1][: 40 if tiny else None]
    parts = ([row for row in held_out if (row.language in LATIN) == is_latin] for is_latin in (True, False))
    for page, rows in zip(PAGES, parts, strict=True):
        folder_of_page = retrieval_folder(rows, held_out)
        metrics[page] = score_retrieval(Encoder(module.embedder), folder_of_page).metrics["ndcg_at_10"]
    return metrics


def retrieval_folder(rows: Sequence[Translation], held_out: Sequence[Translation]) -> RetrievalFolder:
    """Sentences as queries; the documents are all held-out English sentences."""
    documents = sorted({row.english for row in held_out})
    index_of = {document: index for index, document in enumerate(documents)}
    ids, queries = [str(index) for index in range(len(documents))], np.arange(len(rows))
    relevant = np.array([index_of[row.english] for row in rows])
    qrels = Qrels(queries, relevant, np.ones(len(rows)), len(rows), len(documents))
    return RetrievalFolder(documents, ids, [row.sentence for row in rows], [str(n) for n in queries], qrels, 0)


def main() -> None:
    """Train both models on each number of pairs; print the scores and the experts' gain over the dense model."""
    chosen = trial_options(__doc__)
    if not (data_folder() / "tatoeba").is_dir():
        print(f"E21 skipped: {data_folder()} does not contain tatoeba; set EMBED_DATA")
        return
    scores = run(chosen, RECIPES)
    print(f"E21, nDCG@10\n{table(scores, [*PAGES, 'total parameters', 'active parameters'])}")
    for dense, experts in zip(scores[::2], scores[1::2], strict=True):
        for page in PAGES:
            print(difference(experts, dense, page))


if __name__ == "__main__":
    main()
