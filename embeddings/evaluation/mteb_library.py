"""mteb, loaded on use and kept quiet, and the names that stand for its tasks."""

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from embeddings.common.errors import OptionError, require

if TYPE_CHECKING:
    from mteb import AbsTask

_TALKATIVE = ("mteb", "datasets", "huggingface_hub", "sentence_transformers")
# mteb's benchmark of each group. Its English suite has only the English parts of multilingual tasks.
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


def load_mteb() -> ModuleType:
    """The module mteb; a `MissingExtraError` names the extra `eval` where it is not installed."""
    with quiet():
        return require("mteb", "eval")


@contextmanager
def quiet(keep_bars: bool = False) -> Iterator[None]:
    """Silence mteb and the libraries under it: their warnings, log lines and (unless `keep_bars`) progress bars.

    This project's own bars are still drawn. Not for several threads at once: these settings belong to the process.
    """
    import datasets
    import tqdm.auto

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    were_drawn = not datasets.are_progress_bars_disabled()
    # No option of mteb turns off all its bars. They are all of this class; this project uses the plain one.
    bar: Any = tqdm.auto.tqdm
    draw = bar.__init__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        if not keep_bars:
            datasets.disable_progress_bars()
            bar.__init__ = partialmethod(draw, disable=True)
        try:
            yield
        finally:
            bar.__init__ = draw
            if were_drawn:
                datasets.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def find_tasks(names: str | Sequence[str]) -> list["AbsTask"]:
    """The tasks that names (or a string of them with commas) stand for, each once, in order, not loaded yet.

    A name is a group (`mteb-english-56`, `mgh-26`, `beir`, `miracl`), one of mteb's benchmarks or tasks, AIR-Bench or
    sets of it (see `air_bench_tasks`), or a folder that is or holds evaluation data. An `OptionError` refuses what
    stands for nothing, tasks of pictures or sounds, and a task twice with other data, languages or splits.
    """
    # A comma inside brackets belongs to the name: MTEB(eng, v1).
    load_mteb()
    words = re.split(r",(?![^(]*\))", names) if isinstance(names, str) else names
    found: dict[str, AbsTask] = {}
    for name in (word.strip() for word in words):
        for task in _tasks_of(name):
            if set(task.metadata.modalities) != {"text"}:
                what = "must be tasks of texts only"
                raise OptionError("tasks", f"{name} with {task.metadata.name}", what, "name others")
            same = found.setdefault(task.metadata.name, task)
            if same.metadata.revision != task.metadata.revision:
                raise OptionError("tasks", name, f"gives a second task {task.metadata.name}", "rename its folder")
            if _extent(same) != _extent(task):
                what = f"gives {task.metadata.name} in other languages or splits than the name before it"
                raise OptionError("tasks", name, what, "run them one after the other")
    if not found:
        raise OptionError("tasks", names, "must name a task", f"a group is {', '.join(GROUPS)}")
    return list(found.values())


def _extent(task: "AbsTask") -> tuple[set[str], set[str]]:
    """The subsets (languages) and splits of its data that a task is scored on."""
    return set(task.hf_subsets), set(task.eval_splits)


def _tasks_of(name: str) -> list["AbsTask"]:
    import mteb

    from embeddings.evaluation.air_bench import PREFIX, air_bench_tasks
    from embeddings.evaluation.mteb_tasks import folder_tasks

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
    # Last, because mteb takes seconds to build all its benchmarks.
    with suppress(KeyError):
        return _benchmark(name)
    fix = f"did you mean {guess[1]}?" if guess else f"a group is {', '.join(GROUPS)}"
    raise OptionError("tasks", name, "must name a task, a group or a folder", fix)


def _benchmark(name: str) -> list["AbsTask"]:
    """The tasks of one of mteb's benchmarks, copied: mteb caches them, and a run changes a task."""
    import mteb

    with quiet():
        return [copy.deepcopy(task) for task in mteb.get_benchmark(name).tasks]
