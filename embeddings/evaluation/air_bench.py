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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError
from mteb import TaskResult
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from embeddings.common.errors import InputError, OptionError, shown
from embeddings.common.io import atomic_path
from embeddings.common.text import GivenPrompt, format_table, one_line
from embeddings.evaluation.folders import Qrels, retrieval_metrics, trec_order
from embeddings.evaluation.mteb_tasks import TaskEncoder
from embeddings.inference.context import choose_context
from embeddings.inference.search import TopK, search_top_k
from embeddings.inference.vector_folder import encode_corpus

PREFIX = "air-bench"
MAIN_SCORES = {"qa": "ndcg_at_10", "long-doc": "recall_at_10"}
# Documents per query in a submission.
SUBMITTED = 1000
_CUTOFFS = (10, 100)
_CHANGED = "check its page for changes of the benchmark, or delete the cached copy and load it again"
_METRICS = {"ndcg_at_10": "nDCG@10 x 100", "recall_at_10": "Recall@10 x 100"}


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
        """The Hub data set of the corpus and queries."""
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
    """All data sets of both versions."""
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
    labels, `dev`; 24.04 only has `test`. An unknown word, or words that no data set matches, are an `OptionError`.
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
        main_score=MAIN_SCORES[data.task],
    )
    task: AirBenchTask = type("AirBenchTask", (AirBenchTask,), {"metadata": metadata, "data": data})()
    return task


class AirBenchTask(AbsTaskRetrieval):
    """A data set as a task, whose results have the format of mteb.

    Once loaded, `dataset` has `corpus`, `queries`, `document_ids`, `query_ids` and `qrels`, None for private labels.
    """

    data: ClassVar[AirBenchSet]
    dataset: Any

    def load_data(self, num_proc: int | None = None, **options: Any) -> None:
        """Load corpus, queries and labels from the cache or the Hub; an `InputError` if one is invalid."""
        if self.data_loaded:
            return
        loaded = {name: _load(self.data, *split, num_proc) for name, split in self.data.splits().items()}
        ids = {name: [*map(str, _column(loaded[name], "id"))] for name in ("queries", "corpus")}
        for name, values in ids.items():
            if len(set(values)) < len(values):
                where = f"{self.data.repository}, {self.data.config}"
                raise InputError(where, f"an id of the {name} occurs twice", _CHANGED)
        qrels = _qrels(self.data, loaded["qrels"], ids["queries"], ids["corpus"]) if self.data.has_labels else None
        self.dataset = loaded | {"qrels": qrels, "query_ids": ids["queries"], "document_ids": ids["corpus"]}
        self.data_loaded = True

    def result(self, best: TopK, seconds: float) -> TaskResult:
        """The scores of a search with all queries, for public labels."""
        scores = retrieval_metrics(best.index_QK, self.dataset["qrels"], _CUTOFFS)
        counts = {"num_queries": scores.num_queries, "num_documents": len(self.dataset["document_ids"])}
        row: Any = {"main_score": scores.metrics[self.metadata.main_score], **scores.metrics, **counts}
        return TaskResult.from_task_results(self, {self.data.split: {"default": row}}, seconds)

    def write_searches(self, path: Path, model: str, best: TopK) -> None:
        """Write a search with all queries in the format of the leaderboard, one query at a time."""
        data, ids = self.data, self.dataset["document_ids"]
        fields = {
            "model_name": model,
            "reranker_name": "NoReranker",
            "benchmark_version": data.config,
            "task_type": data.task,
            "domain": data.domain,
            "language": data.language,
            "dataset_name": data.dataset,
            "split": data.split,
        }
        with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(fields, indent=4).removesuffix("\n}") + ',\n    "search_results": {')
            for number, query in enumerate(self.dataset["query_ids"]):
                pairs = zip(best.index_QK[number].tolist(), best.score_QK[number].tolist(), strict=True)
                ranked = {ids[row]: score for row, score in pairs}
                file.write(f"{',' if number else ''}\n        {json.dumps(query)}: {json.dumps(ranked)}")
            file.write("\n    }\n}\n")


def _load(data: AirBenchSet, repository: str, split: str, columns: Sequence[str], num_proc: int | None) -> Dataset:
    where = f"{repository}, {data.config}"
    try:
        rows = load_dataset(repository, data.config, split=split, num_proc=num_proc)
    except DatasetNotFoundError as error:
        hint = "ask for access on its page and log in (hf auth login)"
        raise InputError(where, one_line(str(error), 200).rstrip("."), hint) from error
    # Raised for a missing config and for a missing split.
    except ValueError as error:
        raise InputError(where, f"has no split {split} ({one_line(str(error), 120)})", _CHANGED) from error
    missing = [name for name in columns if name not in rows.column_names]
    if missing:
        what = f"split {split} has no column {missing[0]} (found: {', '.join(rows.column_names)})"
        raise InputError(where, what, _CHANGED)
    return rows


