import pytest
import torch

from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import TinyContextualStep, TinyStep, random_batch, with_context
from tests.helpers.tiny import tiny_bert


def test_without_a_context_it_is_the_loss_of_both_towers() -> None:
    step, batch = TinyStep(tiny_bert()), random_batch(4, 1)
    assert torch.equal(plain_step(step, batch).loss, step.plain_loss(batch).loss)


def test_both_towers_read_one_context_that_is_embedded_once() -> None:
    step, batch = TinyContextualStep(tiny_bert(1), tiny_bert(2)), with_context(random_batch(4, 1), 3)
    calls = []
    step.first.register_forward_hook(lambda *_: calls.append(None))
    loss = plain_step(step, batch).loss
    assert len(calls) == 1
    assert torch.equal(loss, step.plain_loss(batch).loss)
    assert not torch.equal(loss, plain_step(step, with_context(batch, 0)).loss)


def test_a_context_that_the_step_does_not_embed_is_refused() -> None:
    with pytest.raises(AssertionError, match="a step that embeds it"):
        plain_step(TinyStep(tiny_bert()), with_context(random_batch(4, 1), 3))
