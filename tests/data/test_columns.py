import pyarrow as pa
import pytest

from embeddings.data.columns import ListColumn, NumberColumn, TextColumn

TEXTS = ["one", "", "東京 café", "a\x00b", "z" * 1000]
LISTS = [["a", "é"], [], ["", "b", "c"], []]


@pytest.mark.parametrize("start", [0, 2])
def test_texts_come_out_as_arrow_gives_them(start):
    array = pa.array(TEXTS, pa.large_string())[start:]
    column = TextColumn(array)
    assert [column[i] for i in range(len(array))] == array.to_pylist() == TEXTS[start:]
    assert column.part(1, 3) == TEXTS[start + 1 : start + 3]
    assert column.part(1, 1) == []


@pytest.mark.parametrize("start", [0, 1])
def test_lists_come_out_as_arrow_gives_them(start):
    array = pa.array(LISTS, pa.large_list(pa.large_string()))[start:]
    column = ListColumn(array, TextColumn(array.values))
    assert [column[i] for i in range(len(array))] == array.to_pylist() == LISTS[start:]
    assert column.starts(2).tolist() == array.offsets.to_pylist()[:3]


def test_lists_of_nothing_need_no_elements():
    for kind, child in ((pa.large_string(), TextColumn), (pa.int8(), lambda array: NumberColumn(array, "b"))):
        array = pa.array([[], []], pa.large_list(kind))
        column = ListColumn(array, child(array.values))
        assert [column[i] for i in range(2)] == [[], []]


@pytest.mark.parametrize(("kind", "code"), [(pa.int8(), "b"), (pa.int32(), "i")])
def test_numbers_come_out_as_arrow_gives_them(kind, code):
    array = pa.array([1, -1, 127, 0], kind)[1:]
    column = NumberColumn(array, code)
    assert column.values.tolist() == array.to_pylist() == [-1, 127, 0]
    assert column.part(1, 3) == [127, 0]
