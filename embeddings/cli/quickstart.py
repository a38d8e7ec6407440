"""`quickstart`: a corpus, a trained model, its scores beside honest opponents, and three searches, in minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embeddings.cli.errors import ConfigError
from embeddings.common.fileio import write_json

CONFIG = Path("lightning_configs/quickstart.yaml")
SPLITS = ("in_domain", "held_out")
METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_10")
EXAMPLES = (
    "shortest path between two nodes of a weighted graph",
    "stop training early when a metric no longer improves",
    "copy a file from one remote file system to another",
)


def quickstart(corpus: Path = Path("data/docstrings"), output: Path = Path("checkpoints/quickstart")) -> None:
    """Build the docstring corpus, train on it, and show what it brought.

    Writes a model directory, `curves.png` and `metrics.json` into the output folder.

    Args:
        corpus: The corpus folder; a finished one is used as it is.
        output: The model directory to write.
    """
    if not CONFIG.is_file():
        raise ConfigError(f"{CONFIG}: no such file; run the quickstart in the project's folder")
    seconds: dict[str, float] = {}
    with phase(1, "the docstring corpus", seconds, "corpus"):
        from embeddings.data.docstrings import prepare_docstrings

        prepare_docstrings(corpus)
    results: dict[str, Any] = {}
    with phase(2, "scores before training: BM25, and the model as it comes", seconds, "before"):
        results |= score_before(corpus)
    with phase(3, "training", seconds, "train"):
        run = train(corpus, output)
    with phase(4, "scores after training", seconds, "after"):
        results["after"] = score_model(str(output), corpus)
    with phase(5, "three searches over the held-out packages", seconds, "search"):
        show_searches(output, corpus)
    results["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    results["seconds"]["total"] = round(sum(seconds.values()), 1)
    write_json(output / "metrics.json", results)
    from embeddings.cli.show import draw_curves

    draw_curves(run, output / "curves.png")
    print(f"\n{table(results)}\n")
    print(f"{results['seconds']['total']:.0f} s in all; model, curves.png and metrics.json are in {output}")
    print(
        f'search it: python main.py search --model {output} --corpus {corpus}/eval/held_out/corpus.jsonl "your words"'
    )


@contextmanager
def phase(number: int, title: str, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Announce a phase and record how long it took."""
    print(f"\n[{number}/5] {title}", flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def score_before(corpus: Path) -> dict[str, Any]:
    """The scores of BM25 and of the untrained backbone, mean-pooled, on both splits."""
    from embeddings.evaluation import BM25, read_retrieval_folder, retrieval_metrics

    bm25 = {}
    for split in SPLITS:
        data = read_retrieval_folder(corpus / "eval" / split)
        ranked, _ = BM25(data.documents).search(data.queries, top_k=100)
        bm25[split] = counted(retrieval_metrics(ranked, data.judgments).metrics, data)
    return {"bm25": bm25, "before": score_model("all-MiniLM-L6-v2", corpus)}


def score_model(model: str, corpus: Path) -> dict[str, Any]:
    """The scores of a model on both splits."""
    from embeddings.common import TextSettings
    from embeddings.evaluation import evaluate_folder, read_retrieval_folder
    from embeddings.inference import Encoder
    from embeddings.models import Embedder

    embedder = Embedder.from_pretrained(model)
    embedder.text = TextSettings(query_max_length=128, document_max_length=128)
    encoder = Encoder(embedder, show_progress=True)
    scores = {}
    for split in SPLITS:
        data = read_retrieval_folder(corpus / "eval" / split)
        scores[split] = counted(evaluate_folder(encoder, data).metrics, data)
    return scores


def counted(metrics: dict[str, float], data: Any) -> dict[str, float]:
    """The three headline metrics and the sizes they were measured on."""
    sizes = {"num_queries": len(data.queries), "num_documents": len(data.documents)}
    return {metric: round(float(metrics[metric]), 4) for metric in METRICS} | sizes


def train(corpus: Path, output: Path) -> Path:
    """Run `fit` with the quickstart's config; returns the run's folder."""
    from embeddings.cli.app import run_trainer

    cli = run_trainer(["fit", "--config", str(CONFIG)])
    assert cli.trainer.log_dir is not None
    return Path(cli.trainer.log_dir)


def show_searches(output: Path, corpus: Path) -> None:
    """Answer three example questions from the held-out packages."""
    from embeddings.inference import Encoder, search_corpus

    encoder = Encoder.from_pretrained(str(output))
    hits_of_queries = search_corpus(encoder, corpus / "eval" / "held_out" / "corpus.jsonl", EXAMPLES, top_k=3)
    for query, hits in zip(EXAMPLES, hits_of_queries, strict=True):
        print(f"  {query}")
        for hit in hits:
            print(f"    {hit.score:.3f}  {hit.document_id}")


def table(results: dict[str, Any]) -> str:
    """The scores as text: a row a system, a group of columns a split."""
    names = {"bm25": "BM25", "before": "before training", "after": "after training"}
    head = f"{'':<18}" + "".join(f"{title:>33}" for title in ("held-out functions", "held-out packages"))
    columns = f"{'':<18}" + "".join(f"{name:>11}" for _ in SPLITS for name in ("nDCG@10", "MRR@10", "Recall@10"))
    rows = [
        f"{title:<18}" + "".join(f"{results[key][split][metric]:>11.3f}" for split in SPLITS for metric in METRICS)
        for key, title in names.items()
    ]
    sizes = ", ".join(
        f"{split.replace('_', '-')} {results['after'][split]['num_queries']} queries over "
        f"{results['after'][split]['num_documents']} documents"
        for split in SPLITS
    )
    return "\n".join([head, columns, *rows, f"({sizes})"])
