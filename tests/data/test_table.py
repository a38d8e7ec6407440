import pickle

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.data import table as table_module
from embeddings.data.table import ROWS_FILE, StoredRow, Table, write_table


def rows_of(count):
    rows = []
    for i in range(count):
        negatives = [f"negative {j} – 東京" for j in range(i % 4)]
        rows.append(
            StoredRow(
                f"query {i}", [f"positive {i}"] * (i % 3), negatives, [1] * len(negatives), i, f"task {i}" * (i % 2)
            )
        )
    return rows


@pytest.mark.parametrize("batch_rows", [1, 3, 7, 100])
def test_every_row_comes_back_wherever_the_batches_are_cut(tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr(table_module, "MAX_BATCH_ROWS", batch_rows)
    rows = rows_of(7)
    assert write_table(tmp_path, iter(rows)) == 7
    table = Table(tmp_path)
    assert len(table) == 7
    assert [table.row(i) for i in range(7)] == rows
    assert [table.query(i) for i in (6, 0)] == ["query 6", "query 0"]
    assert [table.positives(i) for i in (5, 3)] == [["positive 5"] * 2, []]
    np.testing.assert_array_equal(table.labels(), np.arange(7))
    assert [level for levels in table.negative_levels() for level in levels.tolist()] == [1] * 9


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_the_levels_of_each_row_are_bits(tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr(table_module, "MAX_BATCH_ROWS", batch_rows)
    levels = [[], [1, 4], [0, 0], [2, 2, 3], [], [4], []]
    write_table(tmp_path, (StoredRow("q", ["p"], ["n"] * len(row), row) for row in levels))
    found = [row for rows in Table(tmp_path).row_levels() for row in rows.tolist()]
    assert found == [sum(1 << level for level in set(row)) for row in levels] == [0, 18, 1, 12, 0, 16, 0]


def test_long_texts_cut_batches_before_many_rows_do(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "MAX_BATCH_CHARACTERS", 100)
    write_table(tmp_path, (StoredRow("x" * 60, [], [], [], -1) for _ in range(5)))
    table = Table(tmp_path)
    assert table._reader.num_record_batches == 3
    assert [len(table.query(i)) for i in range(5)] == [60] * 5


def test_a_table_is_pickled_by_its_folder(tmp_path):
    write_table(tmp_path, rows_of(1000))
    table = Table(tmp_path)
    data = pickle.dumps(table)
    assert len(data) < 500
    assert pickle.loads(data).row(999) == table.row(999)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_row_outside_the_table_is_refused(tmp_path, index):
    write_table(tmp_path, rows_of(3))
    with pytest.raises(IndexError, match=f"row {index} of 3"):
        Table(tmp_path).row(index)


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_damaged_file_is_refused(tmp_path, cut):
    write_table(tmp_path, rows_of(100))
    data = (tmp_path / ROWS_FILE).read_bytes()
    assert len(data) > cut
    (tmp_path / ROWS_FILE).write_bytes(data[:-cut])
    with pytest.raises(InputError, match="the converted data is damaged; delete the folder and run again"):
        Table(tmp_path)
