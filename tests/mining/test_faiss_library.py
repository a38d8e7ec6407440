import sys
from types import SimpleNamespace

import numpy as np
import pytest

from embeddings.common import MissingExtraError, OptionError
from embeddings.mining.faiss_library import (
    faiss_version,
    load_faiss,
    map_lists,
    new_lists,
    without_missing,
    write_lists,
)
from tests.helpers.processes import run_command


def test_the_processors_faiss_is_loaded():
    faiss = load_faiss()
    assert faiss.IndexFlatIP(4).d == 4
    assert faiss_version() == faiss.__version__


@pytest.mark.parametrize(("gpu", "extra"), [(False, "cpu"), (True, "gpu")])
def test_a_missing_faiss_names_the_extra_that_brings_it(gpu, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=rf"pip install -e '\.\[{extra}\]'"):
        load_faiss(gpu)


def test_a_gpu_is_refused_where_the_build_has_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace(get_num_gpus=lambda: 1))
    with pytest.raises(OptionError, match="gpu needs a build of faiss for GPUs"):
        load_faiss(gpu=True)


def test_a_gpu_is_refused_where_the_machine_has_none(monkeypatch):
    build = SimpleNamespace(get_num_gpus=lambda: 0, StandardGpuResources=object)
    monkeypatch.setitem(sys.modules, "faiss", build)
    with pytest.raises(OptionError, match="gpu needs a CUDA device"):
        load_faiss(gpu=True)
    build.get_num_gpus = lambda: 1
    assert load_faiss(gpu=True) is build


def test_new_lists_take_vectors_and_what_they_do_not_find_scores_minus_infinity():
    quantizer = load_faiss().IndexFlatIP(2)
    quantizer.add(np.eye(2, dtype=np.float32))
    lists = new_lists(quantizer, 2)
    lists.add(np.eye(2, dtype=np.float32))
    score_QK, row_QK = lists.search(np.array([[1.0, 0.5]], np.float32), 2)
    assert row_QK.tolist() == [[0, -1]]
    assert without_missing(score_QK, row_QK).tolist() == [[1.0, -np.inf]]


def test_lists_that_do_not_fit_end_in_an_os_error(tmp_path):
    quantizer = load_faiss().IndexFlatIP(2)
    quantizer.add(np.eye(2, dtype=np.float32))
    write_lists(new_lists(quantizer, 2), tmp_path / "a")
    assert map_lists(tmp_path / "a").nlist == 2
    with pytest.raises(FileNotFoundError):
        write_lists(new_lists(quantizer, 2), tmp_path / "none" / "a")


# A thread that still reads a mapped file when it becomes shorter ends the whole process.
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


def test_nothing_reads_the_file_once_a_search_has_returned(tmp_path):
    run_command(["-c", _SHORTER_AFTER_EACH_SEARCH, str(tmp_path / "lists")], check=True)
