"""AIR-Bench: data sets with public labels are scored; for the others, search results are written for its leaderboard.

A data set has a version, a task (`qa`, `long-doc`), a domain and a language. Version 24.05 publishes the labels of its
development queries. The labels of its test queries and all labels of 24.04 are private.

Checked against the data set cards and the benchmark's repository; no data set was downloaded:

- Corpus and queries are `AIR-Bench/{task}_{domain}_{language}`, the version is the config (`AIR-Bench_24.05`), and rows
  are {"id", "text"}. Splits are `corpus_{dataset}` and `queries_{dataset}_{split}`; 24.04 has `queries_{dataset}`. A
  hyphen in the name of a data set is an underscore in the name of a split.
- Labels are `AIR-Bench/qrels-{task}_{domain}_{language}-dev`, split `qrels_{dataset}_dev`, with rows {"qid", "docid",
  "relevance"}: 1, or 0 for a hard negative.
- A submission is a zip of `{task}/{domain}/{language}_{dataset}_{split}.json`, each with the names of model, reranker,
  version and data set, and the 1,000 best documents of each query.

The main score is nDCG@10 for `qa` and Recall@10 for `long-doc`. In Tables 9 and 10 of NV-Embed, the score of a domain
is the mean over its data sets, and the last column the mean over all data sets.
"""

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from datasets import load_dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.search_wrappers import SearchEncoderWrapper

from embeddings.common.errors import InputError, OptionError, shown
from embeddings.common.io import atomic_path, write_text
from embeddings.common.text import format_table
from embeddings.evaluation.mteb_tasks import TEXTS_PER_BATCH, ContextualTaskEncoder, TaskEncoder

PREFIX = "air-bench"
_MAIN_SCORES = {"qa": "ndcg_at_10", "long-doc": "recall_at_10"}
_METRICS = {"qa": "nDCG@10 x 100", "long-doc": "Recall@10 x 100"}
# Documents per query in a submission.
SUBMITTED = 1000
_CHANGED = "check its page for changes of the benchmark, or delete the cached copy and load it again"


class AirBenchSet(NamedTuple):
    """One data set, with one split of its queries."""

    version: str
    task: str
    domain: str
    language: str
    dataset: str
    split: str

    @property
    def name(self) -> str:
        """The name of the task: `air-bench-24.05-qa-law-en-dev`, with the data set if the domain has several."""
        words = (PREFIX, self.version, self.task, self.domain, self.language, self.split, self.dataset)
        return "-".join(words if self.dataset != "default" else words[:-1])

    @property
    def has_labels(self) -> bool:
        return self.split == "dev"

    @property
    def config(self) -> str:
        """The name of the version in the data sets and the leaderboard."""
        return f"AIR-Bench_{self.version}"

    @property
    def repository(self) -> str:
        return f"AIR-Bench/{self.task}_{self.domain}_{self.language}"

    def splits(self) -> dict[str, tuple[str, str, tuple[str, ...]]]:
        """Hub data set, split and columns of the corpus, the queries and, if they are public, the labels."""
        dataset = self.dataset.replace("-", "_")
        queries = f"queries_{dataset}" if self.version == "24.04" else f"queries_{dataset}_{self.split}"
        splits: dict[str, tuple[str, str, tuple[str, ...]]] = {
            "corpus": (self.repository, f"corpus_{dataset}", ("id", "text")),
            "queries": (self.repository, queries, ("id", "text")),
        }
        if self.has_labels:
            qrels = f"AIR-Bench/qrels-{self.task}_{self.domain}_{self.language}-dev"
            splits["qrels"] = (qrels, f"qrels_{dataset}_dev", ("qid", "docid", "relevance"))
        return splits


