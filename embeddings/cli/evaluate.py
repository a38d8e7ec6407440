"""`evaluate`: a model's scores on evaluation folders, or on tasks of mteb."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from embeddings.cli.encode import PrecisionName, load_encoder, warn_of_untrained, warn_without_context
from embeddings.common import InputError, OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.io import write_json
from embeddings.common.jobs import ArrayTask, TaskOptions
from embeddings.evaluation import evaluate_folders, format_results
from embeddings.evaluation.instructions import Instructions
from embeddings.evaluation.mteb_library import load_mteb
from embeddings.inference import Encoder


def evaluate(
    model: str,
    data: Path | list[Path] | None = None,
    tasks: str | list[str] | None = None,
    prompt_name: str | None = None,
    instructions: str | None = None,
    output: Path | None = None,
    precision: PrecisionName = "auto",
    dimensions: int | list[int] | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    *,
    task: TaskOptions,
) -> None:
    """Score a model on evaluation folders (`--data`) or on tasks of mteb (`--tasks`).

    Args:
        model: A model directory or Hub id.
        data: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`. mteb scores all kinds but
            retrieval and similarity.
        tasks: Tasks or benchmarks of mteb, groups of tasks (`mteb-english-56`, `mgh-26`, `beir`, `miracl`), sets of
            AIR-Bench (`air-bench`, `air-bench-qa-law-en`, `air-bench-24.04`), or folders as for `data`, which then have
            their results kept; several as `[NAME, NAME]`. After a kill the same line resumes at the first task that is
            not done.
        prompt_name: Which of the model's prompts goes before queries (retrieval, reranking) or every text (others).
        instructions: With `tasks`, what queries (retrieval) or every text (the other kinds) is encoded with, by task:
            the published tables `nv-embed` and `mgh`, or a JSON file `{"instructions": {TASK: TEXT}}`. Not beside
            `prompt_name`.
        output: A JSON file for the scores; with `tasks` the folder of their results, in mteb's format, a `scores.csv`
            beside those of each model and its settings.
        precision: Format of matrix products.
        dimensions: How many leading dimensions of each vector are compared, of a model that was trained so; several as
            `[384, 128]`, from one encoding; all if left out.
        context_size: How many documents of each folder's or task's own corpus a contextual model reads its texts in;
            without it the model reads texts alone.
        context_seed: Seed of the draw.
        task: Which of the tasks this process runs.
    """
    if (data is None) == (tasks is None):
        which = "neither" if data is None else "both"
        raise OptionError("data", which, "or tasks must be given", "--data FOLDER, or --tasks NAME --output FOLDER")
    widths = [dimensions] if isinstance(dimensions, int) else dimensions
    settings: dict[str, Any] = {"prompt_name": prompt_name, "widths": widths}
    settings |= {"context_size": context_size, "context_seed": context_seed}
    if tasks is not None:
        run = _planned_tasks(tasks, output, instructions, task.resolve(), settings)
    else:
        refuse_given({"instructions": instructions, **asdict(task)}, "has no effect without --tasks")
        folders = data if isinstance(data, list) else [data] if data is not None else []
        if not folders:
            raise InputError("--data", "names no folder", "name one, or several as [FOLDER, FOLDER]")
        if output is not None and output.is_dir():
            raise InputError(f"--output {output}", "is a directory", "name a JSON file")
        run = partial(_score_folders, folders=folders, output=output, settings=settings)
    encoder = load_encoder(model, precision, None)
    warn_of_untrained(encoder, widths or [])
    warn_without_context(encoder, context_size is not None, "--context-size")
    print(run(encoder, model))


def _planned_tasks(
    names: str | list[str], output: Path | None, instructions: str | None, task: ArrayTask, settings: dict[str, Any]
) -> Callable[[Encoder, str], str]:
    """What runs this process's tasks of mteb and returns the table of all that have a result.

    All errors that do not need the model are raised first.
    """
    if output is None:
        raise OptionError("output", None, "must name the folder of the tasks' results", "--output FOLDER")
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output}", "is a file", "name a folder")
    table = None if instructions is None else Instructions.read(instructions)
    load_mteb()
    from embeddings.evaluation.air_bench import AirBenchTask, format_domains
    from embeddings.evaluation.mteb_library import find_tasks
    from embeddings.evaluation.task_runs import TaskSettings, format_table, run_tasks

    chosen = TaskSettings(instructions=table, **settings)
    tasks = find_tasks(names)

    def run(encoder: Encoder, model: str) -> str:
        """Run this process's tasks; the table names the number of tasks that others have left undone."""
        scores = run_tasks(encoder, model, tasks, output, chosen, task.shards(len(tasks)))
        missing = sum(not score.complete for score in scores)
        sets = [(one, score.scores) for one, score in zip(tasks, scores, strict=True) if isinstance(one, AirBenchTask)]
        labelled = [(one.data, known) for one, known in sets if one.data.has_labels]
        domains = f"\n\n{format_domains(labelled)}" if labelled else ""
        others = f"\nthis process's tasks are done, {missing} others are missing" if missing else ""
        return format_table(scores) + domains + others

    return run


def _score_folders(
    encoder: Encoder, model: str, *, folders: list[Path], output: Path | None, settings: dict[str, Any]
) -> str:
    """The table of scores on folders, which are written too where a file is named."""
    results = evaluate_folders(encoder, folders, **settings)
    if output is not None:
        trained = {"trained_widths": list(encoder.embedder.trained_widths)}
        write_json(output, [{**asdict(result), **trained} for result in results])
    return format_results(results)
