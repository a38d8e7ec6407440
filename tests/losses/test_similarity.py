import math

import pytest
import torch

from embeddings.losses import similarity_matrix
from embeddings.losses.tiles import comparable


def test_the_cosine_equals_a_loop() -> None:
    query, candidate = torch.randn(3, 4), torch.randn(5, 4)
    found = similarity_matrix(query, candidate)
    for row in range(3):
        for column in range(5):
            inner = sum(float(a) * float(b) for a, b in zip(query[row], candidate[column], strict=True))
            norms = [math.sqrt(sum(float(a) ** 2 for a in vector)) for vector in (query[row], candidate[column])]
            assert float(found[row, column]) == pytest.approx(inner / norms[0] / norms[1], abs=1e-6)


def test_the_dot_product_keeps_the_norms() -> None:
    assert similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 1.0]]), "dot").tolist() == [[10.0]]


def test_a_zero_vector_is_like_nothing_and_gets_no_gradient() -> None:
    zero = torch.zeros(1, 3, requires_grad=True)
    score = similarity_matrix(zero, torch.ones(2, 3))
    score.sum().backward()
    assert score.tolist() == [[0.0, 0.0]]
    assert zero.grad is not None
    assert zero.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_gradients_of_the_cosine_equal_finite_differences() -> None:
    vectors = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(similarity_matrix, vectors)


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_similarities_are_float32_or_better_even_under_autocast(given: torch.dtype, computed: torch.dtype) -> None:
    query = torch.randn(4, 64).to(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = similarity_matrix(query, query)
    assert found.dtype == computed == comparable(query).dtype
    assert torch.allclose(found.diagonal(), torch.ones(4, dtype=computed), atol=1e-6)
