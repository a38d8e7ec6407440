"""faiss, loaded on use, with the device it was asked for or not at all."""

import errno
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.optional import require


def load_faiss(gpu: bool = False) -> ModuleType:
    """The module faiss.

    The processor's build of faiss takes `gpu=True` without a word and runs on the processor, so the device is checked
    here, once, before any work.

    Args:
        gpu: Whether the search is to run on a GPU.

    Raises:
        MissingExtraError: If faiss is not installed; the message names the extra `cpu` or `gpu`.
        OptionError: If a GPU is asked for and this build or this machine has none.
    """
    faiss = require("faiss", "gpu" if gpu else "cpu")
    if gpu and not hasattr(faiss, "StandardGpuResources"):
        raise OptionError(
            "gpu", True, "needs a build of faiss for GPUs", "pip install -e '.[gpu]' in place of faiss-cpu"
        )
    if gpu and faiss.get_num_gpus() == 0:
        raise OptionError("gpu", True, "needs a CUDA device, and faiss sees none", "leave it out, or check the driver")
    return faiss


def faiss_version() -> str:
    """The installed faiss's version, for manifests: another version may order equal scores or train otherwise.

    Raises:
        MissingExtraError: If faiss is not installed.
    """
    return str(require("faiss", "cpu").__version__)


def new_lists(quantizer: Any, num_lists: int) -> Any:
    """Empty inverted lists whose centroids are a quantizer's, by inner product."""
    faiss = load_faiss()
    lists = faiss.IndexIVFFlat(quantizer, quantizer.d, num_lists, faiss.METRIC_INNER_PRODUCT)
    lists.is_trained = True
    return lists


def without_missing(score_QK: npt.NDArray[np.float32], row_QK: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Scores, (Q, K), changed in place: -inf where the row is -1, for which faiss gives the least float."""
    score_QK[row_QK < 0] = -np.inf
    return score_QK


def write_lists(lists: Any, path: Path) -> None:
    """Write inverted lists to exactly this path, and see that all of them arrived.

    Raises:
        OSError: If they cannot be written; faiss itself raises a RuntimeError, and none where closing the file fails.
    """
    try:
        load_faiss().write_index(lists, str(path))
        map_lists(path)
    except RuntimeError as error:
        # The reason is in faiss's text alone.
        number = next((number for number in errno.errorcode if os.strerror(number) in str(error)), errno.EIO)
        raise OSError(number, os.strerror(number), str(path)) from None


def map_lists(path: Path) -> Any:
    """Inverted lists, mapped into memory.

    faiss would start 32 threads at each search that read its lists ahead. They go on reading after the search has
    returned, when the file may be another; and where it lies in memory already the search takes twice as long for them.

    Raises:
        RuntimeError: If the file holds none, or not all that it says.
    """
    faiss = load_faiss()
    lists = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    faiss.downcast_InvertedLists(lists.invlists).prefetch_nthread = 0
    return lists
