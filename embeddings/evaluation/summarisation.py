"""Summaries by machines, and how well their cosines with people's own follow people's marks for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.data.sources import open_reader
from embeddings.evaluation.fields import filled_texts, finite_numbers
from embeddings.evaluation.metrics import spearman

SUMMARY_FIELDS = ("human_summaries", "machine_summaries", "relevance")


@dataclass(frozen=True, eq=False)
class SummarisationFolder:
    """Summaries of texts: of each text some by people, some by machines, and people's marks for the latter."""

    kind: ClassVar[str] = "summarisation"
    human_summaries: list[list[str]]
    machine_summaries: list[list[str]]
    relevance: list[list[float]]


def read_summarisation(path: Path) -> SummarisationFolder:
    """The summaries of a file of rows {"human_summaries", "machine_summaries", "relevance"}, three lists.

    Raises:
        InputError: If a row cannot be used, or no row has two different marks; the message names file and row.
    """
    folder = SummarisationFolder([], [], [])
    for where, fields in open_reader(path, SUMMARY_FIELDS, SUMMARY_FIELDS):
        folder.human_summaries.append(filled_texts(where, fields, "human_summaries"))
        machine, relevance = (
            filled_texts(where, fields, "machine_summaries"),
            finite_numbers(where, fields, "relevance"),
        )
        if len(machine) != len(relevance):
            what = f"relevance has length {len(relevance)}, machine_summaries {len(machine)}"
            raise InputError(where, what, "give each machine summary a number")
        folder.machine_summaries.append(machine)
        folder.relevance.append(relevance)
    if all(len({*relevance}) < 2 for relevance in folder.relevance):
        raise InputError(str(path), "no row has two different numbers in relevance", "a rank correlation needs them")
    return folder


def summarisation_metrics(
    folder: SummarisationFolder, human_ND: npt.NDArray[np.float32], machine_ND: npt.NDArray[np.float32]
) -> tuple[dict[str, float], int]:
    """Spearman's correlation, within each text, of marks with the best cosine of a summary with one of people's.

    Args:
        folder: The summaries.
        human_ND: Vectors of all summaries by people, in their order, (N, D) of unit length.
        machine_ND: Vectors of all summaries by machines, the same.

    Returns:
        `cosine_spearman`, its mean over the texts that have one, and how many of the texts have none because their
        marks or their cosines are all equal; 0 where no text has one.
    """
    values = []
    humans, machines = _split(human_ND, folder.human_summaries), _split(machine_ND, folder.machine_summaries)
    for human_nD, machine_mD, relevance in zip(humans, machines, folder.relevance, strict=True):
        best_m = (machine_mD @ human_nD.T).max(axis=1).astype(np.float64)
        if len({*relevance}) > 1 and len({*best_m.tolist()}) > 1:
            values.append(spearman(best_m, np.array(relevance)))
    return {"cosine_spearman": float(np.mean(values)) if values else 0.0}, len(folder.relevance) - len(values)


def _split(vector_ND: npt.NDArray[np.float32], texts: Sequence[Sequence[str]]) -> list[npt.NDArray[np.float32]]:
    return np.split(vector_ND, [*accumulate(map(len, texts))][:-1])
