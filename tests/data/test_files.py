import pytest

from embeddings.common import InputError
from embeddings.data.sources import resolve_files


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.parquet", "odd[1].jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "sub").mkdir()
    return tmp_path


def test_a_glob_gives_its_matches_sorted_and_a_list_keeps_its_order(folder):
    found = resolve_files([f"{folder}/c.parquet", f"{folder}/[ab].jsonl"])
    assert [file.name for file in found] == ["c.parquet", "a.jsonl", "b.jsonl"]


def test_a_name_with_brackets_is_a_name_where_such_a_file_is_there(folder):
    assert [file.name for file in resolve_files(f"{folder}/odd[1].jsonl")] == ["odd[1].jsonl"]


@pytest.mark.parametrize("written", ["$TEST_ROOT/a.jsonl", "${TEST_ROOT}/a.jsonl"])
def test_environment_variables_are_filled_in(folder, monkeypatch, written):
    monkeypatch.setenv("TEST_ROOT", str(folder))
    assert resolve_files(written) == [folder / "a.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("${TEST_UNSET}/a.jsonl", "the environment variable TEST_UNSET is not set; run: export TEST_UNSET=FOLDER"),
        ("none.jsonl", "no such file"),
        ("*.none", "no file matches"),
        ("sub", "is a folder, expected a file"),
        (["a.jsonl", "?.jsonl"], "the path names this file twice"),
    ],
)
def test_a_path_that_names_no_file_is_refused(folder, monkeypatch, path, message):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TEST_UNSET", raising=False)
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        resolve_files(path)
