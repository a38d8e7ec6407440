"""Finds tasks of mteb by name, runs them one by one, and writes each result as soon as it is computed."""

import copy
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import huggingface_hub.constants
import mteb
from mteb import AbsTask, TaskResult
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.models import ModelMeta
from mteb.models.model_meta import ScoringFunction

from embeddings.common import text as common_text
from embeddings.common.errors import InputError, OptionError, UserError
from embeddings.common.io import atomic_path, scratch_folder, write_json, write_text
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.text import one_line
from embeddings.evaluation.air_bench import PREFIX, AirBenchTask, air_bench_tasks, pack_searches, searches_path
from embeddings.evaluation.folders import EvaluationFolder
from embeddings.evaluation.mteb_library import Instructions, quiet
from embeddings.evaluation.mteb_tasks import (
    KINDS,
    TEXTS_PER_BATCH,
    ContextualTaskEncoder,
    TaskEncoder,
    folder_task,
    folder_tasks,
)
from embeddings.inference.context import require_context_size
from embeddings.inference.encoder import Encoder, check_widths, embedder_sha256

# The benchmark of mteb for each group. Its English suite has only the English parts of multilingual tasks.
_BENCHMARKS = {"mteb-english-56": "MTEB(eng, v1)", "mgh-26": "MTEB(eng, v1)", "beir": "BEIR"}
_TASKS = {"miracl": "MIRACLRetrieval"}
GROUPS = (*_BENCHMARKS, *_TASKS, "air-bench")
# MGH (Negative Matters), appendix C.2, which follows Springer et al. 2024.
MGH_26 = (
    *("FiQA2018", "SCIDOCS", "SciFact", "NFCorpus"),
    *("TwitterSemEval2015", "TwitterURLCorpus"),
    *("ImdbClassification", "AmazonReviewsClassification"),
    *("TweetSentimentExtractionClassification", "MTOPDomainClassification"),
    *("TwentyNewsgroupsClustering", "BiorxivClusteringS2S", "MedrxivClusteringS2S"),
    *("StackOverflowDupQuestions", "AskUbuntuDupQuestions", "SciDocsRR"),
    *("BIOSSES", "STS12", "STS13", "STS14", "STS15", "STS16", "STS17", "STS22", "STSBenchmark", "SICK-R"),
)


def find_tasks(names: str | Sequence[str]) -> list[AbsTask]:
    """The tasks with these names (a list, or text separated by commas), unique, in order, without their data.

    A name is a group (`mteb-english-56`, `mgh-26`, `beir`, `miracl`), a benchmark or task of mteb, AIR-Bench or some of
    its data sets (see `air_bench_tasks`), or a folder with evaluation data at or below it.
    """
    # A comma inside brackets is part of the name: MTEB(eng, v1).
    words = re.split(r",(?![^(]*\))", names) if isinstance(names, str) else names
    tasks: dict[str, AbsTask] = {}
    for name in (word.strip() for word in words):
        for task in _tasks_of(name):
            if set(task.metadata.modalities) != {"text"}:
                found = f"{name} with {task.metadata.name}"
                raise OptionError("tasks", found, "must be tasks with texts only", "name others")
            first = tasks.setdefault(task.metadata.name, task)
            if first.metadata.revision != task.metadata.revision:
                raise OptionError("tasks", name, f"has a second task {task.metadata.name}", "rename its folder")
            if _subsets(first) != _subsets(task):
                rule = f"has {task.metadata.name} in other languages or splits than an earlier name"
                raise OptionError("tasks", name, rule, "run them one after the other")
    if not tasks:
        raise OptionError("tasks", names, "must name a task", f"a group is {', '.join(GROUPS)}")
    return list(tasks.values())


def _subsets(task: AbsTask) -> tuple[set[str], set[str]]:
    """The subsets (languages) and splits that a task is scored on."""
    return set(task.hf_subsets), set(task.eval_splits)


def _tasks_of(name: str) -> list[AbsTask]:
    if name.startswith(PREFIX):
        return [*air_bench_tasks(name)]
    if name in _BENCHMARKS:
        tasks = _benchmark(_BENCHMARKS[name])
        return [task for task in tasks if name != "mgh-26" or task.metadata.name in MGH_26]
    try:
        with quiet():
            return [mteb.get_task(_TASKS.get(name, name))]
    except KeyError as error:
        guess = re.search(r"Did you mean: '(.+)'", str(error))
    if name and Path(name).is_dir():
        return folder_tasks(name)
    # Benchmarks come last, because mteb needs seconds to build them all.
    with suppress(KeyError):
        return _benchmark(name)
    hint = f"did you mean {guess[1]}?" if guess else f"a group is {', '.join(GROUPS)}"
    raise OptionError("tasks", name, "must name a task, a group or a folder", hint)


