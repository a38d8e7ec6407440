"""The library's exceptions, and optional libraries."""

import pickle
import subprocess
import sys

import pytest

from embeddings.common import errors
from embeddings.common.errors import (
    InputError,
    MissingExtraError,
    NumericError,
    OptionError,
    UserError,
    require,
    require_minimum,
)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UserError("x"), "x", 2),
        (InputError("train.jsonl:17", "field is missing", "map it"), "train.jsonl:17: field is missing; map it", 2),
        (OptionError("loss.scale", 0.0, "must be > 0", "try 1"), "loss.scale must be > 0, got 0.0; try 1", 2),
        (OptionError("text", "x" * 999, "must be short", "cut it"), f"text must be short, got '{'x' * 58}…; cut it", 2),
        (MissingExtraError("faiss", "cpu"), "faiss is not installed; run: pip install -e '.[cpu]'", 2),
        (NumericError("loss is nan"), "loss is nan", 70),
    ],
)
def test_an_error_has_one_line_and_survives_pickling(error, line, code):
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error) == line
    assert (copied.args, copied.exit_code) == (error.args, code)


def test_a_number_below_its_minimum_is_refused_and_null_where_it_has_no_meaning():
    for accepted in (1, 1.5):
        require_minimum("loss.scale", accepted, 1)
    require_minimum("loss.scale", None, 1, optional=True)
    with pytest.raises(OptionError, match=r"loss\.scale must be >= 1, got None; try 1"):
        require_minimum("loss.scale", None, 1, "try 1")
    with pytest.raises(OptionError, match=r"loss\.scale must be >= 1, got 0; leave it out for the default"):
        require_minimum("loss.scale", 0, 1)
    with pytest.raises(OptionError, match=r"loss\.scale must be >= 0, got nan; try 1"):
        require_minimum("loss.scale", float("nan"), 0, "try 1")


def test_only_a_missing_library_raises_an_error_that_names_its_extra(tmp_path, monkeypatch):
    assert require("json", "dev") is sys.modules["json"]
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[cpu\]'"):
        require("no_such_library_at_all", "cpu")
    (tmp_path / "half_broken.py").write_text("import a_dependency_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_absent"):
        require("half_broken", "cpu")


def test_an_installed_package_names_the_requirements_of_an_extra(monkeypatch):
    """No index has the distribution, so its name cannot be installed."""
    monkeypatch.setattr(errors, "CHECKOUT", None)
    stated = ["torch>=2.11", "onnx>=1.23; extra == 'onnx'", 'onnxruntime>=1.31; extra == "onnx"', "x; extra == 'cpu'"]
    monkeypatch.setattr(errors, "requires", lambda name: stated if name == "embedding-zoo" else None)
    assert errors.pip_install("onnx") == "pip install 'onnx>=1.23' 'onnxruntime>=1.31'"


def test_importing_the_library_loads_nothing_heavy():
    code = (
        "import sys, embeddings, embeddings.cli.main; "
        "heavy = {'torch', 'transformers', 'lightning', 'datasets', 'faiss', 'mteb', 'deepspeed', 'sklearn'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
