"""Pairs that mean the same or do not, and how well cosines tell which."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, shown
from embeddings.data.records import kind_of
from embeddings.data.sources import open_reader
from embeddings.evaluation.fields import filled_text

PAIR_FIELDS = ("sentence1", "sentence2", "label")


@dataclass(frozen=True, eq=False)
class PairClassificationFolder:
    """Pairs of sentences, (N) each, and which of them mean the same: 1, others 0, (N,) int64."""

    kind: ClassVar[str] = "pair_classification"
    first: list[str]
    second: list[str]
    label_N: npt.NDArray[np.int64]


def read_pair_classification(path: Path) -> PairClassificationFolder:
    """The pairs of a file of rows {"sentence1", "sentence2", "label"}, the label 0 or 1 (or false, true).

    Raises:
        InputError: If a row cannot be used, or all labels are one; the message names file and row.
    """
    first, second, labels = [], [], []
    for where, fields in open_reader(path, PAIR_FIELDS, PAIR_FIELDS):
        first.append(filled_text(where, fields, "sentence1"))
        second.append(filled_text(where, fields, "sentence2"))
        value = fields.get("label")
        if not isinstance(value, int) or value not in (0, 1):
            given = "missing" if "label" not in fields else f"{_shown(value)}, expected 0 or 1"
            raise InputError(where, f"label is {given}", "write 1 for a pair that means the same, else 0")
        labels.append(int(value))
    if len({*labels}) < 2:
        raise InputError(str(path), f"every label is {labels[0]}", "pairs of both labels are needed, 0 and 1")
    return PairClassificationFolder(first, second, np.array(labels, dtype=np.int64))


def pair_classification_metrics(cosine_N: npt.NDArray[np.float64], label_N: npt.NDArray[np.int64]) -> dict[str, float]:
    """Average precision of the pairs ranked by cosine.

    The sum, over the thresholds that a cosine can be held against, of the gain in recall times the precision there;
    pairs of one cosine share a threshold, so their order has no say.

    Args:
        cosine_N: The cosine of each pair, (N,).
        label_N: 1 where the pair means the same, (N,), of both labels.

    Returns:
        `cosine_ap`, from 0 to 1, as mteb calls it.
    """
    from sklearn.metrics import average_precision_score

    return {"cosine_ap": float(average_precision_score(label_N, cosine_N))}


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"the text {shown(value)}"
    return str(value) if isinstance(value, int | float) else kind_of(value)