def _benchmark(name: str) -> list[AbsTask]:
    """Copies of the tasks of a benchmark of mteb, which caches them: a run changes its task."""
    with quiet():
        return [copy.deepcopy(task) for task in mteb.get_benchmark(name).tasks]


@dataclass(frozen=True)
class TaskSettings:
    """Settings that affect scores, other than the model and the tasks.

    The prompt of `prompt_name` precedes queries, or all texts of tasks without roles; `instructions` replace it for the
    tasks that have one. Each of `widths`, numbers of leading dimensions, has its own score. A contextual model has
    `context_size` context documents, drawn for each task, or none.
    """

    prompt_name: str | None = None
    instructions: Instructions | None = None
    widths: Sequence[int] | None = None
    context_size: int | None = None
    context_seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_name is not None and self.instructions is not None:
            rule = "has no effect beside instructions, which go before the same texts"
            raise OptionError("prompt_name", self.prompt_name, rule, "leave one of them out")


class TaskResults:
    """A folder of results, `results/MODEL/REVISION/[experiments/SETTINGS/]TASK.json`, as `mteb.ResultCache` reads them.

    That class does not write them: its files are not atomic, and `only-missing` returns a result for changed data.
    """

    def __init__(self, folder: Path, metas: Mapping[int, ModelMeta]) -> None:
        self.folder, self.metas = folder, metas

    def folder_of(self, width: int) -> Path:
        meta = self.metas[width]
        folder = self.folder / "results" / meta.model_name_as_path() / str(meta.revision)
        return folder if meta.experiment_name is None else folder / "experiments" / meta.experiment_name

    def find(self, task: AbsTask, width: int) -> TaskResult | None:
        """The result of a task for its data, languages and splits and this release of mteb, or None."""
        path = self.folder_of(width) / f"{task.metadata.name}.json"
        if not path.is_file():
            return None
        try:
            # Otherwise mteb accepts any JSON as a result of an early release.
            result = TaskResult.from_disk(path, load_historic_data=False)
        except ValueError:
            raise InputError(str(path), "is empty or damaged", "delete it and run the task again") from None
        same = result.is_mergeable(task, criteria=["dataset_revision", "mteb_version"])
        if not same or result.get_missing_evaluations(task):
            return None
        return result if task.is_aggregate else result.validate_and_filter_scores(task)

    def model(self, width: int) -> str:
        """The name of the model in a submission, including its settings."""
        meta = self.metas[width]
        return "_".join(filter(None, (str(meta.name).rpartition("/")[2], meta.experiment_name)))

    def searches(self, task: AirBenchTask, width: int) -> Path:
        return searches_path(self.folder_of(width), self.model(width), task.data)

    def score(self, task: AbsTask, width: int) -> float | None:
        """The main score of a task; NaN if it was searched and its labels are private, None if it was not run."""
        if isinstance(task, AirBenchTask) and not task.data.has_labels:
            return math.nan if self.searches(task, width).is_file() else None
        result = self.find(task, width)
        return None if result is None else float(result.get_score())

    def row(self, task: AbsTask) -> "TaskScore":
        about, scores = task.metadata, {width: self.score(task, width) for width in self.metas}
        return TaskScore(about.name, about.type, about.main_score, scores)

    def write(self, result: TaskResult, width: int) -> None:
        folder = self.folder_of(width)
        write_json(folder / "model_meta.json", json.loads(json.dumps(self.metas[width].to_dict(), default=str)))
        with atomic_path(folder / f"{result.task_name}.json") as temporary:
            result.to_disk(temporary)


class TaskScore(NamedTuple):
    """The main score of a task at each width; None if it was not run, NaN if its labels are private."""

    task: str
    kind: str
    metric: str
    scores: dict[int, float | None]

    @property
    def complete(self) -> bool:
        return None not in self.scores.values()


def write_table(results: TaskResults, tasks: Sequence[AbsTask]) -> list[TaskScore]:
    """Write `scores.csv` with the scores of these tasks beside the results of each width, and return the scores."""
    scores = list(map(results.row, tasks))
    for width in results.metas:
        text = io.StringIO()
        rows = [score._replace(scores={width: score.scores[width]}) for score in scores]
        csv.writer(text, lineterminator="\n").writerows(_table(rows))
        write_text(results.folder_of(width) / "scores.csv", text.getvalue())
    return scores


