"""Cross-entropies of tokens and of words against loops."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from embeddings.common import TokenBatch
from embeddings.losses.prediction import WordPrediction, token_cross_entropy


def case(num_targets: int = 11, vocabulary: int = 7) -> tuple[Tensor, Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    state_PH = torch.randn(num_targets, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    label_P = torch.randint(vocabulary, (num_targets,), generator=generator)
    torch.manual_seed(0)
    return state_PH, label_P, nn.Linear(5, vocabulary).double()


@pytest.mark.parametrize("num_targets", [None, 22.0])
@pytest.mark.parametrize("tile_positions", [1, 4, 11, 100])
def test_the_loss_and_its_gradients_are_those_of_a_loop(tile_positions: int, num_targets: float | None) -> None:
    """The head sees at most one tile of states at once, and the sum is divided by `num_targets`."""
    state_PH, label_P, head = case()
    divisor, seen = num_targets or 11, []

    def watched(state_pH: Tensor) -> Tensor:
        seen.append(len(state_pH))
        return head(state_pH)

    total, right = torch.zeros((), dtype=torch.float64), 0
    for state_H, label in zip(state_PH, label_P, strict=True):
        logits = head(state_H)
        total = total + logits.exp().sum().log() - logits[label]
        right += int(logits.argmax() == label)
    inputs = (state_PH, *head.parameters())
    expected = torch.autograd.grad(total / divisor, inputs)

    output = token_cross_entropy(state_PH, label_P, watched, tile_positions, num_targets)
    assert max(seen) <= tile_positions
    assert sum(seen) == 11
    assert output.loss.item() == pytest.approx(total.item() / divisor, rel=1e-12)
    assert output.terms["accuracy"].item() == pytest.approx(right / divisor)
    found = torch.autograd.grad(output.loss, inputs)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_without_targets_the_loss_is_zero_and_bfloat16_logits_are_summed_in_float32() -> None:
    state_PH, label_P, head = case()
    token_cross_entropy(state_PH[:0], label_P[:0], head, 4, num_targets=3.0).loss.backward()
    assert not head.weight.grad.any()
    output = token_cross_entropy(state_PH.bfloat16(), label_P, head.bfloat16(), 4)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(token_cross_entropy(*case(), 4).loss.item(), rel=0.02)


TEXTS = [[1, 5, 7, 5, 2], [1, 9, 2], [1, 2], [1, 4, 6, 8, 10, 11, 2]]
SPECIAL = (0, 1, 2)


def tokens(texts: list[list[int]]) -> TokenBatch:
    return TokenBatch.from_lists(texts, [[True] * len(text) for text in texts])


def by_loops(table_VH: Tensor, vectors: Tensor, texts: list[list[int]], special: Sequence[int] = SPECIAL) -> Tensor:
    """The mean over texts and their distinct words of -log softmax, by loops."""
    centred = table_VH - table_VH.mean(dim=0)
    rows = [row / row.norm() for row in centred]
    counts = [sum(v in text for text in texts) for v in range(len(rows))]
    losses = []
    for vector, text in zip(vectors, texts, strict=True):
        words = sorted(set(text) - set(special))
        if not words:
            continue
        scale = 3.0 * math.sqrt(len(words)) / vector.norm()
        vocabulary = [v for v in range(len(rows)) if v not in special]
        logits = {v: scale * (vector @ rows[v]) + math.log(counts[v] + 0.01) for v in vocabulary}
        total = torch.stack(list(logits.values())).exp().sum().log()
        losses.append(torch.stack([total - logits[word] for word in words]).mean())
    return torch.stack(losses).mean()


def test_value_and_gradient_equal_a_loop_and_texts_without_words_are_ignored() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(12, 6, generator=generator).double()
    first, second = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double() for _ in range(2))
    found = WordPrediction(table, SPECIAL)(first.requires_grad_(), tokens(TEXTS))
    expected = by_loops(table, second.requires_grad_(), TEXTS)
    found.backward()
    expected.backward()
    # The table is in float32.
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert second.grad.abs().max() > 1e-2
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-5, atol=1e-7)
    assert torch.equal(first.grad[2], torch.zeros(6).double())


def test_tokens_that_are_not_pooled_are_not_targets() -> None:
    table, vectors = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.ones(1, 6)
    words = WordPrediction(table, SPECIAL)
    masked = TokenBatch.from_lists([[1, 3, 5, 7, 2]], [[True, False, True, True, True]])
    other = WordPrediction(table, SPECIAL)
    assert torch.equal(words(vectors, masked), other(vectors, tokens([[1, 5, 7, 2]])))
    assert words.count_V.tolist() == [float(word in (5, 7)) for word in range(12)]
    assert not torch.equal(words(vectors, masked), other(vectors, tokens([[1, 3, 5, 7, 2]])))


def test_words_are_counted_exactly_in_half_precision() -> None:
    words = WordPrediction(torch.randn(12, 6), SPECIAL).bfloat16()
    for _ in range(300):
        words(torch.ones(1, 6, dtype=torch.bfloat16), tokens([[1, 5, 2]]))
    assert words.count_V[5] == 300
