"""`evaluate --tasks`: a model's scores on tasks of mteb."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from embeddings.common import InputError, OptionError

if TYPE_CHECKING:
    from embeddings.evaluation.task_runs import TaskSettings
    from embeddings.inference import Encoder


@dataclass(frozen=True)
class TaskPlan:
    """What is to be run, once all that can be known without the model is known to be right.

    Attributes:
        tasks: The tasks of mteb, not loaded.
        output: The folder of their results.
        settings: What the scores depend on beside the model.
        share: The numbers of the tasks that are this process's.
    """

    tasks: list[Any]
    output: Path
    settings: "TaskSettings"
    share: range

    @classmethod
    def of(
        cls,
        names: str | list[str],
        output: Path | None,
        instructions: str | None,
        task_index: int | None,
        num_tasks: int | None,
        **settings: Any,
    ) -> Self:
        """The plan of the options of `evaluate`, which describes them; the settings are a `TaskSettings`'s others.

        Raises:
            MissingExtraError: If mteb is not installed.
            OptionError: If an option is impossible.
            InputError: If a file or folder that an option names cannot be used.
        """
        from embeddings.evaluation.instructions import Instructions
        from embeddings.evaluation.mteb_library import load_mteb
        from embeddings.mining.jobs import ArrayTask

        if output is None:
            raise OptionError("output", None, "must name the folder of the tasks' results", "--output FOLDER")
        if output.exists() and not output.is_dir():
            raise InputError(f"--output {output}", "is a file", "name a folder")
        task = ArrayTask.resolve(task_index, num_tasks)
        table = None if instructions is None else Instructions.read(instructions)
        load_mteb()
        from embeddings.evaluation.task_groups import find_tasks
        from embeddings.evaluation.task_runs import TaskSettings

        chosen = TaskSettings(instructions=table, **settings)
        tasks = find_tasks(names)
        return cls(tasks, output, chosen, task.shards(len(tasks)))

    def run(self, encoder: "Encoder", model: str) -> str:
        """Run the tasks that have no result yet, and return the table of all that have one.

        Args:
            encoder: The model.
            model: What it is called.

        Raises:
            OptionError: If a setting is impossible for this model.
            InputError: If a task's data cannot be had or used, or a score is no number.
        """
        from embeddings.evaluation.task_results import format_table
        from embeddings.evaluation.task_runs import run_tasks

        scores = run_tasks(encoder, model, self.tasks, self.output, self.settings, self.share)
        missing = sum(not score.complete for score in scores)
        lines = [format_table(scores)]
        if missing:
            lines.append(f"this process's tasks are done, {missing} others are missing yet")
        return "\n".join(lines)
