"""E23: which mined negatives help: their margin below the positive, their number, and their teacher.

MiniLM trains on about 3,200 pairs of the docstring corpus; half of them have a planted near-copy. No function in the
corpus copies another, so a pair's near-copy is its only known false negative. A teacher scores every document for every
query. Candidates at or above `margin` times the positive's score are removed (TopK-PercPos); the highest remaining ones
are the negatives. The script counts what each teacher and margin remove and keep over all pairs. Training then varies
one setting at a time, starting from margin 0.95, four negatives, and MiniLM itself as the teacher.
"""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from benchmarks.docstring_trials import Workspace, fit, near_copy, optimisation, score
from benchmarks.harness import record
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
from benchmarks.workloads import read_json_lines
from embeddings.callbacks import ExportModel
from embeddings.common.io import atomic_path, text_hash, write_text
from embeddings.data import BlendedBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.evaluation import retrieval_metrics
from embeddings.inference import BM25, Encoder
from embeddings.losses import InfoNCE
from embeddings.mining import NegativeRules, choose_negatives
from embeddings.mining.negatives import MinedQueries, ScoredCandidates
from embeddings.mining.pair_index import KnownPositives
from embeddings.models import BackboneConfig, Embedder, MeanPooling
from embeddings.modules import NVEmbedModule

TeacherName = Literal["BM25", "MiniLM", "MiniLM, trained"]
Floats = npt.NDArray[np.float32]
NUM_ROWS = 3200
# Numbers of hard negatives in the variants, and of candidates that they are chosen from.
NUMBERS, NUM_CANDIDATES = (1, 4, 7), 100
MARGINS = (0.9, 0.95, 0.98, None)
TEACHER_SEED = 1000
PAGES = ("held-out packages", "held-out functions")


@dataclass(frozen=True)
class Recipe(TrainingRecipe):
    """How a model is trained.

    Args:
        margin: Fraction of the positive's score that negatives must be below, or None.
        num_negatives: Hard negatives per pair.
        teacher: What scores the candidates.
        num_rows: Training pairs, without their near-copies.
    """

    num_steps: int = 16
    batch_size: int = 16
    max_length: int = 32
    margin: float | None = 0.95
    num_negatives: int = 4
    teacher: TeacherName = "MiniLM"
    num_rows: int = NUM_ROWS


TEACHER = Recipe(num_steps=60, batch_size=32, max_length=64, num_negatives=0)
BEFORE = {"before training": Recipe(num_steps=0)}
RECIPES = {
    "margin 0.95, 4 negatives, MiniLM": Recipe(),
    "margin 0.90": Recipe(margin=0.9),
    "margin 0.98": Recipe(margin=0.98),
    "no margin": Recipe(margin=None),
    "0 negatives": Recipe(num_negatives=0),
    "1 negative": Recipe(num_negatives=1),
    "7 negatives": Recipe(num_negatives=7),
    "BM25": Recipe(teacher="BM25"),
    "MiniLM, trained": Recipe(teacher="MiniLM, trained"),
}


