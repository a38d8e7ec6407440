"""Vectors are stored in their format and read back within its error bound."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import save_array
from embeddings.inference.vector_folder import (
    VECTOR_FORMATS,
    VectorShards,
    bytes_per_vector,
    float_rows,
    require_format,
    sign_bits,
    stored_rows,
    stored_type,
)
from tests.data.cluster_folders import unit_vectors
from tests.helpers.refusals import refused

HAND = np.array(
    [[127.0, -63.5, 1.5, 0.0, 2.5, -0.4, 0.6, -127.0], [-2.0, 1.0, 0.0, -1.0, 0.5, 0.25, 2.0, -0.01]], np.float32
)


def test_int8_has_one_scale_per_row_and_binary_has_the_signs():
    rows = stored_rows(HAND, "int8", "here")
    # Half rounds to even.
    assert rows["codes"].tolist() == [[127, -64, 2, 0, 2, 0, 1, -127], [-127, 64, 0, -64, 32, 16, 127, -1]]
    assert rows["scale"].tolist() == [1.0, float(np.float32(2) / np.float32(127))]
    restored = float_rows(rows, "int8")
    assert restored[0].tolist() == [127, -64, 2, 0, 2, 0, 1, -127]
    assert restored.dtype == np.float32
    bits = stored_rows(HAND, "binary", "here")
    # The sign of the first number is the highest bit.
    assert [f"{byte:08b}" for byte in bits[:, 0]] == ["10101010", "01001110"]
    assert float_rows(bits, "binary").tolist() == [[1, -1, 1, -1, 1, -1, 1, -1], [-1, 1, -1, -1, 1, 1, 1, -1]]


@pytest.mark.parametrize("vector_format", VECTOR_FORMATS)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 8), (1, 8), (1, 384), (50, 24)])
def test_each_number_equals_a_loop_by_hand(vector_format, num_rows, width):
    vectors = np.random.default_rng(num_rows + width).standard_normal((num_rows, width)).astype(np.float32)
    stored = stored_rows(vectors, vector_format, "here")
    kind, row = stored_type(vector_format, width)
    assert (stored.dtype, stored.shape) == (kind, (num_rows, *row))
    assert stored.nbytes == num_rows * bytes_per_vector(vector_format, width)
    found = float_rows(stored, vector_format)
    assert (found.dtype, found.shape) == (np.float32, (num_rows, width))
    for vector, restored in zip(vectors, found, strict=True):
        scale = max(abs(number) for number in vector) / np.float32(127)
        for number, kept in zip(vector, restored, strict=True):
            by_hand = {
                "float32": number,
                "float16": np.float32(np.float16(number)),
                "int8": np.float32(round(float(number / scale))) * scale,
                "binary": 1.0 if number > 0 else -1.0,
            }
            assert kept == by_hand[vector_format]


@pytest.mark.parametrize("vector_format", VECTOR_FORMATS)
@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (np.inf, "not finite")])
def test_a_zero_or_non_finite_vector_is_refused_by_its_row(value, kind, vector_format):
    vectors = unit_vectors(5)
    vectors[3] = value
    refused(InputError, f"corpus:13: the vector is {kind}", stored_rows, vectors, vector_format, "corpus", first_row=10)


@pytest.mark.parametrize("value", [7e4, 1e-9])
def test_a_vector_outside_float16_is_refused_and_int8_stores_it(value):
    vectors = unit_vectors(5)
    vectors[3] = value
    with pytest.raises(InputError, match="corpus:4: the vector has numbers too large or too small for float16; encode"):
        stored_rows(vectors, "float16", "corpus", first_row=1)
    np.testing.assert_allclose(float_rows(stored_rows(vectors, "int8", "corpus"), "int8")[3], value, rtol=1e-6)


def test_an_impossible_format_is_refused_by_name():
    require_format("int8", 20)
    refused(OptionError, "vectors whose width is a multiple of 8, these have 20", require_format, "binary", 20)
    refused(OptionError, "must be one of float32, float16, int8, binary, got 'int4'", require_format, "int4", 24)


def test_signs_are_those_of_sentence_transformers():
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    vectors = unit_vectors(30, width=40)
    vectors[0, :3] = 0
    np.testing.assert_array_equal(sign_bits(vectors), quantization.quantize_embeddings(vectors, "ubinary"))


def formatted_shards(folder, vectors, vector_format="float32", shard_size=10):
    shards = VectorShards(folder, len(vectors), vectors.shape[1], shard_size, vector_format)
    for shard in range(shards.num_shards):
        part = vectors[shard * shard_size : (shard + 1) * shard_size]
        # float32 is not checked, so that a test can write an invalid vector.
        stored = part if vector_format == "float32" else stored_rows(part, vector_format, "here")
        save_array(shards.path(shard), stored)
    return shards


@pytest.mark.parametrize("other", [None, np.ones((0, 3), np.float32), np.ones((2, 4), np.float32), np.ones((2, 3))])
def test_a_damaged_shard_is_named(other, tmp_path):
    shards = formatted_shards(tmp_path, unit_vectors(5, width=3), shard_size=2)
    shards.path(1).write_bytes(shards.path(1).read_bytes()[:-4])
    if other is not None:
        np.save(shards.path(1), other)
    refused(InputError, r"vectors-00001\.npy", list, shards)


@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (1, "of length 2.828")])
def test_a_taken_vector_that_is_invalid_is_named_by_shard_and_row(value, kind, tmp_path):
    vectors = unit_vectors(60)
    vectors[23] = value
    shards = formatted_shards(tmp_path, vectors)
    np.testing.assert_array_equal(shards.take(np.array([24, 22])), vectors[[24, 22]])
    with pytest.raises(InputError, match=rf"vectors-00002\.npy:3: the vector is {kind}; check its text and the model"):
        shards.take(np.array([59, 23, 0]))
    if kind.startswith("of length"):
        np.testing.assert_array_equal(shards.take(np.array([23]), unit=False), vectors[23:24])
    else:
        refused(InputError, kind, shards.take, np.array([23]), unit=False)


@pytest.mark.parametrize("vector_format", VECTOR_FORMATS)
def test_vectors_of_every_format_are_mapped_and_read_back_as_numbers(vector_format, tmp_path):
    vectors = unit_vectors(27)
    shards = formatted_shards(tmp_path, vectors, vector_format)
    expected = float_rows(stored_rows(vectors, vector_format, "here"), vector_format)
    np.testing.assert_array_equal(np.concatenate(list(shards)), expected)
    rows = np.array([26, 3, 3, 11, 0])
    for taken in (rows, rows[:0]):
        np.testing.assert_array_equal(shards.take(taken, unit=False), expected[taken])
    assert isinstance(shards.stored(0), np.memmap)


@pytest.mark.parametrize(("scale", "kind"), [(0, "zero"), (np.nan, "not finite")])
def test_a_damaged_scale_is_named_by_shard_and_row_and_another_format_refused(scale, kind, tmp_path):
    shards = formatted_shards(tmp_path, unit_vectors(27), "int8")
    stored = np.array(shards.stored(2))
    stored["scale"][4] = scale
    save_array(shards.path(2), stored)
    refused(InputError, rf"vectors-00002\.npy:4: the vector is {kind}", shards.take, np.array([24]), unit=False)
    with pytest.raises(
        InputError,
        match=r"vectors-00000\.npy: is .* of shape \(10,\), expected float32 of shape \(10, 8\); delete the folder",
    ):
        VectorShards(tmp_path, 27, 8, 10, "float32").load(0)
