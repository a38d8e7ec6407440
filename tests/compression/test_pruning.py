"""Pruning of one matrix against loops written out by hand and against dense solves, in float64."""

import math

import pytest
import torch

from embeddings.common import NumericError, OptionError
from embeddings.compression.pruning import (
    Sparsity,
    inverse_factor,
    lowest,
    prune_by_magnitude,
    prune_by_sparsegpt,
    prune_by_wanda,
    sweep,
)

PATTERNS = [("2:4", None), ("4:8", None), ("1:4", None), ("unstructured", None), ("unstructured", 0.3)]


def problem(outputs=6, inputs=16, tokens=50, seed=0):
    """Weights (O, I) and correlated inputs (T, I), float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs_TI = torch.randn(tokens, inputs, dtype=torch.float64, generator=generator)
    mixing_II = torch.eye(inputs) + 0.2 * torch.randn(inputs, inputs, dtype=torch.float64, generator=generator)
    mixed_TI = inputs_TI @ mixing_II
    return torch.randn(outputs, inputs, dtype=torch.float64, generator=generator), mixed_TI


def zeros_by_hand(scores, sparsity, per_output):
    """The set of (row, column) that become zero: a loop over groups, rows or all weights."""
    rows, columns = len(scores), len(scores[0])
    if sparsity.group is not None:
        pools = [
            [(row, column) for column in range(first, first + sparsity.group)]
            for row in range(rows)
            for first in range(0, columns, sparsity.group)
        ]
    elif per_output:
        pools = [[(row, column) for column in range(columns)] for row in range(rows)]
    else:
        pools = [[(row, column) for row in range(rows) for column in range(columns)]]
    found = set()
    for pool in pools:
        count = round(sparsity.fraction * len(pool))
        found |= set(sorted(pool, key=lambda place: scores[place[0]][place[1]])[:count])
    return found


def assert_zeros(weight, sparsity, expected_fraction_tolerance=0.0):
    """Each group has exactly its number of zeros; without groups, the matrix has its fraction."""
    is_zero = weight == 0
    if sparsity.group is not None:
        counts = is_zero.unflatten(1, (-1, sparsity.group)).sum(dim=2)
        assert counts.unique().tolist() == [round(sparsity.fraction * sparsity.group)]
    else:
        assert float(is_zero.double().mean()) == pytest.approx(sparsity.fraction, abs=expected_fraction_tolerance)


@pytest.mark.parametrize(("pattern", "fraction"), PATTERNS)
def test_magnitude_and_wanda_equal_loops_by_hand(pattern, fraction):
    weight, inputs = problem()
    sparsity, gram = Sparsity.parse(pattern, fraction), inputs.T @ inputs
    norms = [math.sqrt(sum(float(x) ** 2 for x in inputs[:, column])) for column in range(weight.shape[1])]
    plain = [[abs(float(w)) for w in row] for row in weight]
    scaled = [[size * norm for size, norm in zip(row, norms, strict=True)] for row in plain]
    for found, scores, per_output in (
        (prune_by_magnitude(weight, sparsity), plain, False),
        (prune_by_wanda(weight, gram, sparsity), scaled, True),
    ):
        zeros = zeros_by_hand(scores, sparsity, per_output)
        assert zeros
        for row in range(weight.shape[0]):
            for column in range(weight.shape[1]):
                expected = 0.0 if (row, column) in zeros else float(weight[row, column])
                assert float(found[row, column]) == expected
        assert_zeros(found, sparsity, 0.02)
    assert not torch.equal(prune_by_magnitude(weight, sparsity), prune_by_wanda(weight, gram, sparsity))


def sparsegpt_by_hand(weight, gram, sparsity, damping, block_size):
    """Algorithm 1 of the paper with scalars: every later weight is updated at once, without blocks."""
    rows, columns = weight.shape
    mean = sum(float(gram[i, i]) for i in range(columns)) / columns
    hessian = gram.clone()
    for i in range(columns):
        hessian[i, i] += damping * mean
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    w = [[float(value) for value in row] for row in weight]
    group = sparsity.group or block_size
    zeros = set()
    for j in range(columns):
        if j % group == 0:
            last = min(j + group, columns)
            costs = [[(w[r][k] / float(upper[k, k])) ** 2 for k in range(j, last)] for r in range(rows)]
            zeros |= {(r, j + k) for r, k in zeros_by_hand(costs, sparsity, False)}
        for r in range(rows):
            error = w[r][j] / float(upper[j, j]) if (r, j) in zeros else 0.0
            for k in range(j + 1, columns):
                w[r][k] -= error * float(upper[j, k])
            if (r, j) in zeros:
                w[r][j] = 0.0
    return torch.tensor(w, dtype=torch.float64)


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize(("pattern", "fraction"), PATTERNS)
def test_sparsegpt_equals_a_loop_by_hand(pattern, fraction, block_size):
    weight, inputs = problem(inputs=24)
    sparsity, gram = Sparsity.parse(pattern, fraction), inputs.T @ inputs
    found = prune_by_sparsegpt(weight, gram, sparsity, 0.01, block_size)
    expected = sparsegpt_by_hand(weight, gram, sparsity, 0.01, block_size)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_zeros(found, sparsity, 0.02)
    kept = found != 0
    assert float((found - weight)[kept].abs().max()) > 0.01  # the others compensate for the zeros


def best_rest(weight_I, hessian, fixed):
    """The optimal weights of the inputs that are not fixed, by a dense least-squares solve."""
    original, changed = weight_I["original"], weight_I["changed"].clone()
    free = [j for j in range(len(changed)) if j not in fixed]
    if free:
        held = sorted(fixed)
        right = hessian[free] @ original - hessian[free][:, held] @ changed[held]
        changed[free] = torch.linalg.solve(hessian[free][:, free], right)
    return changed


def test_the_update_of_a_row_equals_a_dense_solve_with_its_mask():
    weight, inputs = problem(outputs=1, inputs=12)
    gram = inputs.T @ inputs
    damped = gram + 0.02 * gram.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    zeros = {0, 3, 4, 7, 8, 10}
    found = sweep(
        weight,
        inverse_factor(gram, 0.02),
        lambda column, weight_IO: torch.zeros(1, dtype=torch.float64) if column in zeros else weight_IO[column],
        block_size=5,
    )
    row = {"original": weight[0], "changed": weight[0].clone()}
    for column in range(12):
        if column in zeros:
            row["changed"][column] = 0
            row["changed"] = best_rest(row, damped, set(range(column + 1)))
    torch.testing.assert_close(found[0], row["changed"], rtol=1e-6, atol=1e-6)
    assert found[0][sorted(zeros)].tolist() == [0.0] * 6


def test_weights_of_dead_inputs_are_pruned_first_and_change_no_other():
    weight, inputs = problem(inputs=16)
    inputs[:, [2, 5, 9]] = 0
    gram = inputs.T @ inputs
    found = prune_by_sparsegpt(weight, gram, Sparsity.parse("2:4"))
    assert bool(torch.isfinite(found).all())
    assert found[:, [2, 5, 9]].abs().sum() == 0
    assert_zeros(found, Sparsity.parse("2:4"))
    # A group of dead inputs still has the right number of zeros.
    inputs[:, 4:8] = 0
    for prune in (prune_by_sparsegpt, prune_by_wanda):
        assert_zeros(prune(weight, inputs.T @ inputs, Sparsity.parse("2:4")), Sparsity.parse("2:4"))
    # If all inputs are dead, the magnitudes of the weights decide.
    alone = prune_by_sparsegpt(weight, torch.zeros_like(gram), Sparsity.parse("2:4"))
    torch.testing.assert_close(alone, prune_by_magnitude(weight, Sparsity.parse("2:4")))


def test_float32_is_near_float64():
    weight, inputs = problem(outputs=32, inputs=64, tokens=400)
    gram, sparsity = inputs.T @ inputs, Sparsity.parse("2:4")
    exact = prune_by_sparsegpt(weight, gram, sparsity)
    found = prune_by_sparsegpt(weight.float(), gram.float(), sparsity)
    assert found.dtype == torch.float32
    assert float(((found == 0) == (exact == 0)).double().mean()) > 0.99
    costs = [float(((pruned.double() - weight) @ inputs.T).square().mean()) for pruned in (found, exact)]
    assert costs[0] == pytest.approx(costs[1], rel=0.01)


def test_a_singular_gram_matrix_is_damped_more_and_one_that_is_not_finite_refused(caplog):
    direction = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    gram = direction.T @ direction
    assert bool(torch.isfinite(inverse_factor(gram, 1e-7)).all())
    assert "damping raised" in caplog.text
    with pytest.raises(NumericError, match="not finite"):
        inverse_factor(torch.full((4, 4), torch.nan), 0.01)


def test_the_lowest_are_counted_exactly_among_equals():
    score = torch.tensor([[1.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert lowest(score, 2).tolist() == [[True, False, False, True], [True, True, False, False]]
    assert not lowest(score, 0).any()
    assert lowest(score, 4).all()


@pytest.mark.parametrize(
    ("pattern", "fraction", "message"),
    [
        ("2:4", 0.5, "has no effect on 2:4"),
        ("4:4", None, "must be N:M"),
        ("0:4", None, "must be N:M"),
        ("half", None, "must be N:M"),
        ("unstructured", 0.0, "between 0 and 1"),
        ("unstructured", 1.0, "between 0 and 1"),
        ("unstructured", math.nan, "between 0 and 1"),
    ],
)
def test_impossible_sparsities_are_refused(pattern, fraction, message):
    with pytest.raises(OptionError, match=message):
        Sparsity.parse(pattern, fraction)
