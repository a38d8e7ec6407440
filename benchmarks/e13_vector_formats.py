"""E13: scores of all-MiniLM-L6-v2 with vectors stored in fewer bytes, on four retrieval folders of EMBED_DATA.

The metrics are nDCG@10 and the overlap with float32: the fraction of its top ten documents that are in the top ten.
Texts have at most 256 tokens and are encoded in the default precision. Int8 with one scale per row is compared with
int8 with one scale per dimension, which is calibrated on the first 1,000 documents. Its clipped values are counted.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import encoder_of, evaluation_root
from benchmarks.harness import options, record
from benchmarks.workloads import data_folder
from embeddings.common.jobs import save_array
from embeddings.evaluation import RetrievalFolder, read_retrieval_folder, retrieval_metrics
from embeddings.evaluation.folders import find_evaluation_folders
from embeddings.inference import Encoder, VectorFormat, VectorShards, search_signs, search_top_k, unit_rows
from embeddings.inference.search import nearest_signs
from embeddings.inference.vector_folder import bytes_per_vector, sign_bits, stored_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
# Returns the rows of the top documents of each query, best first, (Q, 10).
Ranking = Callable[[Floats, Floats], Rows]

TOP_K = 10
FOLDERS = ("cranfield", "cisi", "chunking_eval", "codebase_chunks")
CALIBRATION_ROWS = 1000
MULTIPLIERS = (1, 4, 10)
SCALE_A_DIMENSION = f"int8, a scale a dimension of {CALIBRATION_ROWS} rows"


def by_cosine(vector_format: VectorFormat) -> Ranking:
    """The ranking by cosine to the documents as a vector format stores them."""

    def rank(query_QD: Floats, document_ND: Floats) -> Rows:
        with tempfile.TemporaryDirectory() as folder:
            shards = written(Path(folder), document_ND, vector_format)
            return search_top_k(query_QD, map(unit_rows, shards), TOP_K).index_QK

    return rank


def by_signs(multiplier: int) -> Ranking:
    """The ranking by Hamming distance, with `multiplier` candidates per result rescored."""

    def rank(query_QD: Floats, document_ND: Floats) -> Rows:
        with tempfile.TemporaryDirectory() as folder:
            return search_signs(query_QD, written(Path(folder), document_ND, "binary"), TOP_K, multiplier).index_QK

    return rank


def by_distance(query_QD: Floats, document_ND: Floats) -> Rows:
    """The ranking by Hamming distance alone."""
    return nearest_signs(sign_bits(query_QD), [sign_bits(document_ND)], TOP_K).index_QK


def by_scaled_dimensions(query_QD: Floats, document_ND: Floats) -> Rows:
    """The ranking by int8 vectors with one scale per dimension."""
    code_ND, scale_D = scaled_dimensions(document_ND)
    return search_top_k(query_QD, unit_rows(np.clip(code_ND, -127, 127) * scale_D), TOP_K).index_QK


def scaled_dimensions(document_ND: Floats) -> tuple[Floats, Floats]:
    """Vectors divided by the scale of each dimension, rounded but not clipped, (N, D), and the scales, (D,)."""
    scale_D = np.abs(document_ND[:CALIBRATION_ROWS]).max(axis=0) / 127
    return np.rint(document_ND / scale_D), scale_D


def written(folder: Path, document_ND: Floats, vector_format: VectorFormat) -> VectorShards:
    """Write the document vectors as one shard."""
    shards = VectorShards(folder, len(document_ND), document_ND.shape[1], len(document_ND), vector_format)
    save_array(shards.path(0), stored_rows(document_ND, vector_format, "documents"))
    return shards


# For each variant: bytes per vector as a function of the embedding dimensions, and the ranking.
RANKINGS: dict[str, tuple[Callable[[int], int], Ranking]] = {
    "float32": (partial(bytes_per_vector, "float32"), by_cosine("float32")),
    "float16": (partial(bytes_per_vector, "float16"), by_cosine("float16")),
    "int8": (partial(bytes_per_vector, "int8"), by_cosine("int8")),
    SCALE_A_DIMENSION: (int, by_scaled_dimensions),
    "binary, Hamming distance alone": (partial(bytes_per_vector, "binary"), by_distance),
    **{
        f"binary, {size} x k scored again": (partial(bytes_per_vector, "binary"), by_signs(size))
        for size in MULTIPLIERS
    },
}


def overlap(approximate_QK: Rows, exact_QK: Rows) -> float:
    """Fraction of the exact ranking's documents that the approximate ranking contains."""
    rankings = zip(approximate_QK.tolist(), exact_QK.tolist(), strict=True)
    return sum(len(set(approximate) & set(exact)) for approximate, exact in rankings) / exact_QK.size


def score(chosen: Namespace, encoder: Encoder, name: str, data: RetrievalFolder) -> dict[str, tuple[float, float]]:
    """nDCG@10 on a folder and overlap with float32's top ten, by variant."""
    query_QD = unit_rows(encoder.encode(data.queries, role="query"))
    document_ND = unit_rows(encoder.encode(data.documents, role="document"))
    rankings = {variant: rank(query_QD, document_ND) for variant, (_, rank) in RANKINGS.items()}
    scores = {}
    for variant, row_QK in rankings.items():
        ndcg = retrieval_metrics(row_QK, data.qrels)["ndcg_at_10"]
        scores[variant] = (ndcg, overlap(row_QK, rankings["float32"]))
        record(chosen, f"E13 nDCG@10 on {name}, {variant}", ndcg, "score", "none")
        record(chosen, f"E13 ten first of float32 on {name}, {variant}", scores[variant][1], "fraction", "none")
    clipped = int((np.abs(scaled_dimensions(document_ND)[0]) > 127).sum())
    record(
        chosen, f"E13 clipped of {document_ND.size} numbers on {name}, {SCALE_A_DIMENSION}", clipped, "count", "none"
    )
    return scores


def main() -> None:
    """Score every folder and print the table."""
    chosen = options(__doc__, threads=2)
    root = evaluation_root(chosen.tiny)
    folders = [root / name for name in FOLDERS] if root == data_folder() else find_evaluation_folders(root)
    encoder = encoder_of(MODEL)
    names = ["/".join(folder.relative_to(root).parts) for folder in folders]
    scores = [
        score(chosen, encoder, name, read_retrieval_folder(folder)) for name, folder in zip(names, folders, strict=True)
    ]
    print("\n".join([f"| vectors | bytes | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]))
    for variant, (num_bytes, _) in RANKINGS.items():
        cells = [f"{ndcg:.3f} ({same:.3f})" for ndcg, same in (of_folder[variant] for of_folder in scores)]
        print(f"| {variant} | {num_bytes(encoder.embedding_dim)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
