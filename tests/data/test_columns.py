import numpy as np
import pyarrow as pa
import pytest

from embeddings.data.table import ListColumn, MappedFile, NumberColumn, TextColumn

TEXTS = ["one", "", "東京 café", "a\x00b", "z" * 1000]
LISTS = [["a", "é"], [], ["", "b", "c"], []]


def opened(tmp_path, column_of, values, kind, sizes):
    """A column of these values, in record batches of these sizes and numbered through, and its (batch, number)s."""
    path, schema = tmp_path / "column.arrow", pa.schema([("column", kind)])
    starts = np.cumsum([0, *sizes]).tolist()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start, size in zip(starts, sizes, strict=False):
            writer.write_batch(pa.record_batch([pa.array(values[start : start + size], kind)], schema=schema))
    file = MappedFile(path)
    reader, column = pa.ipc.open_file(file.buffer), column_of(file, len(sizes))
    for batch, start in enumerate(starts[:-1]):
        column.open(batch, reader.get_batch(batch).column(0), start)
    return column, [(batch, starts[batch] + i) for batch, size in enumerate(sizes) for i in range(size)]


def taken(column, places):
    """The values at some places, read together."""
    batch_N, number_N = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return column.take(batch_N, number_N)


def in_another_order(places):
    return [*places[::-1], places[1], places[1], places[0]]


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 0, 1, 3]])
def test_texts_come_out_as_they_went_in(tmp_path, sizes):
    column, places = opened(tmp_path, TextColumn, TEXTS, pa.large_string(), sizes)
    assert [column.at(*place) for place in places] == taken(column, places) == TEXTS
    assert taken(column, in_another_order(places)) == [*TEXTS[::-1], TEXTS[1], TEXTS[1], TEXTS[0]]
    assert taken(column, [places[1]] * 2) == ["", ""]
    assert taken(column, []) == column.part(0, 0, 0) == []
    assert column.part(len(sizes) - 1, 3, 5) == TEXTS[3:]


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 1, 1, 1]])
def test_lists_come_out_as_they_went_in(tmp_path, sizes):
    def column_of(file, num_batches):
        return ListColumn(file, num_batches, TextColumn(file, num_batches))

    column, places = opened(tmp_path, column_of, LISTS, pa.large_list(pa.large_string()), sizes)
    assert [column.at(*place) for place in places] == taken(column, places) == LISTS
    assert taken(column, in_another_order(places)) == [*LISTS[::-1], LISTS[1], LISTS[1], LISTS[0]]
    assert np.diff(column.starts(0, 0, sizes[0])).tolist() == [len(each) for each in LISTS[: sizes[0]]]
    assert column.num_elements(0) == sum(len(each) for each in LISTS[: sizes[0]])


@pytest.mark.parametrize("lists", [[[], []], [[1], [-2]], [[1, 2], [3, 4]]])
def test_lists_of_one_length_come_out_as_they_went_in(tmp_path, lists):
    def column_of(file, num_batches):
        return ListColumn(file, num_batches, NumberColumn(file, num_batches, "int8"))

    column, places = opened(tmp_path, column_of, lists, pa.large_list(pa.int8()), [1, 1])
    assert [column.at(*place) for place in places] == taken(column, places) == lists
    found = taken(column, [places[1]] * 2)
    assert found == [lists[1]] * 2
    assert found[0] is not found[1]


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_numbers_come_out_as_they_went_in(tmp_path, dtype):
    numbers = [1, -1, 127, 0]
    kind = pa.from_numpy_dtype(dtype)
    column, places = opened(tmp_path, lambda file, count: NumberColumn(file, count, dtype), numbers, kind, [1, 3])
    assert [column.at(*place) for place in places] == taken(column, places) == numbers
    assert taken(column, places[::-1]) == numbers[::-1]
    assert column.part(1, 1, 3) == column.view(1, 1, 3).tolist() == numbers[1:3]
