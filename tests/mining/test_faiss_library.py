import sys
from types import SimpleNamespace

import pytest

from embeddings.common import MissingExtraError, OptionError
from embeddings.mining.faiss_library import faiss_version, load_faiss


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
