import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from embeddings.common import TokenBatch
from embeddings.losses.prediction import WordPrediction

TEXTS = [[1, 5, 7, 5, 2], [1, 9, 2], [1, 2], [1, 4, 6, 8, 10, 11, 2]]
SPECIAL = (0, 1, 2)


def tokens(texts: list[list[int]]) -> TokenBatch:
    return TokenBatch.from_lists(texts, [[True] * len(text) for text in texts])


def by_loops(table_VH: Tensor, vectors: Tensor, texts: list[list[int]], special: Sequence[int] = SPECIAL) -> Tensor:
    """The mean over texts and their distinct words of -log softmax, written out; each text's words count once."""
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


def test_value_and_gradient_are_those_of_loops_and_a_text_without_words_has_no_part() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(12, 6, generator=generator).double()
    first, second = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double() for _ in range(2))
    found = WordPrediction(table, SPECIAL)(first.requires_grad_(), tokens(TEXTS))
    expected = by_loops(table, second.requires_grad_(), TEXTS)
    found.backward()
    expected.backward()
    # The table is kept in float32.
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert first.grad is not None
    assert second.grad is not None
    assert second.grad.abs().max() > 1e-2
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-5, atol=1e-7)
    assert torch.equal(first.grad[2], torch.zeros(6).double())


def test_tokens_that_do_not_enter_the_pooling_are_no_target() -> None:
    table, vectors = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.ones(1, 6)
    words = WordPrediction(table, SPECIAL)
    masked = TokenBatch.from_lists([[1, 3, 5, 7, 2]], [[True, False, True, True, True]])
    other = WordPrediction(table, SPECIAL)
    assert torch.equal(words(vectors, masked), other(vectors, tokens([[1, 5, 7, 2]])))
    assert words.count_V.tolist() == [float(word in (5, 7)) for word in range(12)]
    assert not torch.equal(words(vectors, masked), other(vectors, tokens([[1, 3, 5, 7, 2]])))


def test_the_sum_of_a_texts_words_is_told_from_any_other_and_what_all_share_costs() -> None:
    def loss(vector: Tensor) -> Tensor:
        words = WordPrediction(table, SPECIAL)
        words.count_V += 1
        value: Tensor = words(vector, text)
        return value

    table, text = torch.eye(12, 12), tokens([[1, 5, 7, 9, 2]])
    own = table[[5, 7, 9]].sum(dim=0, keepdim=True)
    assert loss(own) < loss(table[[5, 7, 10]].sum(dim=0, keepdim=True))
    assert loss(own) < loss(own - 2 * table[:3].sum(dim=0))


def test_frequent_words_pull_no_vector_towards_them() -> None:
    """Two texts share a word that the counts know; the best common direction is then no better than none."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.functional.normalize(torch.randn(400, 64, generator=generator), dim=-1)
    vector = torch.randn(1, 64, generator=generator).requires_grad_()
    texts = tokens([[1, 5, 7, 2], [1, 5, 9, 2]])
    pulls = []
    for seen in (0.0, 1e4):
        words = WordPrediction(table, SPECIAL)
        words.count_V[5] = seen
        # Half of what is drawn is then the word that is in every text, as half of each text's words are.
        words.count_V[10:] = seen / 390
        (gradient,) = torch.autograd.grad(words(vector.expand(2, -1), texts), vector)
        pulls.append(float(-gradient[0] @ words.table_VH[5]))
    without, known = pulls
    assert without > 0
    assert abs(known) < 0.3 * without


def test_the_value_is_the_same_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    table, vectors = torch.randn(12, 6), torch.randn(4, 6)
    whole = WordPrediction(table, SPECIAL)(vectors, tokens(TEXTS))
    monkeypatch.setattr("embeddings.losses.prediction._TILE", 3)
    assert WordPrediction(table, SPECIAL)(vectors, tokens(TEXTS)).item() == pytest.approx(whole.item(), rel=1e-6)
