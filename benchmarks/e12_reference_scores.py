"""E12: scores of BM25, all-MiniLM-L6-v2 and the quickstart's model on the evaluation folders of EMBED_DATA.

Metrics: nDCG@10 for retrieval, mean average precision for reranking, Spearman's correlation for similarity and
summaries, average precision for labelled pairs, accuracy for classification, V-measure for clustering. Texts have at
most 256 tokens; vectors use the default precision. BM25 is scored on retrieval only. The quickstart's model is the
output of `make quickstart`; its column is omitted if that model is missing.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.docstring_trials import MODEL, Workspace
from benchmarks.harness import options, record
from benchmarks.workloads import data_folder
from embeddings.common import TextSettings
from embeddings.evaluation import RetrievalFolder, evaluate_folder, read_evaluation_folder, retrieval_metrics
from embeddings.evaluation.folders import find_evaluation_folders
from embeddings.inference import BM25, Encoder
from embeddings.inference.precision import Precision
from embeddings.models import Embedder

QUICKSTART = Path("checkpoints/quickstart")
MAX_LENGTH = 256
METRICS = {
    "retrieval": "nDCG@10",
    "sts": "Spearman",
    "classification": "accuracy",
    "clustering": "V-measure",
    "reranking": "MAP",
    "pair_classification": "average precision",
    "summarisation": "Spearman",
}


def encoder_of(model: str, precision: Precision = "auto") -> Encoder:
    """An encoder that reads at most 256 tokens per text."""
    embedder = Embedder.from_pretrained(model)
    embedder.text = TextSettings(MAX_LENGTH, MAX_LENGTH, prompts=embedder.text.prompts)
    return Encoder(embedder, precision=precision)


def evaluation_root(tiny: bool) -> Path:
    """The folder EMBED_DATA; if `tiny` or if it is missing, the folder of the tiny evaluation sets."""
    root = data_folder()
    return root if root.is_dir() and not tiny else tiny_evaluation_root()


def tiny_evaluation_root() -> Path:
    """The folder of the tiny docstring corpus's evaluation sets, prepared first."""
    workspace = Workspace(Path("checkpoints/trials"), tiny=True)
    with workspace.locked():
        workspace.prepare([])
    return workspace.evaluation_root


def scores_of(folder: Path, encoders: Mapping[str, Encoder]) -> tuple[str, dict[str, float]]:
    """The kind of a folder, and the main metric of each model; for retrieval, of BM25 too."""
    data, scores = read_evaluation_folder(folder), {}
    if isinstance(data, RetrievalFolder) and data.kind == "retrieval":
        ranked, _ = BM25(data.documents).search(data.queries, 100, data.tie_order_N)
        scores["BM25"] = retrieval_metrics(ranked, data.qrels)["ndcg_at_10"]
    for name, encoder in encoders.items():
        result = evaluate_folder(encoder, data)
        scores[name] = result.metrics[result.main_metric]
    return data.kind, scores


def main() -> None:
    """Score every folder and print the table."""
    chosen = options(__doc__, threads=2)
    root = evaluation_root(chosen.tiny)
    models = {MODEL: MODEL} | ({"quickstart": str(QUICKSTART)} if (QUICKSTART / "modules.json").is_file() else {})
    encoders = {name: encoder_of(model) for name, model in models.items()}
    columns = ["BM25", *encoders]
    lines = [f"| set | score | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for folder in find_evaluation_folders(root):
        name = "/".join(folder.relative_to(root).parts)
        kind, scores = scores_of(folder, encoders)
        cells = [f"{scores[column]:.3f}" if column in scores else "–" for column in columns]
        lines.append(f"| {name} | {METRICS[kind]} | {' | '.join(cells)} |")
        for column, value in scores.items():
            record(chosen, f"E12 {METRICS[kind]} on {name}, {column}", value, "score", "none")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