def format_table(scores: Sequence[TaskScore]) -> str:
    """The table as text: a row per task, then the means by type and over all finished tasks."""
    return common_text.format_table(_table(scores), "<")


def _table(scores: Sequence[TaskScore]) -> list[tuple[str, ...]]:
    """The rows of the table with a header; means are over the tasks that are finished at every width."""
    finished = [
        score for score in scores if not any(value is None or math.isnan(value) for value in score.scores.values())
    ]
    widths = list(scores[0].scores)
    names = ["score"] if len(widths) == 1 else [f"score_{width}" for width in widths]
    rows = [("task", "type", "metric", *names)]
    rows += [(score.task, score.kind, score.metric, *map(_cell, score.scores.values())) for score in scores]
    for kind in [*sorted({score.kind for score in finished}), "all"]:
        members = [score for score in finished if kind in (score.kind, "all")]
        if members:
            means = (sum(score.scores[width] or 0.0 for score in members) / len(members) for width in widths)
            rows.append((f"mean of {len(members)}", kind, "", *map(_cell, means)))
    return rows


def _cell(score: float | None) -> str:
    return "" if score is None else "searched" if math.isnan(score) else f"{score:.4f}"


def run_tasks(
    encoder: Encoder,
    model: str,
    tasks: Sequence[AbsTask],
    output: Path,
    settings: TaskSettings,
    share: Iterable[int] | None = None,
) -> list[TaskScore]:
    """Run the tasks that have no result yet, write a table of all results, and return the scores.

    After a kill the same call resumes at the first unfinished task. In offline mode, the data of all tasks are loaded
    once before the first task runs, so that a missing data set is reported first. `share` contains the indices of the
    tasks that this process runs.
    """
    widths = list(dict.fromkeys(settings.widths or [encoder.embedding_dim]))
    check_widths(encoder, widths)
    metas = _metas(encoder, model, settings, widths)
    adapted, results = _adapted(encoder, metas[widths[0]], settings), TaskResults(output, metas)
    shared = tasks if share is None else [tasks[index] for index in share]
    remaining = [task for task in shared if any(results.score(task, width) is None for width in widths)]
    show_bars = encoder.show_progress
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        for task in remaining:
            with _loaded(task, show_bars):
                pass
    done = len(shared) - len(remaining)
    with progress_bar(len(shared), "tasks", "task", initial=done, disable=not show_bars) as bar:
        for task in remaining:
            bar.set_description(task.metadata.name)
            with bar.item():
                _run(adapted, task, results, settings)
    private = [task.data for task in tasks if isinstance(task, AirBenchTask) and not task.data.has_labels]
    for width in widths:
        for path in pack_searches(results.folder_of(width), results.model(width), private):
            logger.info("searches for AIR-Bench's leaderboard: %s", path)
    return write_table(results, tasks)


def score_folder(
    encoder: Encoder, name: str, folder: EvaluationFolder, widths: Sequence[int], settings: TaskSettings
) -> list[dict[str, float]]:
    """The metrics of a folder's data at each width, computed by mteb, the main one first; no results are written."""
    # Names of tasks have dots instead of slashes.
    task, (_, _, metrics) = folder_task(name.replace("/", "."), folder.kind, folder), KINDS[folder.kind]
    facts = {"name": f"local/{name}", "similarity_fn_name": ScoringFunction(encoder.embedder.similarity)}
    meta = ModelMeta.create_empty(overwrites=facts)
    adapted, scores = _adapted(encoder, meta, settings), []
    with TemporaryDirectory() as vectors, _loaded(task, encoder.show_progress):
        adapted.folder = Path(vectors) if len(widths) > 1 else None
        for width in widths:
            adapted.width = width
            (row,) = _evaluate(adapted, task).scores["test"]
            scores.append({metric: float(row[metric]) for metric in metrics})
    return scores


def _adapted(encoder: Encoder, meta: ModelMeta, settings: TaskSettings) -> TaskEncoder:
    if settings.prompt_name is not None:
        encoder.embedder.text.prompt(settings.prompt_name, "query")
    if settings.context_size is None:
        return TaskEncoder(encoder, meta, settings.prompt_name)
    size = require_context_size(encoder, settings.context_size)
    return ContextualTaskEncoder(encoder, meta, settings.prompt_name, size, settings.context_seed)


