import pickle

import numpy as np
import pytest

from embeddings.data.store import ClassIndex, write_class_index


@pytest.mark.parametrize("labels", [[0], [0, 1], [1, 0, 2, 0, 1, 0], [3, 3, 0, 2, 2, 1, 3]])
def test_members_and_outsiders_are_what_a_loop_finds(tmp_path, labels):
    num_classes = max(labels) + 1
    write_class_index(tmp_path, np.array(labels, dtype=np.int32), num_classes)
    index = ClassIndex(tmp_path)
    assert len(index) == num_classes
    for label in range(num_classes):
        inside = [row for row, other in enumerate(labels) if other == label]
        outside = [row for row, other in enumerate(labels) if other != label]
        assert [index.member(label, i) for i in range(index.size(label))] == inside
        found = [index.outsider(label, i) for i in range(index.num_outside(label))]
        assert sorted(found) == outside
        assert [index.label_of_outsider(label, i) for i in range(len(found))] == [labels[row] for row in found]


def test_rows_of_lone_classes_can_have_no_positive(tmp_path):
    write_class_index(tmp_path, np.array([2, 0, 1, 0, 2, 3], dtype=np.int32), 4, lone=[2, 3])
    index = ClassIndex(tmp_path)
    assert [index.paired(i) for i in range(index.num_paired)] == [1, 2, 3]


def test_an_index_is_mapped_and_pickled_by_its_folder(tmp_path):
    write_class_index(tmp_path, np.arange(10_000, dtype=np.int32) % 10, 10)
    index = ClassIndex(tmp_path)
    assert isinstance(index._order, np.memmap)
    data = pickle.dumps(index)
    assert len(data) < 500
    assert pickle.loads(data).member(3, 5) == index.member(3, 5) == 53
