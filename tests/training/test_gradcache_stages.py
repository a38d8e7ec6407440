"""GradCache over two stages: both encoders get the plain step's gradient, and each way to lose it is caught."""

from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.common import ContrastiveBatch, Representations, TokenBatch
from embeddings.training import GradCache, gradcache
from embeddings.training.gradcache import CONTEXT, QUERY
from tests.helpers.contrastive import (
    Record,
    TinyContextualStep,
    batch_of,
    gradient_vector,
    random_batch,
    relative_error,
    with_context,
)
from tests.helpers.tiny import tiny_bert
from tests.training.test_gradcache import REPLAYED, TOLERANCE, Unreplayed, direct_gradient, lora


def make_step(dtype: torch.dtype = torch.float64, dropout: float = 0.0, kind: Any = TinyContextualStep) -> Any:
    step = kind(tiny_bert(1, dropout), tiny_bert(2, dropout), context_dropout=dropout).to(dtype)
    return step.train(dropout > 0)


def batch_with_context(num_queries: int = 6, num_negatives: int = 2, num_context: int = 5) -> ContrastiveBatch:
    return with_context(random_batch(num_queries, num_negatives), num_context)


def errors(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """How far the gradients of the first and of the second encoder are from the expected ones."""
    return relative_error(found[0], expected[0]), relative_error(found[1], expected[1])


def gradients(step: TinyContextualStep) -> tuple[Tensor, Tensor]:
    return gradient_vector(step.first), gradient_vector(step.backbone)


def plain_gradients(step: TinyContextualStep, batch: ContrastiveBatch) -> tuple[Tensor, Tensor]:
    step.zero_grad()
    step.plain_loss(batch).loss.backward()
    return gradients(step)


def direct_gradients(step: TinyContextualStep, batch: ContrastiveBatch, engine: GradCache) -> tuple[Tensor, Tensor]:
    direct_gradient(step, batch, engine)
    return gradients(step)


def cached_gradients(
    step: TinyContextualStep, batch: ContrastiveBatch, engine: GradCache, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    step.zero_grad()
    engine.step(step, batch, scale=scale)
    return gradients(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_negatives", [0, 1, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"mini_batch_tokens": 10_000, "mini_batch_texts": 1},
        {"mini_batch_tokens": 50},
        {"mini_batch_tokens": 10_000},
        {"mini_batch_tokens": 50, "kept_fraction": 0.5},
        {"mini_batch_tokens": 50, "kept_fraction": 1.0},
        {"mini_batch_tokens": 50, "kept_gib": 3e-4},
    ],
    ids=["one text", "uneven", "larger than the batch", "half kept", "all kept", "memory budget"],
)
def test_gradients_of_both_encoders_equal_the_plain_step(
    dtype: torch.dtype, num_negatives: int, options: dict[str, Any]
) -> None:
    step, batch = make_step(dtype), batch_with_context(5, num_negatives)
    expected, engine = plain_gradients(step, batch), GradCache(**options)
    assert max(errors(cached_gradients(step, batch, engine), expected)) <= TOLERANCE[dtype]
    plain_loss = step.plain_loss(batch).loss.item()
    assert engine.step(step, batch).loss.item() == pytest.approx(plain_loss, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_negatives", [0, 7])
@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_dropout_of_both_stages_and_of_the_context_is_replayed(
    dtype: torch.dtype, num_negatives: int, options: dict[str, Any]
) -> None:
    step, batch = make_step(dtype, dropout=0.1), batch_with_context(6, num_negatives)
    engine = GradCache(**options)
    torch.manual_seed(1)
    expected = direct_gradients(step, batch, engine)
    after = torch.rand(3)
    torch.manual_seed(1)
    found = cached_gradients(step, batch, engine)
    assert torch.equal(after, torch.rand(3))
    assert max(errors(found, expected)) <= TOLERANCE[dtype]
    assert min(errors(cached_gradients(step, batch, engine), expected)) > 1e-3


# peft 0.21 reads a name that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_the_adapters_of_both_encoders_get_the_gradient(
    dtype: torch.dtype, dropout: float, options: dict[str, Any]
) -> None:
    encoders = [lora(tiny_bert(seed), dropout) for seed in (1, 2)]
    step, batch = TinyContextualStep(*encoders, context_dropout=dropout).to(dtype).train(), batch_with_context(5, 1)
    engine = GradCache(**options)
    torch.manual_seed(1)
    expected = direct_gradients(step, batch, engine) if dropout else plain_gradients(step, batch)
    torch.manual_seed(1)
    assert max(errors(cached_gradients(step, batch, engine), expected)) <= TOLERANCE[dtype]


class LastMiniBatch(gradcache._TwoPasses):
    """Keeps what the last mini-batch says of the context."""

    def _take_context_gradient(self, scale: float) -> None:
        if self.context is not None and self.context.grad is not None:
            self.gradient_of[self.context] = torch.zeros_like(self.context)
        super()._take_context_gradient(scale)


class OneTower(gradcache._TwoPasses):
    """Forgets what the queries say of the context."""

    def run_early(self, visit: Any, *arguments: Any) -> None:
        before = self.gradient_of[self.context].clone()
        super().run_early(visit, *arguments)
        if visit.mini_batch.tower == QUERY:
            self.gradient_of[self.context] = before


class TruncatedFirstStage(gradcache._TwoPasses):
    """Recomputes two mini-batches of the first stage and leaves out the rest."""

    def second_order(self) -> list[Any]:
        visits = super().second_order()
        first = [visit for visit in visits if visit.mini_batch.tower == CONTEXT]
        assert len(first) > 2
        return [visit for visit in visits if visit.mini_batch.tower != CONTEXT] + first[:2]


class FirstStageUnreplayed(gradcache._TwoPasses):
    """Drops other numbers when the first stage is recomputed."""

    def _outputs_and_gradients(self, visit: Any) -> Any:
        if visit.mini_batch.tower == CONTEXT:
            visit.random_state = Unreplayed.capture(self.device)
        return super()._outputs_and_gradients(visit)


class Unscaled(gradcache._TwoPasses):
    """Leaves the scale on the context's gradient, so that the first stage has it twice."""

    def _take_context_gradient(self, scale: float) -> None:
        super()._take_context_gradient(1.0)


class DetachedContext(TinyContextualStep):
    """Reads the context as a constant."""

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        return super().embed(tokens, context.detach())


@pytest.mark.parametrize(
    "mutant", [LastMiniBatch, OneTower, TruncatedFirstStage, FirstStageUnreplayed, Unscaled], ids=lambda m: m.__name__
)
def test_a_wrong_gradient_of_the_context_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, batch, engine = make_step(dropout=0.1), batch_with_context(num_context=12), GradCache(mini_batch_tokens=30)
    torch.manual_seed(1)
    expected = direct_gradients(step, batch, engine)
    monkeypatch.setattr(gradcache, "_TwoPasses", mutant)
    torch.manual_seed(1)
    one, two = cached_gradients(step, batch, engine, scale=0.5)
    first, second = errors((2 * one, 2 * two), expected)
    assert first > 1e-2
    assert second <= 1e-12


def test_a_detached_context_is_caught() -> None:
    batch, step = batch_with_context(), make_step(kind=DetachedContext)
    found = cached_gradients(step, batch, GradCache(mini_batch_tokens=40))
    assert found[0].norm() == 0
    assert errors(found, plain_gradients(make_step(), batch))[1] <= 1e-12


def test_the_last_backward_is_the_first_stages_and_only_that_is_left_to_the_caller() -> None:
    step, batch, early = make_step(), batch_with_context(), []
    engine = GradCache(mini_batch_tokens=40)
    stages = engine.plan(batch)
    expected = plain_gradients(step, batch)

    def backward(surrogate: Tensor) -> None:
        early.append(gradient_vector(step.first).norm().item())
        surrogate.backward()

    step.zero_grad()
    output = engine.forward_backward(step, batch, backward)
    assert len(early) == sum(map(len, engine.plan(batch))) - 1
    # No backward of the second stage reaches the first encoder.
    assert early[: len(stages[1]) + 1] == [0.0] * (len(stages[1]) + 1)
    assert errors(gradients(step), expected)[1] <= 1e-12
    output.loss.backward()
    assert max(errors(gradients(step), expected)) <= 1e-12


def test_two_forwards_before_the_last_backwards_keep_apart() -> None:
    step, engine = make_step(), GradCache(mini_batch_tokens=40, kept_fraction=0.3)
    batches = [with_context(random_batch(5, 1, seed=seed), 4) for seed in (1, 2)]
    one, two = (plain_gradients(step, batch) for batch in batches)
    step.zero_grad()
    losses = [engine.forward_backward(step, batch).loss for batch in batches]
    torch.stack(losses).sum().backward()
    assert max(errors(gradients(step), (one[0] + two[0], one[1] + two[1]))) <= 1e-12


def test_without_gradients_it_is_just_the_loss() -> None:
    step, batch = make_step(), batch_with_context()
    with torch.no_grad():
        output = GradCache(mini_batch_tokens=40).forward_backward(step, batch)
    assert not output.loss.requires_grad
    assert output.loss.item() == pytest.approx(step.plain_loss(batch).loss.item(), rel=1e-12)


@pytest.mark.parametrize("scale", [65536.0, 1 / 3])
def test_a_loss_scale_multiplies_the_gradients_of_both_encoders_once(scale: float) -> None:
    step, batch = make_step(), batch_with_context()
    first, second = plain_gradients(step, batch)
    found = cached_gradients(step, batch, GradCache(mini_batch_tokens=40), scale)
    assert max(errors(found, (first * scale, second * scale))) <= 1e-12


@pytest.mark.parametrize("num_context", [1, 20])
def test_a_context_of_one_document_and_one_of_all_of_them(num_context: int) -> None:
    step, batch = make_step(), batch_with_context(4, 1, num_context)
    expected = plain_gradients(step, batch)
    assert max(errors(cached_gradients(step, batch, GradCache(mini_batch_tokens=40)), expected)) <= 1e-12


@pytest.mark.parametrize("frozen", ["first", "backbone"])
def test_a_frozen_stage_leaves_the_other_ones_gradient(frozen: str) -> None:
    step, batch = make_step(), batch_with_context()
    getattr(step, frozen).requires_grad_(False)
    step.plain_loss(batch).loss.backward()
    other = {"first": step.backbone, "backbone": step.first}[frozen]
    expected = gradient_vector(other)
    step.zero_grad()
    GradCache(mini_batch_tokens=40).step(step, batch)
    assert relative_error(gradient_vector(other), expected) <= 1e-12
    assert all(parameter.grad is None for parameter in getattr(step, frozen).parameters())


def test_bfloat16_autocast_trains_both_encoders_as_the_plain_step_does() -> None:
    step, batch = make_step(torch.float32), batch_with_context(8, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cached_gradients(step, batch, GradCache(40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = step.plain_loss(batch)
    step.zero_grad()
    output.loss.backward()
    for one, other in zip(found, gradients(step), strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) >= 0.999


@pytest.mark.parametrize(
    ("options", "num_recomputed"),
    [({}, 2 + 5), ({"kept_fraction": 0.5}, 0 + 3), ({"kept_fraction": 1.0}, 0), ({"kept_gib": 1.0}, 0)],
)
def test_kept_graphs_of_both_stages_are_not_recomputed(options: dict[str, Any], num_recomputed: int) -> None:
    """Two mini-batches of context (24 tokens), six of both towers (120 tokens); half the tokens keep 2 + 2 graphs."""
    batch = with_context(batch_of([Record([7] * 4, [8] * 4) for _ in range(6)]), 6)
    step, engine, forwards = make_step(), GradCache(mini_batch_tokens=20, **options), []
    for encoder in (step.backbone, step.first):
        encoder.register_forward_hook(lambda *_: forwards.append(1))
    engine.step(step, batch)
    assert len(forwards) == sum(map(len, engine.plan(batch))) + num_recomputed
