import pytest

from embeddings.common import InputError
from embeddings.data import SourceConfig, store
from embeddings.data.store import open_cached, read_languages
from tests.data.rows import pairs, write_jsonl


def in_languages(*names):
    rows = zip(pairs(len(names)), names, strict=True)
    return [row if name is None else {**row, "language": name} for row, name in rows]


def read(folder, rows, **options):
    config = SourceConfig("a", str(write_jsonl(folder / "a.jsonl", rows)), **options)
    return read_languages(config, open_cached(config, folder / "cache")).tolist()


def test_languages_are_numbered_by_first_appearance(tmp_path):
    assert read(tmp_path, in_languages("de", "fr", "de", "DE", "fr")) == [0, 1, 0, 2, 1]


def test_a_language_may_have_a_column_of_another_name(tmp_path):
    rows = [{**row, "lang": "sw"} for row in pairs(2)]
    assert read(tmp_path, rows, columns={"language": "lang"}) == [0, 0]


def test_records_left_out_as_suspect_shift_no_row(tmp_path):
    rows = in_languages("de", "fr", "sw")
    rows[1]["positive"] = rows[1]["query"]
    assert read(tmp_path, rows, suspect_rows="leave_out") == [0, 1]


def test_a_record_without_a_language_is_named(tmp_path):
    with pytest.raises(InputError, match=r"a\.jsonl:2: the record has no language; give every record one, or map it"):
        read(tmp_path, in_languages("de", None, "de"))


def test_a_column_of_ever_new_texts_is_no_language(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_LANGUAGES", 2)
    assert read(tmp_path, in_languages("a", "b", "a")) == [0, 1, 0]
    with pytest.raises(InputError, match=r"a\.jsonl:3: language 'c' is one of more than 2; map language"):
        read(tmp_path, in_languages("a", "b", "c"))