@cache
def _table() -> dict[str, Any]:
    text = (resources.files(__package__) / "tables" / "air_bench.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def air_bench_sets() -> tuple[AirBenchSet, ...]:
    return tuple(
        AirBenchSet(version, task, domain, language, dataset, split)
        for version, task, domain, languages, dataset, splits in _table()["sets"]
        for language in languages.split()
        for split in splits.split()
    )


def air_bench_tasks(name: str) -> list["AirBenchTask"]:
    """The tasks of a name: `air-bench` with any words for version, task, domain, language and split.

    Several words of one kind select the data sets of any of them, and a kind without a word is not restricted:
    `air-bench-qa-law-en-de` is two data sets. By default the version is 24.05, and the split the one with public
    labels, `dev`; 24.04 only has `test`.
    """
    exact = [data for data in air_bench_sets() if data.name == name]
    if exact:
        return [_task(data) for data in exact]
    kinds = ("version", "task", "domain", "language", "split")
    known = {kind: sorted({getattr(data, kind) for data in air_bench_sets()}) for kind in kinds}
    words = re.findall(r"long-doc|[^-]+", name.removeprefix(PREFIX))
    for word in words:
        if not any(word in values for values in known.values()):
            listed = "; ".join(", ".join(values) for values in known.values())
            raise OptionError("tasks", name, f"has the unknown word {shown(word)}", f"the words are {listed}")
    chosen = {kind: [word for word in words if word in values] for kind, values in known.items()}
    chosen["version"] = chosen["version"] or ["24.05"]
    tasks = []
    for data in air_bench_sets():
        splits = chosen["split"] or (["test"] if data.version == "24.04" else ["dev"])
        if data.split in splits and all(getattr(data, kind) in values for kind, values in chosen.items() if values):
            tasks.append(_task(data))
    if not tasks:
        raise OptionError("tasks", name, "matches no data set", "leave a word out, as in air-bench-24.04-long-doc-book")
    return tasks


def _task(data: AirBenchSet) -> "AirBenchTask":
    metadata = TaskMetadata(
        name=data.name,
        dataset={"path": data.repository, "revision": data.config},
        description=f"AIR-Bench {data.version}: {data.task}, {data.domain}, {data.language}.",
        type="Retrieval",
        eval_splits=[data.split],
        eval_langs=["und-Zyyy"],
        main_score=_MAIN_SCORES[data.task],
    )
    task: AirBenchTask = type("AirBenchTask", (AirBenchTask,), {"metadata": metadata, "data": data})()
    return task


class AirBenchTask(AbsTaskRetrieval):
    """A data set as a task of mteb; without public labels it can be searched, but not scored."""

    data: ClassVar[AirBenchSet]
    dataset: Any

    def load_data(self, num_proc: int | None = None, **options: Any) -> None:
        """Load corpus, queries and labels from the cache or the Hub."""
        if self.data_loaded:
            return
        where = f"{self.data.repository}, {self.data.config}"
        loaded: dict[str, Any] = {}
        for name, (repository, split, columns) in self.data.splits().items():
            rows = load_dataset(repository, self.data.config, split=split, num_proc=num_proc)
            missing = [column for column in columns if column not in rows.column_names]
            if missing:
                what = f"split {split} has no column {missing[0]} (found: {', '.join(rows.column_names)})"
                raise InputError(where, what, _CHANGED)
            loaded[name] = rows.select_columns(list(columns))
        known = {"qid": set(loaded["queries"]["id"][:]), "docid": set(loaded["corpus"]["id"][:])}
        for name, column in (("queries", "qid"), ("corpus", "docid")):
            if len(known[column]) < len(loaded[name]):
                raise InputError(where, f"an id of the {name} occurs twice", _CHANGED)
        relevant: dict[str, dict[str, int]] = defaultdict(dict)
        if self.data.has_labels:
            for row in loaded["qrels"]:
                unknown = next((name for name, values in known.items() if row[name] not in values), None)
                if unknown is not None:
                    raise InputError(where, f"a label names the unknown {unknown} {shown(row[unknown])}", _CHANGED)
                relevant[row["qid"]][row["docid"]] = int(row["relevance"])
            if not any(grade > 0 for grades in relevant.values() for grade in grades.values()):
                raise InputError(where, "no document is relevant to any query", _CHANGED)
        parts = {"corpus": loaded["corpus"], "queries": loaded["queries"], "relevant_docs": dict(relevant)}
        self.dataset = {"default": {self.data.split: parts | {"top_ranked": None}}}
        self.data_loaded = True

    def write_searches(self, path: Path, model: str, adapted: TaskEncoder) -> None:
        """Search the corpus with all queries, and write the results in the format of the leaderboard."""
        data, split = self.data, self.dataset["default"][self.data.split]
        searcher: Any = adapted if isinstance(adapted, ContextualTaskEncoder) else SearchEncoderWrapper(adapted)
        shared: Any = {"task_metadata": self.metadata, "hf_split": data.split, "hf_subset": "default"}
        shared["encode_kwargs"] = {"batch_size": TEXTS_PER_BATCH, "show_progress_bar": False}
        searcher.index(split["corpus"], **shared)
        found = searcher.search(split["queries"], top_k=SUBMITTED, **shared)
        fields = {
            "model_name": model,
            "reranker_name": "NoReranker",
            "benchmark_version": data.config,
            "task_type": data.task,
            "domain": data.domain,
            "language": data.language,
            "dataset_name": data.dataset,
            "split": data.split,
            "search_results": {
                query: dict(sorted(scores.items(), key=lambda pair: -pair[1])) for query, scores in found.items()
            },
        }
        write_text(path, json.dumps(fields))


def searches_path(root: Path, model: str, data: AirBenchSet) -> Path:
    folder = root / data.config / model / "NoReranker" / data.task / data.domain
    return folder / f"{data.language}_{data.dataset}_{data.split}.json"


def pack_searches(root: Path, model: str, sets: Sequence[AirBenchSet]) -> list[Path]:
    """Zip the search results of each version of these data sets that is complete, and return the zips.

    A zip has all search results in its folder, including those of earlier runs.
    """
    packed = []
    for version in dict.fromkeys(data.config for data in sets):
        folder, target = root / version / model / "NoReranker", root / version / f"{model}_NoReranker.zip"
        if not all(searches_path(root, model, data).is_file() for data in sets if data.config == version):
            continue
        with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(folder.rglob("*.json")):
                file.write(path, path.relative_to(folder))
        packed.append(target)
    return packed


def format_domains(scored: Sequence[tuple[AirBenchSet, Mapping[int, float | None]]]) -> str:
    """Scores x 100 by language and domain, one table per task, with the paper's scores if English is included.

    The score of a domain is the mean over its data sets, and the last column the mean over all data sets of the row.
    The mean of the paper is shown only if all of its domains are. Data sets without a score are left out.
    """
    tables = []
    for version, task in dict.fromkeys((data.version, data.task) for data, _ in scored):
        rows = [(data, scores) for data, scores in scored if (data.version, data.task) == (version, task)]
        domains = sorted({data.domain for data, _ in rows})
        languages = list(dict.fromkeys(data.language for data, _ in rows))
        table = [(f"AIR-Bench {version} {task} dev, {_METRICS[task]}", *domains, "mean")]
        widths = list(rows[0][1])
        for width in widths:
            for language in [*languages, "all"] if len(languages) > 1 else languages:
                selected = [(data.domain, scores[width]) for data, scores in rows if language in (data.language, "all")]
                name = language if len(widths) == 1 else f"{language} [{width}]"
                table.append((name, *(_mean(selected, domain) for domain in domains), _mean(selected, None)))
        if "en" in languages:
            for name, published in _table()["paper"][task].items():
                columns = [*domains, "mean"] if {*published} <= {*domains, "mean"} else domains
                cells = (f"{published[column]:.2f}" if column in published else "" for column in columns)
                table.append((f"{name}, 24.04 test, en", *cells))
        tables.append(format_table(table))
    return "\n\n".join(tables)


def _mean(scored: Sequence[tuple[str, float | None]], domain: str | None) -> str:
    """The mean of the known scores of one domain, or of all domains (None)."""
    values = [score for scored_domain, score in scored if score is not None and domain in (scored_domain, None)]
    return f"{100 * sum(values) / len(values):.2f}" if values else ""
