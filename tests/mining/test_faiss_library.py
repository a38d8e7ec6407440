"""A missing faiss or GPU is refused, and a mapped file is read by no thread after a search."""

import sys
from types import SimpleNamespace

import pytest

from embeddings.common import MissingExtraError, OptionError
from embeddings.mining.faiss_library import load_faiss
from tests.helpers.processes import run_command
from tests.helpers.refusals import refused


@pytest.mark.parametrize(("gpu", "extra"), [(False, "cpu"), (True, "gpu")])
def test_a_missing_faiss_names_its_extra(gpu, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    refused(MissingExtraError, rf"pip install -e '\.\[{extra}\]'", load_faiss, gpu)


def test_a_gpu_is_refused_without_a_gpu_build_or_device(monkeypatch):
    build = SimpleNamespace(get_num_gpus=lambda: 0)
    monkeypatch.setitem(sys.modules, "faiss", build)
    refused(OptionError, "gpu needs a build of faiss for GPUs", load_faiss, gpu=True)
    build.StandardGpuResources = object
    refused(OptionError, "gpu needs a CUDA device", load_faiss, gpu=True)
    build.get_num_gpus = lambda: 1
    assert load_faiss(gpu=True) is build


# If a thread still reads a mapped file when it is truncated, the process is killed.
_SHORTER_AFTER_EACH_SEARCH = """
import sys
import numpy as np
from pathlib import Path
from embeddings.mining.faiss_library import load_faiss, map_lists, new_lists, write_lists
path, vectors = Path(sys.argv[1]), np.random.default_rng(0).standard_normal((5000, 8)).astype(np.float32)
quantizer = load_faiss().IndexFlatIP(8)
quantizer.add(vectors[:8])
lists = new_lists(quantizer, 8)
lists.add(vectors)
write_lists(lists, path)
whole = path.read_bytes()
for _ in range(300):
    mapped = map_lists(path)
    mapped.nprobe = 8
    mapped.search(vectors[:1], 5)
    path.write_bytes(whole)
"""


def test_no_thread_reads_the_file_after_a_search(tmp_path):
    run_command(["-c", _SHORTER_AFTER_EACH_SEARCH, str(tmp_path / "lists")], check=True)
