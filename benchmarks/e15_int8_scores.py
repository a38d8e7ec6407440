"""E15: what int8 costs in score: all-MiniLM-L6-v2 in float32 and in int8 on four evaluation folders of EMBED_DATA.

nDCG@10 on retrieval and Spearman's correlation on similarity, texts of 256 tokens; documents and queries are encoded in
the precision that is scored.
"""

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import METRICS, encoder_of, evaluation_root
from benchmarks.harness import options, record
from benchmarks.moe_trials import data_folder
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
