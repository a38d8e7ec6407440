"""GradCache against the plain step: equal values, equal gradients, and every known way to get them wrong is caught."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, Representations
from embeddings.common.mini_batches import take_texts
from embeddings.training import GradCache
from tests.helpers.contrastive import TinyStep, gradient_vector, random_batch, relative_error
from tests.helpers.tiny import tiny_bert, tiny_mistral

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def plain_gradient(step: TinyStep, batch: ContrastiveBatch) -> tuple[float, Tensor]:
    step.zero_grad()
    output = step.plain_loss(batch)
    output.loss.backward()
    return output.loss.item(), gradient_vector(step)


def cached_gradient(step: TinyStep, batch: ContrastiveBatch, engine: GradCache, **kwargs: Any) -> tuple[float, Tensor]:
    step.zero_grad()
    output = engine.step(step, batch, **kwargs)
    return output.loss.item(), gradient_vector(step)


def direct_gradient(step: TinyStep, batch: ContrastiveBatch, engine: GradCache) -> tuple[float, Tensor]:
    """The plain step over the same mini-batches in the same order, so that dropout draws the same numbers."""
    step.zero_grad()
    towers = ([], [])
    for mini_batch in engine.plan(batch):
        tokens = (batch.query, batch.candidate)[mini_batch.tower]
        vector_nD = step.embed(take_texts(tokens, mini_batch.rows_n)).vector_ND
        towers[mini_batch.tower].extend(zip(mini_batch.rows_n.tolist(), vector_nD, strict=True))
    vectors = [torch.stack([vector for _, vector in sorted(tower, key=lambda pair: pair[0])]) for tower in towers]
    loss = step.loss_from_representations(Representations(vectors[0]), Representations(vectors[1]), batch).loss
    loss.backward()
    return loss.item(), gradient_vector(step)


def lora(backbone: nn.Module, dropout: float = 0.1) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(backbone, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_negatives", [0, 1, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"mini_batch_tokens": 10_000, "mini_batch_texts": 1},
        {"mini_batch_tokens": 40},
        {"mini_batch_tokens": 10_000, "mini_batch_texts": 7},
        {"mini_batch_tokens": 10_000},
        {"mini_batch_tokens": 40, "kept_fraction": 0.5},
        {"mini_batch_tokens": 40, "kept_fraction": 1.0},
        {"mini_batch_tokens": 40, "kept_gib": 2e-4},
    ],
    ids=["one text", "uneven", "seven texts", "larger than the batch", "half kept", "all kept", "memory budget"],
)
def test_gradients_equal_the_plain_step(dtype: torch.dtype, num_negatives: int, options: dict[str, Any]) -> None:
    step = TinyStep(tiny_bert().to(dtype))
    batch = random_batch(5, num_negatives)
    loss, gradient = cached_gradient(step, batch, GradCache(**options))
    plain_loss, plain = plain_gradient(step, batch)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert relative_error(gradient, plain) <= TOLERANCE[dtype]


@pytest.mark.parametrize("num_negatives", [0, 7])
@pytest.mark.parametrize("kept_fraction", [None, 0.5])
def test_dropout_is_replayed(num_negatives: int, kept_fraction: float | None) -> None:
    step = TinyStep(tiny_bert(dropout=0.1).double().train())
    batch, engine = random_batch(6, num_negatives), GradCache(mini_batch_tokens=30, kept_fraction=kept_fraction)
    torch.manual_seed(1)
    loss, gradient = cached_gradient(step, batch, engine)
    after = torch.rand(3)
    torch.manual_seed(1)
    direct_loss, direct = direct_gradient(step, batch, engine)
    assert loss == pytest.approx(direct_loss, rel=1e-12)
    assert relative_error(gradient, direct) <= 1e-12
    assert torch.equal(after, torch.rand(3))
    assert relative_error(cached_gradient(step, batch, engine)[1], direct) > 1e-3


def test_the_adapter_alone_gets_the_gradient_under_lora_with_dropout() -> None:
    step = TinyStep(lora(tiny_mistral()).double().train())
    batch, engine = random_batch(5, 2), GradCache(mini_batch_tokens=30)
    torch.manual_seed(1)
    _, gradient = cached_gradient(step, batch, engine)
    torch.manual_seed(1)
    _, direct = direct_gradient(step, batch, engine)
    assert relative_error(gradient, direct) <= 1e-12
    trained = [name for name, parameter in step.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
