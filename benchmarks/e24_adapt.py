"""E24: what `adapt` gains on the corpora of EMBED_DATA with queries of people, in its released defaults.

Each corpus is adapted to as a user would, from all-MiniLM-L6-v2 and without a language model. The queries are only test
(three quarters) and validation: none is trained on, as by default if there are fewer than 500. Their documents are
trained on (`--hold-out-judged false`), as the documents that a user searches are. Gains are variant - start, with 95 %
bootstrap intervals over the test queries.
Forgetting is measured on STS-B; with several seeds its interval is from the lowest to the highest bound.

`--seeds N` runs several seeds, each of which has other training queries and another part of the queries as test.
`--only NAME ...` runs some corpora. `--without KIND` does not train on queries of a kind, such as `sentence`.
`--training-share S` trains on a share of the queries, and tests on what is left; 0.5 is the default of larger sets.
`--work DIR` keeps the scores of each run, so that a later command with more seeds runs only the new ones. Name another
folder after a change of what is measured.
"""

import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.docstring_trials import MODEL
from benchmarks.e12_reference_scores import tiny_evaluation_root
from benchmarks.e25_hybrid import folder_of
from benchmarks.harness import Ratio, options, record
from benchmarks.workloads import data_folder
from embeddings.adaptation.candidates import KINDS
from embeddings.adaptation.real_queries import REAL
from embeddings.adaptation.verdict import HYBRID, START, TRAINED
from embeddings.cli import adapt
from embeddings.cli.main import dispatch
from embeddings.common.io import write_json
from embeddings.evaluation import RetrievalFolder, paired_bootstrap, read_retrieval_folder
from embeddings.evaluation.folders import find_evaluation_folders

SETS = ("cranfield", "codebase_chunks", "se_answers_pairs", "cisi", "chunking_eval", "vaswani_npl", "medquad_pairs")
FUSED = f"{TRAINED} + {HYBRID}"
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


@dataclass(frozen=True)
class Adapted:
    """What one seed gave: minutes, nDCG@10 by variant and test query, and changes on STS-B by variant."""

    minutes: float
    scores: dict[str, dict[str, float]]
    changes: dict[str, Mapping[str, float]]


def remove_pairs(path: Path, kind: str) -> None:
    """Remove the training pairs of a kind from a file, which may be missing."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if json.loads(line)["kind"] != kind]
    print(f"{len(kept)} of {len(lines)} pairs are not of the kind {kind}")
    if lines:
        path.write_text("".join(kept), "utf-8")


@contextmanager
def without_kind(kind: str | None) -> Iterator[None]:
    """Remove the training pairs of a kind as soon as `queries` has written them."""

    def run_step(argv: list[str]) -> None:
        dispatch(argv)
        if kind is not None and argv[0] == "queries":
            remove_pairs(Path(argv[argv.index("--output") + 1]) / "pairs.jsonl", kind)

    with patch.object(adapt, "run_step", run_step):
        yield


def adapted(chosen: Namespace, folder: RetrievalFolder, work: Path, seed: int) -> Adapted:
    """Adapt to one corpus."""
    data, output, start = write_folder(folder, work / "data"), work / "out", time.monotonic()
    general = data_folder() / GENERAL
    words: list[Any] = ["adapt", data / "corpus.jsonl", "--output", output, "--model", MODEL, "--queries", data]
    words += ["--hold-out-judged", "false", "--minutes", MINUTES, "--seed", seed]
    words += ["--training-share", chosen.training_share]
    words += ["--general", general] if not chosen.tiny and general.is_dir() else []
    with without_kind(chosen.without):
        dispatch(list(map(str, words)))
    scores: dict[str, dict[str, float]] = {}
    for line in (output / "verdict" / "queries.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == REAL:
            for variant, score in row["ndcg_at_10"].items():
                scores.setdefault(variant, {})[row["_id"]] = score
    verdict = json.loads((output / "verdict" / "verdict.json").read_text("utf-8"))
    changes = {variant: change for other in verdict["general"] for variant, change in other["differences"].items()}
    print(f"seed {seed}: recommends {verdict['recommendation']['variant']}")
    return Adapted((time.monotonic() - start) / 60, scores, changes)


def kept(chosen: Namespace, title: str, folder: RetrievalFolder, seed: int) -> Adapted:
    """The run of a seed, or what an earlier command kept of it."""
    path = None if chosen.work is None else chosen.work / f"{title}, seed {seed}.json"
    if path is not None and path.exists():
        return Adapted(**json.loads(path.read_text("utf-8")))
    with tempfile.TemporaryDirectory() as work:
        run = adapted(chosen, folder, Path(work), seed)
    if path is not None:
        write_json(path, asdict(run))
    return run


def record_all(chosen: Namespace, title: str, runs: list[Adapted]) -> None:
    """Record a row per variant. A query's score is its mean over the seeds whose test has it."""
    record(chosen, f"E24 minutes on {title}", max(run.minutes for run in runs), "min", "none")
    queries = sorted(set().union(*(run.scores[START] for run in runs)))
    score_of = {
        variant: np.array(
            [np.mean([run.scores[variant][query] for run in runs if query in run.scores[variant]]) for query in queries]
        )
        for variant in runs[0].scores
        if all(variant in run.scores for run in runs)
    }
    for variant, score_Q in score_of.items():
        record(chosen, f"E24 nDCG@10 on {title}, {variant}", float(score_Q.mean()), "score", "none")
        for base, over in ((START, ""), (HYBRID, " over hybrid")):
            if variant == FUSED or (base == START != variant):
                gain = paired_bootstrap(score_Q, score_of[base])
                interval = Ratio(gain.mean, gain.low, gain.high, float("nan"))
                record(chosen, f"E24 gain{over} on {title}, {variant}", interval, "nDCG@10", "none")
    for variant in runs[0].changes:
        of_runs = [run.changes[variant] for run in runs if variant in run.changes]
        low, high = min(each["low"] for each in of_runs), max(each["high"] for each in of_runs)
        change = Ratio(float(np.mean([each["mean"] for each in of_runs])), low, high, float("nan"))
        record(chosen, f"E24 change on {GENERAL} after {title}, {variant}", change, "Spearman", "none")


def main() -> None:
    """Adapt to every corpus that is there, or to some."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS, help="names of corpora")
    parser.add_argument("--without", choices=KINDS, metavar="KIND", help="kind of query that is not trained on")
    parser.add_argument("--training-share", type=float, default=0.0, help="share of the queries that are trained on")
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder that keeps each run's scores")
    chosen = options(__doc__, parser=parser)
    names = [name for name in chosen.only if (data_folder() / name).is_dir()]
    if chosen.tiny:
        names = [str(find_evaluation_folders(tiny_evaluation_root())[0])]
    if not names:
        print("skipped: set EMBED_DATA to the folder with the data sets")
    for name in names:
        folder = read_retrieval_folder(Path(name)) if chosen.tiny else folder_of(name)
        title = Path(name).name if chosen.without is None else f"{Path(name).name} without {chosen.without}"
        title += f" with {chosen.training_share:g} of the queries" if chosen.training_share else ""
        runs = [kept(chosen, title, folder, seed) for seed in range(chosen.seeds)]
        record_all(chosen, title, runs)


if __name__ == "__main__":
    main()
