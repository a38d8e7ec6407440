"""Tasks of mteb run one by one with one of this project's models, each result kept as soon as it is there."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import mteb
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.models import ModelMeta
from mteb.models.model_meta import ScoringFunction
from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError, UserError
from embeddings.common.io import remove_abandoned, scratch_folder
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.evaluation.instructions import Instructions
from embeddings.evaluation.mteb_library import quiet
from embeddings.evaluation.mteb_model import ContextualTaskEncoder, TaskEncoder
from embeddings.evaluation.runner import check_widths
from embeddings.evaluation.task_results import TaskResults, TaskScore, write_table
from embeddings.inference.context import require_context_size
from embeddings.inference.encoder import Encoder, embedder_sha256

if TYPE_CHECKING:
    from mteb import AbsTask, TaskResult

# mteb hands the texts over in batches of this size; how they are computed is the encoder's affair.
_TEXTS_PER_BATCH = 1024


@dataclass(frozen=True)
class TaskSettings:
    """What a model's scores depend on beside the model.

    Args:
        prompt_name: Which of the model's prompts goes before queries, or before every text of a task without roles.
        instructions: Instructions in place of the model's prompts, for the tasks that have one.
        widths: How many of the first numbers of each vector are compared, one score each; None for all.
        context_size: Documents that a contextual model reads texts behind, drawn for each task; None for none.
        context_seed: Seed of these draws.

    Raises:
        OptionError: If both a prompt and instructions are given.
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


def run_tasks(
    encoder: Encoder,
    model: str,
    tasks: Sequence["AbsTask"],
    output: Path,
    settings: TaskSettings,
    share: Iterable[int] | None = None,
) -> list[TaskScore]:
    """Run the tasks that have no result yet, and write the table of all that have one.

    A task's result is written once the task is done, and that of each part of a task that is the mean of others, so the
    same call goes on where a killed one was. Without a network the data of all tasks are looked for before the first is
    run, so that a set which is not there costs no work.

    Args:
        encoder: The model.
        model: What it is called: a directory or a Hub id.
        tasks: The tasks, not loaded.
        output: The folder of the results (see `TaskResults`) and of their tables, `scores.csv`.
        settings: What the scores depend on beside the model.
        share: The numbers of the tasks that this process runs; None for all.

    Returns:
        The score of each task, of those that other processes have run too.

    Raises:
        OptionError: If a setting is impossible for this model.
        InputError: If a task's data cannot be had or used, or a score is no number; the message names the task.
    """
    widths = list(dict.fromkeys(settings.widths or [encoder.embedding_dim]))
    check_widths(encoder, widths)
    metas = _metas(encoder, model, settings, widths)
    adapted, results = _adapted(encoder, metas[widths[0]], settings), TaskResults(output, metas)
    own = tasks if share is None else [tasks[number] for number in share]
    left = [task for task in own if any(results.find(task, width) is None for width in widths)]
    shows = encoder.show_progress
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        _look_for_data(left, shows)
    with tqdm(total=len(own), initial=len(own) - len(left), unit="task", disable=not shows) as bar:
        for task in left:
            bar.set_description(task.metadata.name)
            with _kept_vectors(adapted, results.place(widths[0]) / f"{task.metadata.name}.vectors", len(widths) > 1):
                _run(adapted, task, [width for width in widths if results.find(task, width) is None], results, settings)
            bar.update()
    return write_table(results, tasks)


def _look_for_data(tasks: Sequence["AbsTask"], shows: bool) -> None:
    """Load the data of tasks and let them go, under a bar that is gone before anything else is said."""
    with tqdm(tasks, unit="task", leave=False, disable=not shows) as bar:
        for task in bar:
            bar.set_description(f"looking for data: {task.metadata.name}")
            for part in _parts(task):
                with _loaded(part, shows):
                    pass


def _adapted(encoder: Encoder, meta: ModelMeta, settings: TaskSettings) -> TaskEncoder:
    if settings.prompt_name is not None:
        encoder.embedder.text.prompt(settings.prompt_name, "query")
    if settings.context_size is None:
        return TaskEncoder(encoder, meta, settings.prompt_name)
    size = require_context_size(encoder, settings.context_size)
    return ContextualTaskEncoder(encoder, meta, settings.prompt_name, size, settings.context_seed)


