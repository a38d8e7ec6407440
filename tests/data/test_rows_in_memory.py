"""Rows in memory become an ordinary source: a file under its content's hash."""

import hashlib
from datetime import date
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

import embeddings
from embeddings import source_from_rows
from embeddings.common import InputError, OptionError
from embeddings.data import PlanEntry, SourceConfig, open_source
from tests.data.rows import pairs, write_jsonl
from tests.helpers.refusals import refused

TRIPLETS = [{"anchor": f"q{i}", "positive": f"p{i}", "negative": f"n{i}", "id": i} for i in range(40)]


@pytest.fixture
def held():
    return datasets.Dataset.from_list(TRIPLETS)


def test_a_data_set_in_memory_gives_the_same_source_as_its_file(tmp_path, held):
    source = source_from_rows(held, name="mine", cache_dir=tmp_path / "cache", instruction="find", weight=2.0)
    path = Path(source.path)
    assert path.parent == tmp_path / "cache" / "rows"
    assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (source.name, source.instruction, source.weight) == ("mine", "find", 2.0)
    file = SourceConfig("mine", str(write_jsonl(tmp_path / "a.jsonl", TRIPLETS)), instruction="find")
    here, there = (open_source(config, tmp_path / "cache") for config in (source, file))
    assert len(here) == len(there) == 40
    examples = [here[PlanEntry(row, row)] for row in range(40)]
    assert examples == [there[PlanEntry(row, row)] for row in range(40)]
    assert (examples[7].query, examples[7].negatives[0].text) == ("q7", "n7")


def test_equal_rows_reuse_the_same_file_and_other_rows_get_another(tmp_path, held):
    first = Path(source_from_rows(held, name="a", cache_dir=tmp_path).path)
    made = first.stat()
    for rows in (TRIPLETS, iter(TRIPLETS), held.to_iterable_dataset(), held.with_format("numpy")):
        assert source_from_rows(rows, name="b", cache_dir=tmp_path).path == str(first)
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    other = source_from_rows(held.select(range(39)), name="a", cache_dir=tmp_path).path
    assert sorted(map(str, first.parent.iterdir())) == sorted([str(first), other])


def test_the_cache_may_have_a_dollar_sign_in_its_path(tmp_path):
    source = source_from_rows(pairs(3), name="a", cache_dir=tmp_path / "$NOT_SET")
    assert len(open_source(source, tmp_path / "cache")) == 3


def test_arrays_are_written_as_lists(tmp_path):
    row = {"query": np.str_("q"), "positive": np.array(["p", "r"]), "score": np.float32(0.5), "id": torch.tensor(3)}
    source = source_from_rows([row, *pairs(1)], name="a", cache_dir=tmp_path)
    assert Path(source.path).read_text().startswith('{"query": "q", "positive": ["p", "r"], "score": 0.5, "id": 3}\n')


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "source 'a': there are no rows"),
        ({"train": pairs(3)}, r"rows\[0\]: is a str, expected a mapping .*; choose a split of a DatasetDict"),
        ([*pairs(2), {"query": date(2024, 1, 1)}], r"source 'a': rows\[2\]: cannot be written as JSON \(.*date"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_and_nothing_is_left(tmp_path, rows, message):
    refused(InputError, message, source_from_rows, rows, name="a", cache_dir=tmp_path)
    assert list((tmp_path / "rows").iterdir()) == []


def test_bad_options_and_a_cache_that_is_a_file_are_refused(tmp_path):
    says = "weight must be a finite number > 0"
    refused(OptionError, says, source_from_rows, pairs(1), name="a", cache_dir=tmp_path, weight=0.0)
    (tmp_path / "file").touch()
    says = r"the cache cannot be written .*; set EMBED_CACHE"
    refused(InputError, says, source_from_rows, pairs(1), name="a", cache_dir=tmp_path / "file")
    assert "source_from_rows" in embeddings.__all__
