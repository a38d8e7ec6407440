import sys

import pytest

from embeddings.common import MissingExtraError
from embeddings.common.optional import require


def test_an_installed_library_is_returned():
    assert require("json", "dev") is sys.modules["json"]


def test_a_missing_library_names_its_extra():
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[cpu\]'"):
        require("no_such_library_at_all", "cpu")


def test_a_library_that_breaks_inside_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_broken.py").write_text("import a_dependency_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_absent"):
        require("half_broken", "cpu")


def test_importing_the_library_loads_nothing_heavy():
    import subprocess

    code = (
        "import sys, embeddings, embeddings.cli.main; "
        "heavy = {'torch', 'transformers', 'lightning', 'datasets', 'faiss', 'mteb', 'deepspeed', 'sklearn'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
