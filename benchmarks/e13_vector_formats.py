"""E13: what all-MiniLM-L6-v2 scores where vectors are kept in fewer bytes, on the retrieval folders of EMBED_DATA.

nDCG@10, and the share of float32's ten first documents that are among the ten found. Texts of 256 tokens, encoded in
the default precision. Beside int8 with one scale a row stands one scale a dimension that
is calibrated on the first 1,000 documents, with the numbers that it clips.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.docstring_trials import MODEL, World
from benchmarks.e12_reference_scores import encoder_of
from benchmarks.harness import options, record
from benchmarks.moe_trials import data_folder
from embeddings.common.jobs import save_array
from embeddings.evaluation import RetrievalFolder, read_retrieval_folder, retrieval_metrics
from embeddings.evaluation.folders import find_evaluation_folders
from embeddings.inference import Encoder, VectorFormat, VectorShards, search_signs, search_top_k, unit_rows
from embeddings.inference.search import nearest_signs
from embeddings.inference.vectors import bytes_per_vector, sign_bits, stored_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
# Rows of the documents found, best first, (Q, 10).
Ranking = Callable[[Floats, Floats], Rows]

TOP_K = 10
FOLDERS = ("cranfield", "cisi", "chunking_eval", "codebase_chunks")
CALIBRATION_ROWS = 1000
MULTIPLIERS = (1, 4, 10)
SCALE_A_DIMENSION = f"int8, a scale a dimension of {CALIBRATION_ROWS} rows"


def kept(vector_format: VectorFormat) -> Ranking:
    """The ranking by the cosines of what a format keeps."""

    def rank(query_QD: Floats, document_ND: Floats) -> Rows:
        with tempfile.TemporaryDirectory() as folder:
            shards = written(Path(folder), document_ND, vector_format)
            return search_top_k(query_QD, map(unit_rows, shards), TOP_K).index_QK

    return rank


def by_signs(multiplier: int) -> Ranking:
    """The ranking by Hamming distance, with some candidates for each place scored again."""

    def rank(query_QD: Floats, document_ND: Floats) -> Rows:
        with tempfile.TemporaryDirectory() as folder:
            return search_signs(query_QD, written(Path(folder), document_ND, "binary"), TOP_K, multiplier).index_QK

    return rank


def by_distance(query_QD: Floats, document_ND: Floats) -> Rows:
    """The ranking by Hamming distance alone."""
    return nearest_signs(sign_bits(query_QD), [sign_bits(document_ND)], TOP_K).index_QK


def by_scaled_dimensions(query_QD: Floats, document_ND: Floats) -> Rows:
    """The ranking by int8 numbers with one scale a dimension."""
    code_ND, scale_D = scaled_dimensions(document_ND)
    return search_top_k(query_QD, unit_rows(np.clip(code_ND, -127, 127) * scale_D), TOP_K).index_QK


def scaled_dimensions(document_ND: Floats) -> tuple[Floats, Floats]:
    """Numbers over their dimension's scale, rounded but not clipped, (N, D), and the scales, (D,)."""
    scale_D = np.abs(document_ND[:CALIBRATION_ROWS]).max(axis=0) / 127
    return np.rint(document_ND / scale_D), scale_D


def written(folder: Path, document_ND: Floats, vector_format: VectorFormat) -> VectorShards:
    """The documents in one shard."""
    shards = VectorShards(folder, len(document_ND), document_ND.shape[1], len(document_ND), vector_format)
    save_array(shards.path(0), stored_rows(document_ND, vector_format, "documents"))
    return shards


# Bytes of a vector by its width, and the ranking.
RANKINGS: dict[str, tuple[Callable[[int], int], Ranking]] = {
    "float32": (partial(bytes_per_vector, "float32"), kept("float32")),
    "float16": (partial(bytes_per_vector, "float16"), kept("float16")),
    "int8": (partial(bytes_per_vector, "int8"), kept("int8")),
    SCALE_A_DIMENSION: (int, by_scaled_dimensions),
    "binary, Hamming distance alone": (partial(bytes_per_vector, "binary"), by_distance),
    **{
        f"binary, {size} x k scored again": (partial(bytes_per_vector, "binary"), by_signs(size))
        for size in MULTIPLIERS
    },
}


def same_share(found_QK: Rows, exact_QK: Rows) -> float:
    """The share of the exact ranking's documents that were found."""
    same = sum(len(set(found) & set(exact)) for found, exact in zip(found_QK.tolist(), exact_QK.tolist(), strict=True))
    return same / exact_QK.size


def score(chosen: Namespace, encoder: Encoder, name: str, data: RetrievalFolder) -> dict[str, tuple[float, float]]:
    """nDCG@10 and share of float32's documents on a folder, by how its vectors are kept and searched."""
    query_QD = unit_rows(encoder.encode(data.queries, role="query"))
    document_ND = unit_rows(encoder.encode(data.documents, role="document"))
    found = {way: rank(query_QD, document_ND) for way, (_, rank) in RANKINGS.items()}
    scores = {}
    for way, row_QK in found.items():
        ndcg = retrieval_metrics(row_QK, data.qrels).metrics["ndcg_at_10"]
        scores[way] = (ndcg, same_share(row_QK, found["float32"]))
        record(chosen, f"E13 nDCG@10 on {name}, {way}", ndcg, "score", "none")
        record(chosen, f"E13 ten first of float32 on {name}, {way}", scores[way][1], "fraction", "none")
    clipped = int((np.abs(scaled_dimensions(document_ND)[0]) > 127).sum())
    record(
        chosen, f"E13 clipped of {document_ND.size} numbers on {name}, {SCALE_A_DIMENSION}", clipped, "count", "none"
    )
    return scores


def main() -> None:
    """Score every folder, and print the README's table."""
    chosen = options(__doc__, threads=2)
    root = data_folder()
    folders = [root / name for name in FOLDERS]
    if chosen.tiny or not root.is_dir():
        world = World(Path("checkpoints/trials"), tiny=True)
        with world.alone():
            world.prepare([])
        root = world.folder / "corpus" / "eval"
        folders = find_evaluation_folders(root)
    encoder = encoder_of(MODEL)
    names = ["/".join(folder.relative_to(root).parts) for folder in folders]
    scores = [
        score(chosen, encoder, name, read_retrieval_folder(folder)) for name, folder in zip(names, folders, strict=True)
    ]
    print("\n".join([f"| vectors | bytes | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]))
    for way, (num_bytes, _) in RANKINGS.items():
        cells = [f"{ndcg:.3f} ({same:.3f})" for ndcg, same in (found[way] for found in scores)]
        print(f"| {way} | {num_bytes(encoder.embedding_dim)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
