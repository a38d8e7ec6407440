"""Stored rows for any batch size and any order of reading, and refusal of damaged files."""

import pickle
import random

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.data import store
from embeddings.data.store import ROWS_FILE, StoredRow, Table, write_table
from tests.helpers.refusals import refused

DAMAGED = "the converted data is damaged; delete the folder and run again"


def rows_of(count, first_scored=None):
    texts = [f"negative {j} – 東京" for j in range(3)]
    rows = [
        StoredRow(f"query {i}", [f"positive {i}"] * (i % 3), texts[: i % 4], [1] * (i % 4), i, f"task {i}" * (i % 2))
        for i in range(count)
    ]
    if first_scored is None:
        return rows
    scores = [[row.label + 0.5] * (len(row.positives) + len(row.negatives)) for row in rows]
    return [row._replace(scores=s if row.label >= first_scored else []) for row, s in zip(rows, scores, strict=True)]


@pytest.mark.parametrize("batch_rows", [1, 3, 7, 100])
def test_every_row_is_read_back_for_any_batch_size_in_any_order_and_repeatedly(tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr(store, "MAX_BATCH_ROWS", batch_rows)
    rows = rows_of(7)
    assert write_table(tmp_path, iter(rows)) == 7
    table = Table(tmp_path)
    assert len(table) == 7
    assert [table.row(i) for i in range(7)] == rows
    assert table.queries([6, 0]) == ["query 6", "query 0"]
    assert table.positives([5, 3]) == [["positive 5"] * 2, []]
    assert table.negatives([1, 4]) == [rows[1].negatives, []]
    np.testing.assert_array_equal(table.labels(), np.arange(7))
    for index in (-1, 7):
        refused(IndexError, f"row {index} of 7", Table(tmp_path).row, index)
        refused(IndexError, f"row {index} of 7", Table(tmp_path).rows, [0, index])
    odd = StoredRow("", ["", "東京 café", "\U0001f600"], [], [], -1, "ein – Auftrag")
    rows = [*rows_of(9), odd, StoredRow("é" * 500, [], [], [])]
    write_table(tmp_path, iter(rows))
    indices = random.Random(0).choices(range(len(rows)), k=50)
    assert Table(tmp_path).rows(indices) == [rows[i] for i in indices]
    assert Table(tmp_path).rows(np.array(indices)) == [rows[i] for i in indices]
    assert Table(tmp_path).rows(range(1, 5)) == rows[1:5]
    found = Table(tmp_path).rows([10, 0, 10])
    assert found == [rows[10], rows[0], rows[10]]
    assert {type(row) for row in found} == {StoredRow}
    assert {type(row.label) for row in found} == {int}
    assert Table(tmp_path).rows([]) == []
    # The levels of each row are a bit mask.
    levels = [[], [1, 4], [0, 0], [2, 2, 3], [], [4], []]
    write_table(tmp_path, (StoredRow("q", ["p"], ["n"] * len(row), row) for row in levels))
    found = [row for rows in Table(tmp_path).row_levels() for row in rows.tolist()]
    assert found == [sum(1 << level for level in set(row)) for row in levels] == [0, 18, 1, 12, 0, 16, 0]


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 100])
@pytest.mark.parametrize("first_scored", [1, 4, 8])
def test_scores_are_read_back_for_any_batch_size_and_first_scored_row(batch_rows, first_scored, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_BATCH_ROWS", batch_rows)
    rows = rows_of(10, first_scored)
    write_table(tmp_path, rows)
    table = Table(tmp_path)
    assert table.has_scores
    assert table.rows(range(9, -1, -1)) == rows[::-1]


@pytest.mark.parametrize("count", [1, 5, 40, 300])
def test_rows_of_many_batches_are_read_in_the_order_of_their_indices(count, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_BATCH_ROWS", 7)
    rows = rows_of(100, first_scored=50)
    write_table(tmp_path, rows)
    indices = [*random.Random(0).choices(range(100), k=count), *range(20, 20 + count % 70)]
    assert Table(tmp_path).rows(indices) == [rows[index] for index in indices]
    assert Table(tmp_path).negatives(indices) == [rows[index].negatives for index in indices]


def test_long_texts_end_a_batch_early_and_a_table_is_pickled_by_its_folder(tmp_path, monkeypatch):
    write_table(tmp_path, rows_of(1000))
    table = Table(tmp_path)
    data = pickle.dumps(table)
    assert len(data) < 500
    assert pickle.loads(data).row(999) == table.row(999)
    monkeypatch.setattr(store, "MAX_BATCH_CHARACTERS", 100)
    write_table(tmp_path, (StoredRow("x" * 60, [], [], [], -1) for _ in range(5)))
    assert [len(masks) for masks in Table(tmp_path).row_levels()] == [2, 2, 1]


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_damaged_file_is_refused(tmp_path, cut):
    write_table(tmp_path, rows_of(100))
    data = (tmp_path / ROWS_FILE).read_bytes()
    assert len(data) > cut
    (tmp_path / ROWS_FILE).write_bytes(data[:-cut])
    refused(InputError, DAMAGED, Table, tmp_path)
