import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.directions import require_directions


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (np.nan, "not finite"), (np.inf, "not finite")])
def test_a_vector_without_direction_is_named_by_its_row(value, kind):
    vectors = np.ones((4, 3), np.float32)
    require_directions(vectors, "documents")
    vectors[2] = value
    with pytest.raises(InputError, match=rf"documents:12: the vector is {kind}"):
        require_directions(vectors, "documents", first_row=10)


def test_a_vector_of_another_length_is_refused_only_where_unit_vectors_are_asked_for():
    vectors = np.eye(3, dtype=np.float32)
    require_directions(vectors, "documents", unit=True)
    vectors[1] *= 2
    require_directions(vectors, "documents")
    with pytest.raises(InputError, match="documents:1: the vector is of length 2"):
        require_directions(vectors, "documents", unit=True)


def test_rows_that_do_not_follow_one_another_are_named():
    vectors = np.array([[1, 0], [0, 0]], np.float32)
    with pytest.raises(InputError, match="documents:3: the vector is zero"):
        require_directions(vectors, "documents", row_N=np.array([7, 3]))