def _metas(encoder: Encoder, model: str, settings: TaskSettings, widths: Sequence[int]) -> dict[int, ModelMeta]:
    """The model as mteb knows it, by width: its revision is a hash of all that decides its vectors but the settings."""
    embedder, precision = encoder.embedder, str(encoder.dtype).removeprefix("torch.")
    is_hub_id = model.count("/") == 1 and not Path(model).expanduser().exists()
    known = {
        "name": model if is_hub_id else f"local/{Path(model).expanduser().resolve().name}",
        "revision": embedder_sha256(encoder)[:40],
        "max_tokens": embedder.text.document_max_length,
        "n_parameters": sum(weight.numel() for weight in embedder.parameters()),
        "similarity_fn_name": ScoringFunction.COSINE,
        "framework": ["PyTorch"],
    }
    metas = {}
    for width in widths:
        given = {
            "precision": None if precision == "float32" else precision,
            "dimensions": None if width == embedder.embedding_dim else width,
            "prompt_name": settings.prompt_name,
            "instructions": settings.instructions and settings.instructions.name,
            "context_size": settings.context_size,
            "context_seed": None if settings.context_size is None else settings.context_seed,
        }
        special = {name: value for name, value in given.items() if value is not None}
        metas[width] = ModelMeta.create_empty(
            overwrites={**known, "embed_dim": width, "experiment_kwargs": special or None}
        )
    return metas


def _run(
    adapted: TaskEncoder, task: "AbsTask", widths: Sequence[int], results: TaskResults, settings: TaskSettings
) -> None:
    """Run a task at some widths and write its results, those of its parts as soon as they are there."""
    name, table = task.metadata.name, settings.instructions
    text = adapted.encoder.embedder.text
    adapted.instruction_prompt = None if table is None else table.prompt(name, task.metadata.type, text)
    if table is not None and adapted.instruction_prompt is None:
        logger.warning("%s: no instruction for this task in %s; the model's own prompts hold", name, table.name)
    whole = task if isinstance(task, AbsTaskAggregate) else None
    for part in _parts(task):
        left = [width for width in widths if results.find(part, width, whole) is None]
        if left:
            with _loaded(part, adapted.encoder.show_progress):
                for width in left:
                    adapted.width = width
                    results.write(_evaluate(adapted, part), part, width, whole)
    for width in widths:
        if whole is not None:
            parts = [results.find(part, width, whole) for part in _parts(task)]
            with quiet():
                results.write(whole.combine_task_results([part for part in parts if part is not None]), task, width)
        found = results.find(task, width)
        assert found is not None
        logger.info("%s [%d]: %s %.4f", name, width, task.metadata.main_score, found.get_score())


def _evaluate(adapted: TaskEncoder, task: "AbsTask") -> "TaskResult":
    """mteb's result of a task whose data are loaded; its draws are those of a first run, however often it runs."""
    again = copy.copy(task)
    again.rng_state, again.np_rng = copy.deepcopy(task.rng_state), copy.deepcopy(task.np_rng)
    options: Any = {"batch_size": _TEXTS_PER_BATCH, "show_progress_bar": False}
    with quiet():
        ran = mteb.evaluate(
            adapted, again, encode_kwargs=options, cache=None, co2_tracker=False, show_progress_bar=False
        )
    return ran.task_results[0]


def _parts(task: "AbsTask") -> list["AbsTask"]:
    """The tasks that one is the mean of, or itself, as new as they were made."""
    return copy.deepcopy(list(task.metadata.tasks) if isinstance(task, AbsTaskAggregate) else [task])


@contextmanager
def _loaded(task: "AbsTask", shows: bool) -> Iterator[None]:
    """A task with its data; the bars of a download are drawn where this process shows any.

    Raises:
        InputError: If they cannot be had.
    """
    try:
        with quiet(keep_bars=shows):
            task.load_data()
    except UserError:
        raise
    # Each library on the way to a data set has errors of its own.
    except Exception as error:
        reason = one_line((str(error).strip() or type(error).__name__).splitlines()[0], 160)
        fix = "run it once with a network, or point HF_HOME to a cache that holds it"
        raise InputError(f"task {task.metadata.name}", f"its data cannot be loaded ({reason})", fix) from error
    try:
        yield
    finally:
        with quiet():
            task.unload_data()


@contextmanager
def _kept_vectors(adapted: TaskEncoder, place: Path, wanted: bool) -> Iterator[None]:
    """A folder for the vectors of a task that is scored at several widths; what a killed run left there is removed.

    Each process has one of its own: another may run the same task at the same time.
    """
    if not wanted:
        remove_abandoned(place)
        yield
        return
    with scratch_folder(place) as adapted.folder:
        try:
            yield
        finally:
            adapted.folder = None
