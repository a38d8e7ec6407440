"""E15: the effect of int8 on scores: all-MiniLM-L6-v2 in float32 and in int8 on four evaluation folders of EMBED_DATA.

The metrics are nDCG@10 for retrieval and Spearman's correlation for similarity. Texts have at most 256 tokens. Queries
and documents are encoded in the same precision.
"""

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import METRICS, encoder_of, evaluation_root
from benchmarks.harness import options, record
from benchmarks.workloads import data_folder
from embeddings.evaluation import evaluate_folder, read_evaluation_folder
from embeddings.evaluation.folders import find_evaluation_folders
from embeddings.inference.precision import Precision

FOLDERS = ("chunking_eval", "cisi", "cranfield", "stsb")
PRECISIONS: tuple[Precision, ...] = ("float32", "int8")


def main() -> None:
    """Score each folder in each precision."""
    chosen = options(__doc__, threads=2)
    root = evaluation_root(chosen.tiny)
    encoders = {precision: encoder_of(MODEL, precision) for precision in PRECISIONS}
    for folder in find_evaluation_folders(root):
        if root == data_folder() and folder.name not in FOLDERS:
            continue
        data = read_evaluation_folder(folder)
        for precision, encoder in encoders.items():
            result = evaluate_folder(encoder, data)
            name = f"E15 {METRICS[data.kind]} on {folder.name}, {precision}"
            record(chosen, name, result.metrics[result.main_metric], "score", "none")


if __name__ == "__main__":
    main()
