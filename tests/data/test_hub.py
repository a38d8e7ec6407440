import sys
from types import ModuleType, SimpleNamespace

import pytest

from embeddings.common import InputError
from embeddings.data import PlanEntry, SourceConfig, open_source
from embeddings.data.sources import HubReader, resolve_revision
from tests.data.rows import pairs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch):
    """A Hub of one data set of three pairs; `calls` counts what was asked of it."""
    calls = {"info": [], "load": []}

    class HfApi:
        def dataset_info(self, name, revision, timeout):
            calls["info"].append((name, revision))
            return SimpleNamespace(sha=COMMIT)

    def load_dataset(name, subset, *, split, revision, streaming):
        calls["load"].append((name, subset, split, revision, streaming))
        return iter(pairs(3 if split == "train" else 0))

    for name, members in (("huggingface_hub", {"HfApi": HfApi}), ("datasets", {"load_dataset": load_dataset})):
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_a_hub_source_is_streamed_at_its_commit_and_only_once(tmp_path, hub):
    config = SourceConfig("mine", "hub:org/name", subset="en", revision="main")
    for _ in range(2):
        source = open_source(config, tmp_path)
        assert [source[PlanEntry(row, 0)].query for row in range(len(source))] == ["query 0", "query 1", "query 2"]
    assert hub["info"] == [("org/name", "main"), ("org/name", COMMIT), ("org/name", "main")]
    assert hub["load"] == [("org/name", "en", "train", COMMIT, True)]


def test_a_full_commit_that_was_converted_needs_no_hub(tmp_path, hub, monkeypatch):
    config = SourceConfig("mine", "hub:org/name", revision=COMMIT)
    open_source(config, tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert len(open_source(config, tmp_path)) == 3


def test_subsets_and_splits_are_different_sources(tmp_path, hub):
    open_source(SourceConfig("a", "hub:org/name", subset="en", revision=COMMIT), tmp_path)
    open_source(SourceConfig("b", "hub:org/name", subset="de", revision=COMMIT), tmp_path)
    assert len(hub["load"]) == 2


def test_a_split_without_rows_is_refused(hub):
    with pytest.raises(InputError, match="hub:org/name: split 'empty' holds no rows"):
        list(HubReader("org/name", None, "empty", COMMIT))


def test_an_unreachable_hub_is_one_line_with_the_way_out(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("cannot reach the Hub\nwith a long trace")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=refuse))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refuse))
    for ask in (lambda: resolve_revision("org/name", None), lambda: list(HubReader("org/name", None, "train", COMMIT))):
        with pytest.raises(InputError) as error:
            ask()
        assert str(error.value) == (
            "hub:org/name: cannot be read (cannot reach the Hub); "
            "check name, split and network, or download it and give its files"
        )
