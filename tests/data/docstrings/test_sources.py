import sys
from pathlib import Path

import pytest

from embeddings.common import OptionError
from embeddings.data.docstrings.extract import find_sources, is_available, package_versions


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (
        *("zoo_x/__init__.py", "zoo_x/b.py", "zoo_x/a.py", "zoo_x/sub/c.py", "zoo_x/notes.txt", "zoo_x/two-part.py"),
        *("zoo_x/tests/t.py", "zoo_x/sub/test_c.py", "zoo_x/conftest.py", "zoo_x/_vendor/six.py", "zoo_x/not-mod/d.py"),
        "single_x.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")
    return tmp_path


def test_sources_are_sorted_without_tests_copies_and_what_cannot_be_imported(package: Path) -> None:
    files = find_sources("zoo_x")
    assert [file.module for file in files] == ["zoo_x", "zoo_x.a", "zoo_x.b", "zoo_x.sub.c"]
    assert [file.path for file in files] == [
        package / "zoo_x" / name for name in ("__init__.py", "a.py", "b.py", "sub/c.py")
    ]
    assert {file.package for file in files} == {"zoo_x"}
    assert files[0].size == files[0].path.stat().st_size
    assert "zoo_x" not in sys.modules


def test_a_single_module_is_a_package_of_one_file(package: Path) -> None:
    assert [file.module for file in find_sources("single_x")] == ["single_x"]


def test_the_standard_library_is_a_package_without_installed_ones() -> None:
    modules = {file.module for file in find_sources("stdlib")}
    assert {"json.decoder", "heapq", "asyncio.queues"} <= modules
    assert not any(module.split(".")[0] in {"numpy", "torch", "site", "test"} - {"site"} for module in modules)


@pytest.mark.parametrize("name", ["no_such_package_x", "", "json.decoder", "../etc", "sys", "zoo x"])
def test_a_package_that_has_no_sources_is_refused_by_name(name: str) -> None:
    assert not is_available(name)
    with pytest.raises(OptionError, match="packages must name installed packages") as raised:
        find_sources(name)
    assert repr(name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_misspelt_package_gets_a_suggestion() -> None:
    with pytest.raises(OptionError, match="did you mean sklearn"):
        find_sources("sklern")


def test_versions_are_those_of_the_distributions(package: Path) -> None:
    versions = package_versions(["zoo_x", "stdlib", "sklearn"])
    assert list(versions) == ["sklearn", "stdlib", "zoo_x"]
    assert versions["stdlib"].count(".") == 2
    assert versions["sklearn"][0].isdigit()
    assert versions["zoo_x"] == ""