def _column(rows: Dataset, name: str) -> list[Any]:
    """The values of one column only: the texts of a corpus may not fit in memory."""
    values: list[Any] = rows.select_columns([name])[:][name]
    return values


def _qrels(data: AirBenchSet, labels: Dataset, query_ids: Sequence[str], document_ids: Sequence[str]) -> Qrels:
    where, rows = f"{data.splits()['qrels'][0]}, {data.config}", []
    for name, ids in (("qid", query_ids), ("docid", document_ids)):
        row_of = {identifier: row for row, identifier in enumerate(ids)}
        judged = [*map(str, _column(labels, name))]
        unknown = next((identifier for identifier in judged if identifier not in row_of), None)
        if unknown is not None:
            raise InputError(where, f"a label names the unknown {name} {shown(unknown)}", _CHANGED)
        rows.append(np.array([row_of[identifier] for identifier in judged], dtype=np.int64))
    query_J, document_J = rows
    grade_J = np.array(_column(labels, "relevance"), dtype=np.float64)
    if not (grade_J > 0).any():
        raise InputError(where, "no document is relevant to any query", _CHANGED)
    # Pairs must be unique.
    _, first_J = np.unique(query_J * len(document_ids) + document_J, return_index=True)
    return Qrels(query_J[first_J], document_J[first_J], grade_J[first_J], len(query_ids), len(document_ids))


def search_set(
    adapted: TaskEncoder, task: AirBenchTask, widths: Sequence[int], folder: Path, context: tuple[int, int] | None
) -> Iterator[tuple[int, TopK]]:
    """Yield each width, and the documents of a loaded data set with the largest scores for each query.

    The corpus is encoded once for all widths into `folder`, which the caller removes; after a kill the same call
    resumes at the first missing shard. Disk: the texts twice, and 4 bytes per document and dimension. `context` is the
    number of context documents that a contextual model draws from the corpus, and the seed.
    """
    encoder, corpus = adapted.encoder, folder / "corpus.parquet"
    # Written again after a kill; `encode_corpus` checks by hash that existing shards are of the same texts.
    with atomic_path(corpus) as temporary:
        texts = task.dataset["corpus"].select_columns(["id", "text"]).with_format("arrow")[:]
        pq.write_table(texts, temporary, row_group_size=10_000)
    drawn = None if context is None else choose_context(encoder, corpus, *context)
    document_prompt = GivenPrompt(text=adapted.prompt(task.metadata, "document"))
    vectors = encode_corpus(encoder, corpus, folder / "encoded", prompt_name=document_prompt, context=drawn)
    queries = _column(task.dataset["queries"], "text")
    query_QD = encoder.encode(queries, context=drawn, role="query", prompt=adapted.prompt(task.metadata, "query"))
    top_k = max(_CUTOFFS) if task.data.has_labels else SUBMITTED
    tie_order_N = trec_order(task.dataset["document_ids"])
    for width in widths:
        truncated = (encoder.comparable(vector_ND[:, :width]) for vector_ND in vectors.tiles())
        query_Qd = encoder.comparable(query_QD[:, :width])
        yield width, search_top_k(query_Qd, truncated, top_k, encoder.device, tie_order_N)


def searches_path(root: Path, model: str, data: AirBenchSet) -> Path:
    folder = root / data.config / model / "NoReranker" / data.task / data.domain
    return folder / f"{data.language}_{data.dataset}_{data.split}.json"


def pack_searches(root: Path, model: str, sets: Sequence[AirBenchSet]) -> list[Path]:
    """Zip the search results of each version of these data sets that is complete, and return the zips.

    A zip has all search results in its folder, including those of earlier runs; it is rewritten if they have changed.
    """
    packed = []
    for version in dict.fromkeys(data.config for data in sets):
        folder, target = root / version / model / "NoReranker", root / version / f"{model}_NoReranker.zip"
        if not all(searches_path(root, model, data).is_file() for data in sets if data.config == version):
            continue
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
        newest = max((folder / name).stat().st_mtime_ns for name in names)
        if not target.is_file() or target.stat().st_mtime_ns < newest or _names_in(target) != names:
            with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
                for name in names:
                    file.write(folder / name, name)
        packed.append(target)
    return packed


def _names_in(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as file:
        return sorted(file.namelist())


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
        table = [(f"AIR-Bench {version} {task} dev, {_METRICS[MAIN_SCORES[task]]}", *domains, "mean")]
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
