"""Errors that people cause, and optional libraries."""

import os
import pickle
import sys

import pytest

from embeddings.common.errors import (
    InputError,
    MissingExtraError,
    NumericError,
    OptionError,
    UserError,
    require,
    rust_panics_as_errors,
)


def test_input_error_names_place_fault_and_way_out():
    error = InputError("train.jsonl:17", "field 'query' is missing", "map it in `columns`")
    assert str(error) == "train.jsonl:17: field 'query' is missing; map it in `columns`"
    assert error.exit_code == 2


def test_option_error_shows_the_option_its_value_and_the_rule():
    assert (
        str(OptionError("temperature", 0.0, "must be > 0", "try 0.02")) == "temperature must be > 0, got 0.0; try 0.02"
    )


def test_a_long_value_is_shown_by_its_beginning():
    line = str(OptionError("columns", {"query": "x" * 1000}, "must be short", "shorten it"))
    assert line.startswith("columns must be short, got {'query': 'xxx")
    assert line.endswith("x…; shorten it")
    assert len(line) < 120


def test_missing_extra_names_what_to_install():
    assert str(MissingExtraError("faiss", "cpu")) == "faiss is not installed; run: pip install -e '.[cpu]'"


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (NumericError, 70)])
def test_exit_codes_follow_the_table(kind, code):
    assert kind("x").exit_code == code


@pytest.mark.parametrize(
    "error",
    [
        UserError("x"),
        InputError("train.jsonl:17", "field 'query' is missing", "map it in `columns`"),
        OptionError("temperature", 0.0, "must be > 0", "try 0.02"),
        MissingExtraError("faiss", "cpu"),
        NumericError("loss is nan"),
    ],
)
def test_an_error_arrives_from_another_process_as_it_was(error):
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args


class PanicException(BaseException):
    """As a library written in Rust raises it."""


def failing(error: BaseException) -> None:
    with rust_panics_as_errors():
        os.write(2, b"a note")
        raise error


def test_a_panic_is_an_error_without_its_backtrace(capfd):
    with pytest.raises(RuntimeError, match=r"^index out of bounds$"):
        failing(PanicException("index out of bounds"))
    assert capfd.readouterr().err == ""


def test_what_else_is_written_meanwhile_comes_afterwards_and_other_exceptions_pass(capfd):
    with rust_panics_as_errors():
        os.write(2, b"a warning")
    assert capfd.readouterr().err == "a warning"
    with pytest.raises(KeyboardInterrupt):
        failing(KeyboardInterrupt())
    assert capfd.readouterr().err == "a note"


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
