"""Results of tasks on disk, as mteb lays them out and reads them, and one table of them."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mteb import TaskResult

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_path, write_json, write_text

if TYPE_CHECKING:
    from mteb import AbsTask
    from mteb.models import ModelMeta


class TaskResults:
    """A folder of results: `results/MODEL/REVISION/TASK.json`, below it what was run with settings of its own.

    Model, revision and settings are part of a result's place, so that one of another model or of other settings is
    never taken for this one. `mteb.ResultCache(FOLDER)` reads them all. Results of the parts of a task that is the mean
    of others lie in a folder of its name: their instructions are the task's, which may not be those that they have when
    they are run by themselves.

    Args:
        folder: The folder; it is made with the first result.
        metas: The model by its width, as mteb knows it: name, revision, settings.
    """

    def __init__(self, folder: Path, metas: Mapping[int, "ModelMeta"]) -> None:
        self.folder, self.metas = folder, metas

    def place(self, width: int) -> Path:
        """The folder of this model's results with these settings."""
        meta = self.metas[width]
        folder = self.folder / "results" / meta.model_name_as_path() / str(meta.revision)
        return folder if meta.experiment_name is None else folder / "experiments" / meta.experiment_name

    def path(self, task: "AbsTask", width: int, whole: "AbsTask | None" = None) -> Path:
        """The file of a task's result, or of a part of a whole one."""
        return self.place(width) / ("" if whole is None else whole.metadata.name) / f"{task.metadata.name}.json"

    def find(self, task: "AbsTask", width: int, whole: "AbsTask | None" = None) -> TaskResult | None:
        """The result of a task, or None where there is none, or of other data or another release of mteb.

        Of a file that holds other languages or splits too, those of the task alone.

        Raises:
            InputError: If the file is damaged.
        """
        path = self.path(task, width, whole)
        if not path.is_file():
            return None
        try:
            # Without this mteb takes any JSON for a result of its first releases.
            result = TaskResult.from_disk(path, load_historic_data=False)
        except ValueError:
            raise InputError(str(path), "is empty or damaged", "delete it and run the task again") from None
        same = result.is_mergeable(task, criteria=["dataset_revision", "mteb_version"])
        if not same or result.get_missing_evaluations(task):
            return None
        return result if task.is_aggregate else result.validate_and_filter_scores(task)

    def write(self, result: TaskResult, task: "AbsTask", width: int, whole: "AbsTask | None" = None) -> None:
        """Write the result of a task, or of a part of a whole one, whole or not at all.

        Raises:
            InputError: If a score is no number.
        """
        for split, rows in result.scores.items():
            for row in rows:
                if not math.isfinite(row["main_score"]):
                    where = f"task {result.task_name}, {split}, {row['hf_subset']}, {width} dimensions"
                    what = f"{task.metadata.main_score} is {row['main_score']}"
                    raise InputError(where, what, "look at the model's vectors: they may all be equal")
        meta = self.place(width) / "model_meta.json"
        if not meta.exists():
            write_json(meta, json.loads(json.dumps(self.metas[width].to_dict(), default=str)))
        with atomic_path(self.path(task, width, whole)) as temporary:
            result.to_disk(temporary)


class TaskScore(NamedTuple):
    """A task's main score at each width; None where it is not there yet."""

    task: str
    kind: str
    metric: str
    scores: dict[int, float | None]

    @property
    def complete(self) -> bool:
        """Whether there is a score at every width."""
        return None not in self.scores.values()


def collect_scores(results: TaskResults, tasks: Sequence["AbsTask"]) -> list[TaskScore]:
    """The scores of tasks that have a result, in their order, and those that have none."""
    rows = []
    for task in tasks:
        found = {width: results.find(task, width) for width in results.metas}
        scores = {width: None if result is None else float(result.get_score()) for width, result in found.items()}
        rows.append(TaskScore(task.metadata.name, task.metadata.type, task.metadata.main_score, scores))
    return rows


def write_table(results: TaskResults, tasks: Sequence["AbsTask"]) -> list[TaskScore]:
    """Write a `scores.csv` beside the results of each width, the table of those tasks, and return the scores.

    Several processes may end at once: each looks again after writing, so that the last table lacks none of their tasks.
    """
    found = collect_scores(results, tasks)
    while True:
        for width in results.metas:
            text = io.StringIO()
            rows = [score._replace(scores={width: score.scores[width]}) for score in found]
            csv.writer(text, lineterminator="\n").writerows(_table(rows))
            write_text(results.place(width) / "scores.csv", text.getvalue())
        before, found = found, collect_scores(results, tasks)
        if _table(before) == _table(found):
            return found


def format_table(scores: Sequence[TaskScore]) -> str:
    """The table as text: a row a task, then the means by type and over all tasks that are finished."""
    rows = _table(scores)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _table(scores: Sequence[TaskScore]) -> list[tuple[str, ...]]:
    """The rows of the table under their header; a mean is over the tasks that are finished at every width."""
    whole = [score for score in scores if score.complete]
    widths = list(scores[0].scores)
    names = ["score"] if len(widths) == 1 else [f"score_{width}" for width in widths]
    rows = [("task", "type", "metric", *names)]
    rows += [(score.task, score.kind, score.metric, *map(_cell, score.scores.values())) for score in scores]
    for kind in [*sorted({score.kind for score in whole}), "all"]:
        members = [score for score in whole if kind in (score.kind, "all")]
        if members:
            means = (sum(score.scores[width] or 0.0 for score in members) / len(members) for width in widths)
            rows.append((f"mean of {len(members)}", kind, "", *map(_cell, means)))
    return rows


def _cell(score: float | None) -> str:
    return "" if score is None else f"{score:.4f}"
