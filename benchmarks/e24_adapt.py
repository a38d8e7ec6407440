"""E24: what `adapt` gains on the corpora of EMBED_DATA with queries of people, in its released defaults.

Each corpus is adapted to as a user would, from all-MiniLM-L6-v2 and without a language model. The queries are only test
(three quarters) and validation: none is trained on. Their documents are trained on (`--hold-out-judged false`), as the
documents that a user searches are. Gains are variant - start, with 95 % bootstrap intervals over the test queries.
Forgetting is measured on STS-B.
"""

import json
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import tiny_evaluation_root
from benchmarks.e25_hybrid import folder_of
from benchmarks.harness import Ratio, options, record
from benchmarks.workloads import data_folder
from embeddings.cli.main import dispatch
from embeddings.evaluation import RetrievalFolder, read_retrieval_folder
from embeddings.evaluation.folders import find_evaluation_folders

SETS = ("cranfield", "codebase_chunks", "se_answers_pairs", "cisi", "chunking_eval", "vaswani_npl", "medquad_pairs")
GENERAL = "stsb"
MINUTES = 30


def write_folder(folder: RetrievalFolder, output: Path) -> Path:
    """Write documents and judged queries as an evaluation folder."""
    output.mkdir(parents=True)
    files = (
        ("corpus.jsonl", folder.document_ids, folder.documents),
        ("queries.jsonl", folder.query_ids, folder.queries),
    )
    for name, ids, texts in files:
        rows = (json.dumps({"_id": key, "text": text}) for key, text in zip(ids, texts, strict=True))
        (output / name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    qrels = zip(folder.qrels.query_J.tolist(), folder.qrels.document_J.tolist(), folder.qrels.relevance_J, strict=True)
    lines = [f"{folder.query_ids[query]}\t{folder.document_ids[row]}\t{grade:g}" for query, row, grade in qrels]
    (output / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n", encoding="utf-8")
    return output


def adapt(chosen: Namespace, folder: RetrievalFolder, title: str, work: Path) -> None:
    """Adapt to one corpus, and record a row per variant."""
    data, output, start = write_folder(folder, work / "data"), work / "out", time.monotonic()
    general = data_folder() / GENERAL
    words: list[Any] = ["adapt", data / "corpus.jsonl", "--output", output, "--model", MODEL, "--queries", data]
    words += ["--hold-out-judged", "false", "--minutes", MINUTES]
    words += ["--general", general] if not chosen.tiny and general.is_dir() else []
    dispatch(list(map(str, words)))
    verdict = json.loads((output / "verdict" / "verdict.json").read_text("utf-8"))
    record(chosen, f"E24 minutes on {title}", (time.monotonic() - start) / 60, "min", "none")
    (group,) = (each for each in verdict["groups"] if each["kind"] == "real")
    for variant, score in group["scores"].items():
        record(chosen, f"E24 nDCG@10 on {title}, {variant}", score["metrics"]["ndcg_at_10"], "score", "none")
        if score["difference"] is not None:
            record(chosen, f"E24 gain on {title}, {variant}", interval(score["difference"]), "nDCG@10", "none")
    for other in verdict["general"]:
        for variant, change in other["differences"].items():
            what = f"E24 change on {other['data']} after {title}, {variant}"
            record(chosen, what, interval(change), "Spearman", "none")
    print(f"{title}: recommends {verdict['recommendation']['variant']}")


def interval(difference: Mapping[str, float]) -> Ratio:
    return Ratio(difference["mean"], difference["low"], difference["high"], float("nan"))


def main() -> None:
    """Adapt to every corpus that is there."""
    chosen = options(__doc__)
    names = [name for name in SETS if (data_folder() / name).is_dir()]
    if chosen.tiny:
        names = [str(find_evaluation_folders(tiny_evaluation_root())[0])]
    if not names:
        print("skipped: set EMBED_DATA to the folder with the data sets")
    for name in names:
        work = Path(tempfile.mkdtemp())
        try:
            adapt(chosen, read_retrieval_folder(Path(name)) if chosen.tiny else folder_of(name), Path(name).name, work)
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