def _metas(encoder: Encoder, model: str, settings: TaskSettings, widths: Sequence[int]) -> dict[int, ModelMeta]:
    """The description of the model for mteb, by width; the revision is a hash of everything that affects vectors."""
    embedder, precision = encoder.embedder, str(encoder.dtype).removeprefix("torch.")
    is_hub_id = model.count("/") == 1 and not Path(model).expanduser().exists()
    shared = {
        "name": model if is_hub_id else f"local/{Path(model).expanduser().resolve().name}",
        "revision": embedder_sha256(encoder)[:40],
        "max_tokens": embedder.text.document_max_length,
        "n_parameters": sum(weight.numel() for weight in embedder.parameters()),
        "similarity_fn_name": ScoringFunction(embedder.similarity),
        "framework": ["PyTorch"],
    }
    metas = {}
    for width in widths:
        experiment = {
            "precision": None if precision == "float32" else precision,
            "dimensions": None if width == embedder.embedding_dim else width,
            "prompt_name": settings.prompt_name,
            "instructions": settings.instructions and settings.instructions.name,
            "context_size": settings.context_size,
            "context_seed": None if settings.context_size is None else settings.context_seed,
        }
        experiment = {name: value for name, value in experiment.items() if value is not None}
        overwrites = shared | {"embed_dim": width, "experiment_kwargs": experiment or None}
        metas[width] = ModelMeta.create_empty(overwrites=overwrites)
    return metas


def _run(adapted: TaskEncoder, task: AbsTask, results: TaskResults, settings: TaskSettings) -> None:
    """Run a task at the widths that have no result, from one encoding, and write the results."""
    name, table = task.metadata.name, settings.instructions
    text = adapted.encoder.embedder.text
    adapted.instruction_prompt = None if table is None else table.prompt(name, task.metadata.type, text)
    if table is not None and adapted.instruction_prompt is None:
        logger.warning("%s: no instruction for this task in %s; using the prompts of the model", name, table.name)
    widths = [width for width in results.metas if results.score(task, width) is None]
    vectors: AbstractContextManager[Path | None] = nullcontext()
    if len(widths) > 1:
        vectors = scratch_folder(results.folder_of(widths[0]) / f"{name}.vectors")
    with _loaded(task, adapted.encoder.show_progress), vectors as adapted.folder:
        for width in widths:
            adapted.width = width
            if isinstance(task, AirBenchTask) and not task.data.has_labels:
                with quiet():
                    task.write_searches(results.searches(task, width), results.model(width), adapted)
            else:
                results.write(_evaluate(adapted, task), width)
            score = _cell(results.score(task, width))
            logger.info("%s [%d]: %s %s", name, width, task.metadata.main_score, score)


def _parts(task: AbsTask) -> list[AbsTask]:
    return list(task.metadata.tasks) if isinstance(task, AbsTaskAggregate) else [task]


def _evaluate(adapted: TaskEncoder, task: AbsTask) -> TaskResult:
    """The result of mteb for a task whose data are loaded; each run starts from the same random state."""
    parts = _parts(task)
    states = [copy.deepcopy((part.rng_state, part.np_rng)) for part in parts]
    encoding: Any = {"batch_size": TEXTS_PER_BATCH, "show_progress_bar": False}
    options: Any = {"cache": None, "co2_tracker": False, "show_progress_bar": False}
    with quiet():
        result = mteb.evaluate(adapted, task, encode_kwargs=encoding, **options).task_results[0]
    for part, state in zip(parts, states, strict=True):
        part.rng_state, part.np_rng = state
    for split, rows in result.scores.items():
        for row in rows:
            if not math.isfinite(row["main_score"]):
                where = f"task {result.task_name}, {split}, {row['hf_subset']}, {adapted.width} dimensions"
                what = f"{task.metadata.main_score} is {row['main_score']}"
                raise InputError(where, what, "check the vectors of the model: they may all be equal")
    return result


@contextmanager
def _loaded(task: AbsTask, show_bars: bool) -> Iterator[None]:
    """Load the data of a task, and unload them afterwards; download bars are drawn with `show_bars`."""
    name = task.metadata.name
    try:
        with quiet(keep_bars=show_bars):
            for part in _parts(task):
                name = part.metadata.name
                part.load_data()
    except UserError:
        raise
    # Each library involved in loading raises its own errors.
    except Exception as error:
        reason = one_line((str(error).strip() or type(error).__name__).splitlines()[0], 160)
        hint = "run it once with a network and access to it, or set HF_HOME to a cache that has it"
        raise InputError(f"task {name}", f"its data cannot be loaded ({reason})", hint) from error
    try:
        yield
    finally:
        with quiet():
            for part in _parts(task):
                part.unload_data()