class MiningWorkspace(Workspace):
    """The corpora, the teachers, and the negatives that each of them mined; existing files are reused."""

    @property
    def trained_teacher(self) -> Path:
        """The model directory of MiniLM after some steps on the corpus."""
        return self.folder / f"mining-teacher-{TEACHER.num_steps}"

    def mined(self, teacher: TeacherName, margin: float | None) -> Path:
        """The training pairs with a teacher's negatives below a margin."""
        return self.folder / "mined" / f"{NUM_ROWS}-{teacher.replace(', ', '-')}-{margin}.jsonl"

    def mine(self) -> None:
        """Train the teacher, and mine with each teacher and margin."""
        if not self.trained_teacher.exists():
            corpus = SourceConfig("docstrings", str(self.training_file))
            recipe = TEACHER.tiny() if self.tiny else TEACHER
            train(self, recipe, corpus, TEACHER_SEED, self.trained_teacher)
        pairs = training_pairs(self)
        for teacher in get_args(TeacherName):
            missing = [margin for margin in MARGINS if not self.mined(teacher, margin).exists()]
            if missing:
                score_QN = self._scores(teacher, pairs)
                for margin in missing:
                    write_mined(self.mined(teacher, margin), pairs, score_QN, margin)

    def encoder(self, name: TeacherName) -> Encoder:
        """The encoder of a teacher that is a model."""
        embedder = Embedder.from_pretrained(self.model if name == "MiniLM" else self.trained_teacher)
        embedder.text = (Recipe().tiny() if self.tiny else Recipe()).text
        return Encoder(embedder)

    def _scores(self, name: TeacherName, pairs: list[dict[str, str]]) -> Floats:
        """A teacher's score of each query with each positive, (Q, Q) float32."""
        queries, documents = [pair["query"] for pair in pairs], [pair["positive"] for pair in pairs]
        if name != "BM25":
            encoder = self.encoder(name)
            return encoder.similarity(encoder.encode_query(queries), encoder.encode_document(documents))
        index_QN, sorted_QN = BM25(documents).search(queries, len(documents))
        score_QN = np.empty_like(sorted_QN)
        np.put_along_axis(score_QN, index_QN, sorted_QN, axis=1)
        return score_QN


