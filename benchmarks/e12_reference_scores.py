"""E12: what BM25, all-MiniLM-L6-v2 and the quickstart's model score on real sets, the evaluation folders of EMBED_DATA.

nDCG@10 on retrieval, mean average precision on reranking, Spearman's correlation on similarity and summaries, average
precision on pairs with labels, accuracy on classification, V-measure on clustering; texts of 256 tokens, vectors in the
default precision. BM25 ranks documents only. The quickstart's model is what `make quickstart`
wrote; without it its column is left out.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.docstring_trials import MODEL, World
from benchmarks.harness import options, record
from benchmarks.moe_trials import data_folder
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
    """A model that reads up to 256 tokens of a text."""
    embedder = Embedder.from_pretrained(model)
    embedder.text = TextSettings(MAX_LENGTH, MAX_LENGTH, prompts=embedder.text.prompts)
    return Encoder(embedder, precision=precision)


def evaluation_root(tiny: bool) -> Path:
    """The folder EMBED_DATA; if `tiny`, or where there is none, the small evaluation sets of the trials."""
    root = data_folder()
    if root.is_dir() and not tiny:
        return root
    world = World(Path("checkpoints/trials"), tiny=True)
    with world.alone():
        world.prepare([])
    return world.folder / "corpus" / "eval"


def scores_of(folder: Path, encoders: Mapping[str, Encoder]) -> tuple[str, dict[str, float]]:
    """The kind of a folder, and its main score by each model, and by BM25 where it has documents to rank."""
    data, found = read_evaluation_folder(folder), {}
    if isinstance(data, RetrievalFolder):
        ranked, _ = BM25(data.documents).search(data.queries, top_k=100)
        found["BM25"] = retrieval_metrics(ranked, data.qrels).metrics["ndcg_at_10"]
    for name, encoder in encoders.items():
        result = evaluate_folder(encoder, data)
        found[name] = result.metrics[result.main_metric]
    return data.kind, found


def main() -> None:
    """Score every folder, and print the README's table."""
    chosen = options(__doc__, threads=2)
    root = evaluation_root(chosen.tiny)
    models = {MODEL: MODEL} | ({"quickstart": str(QUICKSTART)} if (QUICKSTART / "modules.json").is_file() else {})
    encoders = {name: encoder_of(model) for name, model in models.items()}
    columns = ["BM25", *encoders]
    lines = [f"| set | score | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for folder in find_evaluation_folders(root):
        name = "/".join(folder.relative_to(root).parts)
        kind, found = scores_of(folder, encoders)
        cells = [f"{found[column]:.3f}" if column in found else "–" for column in columns]
        lines.append(f"| {name} | {METRICS[kind]} | {' | '.join(cells)} |")
        for column, value in found.items():
            record(chosen, f"E12 {METRICS[kind]} on {name}, {column}", value, "score", "none")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
