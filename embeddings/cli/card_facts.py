"""What a model's card is made of: a checkpoint, the files beside it, and scores that `evaluate` wrote."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embeddings.common import InputError

if TYPE_CHECKING:
    from embeddings.models.model_card import TrainingFacts

# No metric is larger, and a card can show it.
_MOST = 1e9


def facts_of_checkpoint(state: Mapping[str, Any], run: Path) -> "TrainingFacts":
    """What a checkpoint and its run's folder say of the training; a file that is missing or damaged says nothing.

    Args:
        state: The checkpoint's content.
        run: The run's folder.
    """
    from embeddings.figures.run_folder import read_run_record
    from embeddings.figures.run_metrics import SCORE, read_curves
    from embeddings.models.model_card import TrainingFacts

    num_steps = state.get("global_step")
    record: dict[str, Any] = {}
    validation: list[tuple[int, float]] = []
    with suppress(InputError):
        record = read_run_record(run)
    with suppress(InputError):
        validation = list(zip(*read_curves(run, [SCORE])[SCORE], strict=True))
    steps = num_steps if isinstance(num_steps, int) else 0
    known = [(step, value) for step, value in validation if step <= steps]
    return TrainingFacts(state["run_config"], steps, record, known)


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint lies in: that of `checkpoints/`."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else folder


def read_scores(path: Path) -> list[dict[str, Any]]:
    """The results that `evaluate --output` wrote.

    Raises:
        InputError: If the file is missing or damaged, or holds something else, NaN among it.
    """
    from embeddings.models.model_files import read_json

    fix = "give the file that evaluate --output wrote"
    results: list[dict[str, Any]] = read_json(path, list, fix)
    if not results or not all(map(_is_result, results)):
        raise InputError(str(path), "holds no scores", fix)
    return results


def _is_result(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    metrics = value.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        return False
    # NaN and what is infinite compare as false, and a whole number of any length compares.
    return all(type(number) in (int, float) and abs(number) < _MOST for number in metrics.values())