def training_pairs(workspace: Workspace) -> list[dict[str, str]]:
    """Pairs from the whole corpus; every second one is followed by its near-copy, and both have the other's text."""
    rows = read_json_lines(workspace.training_file)
    pairs: list[dict[str, str]] = []
    for number, row in enumerate(rows[:: max(1, len(rows) // NUM_ROWS)]):
        pair = {"query": row["query"], "positive": row["positive"]}
        if number % 2:
            pairs.append(pair)
        else:
            copy = near_copy(pair)
            pairs += [{**pair, "copy": copy["positive"]}, {**copy, "copy": pair["positive"]}]
    return pairs


def write_mined(path: Path, pairs: list[dict[str, str]], score_QN: Floats, margin: float | None) -> None:
    """Write the pairs with their negatives, hardest first, and to a JSON file the fraction of candidates removed."""
    rows = np.arange(len(pairs))
    hash_N = np.array([text_hash(pair["positive"]) for pair in pairs])
    row_QC = np.argsort(-score_QN, axis=1, kind="stable")[:, : NUM_CANDIDATES + 1].astype(np.int64)
    candidates = ScoredCandidates(row_QC, hash_N[row_QC], np.take_along_axis(score_QN, row_QC, axis=1)[None])
    hash_Q, own_Q = np.array([text_hash(pair["query"]) for pair in pairs]), score_QN[rows, rows]
    queries = MinedQueries(rows, hash_Q, KnownPositives(rows, rows, rows), hash_N, own_Q[None])
    chosen = choose_negatives(candidates, queries, NegativeRules(max(NUMBERS), margin, last_rank=NUM_CANDIDATES))
    removed = chosen.removed["margin"] / (chosen.removed["margin"] + chosen.num_left)
    write_text(path.with_suffix(".json"), json.dumps({"refused candidates": removed}))
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for pair, row_N in zip(pairs, chosen.row_QN.tolist(), strict=True):
            negatives = [pairs[row]["positive"] for row in row_N if row >= 0]
            file.write(json.dumps({**pair, "negatives": negatives}) + "\n")


def mining_fractions(path: Path) -> Metrics:
    """What a margin removes and keeps, as fractions.

    The fraction of all candidates that are removed; for each number of negatives, the fraction of pairs with a
    near-copy whose negatives include it; and, of the first four negatives except near-copies, the fraction whose
    function has the positive's name.
    """
    rows = read_json_lines(path)
    fractions: Metrics = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    for number in NUMBERS:
        has_copy = [row["copy"] in row["negatives"][:number] for row in rows if "copy" in row]
        fractions[f"near-copies among {number}"] = float(np.mean(has_copy))
    others = [(row["positive"], text) for row in rows for text in row["negatives"][:4] if text != row.get("copy")]
    same_name = [_name(positive) == _name(text) for positive, text in others]
    return {**fractions, "of the same name": float(np.mean(same_name)) if same_name else 0.0}


def _name(document: str) -> str:
    """The name of a document's function, without its package, module and class."""
    return document.partition("\n")[0].rpartition(".")[2]


def train(
    workspace: Workspace, recipe: Recipe, source: SourceConfig, seed: int, export: Path | None = None
) -> NVEmbedModule:
    """Train MiniLM on a source, with the same rows in the same order for all recipes with the same seed."""
    module = NVEmbedModule(
        BackboneConfig(workspace.model),
        MeanPooling,
        loss=InfoNCE(temperature=0.05),
        **optimisation(recipe.learning_rate, recipe.num_steps),
        seed=seed,
    )
    data = EmbeddingDataModule(
        [source], recipe.text, recipe.batch_size, recipe.num_negatives, BlendedBatchSampler, seed=seed
    )
    if recipe.num_steps:
        fit(workspace, module, data, recipe.num_steps, [] if export is None else [ExportModel(export)])
    return module


def bm25_score(workspace: Workspace) -> float:
    """nDCG@10 of BM25 over the queries of the held-out packages, each searched separately."""
    folders = list(workspace.domains().values())
    ranked = [BM25(folder.documents).search(folder.queries, 100, folder.tie_order_N)[0] for folder in folders]
    ndcg = [
        retrieval_metrics(index_QK, folder.qrels)["ndcg_at_10"]
        for index_QK, folder in zip(ranked, folders, strict=True)
    ]
    return float(np.average(ndcg, weights=[len(folder.queries) for folder in folders]))


def run(chosen: Namespace, recipes: Mapping[str, Recipe]) -> list[Scores]:
    """Train and score each recipe with each seed; arguments as in `run_recipes`."""
    return run_recipes(chosen, "E23", sized(chosen, recipes), run_trial)


def run_trial(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Train by the trial's recipe and score the model; without training steps, score the teachers too."""
    workspace, recipe = MiningWorkspace(work, tiny), Recipe(**trial.settings)  # type: ignore[arg-type]
    source = SourceConfig("docstrings", str(workspace.mined(recipe.teacher, recipe.margin)))
    module = train(workspace, recipe, source, trial.seed)
    module.embedder.text = recipe.text
    metrics = score(workspace, module.embedder)
    if recipe.num_steps:
        return metrics
    teacher = score(workspace, workspace.encoder("MiniLM, trained").embedder)
    return {**metrics, "BM25": bm25_score(workspace), "MiniLM, trained": teacher["held-out packages"]}


def measure(chosen: Namespace) -> None:
    """Mine with each teacher and margin, and record what is removed and kept."""
    workspace = MiningWorkspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
        workspace.mine()
    for teacher in get_args(TeacherName):
        for margin in MARGINS:
            below = "no margin" if margin is None else f"margin {margin:.2f}"
            for name, fraction in mining_fractions(workspace.mined(teacher, margin)).items():
                record(replaced(chosen, threads=1), f"E23 {name}, {teacher}; {below}", fraction, "fraction", "none")


def main() -> None:
    """Mine, train with each variant; print the table and the differences to the first variant."""
    chosen = trial_options(__doc__)
    measure(chosen)
    # Before training, the model does not depend on the seed.
    (before,) = run(replaced(chosen, seeds=1), BEFORE)
    default, *others = run(chosen, RECIPES)
    print(f"E23, nDCG@10\n{table([before, default, *others], PAGES)}")
    teachers = ", ".join(f"{name} {before.values(name)[0]:.4f}" for name in ("BM25", "MiniLM, trained"))
    print(f"teachers on held-out packages: {teachers}")
    for page in PAGES:
        for variant in others:
            print(difference(variant, default, page))


if __name__ == "__main__":
    main()
