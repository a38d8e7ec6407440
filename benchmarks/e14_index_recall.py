"""E14: recall of `index` on real text: all-MiniLM-L6-v2 on the retrieval folder `vaswani_npl` of EMBED_DATA.

Recall@10 is the fraction of the exact search's top ten documents that the index returns. The index has the default
number of lists and is searched with the default number of probes, with fewer and with more. Texts have at most 256
tokens and are encoded in the default precision.
"""

import tempfile
from pathlib import Path

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import encoder_of, tiny_evaluation_root
from benchmarks.e13_vector_formats import overlap
from benchmarks.harness import options, record
from benchmarks.workloads import data_folder
from embeddings.evaluation import read_retrieval_folder, retrieval_metrics
from embeddings.evaluation.folders import find_evaluation_folders, retrieval_files_of
from embeddings.inference import encode_corpus, search_top_k, unit_rows
from embeddings.mining import build_index

TOP_K = 10
FOLDER = "vaswani_npl"
PROBES = (4, 8, 16, None, 64)


def main() -> None:
    """Encode the folder once; search all documents, then through the index with each number of probes."""
    chosen = options(__doc__)
    folder = data_folder() / FOLDER
    if chosen.tiny or not folder.is_dir():
        folder = find_evaluation_folders(tiny_evaluation_root())[0]
    data, encoder = read_retrieval_folder(folder), encoder_of(MODEL)
    encoder.show_progress = not chosen.tiny
    query_QD = unit_rows(encoder.encode(data.queries, role="query"))
    with tempfile.TemporaryDirectory() as scratch:
        vectors = encode_corpus(encoder, retrieval_files_of(folder / "qrels.tsv").corpus, Path(scratch) / "vectors")
        exact_QK = search_top_k(query_QD, vectors.directions(), TOP_K).index_QK
        ndcg = retrieval_metrics(exact_QK, data.qrels)["ndcg_at_10"]
        record(chosen, f"E14 nDCG@10 on {folder.name}, all documents", ndcg, "score", "none")
        for probes in PROBES:
            index = build_index(vectors, num_probes=None if chosen.tiny else probes)
            row_QK = index.search(query_QD, TOP_K).index_QK
            ndcg = retrieval_metrics(row_QK, data.qrels)["ndcg_at_10"]
            lists = f"{index.num_probes} of {index.num_lists} lists of {vectors.num_documents} documents"
            setting = f"{folder.name}, {lists}"
            record(chosen, f"E14 recall@10 on {setting}", overlap(row_QK, exact_QK), "fraction", "none", "faiss-cpu")
            record(chosen, f"E14 nDCG@10 on {setting}", ndcg, "score", "none", "faiss-cpu")


if __name__ == "__main__":
    main()
