"""`quickstart`: builds a corpus, trains a model, compares its scores with BM25's, and searches, in minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings import figures
from embeddings.common import TextSettings
from embeddings.common.errors import program, refuse_given
from embeddings.common.io import write_json
from embeddings.common.process import trim_malloc, tune_malloc
from embeddings.common.text import format_table
from embeddings.data.docstrings import prepare_docstring_test, prepare_docstrings
from embeddings.evaluation import RetrievalFolder, read_retrieval_folder, retrieval_metrics, score_retrieval
from embeddings.inference import BM25, Encoder, search_top_k
from embeddings.models import Embedder

Folders = dict[str, RetrievalFolder]
Vectors = npt.NDArray[np.float32]

CONFIG = "lightning_configs/quickstart.yaml"
CORPUS, OUTPUT = Path("data/docstrings"), Path("checkpoints/quickstart")
NUM_PHASES = 5
SPLITS = ("in_domain", "held_out")
METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_10")
EXAMPLES = (
    "shortest path between two nodes of a weighted graph",
    "stop training early when a metric no longer improves",
    "copy a file from one remote file system to another",
)


def quickstart() -> None:
    """Build the docstring corpus, train on it, and compare scores before and after.

    A finished corpus in `data/docstrings` is reused, and training that was stopped is resumed. The result is the
    model directory `checkpoints/quickstart`, with `curves.png` and `metrics.json`. The training config is
    lightning_configs/quickstart.yaml, which has the same paths.
    """
    from embeddings.cli.fit import run_trainer

    seconds: dict[str, float] = {}
    with phase(1, "the docstring corpus", seconds, "corpus"):
        prepare_docstrings(CORPUS)
    data = {split: read_retrieval_folder(CORPUS / "eval" / split) for split in SPLITS}
    results: dict[str, Any] = {}
    with phase(2, "scores before training: BM25, and the pretrained model", seconds, "before"):
        results["bm25"] = score_bm25(data)
        results["before"], _ = score_model("all-MiniLM-L6-v2", data)
    with phase(3, "training", seconds, "train"):
        run = run_trainer(["fit", "--config", CONFIG, "--ckpt_path", "auto"]).trainer.log_dir
    with phase(4, "scores after training", seconds, "after"):
        results["after"], document_ND = score_model(str(OUTPUT), data)
    with phase(5, "three searches over the held-out packages", seconds, "search"):
        show_searches(data["held_out"], document_ND)
    total = sum(seconds.values())
    results["seconds"] = {name: round(value, 1) for name, value in {**seconds, "total": total}.items()}
    write_json(OUTPUT / "metrics.json", results)
    figures.draw_curves([Path(str(run))], OUTPUT / "curves.png")
    print(f"\n{score_table(results)}\n")
    print(f"{total:.0f} s in total; model, curves.png and metrics.json are in {OUTPUT}")
    line = f"{program()} search --model {OUTPUT} --corpus {CORPUS}/eval/held_out/corpus.jsonl"
    print(f'search it: {line} "your words"')


@contextmanager
def phase(number: int, title: str, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Print the title of a phase and record its duration; return its memory to the system."""
    print(f"\n[{number}/{NUM_PHASES}] {title}", flush=True)
    start = time.perf_counter()
    yield
    trim_malloc()
    seconds[name] = time.perf_counter() - start


def score_bm25(data: Folders) -> dict[str, Any]:
    scores = {}
    for split, folder in data.items():
        ranked, _ = BM25(folder.documents).search(folder.queries, 100, folder.tie_order_N)
        scores[split] = rounded(retrieval_metrics(ranked, folder.qrels))
    return scores


def score_model(model: str, data: Folders) -> tuple[dict[str, Any], Vectors]:
    """The scores of a model on both splits, and its document vectors of the last split."""
    tune_malloc()
    embedder = Embedder.from_pretrained(model)
    embedder.text = TextSettings(query_max_length=128, document_max_length=128)
    encoder = Encoder(embedder, show_progress=True)
    scores = {}
    for split, folder in data.items():
        run = score_retrieval(encoder, folder)
        scores[split] = rounded(run.metrics)
    return scores, encoder.comparable(run.document_ND)


def rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {metric: round(float(metrics[metric]), 4) for metric in METRICS}


def show_searches(folder: RetrievalFolder, document_ND: Vectors) -> None:
    encoder = Encoder.from_pretrained(str(OUTPUT))
    hits = search_top_k(encoder.encode(EXAMPLES, role="query"), document_ND, top_k=3)
    for query, scores, rows in zip(EXAMPLES, hits.score_QK.tolist(), hits.index_QK.tolist(), strict=True):
        print(f"  {query}")
        for score, row in zip(scores, rows, strict=True):
            print(f"    {score:.3f}  {folder.document_ids[row]}")


def score_table(results: dict[str, Any]) -> str:
    """The scores as a table: a row for each system, a group of columns for each split."""
    names = {"bm25": "BM25", "before": "before training", "after": "after training"}
    rows = [["", "held-out functions", "", "", "held-out packages"], ["", *("nDCG@10", "MRR@10", "Recall@10") * 2]]
    for key, title in names.items():
        scores = (results[key][split][metric] for split in SPLITS for metric in METRICS)
        rows.append([title, *(f"{score:.3f}" for score in scores)])
    return format_table(rows)


def docstrings(output: Path = Path("data/docstrings"), max_rows: int | None = None, test_only: bool = False) -> None:
    """Build a training corpus of query-document pairs from the functions of installed packages.

    Args:
        output: The folder to write; a finished corpus of the same inputs is reused.
        max_rows: Maximum number of training pairs, sampled evenly; evaluation folders are not limited.
        test_only: Whether to write only two small evaluation folders: `docstrings`, 200 queries for 500 functions, and
            `descriptions`, the summaries of the installed packages for their descriptions.
    """
    if test_only:
        refuse_given({"max_rows": max_rows}, "has no effect with --test-only")
        print(f"wrote {prepare_docstring_test(output)}")
        return
    prepare_docstrings(output, max_rows=max_rows)
