import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError
from embeddings.data.docstrings import HELD_OUT_PACKAGES
from embeddings.data.text_streams import Documents, TextSource

TEXTS = ["one fox", "two foxes", " \n", "", "naïve café"]


def documents(tmp_path: Path, **fields: Any) -> Documents:
    return Documents(TextSource("texts", **fields), tmp_path / "hashes")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    lines = "".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(TEXTS))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS, "id": range(5)}), tmp_path / "c.parquet")
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]


def test_every_kind_of_file_gives_its_texts_without_blank_ones(files: list[str], tmp_path: Path) -> None:
    expected = ["one fox", "two foxes", "naïve café"]
    for path in files:
        assert list(documents(tmp_path, path=path)) == expected
    assert list(documents(tmp_path, path=files)) == expected * 3


def test_inputs_follow_from_the_bytes(files: list[str], tmp_path: Path) -> None:
    one, two = documents(tmp_path, path=files[0]), documents(tmp_path, path=files[1])
    assert one.inputs == documents(tmp_path, path=files[0]).inputs != two.inputs
    one.require_unchanged()
    Path(files[0]).write_text('{"text": "other"}\n')
    with pytest.raises(InputError, match="changed while it was read"):
        one.require_unchanged()


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({"text": 3}, "text", "2: text is a number, expected text"),
        ({"text": None}, "text", "2: text is null, expected text"),
        ({"body": "x"}, "text", "2: no column 'text' among body"),
    ],
)
def test_a_record_without_a_text_is_named(row: dict[str, Any], column: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=f"bad.jsonl:{says}"):
        list(documents(tmp_path, path=str(tmp_path / "bad.jsonl"), column=column))


def test_packages_give_their_source_files_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "zoo_text"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'café'\n".encode("latin-1"))
    (package / "broken.py").write_bytes(b"name = '\xff'\n")
    (package / "empty.py").write_text("\n")
    found = documents(tmp_path, packages=["zoo_text", "zoo_text"])
    assert list(found) == ["raise RuntimeError('imported')\n", "# -*- coding: latin-1 -*-\nname = 'café'\n"]
    (package / "empty.py").write_text("x = 1\n")
    assert documents(tmp_path, packages=["zoo_text"]).inputs != found.inputs


def test_a_name_stands_for_the_packages_of_the_docstring_corpus(tmp_path: Path) -> None:
    packages = {file.package for file in documents(tmp_path, packages=["held_out"])._modules}
    assert packages == set(HELD_OUT_PACKAGES)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "path or packages must be given, got 'neither'"),
        ({"path": "a", "packages": ["b"]}, "path or packages must be given, got 'both'"),
        ({"path": "hub:a b"}, "is no name of a Hub data set"),
        ({"path": ["hub:a/b", "c"]}, "lists a Hub data set"),
        ({"path": "a", "split": "train"}, "split has a meaning for Hub data sets only"),
        ({"packages": ["a"], "column": "body"}, "column has no meaning for packages"),
        ({"path": "a", "weight": 0.0}, "weight must be a finite number > 0"),
    ],
)
def test_a_source_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        TextSource("texts", **fields)
    with pytest.raises(OptionError, match="name must not be empty"):
        TextSource(" ", path="a")


def test_a_package_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must name installed packages"):
        documents(tmp_path, packages=["no_such_package_x"])


def test_a_hub_data_set_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from embeddings.data import sources
    from embeddings.data.sources import Row

    rows = [Row("hub:a/b[test]:1", {"text": "one", "n": 1}), Row("hub:a/b[test]:2", {"text": "", "n": 2})]
    monkeypatch.setattr(sources, "_ask_commit", lambda name, revision: "c" * 40)
    monkeypatch.setattr(sources.HubReader, "__iter__", lambda self: iter(rows))
    found = documents(tmp_path, path="hub:a/b", split="test")
    assert found.inputs == [{"hub": "a/b", "subset": None, "split": "test", "commit": "c" * 40}]
    assert list(found) == ["one"]
