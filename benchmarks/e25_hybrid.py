"""E25: nDCG@10 of all-MiniLM-L6-v2, BM25 and their fusions on retrieval folders and pairs of EMBED_DATA.

Each gain is the difference between a fusion and the dense search, with its 95 % bootstrap interval over the queries.
Of files of pairs, 2,000 random pairs are used; the corpus is all of their different answers.
Each corpus is encoded once, with at most 256 tokens per text, in the default precision. On xquad, BM25 is also scored
with its rules for any language and with those of each language.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import encoder_of, tiny_evaluation_root
from benchmarks.harness import Ratio, options, record
from benchmarks.workloads import data_folder, read_json_lines
from embeddings.evaluation import Qrels, RetrievalFolder, paired_bootstrap, read_retrieval_folder
from embeddings.evaluation.folders import find_evaluation_folders, query_ndcg
from embeddings.inference import BM25, Encoder, FusionRule, TopK, search_top_k
from embeddings.inference.bm25 import ANY_LANGUAGE, tokenizer
from embeddings.inference.hybrid import fused_top_k

SETS = ("cranfield", "cisi", "vaswani_npl", "codebase_chunks", "se_answers_pairs", "medquad_pairs")
MAX_PAIRS = 2000
TOP_K = 10
# The rules of tokens for the languages of xquad.
LANGUAGES = {
    "ar": "arabic",
    "de": "german",
    "el": "greek",
    "es": "spanish",
    "hi": "hindi",
    "ro": "romanian",
    "ru": "russian",
    "th": "none",
    "tr": "turkish",
    "vi": "none",
    "zh": "none",
}
RULES = {
    "z-scores, 0.2": FusionRule(),
    "z-scores, 0.5": FusionRule(weight=0.5),
    "min-max, 0.2": FusionRule("minmax"),
    "reciprocal ranks": FusionRule("rrf"),
}


def pairs_folder(path: Path) -> RetrievalFolder:
    """A retrieval folder of at most 2,000 random pairs: all different answers, and for each question its answers."""
    records = read_json_lines(path)
    rows = np.random.default_rng(0).permutation(len(records))[:MAX_PAIRS]
    pairs = [(records[row]["query"], records[row]["positive"]) for row in np.sort(rows).tolist()]
    queries, documents = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    query_row, document_row = ({text: row for row, text in enumerate(texts)} for texts in (queries, documents))
    judged = {(query_row[query], document_row[document], 1.0) for query, document in pairs}
    qrels = Qrels.of(sorted(judged), len(queries), len(documents))
    document_ids, query_ids = (list(map(str, range(len(texts)))) for texts in (documents, queries))
    return RetrievalFolder(documents, document_ids, queries, query_ids, qrels)


def folder_of(name: str) -> RetrievalFolder:
    """The data set of a name in EMBED_DATA."""
    folder = data_folder() / name
    pairs = folder / "train.jsonl.gz"
    return pairs_folder(pairs) if pairs.is_file() else read_retrieval_folder(folder)


def scores_of(folder: RetrievalFolder, encoder: Encoder) -> dict[str, npt.NDArray[np.float64]]:
    """nDCG@10 of each query: of the dense search, of BM25, and of each rule."""
    words, order_N = BM25(folder.documents), folder.tie_order_N
    query_QD = encoder.comparable(encoder.encode(folder.queries, role="query"))
    document_ND = encoder.comparable(encoder.encode(folder.documents, role="document"))

    def nearest(query_QD: npt.NDArray[np.float32], top_k: int) -> TopK:
        return search_top_k(query_QD, document_ND, top_k, encoder.device, order_N)

    fused = partial(fused_top_k, folder.queries, query_QD, words, TOP_K, tie_order_N=order_N)
    rankings = {
        "dense": nearest(query_QD, TOP_K).index_QK,
        "BM25": words.search(folder.queries, TOP_K, order_N)[0],
        **{
            name: fused([rule], tiles=lambda: [document_ND], nearest=nearest, device=encoder.device)[0].index_QK
            for name, rule in RULES.items()
        },
    }
    return {name: query_ndcg(row_QK, folder.qrels) for name, row_QK in rankings.items()}


def score(chosen: Namespace, names: Sequence[str]) -> None:
    """Score the data sets, and record a row per system."""
    encoder = encoder_of(MODEL)
    for name in names:
        folder = read_retrieval_folder(Path(name)) if chosen.tiny else folder_of(name)
        title = Path(name).name
        dense_Q, words_Q, *fused = scores_of(folder, encoder).values()
        record(chosen, f"E25 nDCG@10 on {title}, all-MiniLM-L6-v2", float(dense_Q.mean()), "score", "none")
        systems = {"BM25": words_Q, **dict(zip(RULES, fused, strict=True))}
        for system, score_Q in systems.items():
            record(chosen, f"E25 nDCG@10 on {title}, {system}", float(score_Q.mean()), "score", "none", "scipy")
            gain = Ratio(*paired_bootstrap(score_Q, dense_Q), float("nan"))
            record(chosen, f"E25 gain on {title}, {system}", gain, "nDCG@10", "none", "scipy")


def score_languages(chosen: Namespace) -> None:
    """Score BM25 on each language of xquad with two rules of tokens."""
    for code, language in LANGUAGES.items():
        folder = read_retrieval_folder(data_folder() / "xquad" / code)
        for rules in (ANY_LANGUAGE, language):
            words = BM25(folder.documents, tokenizer(rules))
            row_QK, _ = words.search(folder.queries, TOP_K, folder.tie_order_N)
            title = "rules for any language" if rules == ANY_LANGUAGE else "rules of the language"
            value = float(query_ndcg(row_QK, folder.qrels).mean())
            record(chosen, f"E25 BM25 on xquad/{code} ({language}), {title}", value, "score", "none", "scipy")


def main() -> None:
    """Score every data set that is there."""
    chosen = options(__doc__)
    if chosen.tiny:
        score(chosen, [str(find_evaluation_folders(tiny_evaluation_root())[0])])
        return
    names = [name for name in SETS if (data_folder() / name).is_dir()]
    if not names:
        print("skipped: set EMBED_DATA to the folder with the data sets")
    score(chosen, names)
    if (data_folder() / "xquad").is_dir():
        score_languages(chosen)


if __name__ == "__main__":
    main()
