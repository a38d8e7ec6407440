"""What is stored of a vector is what the format says, and reads back as near as it promises."""

from typing import get_args

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference.vectors import (
    VECTOR_FORMATS,
    VectorFormat,
    bytes_per_vector,
    float_rows,
    require_format,
    sign_bits,
    stored_rows,
    stored_type,
    unit_rows,
)
from tests.data.cluster_folders import unit_vectors

HAND = np.array(
    [[127.0, -63.5, 1.5, 0.0, 2.5, -0.4, 0.6, -127.0], [-2.0, 1.0, 0.0, -1.0, 0.5, 0.25, 2.0, -0.01]], np.float32
)


def test_int8_is_one_scale_a_row_and_rounds_to_the_nearest():
    rows = stored_rows(HAND, "int8", "here")
    # Halves go to the even number.
    assert rows["codes"].tolist() == [[127, -64, 2, 0, 2, 0, 1, -127], [-127, 64, 0, -64, 32, 16, 127, -1]]
    assert rows["scale"].tolist() == [1.0, float(np.float32(2) / np.float32(127))]
    restored = float_rows(rows, "int8")
    assert restored[0].tolist() == [127, -64, 2, 0, 2, 0, 1, -127]
    assert restored.dtype == np.float32


def test_binary_is_the_signs_with_the_first_number_in_the_highest_bit():
    bits = stored_rows(HAND, "binary", "here")
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


def test_errors_stay_within_what_is_promised_and_are_not_nothing():
    vectors, queries = unit_vectors(400, width=384), unit_vectors(30, width=384, seed=1)
    rows = stored_rows(vectors, "int8", "here")
    error = np.abs(float_rows(rows, "int8").astype(np.float64) - vectors)
    bound_N1 = rows["scale"][:, None].astype(np.float64) / 2
    assert (error <= bound_N1 * (1 + 1e-5)).all()
    assert error.max() > 0.4 * bound_N1.max()
    product_error = np.abs(queries.astype(np.float64) @ (float_rows(rows, "int8") - vectors).T)
    assert (product_error <= np.sqrt(384) * bound_N1.T).all()
    assert 0 < np.abs(float_rows(stored_rows(vectors, "float16", "here"), "float16") - vectors).max() < 2.0**-12
    cosine = unit_rows(float_rows(stored_rows(vectors, "binary", "here"), "binary")) @ vectors.T
    # Signs of a random vector keep a cosine of sqrt(2 / pi) with it.
    np.testing.assert_allclose(np.diag(cosine).mean(), np.sqrt(2 / np.pi), atol=0.01)


def test_a_row_does_not_depend_on_the_others():
    vectors = unit_vectors(40, width=16)
    for vector_format in VECTOR_FORMATS:
        whole = stored_rows(vectors, vector_format, "here")
        parts = [stored_rows(vectors[start : start + 7], vector_format, "here") for start in range(0, 40, 7)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("vector_format", VECTOR_FORMATS)
@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (np.inf, "not finite")])
def test_a_vector_without_a_direction_is_refused_by_its_row(value, kind, vector_format):
    vectors = unit_vectors(5)
    vectors[3] = value
    with pytest.raises(InputError, match=f"corpus:13: the vector is {kind}"):
        stored_rows(vectors, vector_format, "corpus", first_row=10)


@pytest.mark.parametrize("value", [7e4, -7e4, 1e-9])
def test_a_vector_beyond_float16_is_refused_and_int8_takes_it(value):
    vectors = unit_vectors(5)
    vectors[3] = value
    with pytest.raises(InputError, match="corpus:4: the vector has numbers too large or too small for float16; encode"):
        stored_rows(vectors, "float16", "corpus", first_row=1)
    np.testing.assert_allclose(float_rows(stored_rows(vectors, "int8", "corpus"), "int8")[3], value, rtol=1e-6)


def test_a_format_that_cannot_be_is_refused_by_name():
    for vector_format in VECTOR_FORMATS:
        require_format(vector_format, 24)
    require_format("int8", 20)
    with pytest.raises(OptionError, match="vector_format needs vectors whose width is a multiple of 8, these have 20"):
        require_format("binary", 20)
    with pytest.raises(OptionError, match="vector_format must be one of float32, float16, int8, binary, got 'int4'"):
        require_format("int4", 24)
    assert get_args(VectorFormat) == VECTOR_FORMATS


def test_signs_are_those_of_sentence_transformers():
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    vectors = unit_vectors(30, width=40)
    vectors[0, :3] = 0
    np.testing.assert_array_equal(sign_bits(vectors), quantization.quantize_embeddings(vectors, "ubinary"))
