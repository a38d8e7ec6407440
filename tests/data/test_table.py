"""Stored rows for any batch size and any order of reading, and refusal of damaged files."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.data import table as table_module
from embeddings.data.table import ROWS_FILE, StoredRow, Table, write_table
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
    monkeypatch.setattr(table_module, "MAX_BATCH_ROWS", batch_rows)
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
    monkeypatch.setattr(table_module, "MAX_BATCH_ROWS", batch_rows)
    rows = rows_of(10, first_scored)
    write_table(tmp_path, rows)
    table = Table(tmp_path)
    assert table.has_scores
    assert table.rows(range(9, -1, -1)) == rows[::-1]


def test_only_the_batches_of_the_requested_rows_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "MAX_BATCH_ROWS", 2)
    write_table(tmp_path, rows_of(9))
    table, opened = Table(tmp_path), []
    read = table._readers[0].get_batch
    monkeypatch.setattr(table, "_readers", [SimpleNamespace(get_batch=lambda n: opened.append(n) or read(n))])
    table.rows([7, 2, 6, 3])
    table.rows([2, 6])
    table.row(7)
    assert opened == [1, 3]


def test_long_texts_end_a_batch_early_and_a_table_is_pickled_by_its_folder(tmp_path, monkeypatch):
    write_table(tmp_path, rows_of(1000))
    table = Table(tmp_path)
    data = pickle.dumps(table)
    assert len(data) < 500
    assert pickle.loads(data).row(999) == table.row(999)
    monkeypatch.setattr(table_module, "MAX_BATCH_CHARACTERS", 100)
    write_table(tmp_path, (StoredRow("x" * 60, [], [], [], -1) for _ in range(5)))
    table = Table(tmp_path)
    assert table._readers[0].num_record_batches == 3
    assert list(map(len, table.queries(range(5)))) == [60] * 5


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_damaged_file_is_refused(tmp_path, cut):
    write_table(tmp_path, rows_of(100))
    data = (tmp_path / ROWS_FILE).read_bytes()
    assert len(data) > cut
    (tmp_path / ROWS_FILE).write_bytes(data[:-cut])
    refused(InputError, DAMAGED, Table, tmp_path)


def assert_damaged(folder):
    """Every way to read the damaged row 4 is refused."""
    refused(InputError, DAMAGED, Table(folder).row, 4)
    refused(InputError, DAMAGED, Table(folder).rows, [0, 4])
    refused(InputError, DAMAGED, Table(folder).positives, [4])


def overwrite(tmp_path, place, data):
    with open(tmp_path / ROWS_FILE, "r+b") as file:
        file.seek(place)
        file.write(data)


@pytest.mark.parametrize("offset", [-1, 2**40])
@pytest.mark.parametrize("step", [1, len("positive i")], ids=["lists", "texts"])
def test_an_offset_out_of_range_is_damage(tmp_path, step, offset):
    write_table(tmp_path, (StoredRow(f"query {i}", [f"positive {i}"]) for i in range(9)))
    offsets = np.arange(0, 10 * step, step, dtype=np.int64).tobytes()
    data = (tmp_path / ROWS_FILE).read_bytes()
    assert data.count(offsets) == 1
    overwrite(tmp_path, data.index(offsets) + 4 * 8, offset.to_bytes(8, "little", signed=True))
    assert_damaged(tmp_path)


def test_invalid_utf8_invalid_arrow_and_wrong_batch_sizes_are_damage(tmp_path, monkeypatch):
    write_table(tmp_path, rows_of(9))
    data = (tmp_path / ROWS_FILE).read_bytes()
    overwrite(tmp_path, data.index(b"positive 4"), b"\xff")
    assert_damaged(tmp_path)
    (tmp_path / ROWS_FILE).write_bytes(data)
    overwrite(tmp_path, data.index(b"\xff" * 4, data.index(b"\xff" * 4) + 4) + 8, b"\x7f" * 32)
    assert_damaged(tmp_path)
    monkeypatch.setattr(table_module, "MAX_BATCH_ROWS", 4)
    write_table(tmp_path, rows_of(9))
    np.save(tmp_path / table_module.STARTS_FILE, np.array([0, 3, 8, 9]))
    assert_damaged(tmp_path)
