"""faiss, loaded on use: device checks, and inverted lists in files."""

import errno
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from embeddings.common.errors import OptionError, pip_install, require


def load_faiss(gpu: bool = False) -> ModuleType:
    """The faiss module; a GPU is checked, because the CPU build would ignore `gpu=True` silently."""
    faiss = require("faiss", "gpu" if gpu else "cpu")
    if gpu and not hasattr(faiss, "StandardGpuResources"):
        hint = f"{pip_install('gpu')} in place of faiss-cpu"
        raise OptionError("gpu", True, "needs a build of faiss for GPUs", hint)
    if gpu and faiss.get_num_gpus() == 0:
        raise OptionError("gpu", True, "needs a CUDA device, and faiss finds none", "leave it out, or check the driver")
    return faiss


def faiss_version() -> str:
    """The version of faiss, for manifests: another version may order ties or train differently."""
    return str(require("faiss", "cpu").__version__)


def new_lists(quantizer: Any, num_lists: int) -> Any:
    faiss = load_faiss()
    lists = faiss.IndexIVFFlat(quantizer, quantizer.d, num_lists, faiss.METRIC_INNER_PRODUCT)
    lists.is_trained = True
    return lists


def write_lists(lists: Any, path: Path) -> None:
    """Write inverted lists and check that the file is complete; an `OSError` if it is not."""
    try:
        load_faiss().write_index(lists, str(path))
        map_lists(path)
    except RuntimeError as error:
        # Only the text of faiss's error has the reason.
        number = next((number for number in errno.errorcode if os.strerror(number) in str(error)), errno.EIO)
        raise OSError(number, os.strerror(number), str(path)) from None


def map_lists(path: Path) -> Any:
    """Inverted lists, memory-mapped; a RuntimeError if the file has none or is incomplete."""
    faiss = load_faiss()
    lists = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    # By default threads prefetch lists after the search has returned, when the file may have been replaced.
    faiss.downcast_InvertedLists(lists.invlists).prefetch_nthread = 0
    return lists
