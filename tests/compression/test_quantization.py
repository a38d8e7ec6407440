"""GPTQ of one matrix equals a loop by hand in float64; codes and scales of the formats."""

import math

import pytest
import torch

from embeddings.compression.quantization import FORMAT_OF, quantise_by_gptq
from embeddings.models.model_files import dequantised
from tests.compression.test_pruning import problem


def by_hand(weight, gram, number, group_size, damping):
    """Algorithm 1 of the paper with scalars: every later weight is updated at once; zeros stay zero."""
    rows, columns = weight.shape
    mean = sum(float(gram[i, i]) for i in range(columns)) / columns
    hessian = gram + damping * mean * torch.eye(columns, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    size = group_size or columns
    w = [[float(value) for value in row] for row in weight]
    found = [[0.0] * columns for _ in range(rows)]
    for row in range(rows):
        for j in range(columns):
            if j % size == 0:
                largest = max(abs(value) for value in w[row][j : j + size])
                # Scales are in float32.
                scale = float(torch.tensor(largest / number.largest, dtype=torch.float32)) or 1.0
            value = 0.0 if float(weight[row, j]) == 0 else w[row][j]
            unit = min(max(value / scale, -number.largest), number.largest)
            if number.kind == "int":
                found[row][j] = round(unit) * scale
            else:
                found[row][j] = float(torch.tensor(unit, dtype=torch.float64).to(number.dtype).double()) * scale
            error = (w[row][j] - found[row][j]) / float(upper[j, j])
            for k in range(j + 1, columns):
                w[row][k] -= error * float(upper[j, k])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("group_size", "block_size"), [(None, 128), (None, 5), (8, 128), (8, 3), (12, 8), (4, 8)])
@pytest.mark.parametrize("name", FORMAT_OF)
def test_gptq_equals_a_loop_by_hand(name, group_size, block_size):
    weight, inputs = problem(inputs=24)
    number, gram = FORMAT_OF[name], inputs.T @ inputs
    found = quantise_by_gptq(weight, gram, number, group_size, 0.01, block_size)
    expected = by_hand(weight, gram, number, group_size, 0.01)
    torch.testing.assert_close(found.values().double(), expected, rtol=1e-6, atol=1e-6)
    assert found.code_OI.dtype == number.dtype
    assert found.scale_OG.shape == (6, 1 if group_size is None else 24 // group_size)
    assert found.scale_OG.dtype == torch.float32
    assert float((found.values().double() - weight).abs().max()) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMAT_OF)
def test_scales_are_rounded_before_the_numbers_are_chosen(name, dtype):
    weight, inputs = problem(inputs=16)
    number = FORMAT_OF[name]
    found = quantise_by_gptq(weight.float(), (inputs.T @ inputs).float(), number, 8, scale_dtype=dtype)
    assert found.scale_OG.dtype == dtype
    assert float(found.code_OI.float().abs().max()) <= number.largest
    made = dequantised({"a.weight": found.code_OI, "a.weight_scale": found.scale_OG, "a.bias": weight[0]})
    assert made.keys() == {"a.weight", "a.bias"}
    assert made["a.weight"].dtype == dtype
    torch.testing.assert_close(made["a.weight"].float(), found.values(), rtol=0.005, atol=0)


def test_a_row_of_zeros_has_a_scale_and_stays():
    weight, inputs = problem(inputs=16)
    weight[2] = 0
    for number in FORMAT_OF.values():
        found = quantise_by_gptq(weight, inputs.T @ inputs, number)
        assert bool((found.scale_OG > 0).all())
        assert found.values()[2].abs().max() == 0
        assert math.isfinite(float(found.values().sum()))
