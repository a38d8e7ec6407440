"""E14: what `index` finds on real text: all-MiniLM-L6-v2 on the retrieval folder vaswani_npl of EMBED_DATA.

The share of the exact search's ten first documents of each query that the lists give, and nDCG@10, for the default
lists and probes and for fewer and more probes. Texts of 256 tokens, encoded in the default precision.
"""

import tempfile
from pathlib import Path

from benchmarks.docstring_trials import MODEL, World
from benchmarks.e12_reference_scores import encoder_of
from benchmarks.e13_vector_formats import same_share
from benchmarks.harness import options, record
from benchmarks.moe_trials import data_folder
from embeddings.evaluation import read_retrieval_folder, retrieval_metrics
from embeddings.evaluation.folders import find_evaluation_folders, retrieval_files_of
from embeddings.inference import encode_corpus, search_top_k, unit_rows
from embeddings.mining import build_index

TOP_K = 10
FOLDER = "vaswani_npl"
PROBES = (4, 8, 16, None, 64)


def main() -> None:
    """Encode the folder once, and search it exactly and by its lists."""
    chosen = options(__doc__)
    place = data_folder() / FOLDER
    if chosen.tiny or not place.is_dir():
        world = World(Path("checkpoints/trials"), tiny=True)
        with world.alone():
            world.prepare([])
        place = find_evaluation_folders(world.folder / "corpus" / "eval")[0]
    data, encoder = read_retrieval_folder(place), encoder_of(MODEL)
    encoder.show_progress = not chosen.tiny
    query_QD = unit_rows(encoder.encode(data.queries, role="query"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = encode_corpus(encoder, retrieval_files_of(place / "qrels.tsv").corpus, Path(scratch) / "vectors")
        exact_QK = search_top_k(query_QD, folder.directions(), TOP_K).index_QK
        ndcg = retrieval_metrics(exact_QK, data.qrels).metrics["ndcg_at_10"]
        record(chosen, f"E14 nDCG@10 on {place.name}, all documents", ndcg, "score", "none")
        for probes in PROBES:
            index = build_index(folder, num_probes=None if chosen.tiny else probes)
            found_QK = index.search(query_QD, TOP_K).index_QK
            ndcg = retrieval_metrics(found_QK, data.qrels).metrics["ndcg_at_10"]
            of = f"{place.name}, {index.num_probes} of {index.num_lists} lists of {folder.num_documents} documents"
            record(chosen, f"E14 recall@10 on {of}", same_share(found_QK, exact_QK), "fraction", "none", "faiss-cpu")
            record(chosen, f"E14 nDCG@10 on {of}", ndcg, "score", "none", "faiss-cpu")


if __name__ == "__main__":
    main()
