import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.inference.vectors import VECTOR_FORMATS, VectorShards, float_rows, save_vectors, stored_rows
from tests.data.cluster_folders import unit_vectors


def written(folder, num_rows=5, shard_size=2, width=3):
    shards = VectorShards(folder, num_rows, width, shard_size)
    values = np.arange(1, num_rows * width + 1, dtype=np.float32).reshape(num_rows, width)
    for shard in range(shards.num_shards):
        save_vectors(shards.path(shard), values[shard * shard_size : (shard + 1) * shard_size])
    return shards, values


@pytest.mark.parametrize(("num_rows", "shard_size", "sizes"), [(5, 2, [2, 2, 1]), (4, 2, [2, 2]), (1, 9, [1])])
def test_shards_follow_one_another_and_are_mapped(num_rows, shard_size, sizes, tmp_path):
    shards, values = written(tmp_path, num_rows, shard_size)
    assert [len(vectors) for vectors in shards] == sizes
    assert [row for shard in range(shards.num_shards) for row in shards.rows(shard)] == list(range(num_rows))
    np.testing.assert_array_equal(np.concatenate(list(shards)), values)
    assert isinstance(shards.load(0), np.memmap)


@pytest.mark.parametrize("damage", ["missing", "empty file", "no rows", "wider", "float64", "text", "short"])
def test_a_shard_that_is_not_what_it_should_be_is_named(damage, tmp_path):
    shards, _ = written(tmp_path)
    path = shards.path(1)
    if damage == "missing":
        path.unlink()
    elif damage in ("empty file", "text"):
        path.write_bytes(b"" if damage == "empty file" else b"vectors")
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        shape = {"no rows": (0, 3), "wider": (2, 4), "float64": (2, 3)}[damage]
        np.save(path, np.ones(shape, np.float64 if damage == "float64" else np.float32))
    with pytest.raises(InputError, match=r"vectors-00001\.npy"):
        list(shards)


def unit_shards(folder, vectors, shard_size):
    shards = VectorShards(folder, len(vectors), vectors.shape[1], shard_size)
    for shard in range(shards.num_shards):
        save_vectors(shards.path(shard), vectors[shard * shard_size : (shard + 1) * shard_size])
    return shards


@pytest.mark.parametrize("shard_size", [1, 7, 100])
def test_vectors_are_taken_from_shards_in_the_order_given(shard_size, tmp_path):
    vectors = unit_vectors(60)
    shards = unit_shards(tmp_path, vectors, shard_size)
    rows = np.array([50, 0, 13, 14, 0, 59])
    np.testing.assert_array_equal(shards.take(rows), vectors[rows])
    assert shards.take(rows[:0]).shape == (0, 8)


@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (1, "of length 2.828")])
def test_a_taken_vector_without_direction_is_named_by_shard_and_row(value, kind, tmp_path):
    vectors = unit_vectors(60)
    vectors[23] = value
    shards = unit_shards(tmp_path, vectors, 10)
    shards.take(np.array([24, 22]))
    with pytest.raises(InputError, match=rf"vectors-00002\.npy:3: the vector is {kind}; check its text and the model"):
        shards.take(np.array([59, 23, 0]))
    if kind.startswith("of length"):
        np.testing.assert_array_equal(shards.take(np.array([23]), unit=False), vectors[23:24])
    else:
        with pytest.raises(InputError, match=kind):
            shards.take(np.array([23]), unit=False)


def formatted_shards(folder, vectors, vector_format, shard_size=10):
    shards = VectorShards(folder, len(vectors), vectors.shape[1], shard_size, vector_format)
    for shard in range(shards.num_shards):
        part = vectors[shard * shard_size : (shard + 1) * shard_size]
        save_vectors(shards.path(shard), stored_rows(part, vector_format, "here"))
    return shards


@pytest.mark.parametrize("vector_format", VECTOR_FORMATS)
def test_vectors_of_every_format_are_mapped_and_read_back_as_numbers(vector_format, tmp_path):
    vectors = unit_vectors(27)
    shards = formatted_shards(tmp_path, vectors, vector_format)
    expected = float_rows(stored_rows(vectors, vector_format, "here"), vector_format)
    np.testing.assert_array_equal(np.concatenate(list(shards)), expected)
    rows = np.array([26, 3, 3, 11])
    np.testing.assert_array_equal(shards.take(rows, unit=False), expected[rows])
    assert isinstance(shards.stored(0), np.memmap)
    pieces = list(shards.pieces(1, 4))
    assert [(start, piece.dtype, len(piece)) for start, piece in pieces] == [
        (0, np.float32, 4),
        (4, np.float32, 4),
        (8, np.float32, 2),
    ]
    np.testing.assert_array_equal(np.concatenate([piece for _, piece in pieces]), expected[10:20])


@pytest.mark.parametrize("stored_as", VECTOR_FORMATS)
@pytest.mark.parametrize("read_as", VECTOR_FORMATS)
def test_a_shard_of_another_format_is_refused(stored_as, read_as, tmp_path):
    formatted_shards(tmp_path, unit_vectors(5), stored_as)
    shards = VectorShards(tmp_path, 5, 8, 10, read_as)
    if stored_as == read_as:
        assert len(shards.load(0)) == 5
        return
    with pytest.raises(InputError, match=r"vectors-00000\.npy: holds .* expected .*; delete the folder"):
        shards.load(0)


@pytest.mark.parametrize(("scale", "kind"), [(0, "zero"), (np.nan, "not finite")])
def test_a_damaged_scale_is_named_by_shard_and_row(scale, kind, tmp_path):
    shards = formatted_shards(tmp_path, unit_vectors(27), "int8")
    stored = np.array(shards.stored(2))
    stored["scale"][4] = scale
    save_vectors(shards.path(2), stored)
    with pytest.raises(InputError, match=rf"vectors-00002\.npy:4: the vector is {kind}"):
        shards.take(np.array([24]), unit=False)
