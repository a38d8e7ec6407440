"""GradCache against the plain step: equal losses and gradients.

In a step of two stages, which has a context, both encoders get the plain step's gradient.
"""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, LossOutput, OptionError, Representations, TokenBatch
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE
from embeddings.training import GradCache
from embeddings.training.gradcache import CANDIDATE, CONTEXT, QUERY, GraphMemory, plain_step, tokens_of
from tests.helpers.casts import Casts
from tests.helpers.contrastive import (
    Record,
    TinyContextualStep,
    TinyStep,
    batch_of,
    gradient_vector,
    random_batch,
    relative_error,
    with_context,
)
from tests.helpers.tiny import tiny_bert, tiny_mistral

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
on_stages = pytest.mark.parametrize("stages", [1, 2])


def make_step(stages: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0, kind: Any = None) -> Any:
    """A step of one encoder, or of two, the first of which reads the context; in training mode if it has dropout."""
    if stages == 1:
        step = (kind or TinyStep)(tiny_bert(dropout=dropout))
    else:
        step = (kind or TinyContextualStep)(tiny_bert(1, dropout), tiny_bert(2, dropout), context_dropout=dropout)
    return step.to(dtype).train(dropout > 0)


def make_batch(stages: int, num_queries: int = 6, num_negatives: int = 1, seed: int = 0) -> ContrastiveBatch:
    batch = random_batch(num_queries, num_negatives, seed)
    return batch if stages == 1 else with_context(batch)


def errors(step: nn.Module, found: Tensor, expected: Tensor) -> list[float]:
    """The relative error of the gradient of each trained part of a step: the backbone, and the first stage if any."""
    parts = [[weight.numel() for weight in part.parameters() if weight.requires_grad] for part in step.children()]
    sizes = [sum(part) for part in parts if part]
    return [relative_error(*both) for both in zip(found.split(sizes), expected.split(sizes), strict=True)]


def plain_gradient(step: TinyStep, batch: ContrastiveBatch) -> tuple[float, Tensor]:
    step.zero_grad()
    output = plain_step(step, batch)
    output.loss.backward()
    return output.loss.item(), gradient_vector(step)


def cached_gradient(
    step: TinyStep, batch: ContrastiveBatch, engine: GradCache, scale: float = 1.0
) -> tuple[float, Tensor]:
    step.zero_grad()
    output = engine.forward_backward(step, batch, scale=scale)
    (output.loss * scale).backward()
    return output.loss.item(), gradient_vector(step)


def in_order(vectors: dict[int, Tensor]) -> Any:
    return torch.stack([vectors[row] for row in sorted(vectors)]) if vectors else None


def direct_gradient(step: Any, batch: ContrastiveBatch, engine: GradCache) -> tuple[float, Tensor]:
    """The plain step over the same mini-batches in the same order, so that dropout draws the same numbers."""
    step.zero_grad()
    towers: dict[int, dict[int, Tensor]] = {QUERY: {}, CANDIDATE: {}, CONTEXT: {}}
    sums: dict[int, dict[str, Any]] = {QUERY: {}, CANDIDATE: {}, CONTEXT: {}}
    for mini_batch in chain.from_iterable(engine.plan(batch)):
        tower = mini_batch.group
        tokens = take_texts(tokens_of(batch, tower), mini_batch.rows_n)
        if tower == CONTEXT:
            found = Representations(step.embed_context(tokens))
        else:
            found = step.embed(tokens, in_order(towers[CONTEXT]))
        towers[tower].update(zip(mini_batch.rows_n.tolist(), found.vector_ND, strict=True))
        for name, value in found.statistics.items():
            sums[tower][name] = sums[tower].get(name, 0) + value
    query, candidate = (Representations(in_order(towers[tower]), sums[tower]) for tower in (QUERY, CANDIDATE))
    loss = step.loss_from_representations(query, candidate, batch).loss
    loss.backward()
    return loss.item(), gradient_vector(step)


def lora(backbone: nn.Module, dropout: float = 0.1) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(backbone, config)


def in_turns(engines: dict[str, dict[str, Any]], values: list[Any]) -> list[Any]:
    """Each engine's options with one stage and two and each value; the precisions take turns, each with each of these.

    Both precisions everywhere would double the time.
    """
    precisions = list(TOLERANCE)
    return [
        pytest.param(options, stages, value, precisions[(row + stages + column) % 2], id=f"{name}-{stages}-{value}")
        for row, (name, options) in enumerate(engines.items())
        for stages in (1, 2)
        for column, value in enumerate(values)
    ]


ENGINES = {
    "one text": {"mini_batch_tokens": 10_000, "mini_batch_texts": 1},
    "uneven": {"mini_batch_tokens": 40},
    "seven texts": {"mini_batch_tokens": 10_000, "mini_batch_texts": 7},
    "larger than the batch": {"mini_batch_tokens": 10_000},
    "half kept": {"mini_batch_tokens": 40, "kept_fraction": 0.5},
    "all kept": {"mini_batch_tokens": 40, "kept_fraction": 1.0},
    "memory budget": {"mini_batch_tokens": 40, "kept_gib": 2e-4},
}


@pytest.mark.parametrize(("options", "stages", "num_negatives", "dtype"), in_turns(ENGINES, [0, 1, 7]))
def test_gradients_equal_the_plain_step(
    stages: int, dtype: torch.dtype, num_negatives: int, options: dict[str, Any]
) -> None:
    step, batch = make_step(stages, dtype), make_batch(stages, 5, num_negatives)
    loss, gradient = cached_gradient(step, batch, GradCache(**options))
    plain_loss, plain = plain_gradient(step, batch)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert len(errors(step, gradient, plain)) == stages
    assert max(errors(step, gradient, plain)) <= TOLERANCE[dtype]


# Options of GradCache with which dropout must be replayed.
REPLAYED = {
    "one text": {"mini_batch_tokens": 10_000, "mini_batch_texts": 1},
    "uneven": {"mini_batch_tokens": 30},
    "larger than the batch": {"mini_batch_tokens": 10_000},
    "half kept": {"mini_batch_tokens": 30, "kept_fraction": 0.5},
}


@pytest.mark.parametrize(("options", "stages", "num_negatives", "dtype"), in_turns(REPLAYED, [0, 7]))
def test_dropout_is_replayed(stages: int, dtype: torch.dtype, num_negatives: int, options: dict[str, Any]) -> None:
    """In both stages, and in the context that the second stage reads."""
    step, batch = make_step(stages, dtype, dropout=0.1), make_batch(stages, 6, num_negatives)
    engine = GradCache(**options)
    torch.manual_seed(1)
    loss, gradient = cached_gradient(step, batch, engine)
    after = torch.rand(3)
    torch.manual_seed(1)
    direct_loss, direct = direct_gradient(step, batch, engine)
    assert loss == pytest.approx(direct_loss, rel=TOLERANCE[dtype])
    assert max(errors(step, gradient, direct)) <= TOLERANCE[dtype]
    assert torch.equal(after, torch.rand(3))
    assert min(errors(step, cached_gradient(step, batch, engine)[1], direct)) > 1e-3


# peft 0.21 reads a name that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(("options", "stages", "dropout", "dtype"), in_turns(REPLAYED, [0.0, 0.1]))
def test_only_the_adapter_gets_a_gradient_under_lora(
    stages: int, dtype: torch.dtype, dropout: float, options: dict[str, Any]
) -> None:
    if stages == 1:
        step = TinyStep(lora(tiny_mistral(), dropout)).to(dtype).train()
    else:
        encoders = [lora(tiny_bert(seed), dropout) for seed in (1, 2)]
        step = TinyContextualStep(*encoders, context_dropout=dropout).to(dtype).train()
    batch, engine = make_batch(stages, 5), GradCache(**options)
    torch.manual_seed(1)
    _, gradient = cached_gradient(step, batch, engine)
    torch.manual_seed(1)
    _, direct = direct_gradient(step, batch, engine) if dropout else plain_gradient(step, batch)
    assert max(errors(step, gradient, direct)) <= TOLERANCE[dtype]
    trained = [name for name, parameter in step.named_parameters() if parameter.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
    torch.manual_seed(2)
    assert (min(errors(step, cached_gradient(step, batch, engine)[1], direct)) > 1e-3) == (dropout > 0)


class Balanced(TinyStep):
    """A step with statistics: the squares of the vectors, summed over texts; the loss is not linear in them."""

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        vector_ND = super().embed(tokens).vector_ND
        statistics = {"spread": vector_ND.square().sum(0), "count": torch.tensor(len(vector_ND))}
        return Representations(vector_ND, statistics)

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        loss, terms = super().loss_from_representations(query, candidate, batch)
        for tower in (query, candidate):
            loss = loss + (tower.statistics["spread"] / tower.statistics["count"]).square().mean()
        return LossOutput(loss, terms)


def test_statistics_summed_over_mini_batches_get_the_gradient_of_the_whole_batch() -> None:
    step, batch = Balanced(tiny_bert().double()), random_batch(6, 2)
    loss, gradient = cached_gradient(step, batch, GradCache(mini_batch_tokens=30, kept_fraction=0.3))
    plain_loss, plain = plain_gradient(step, batch)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    assert relative_error(gradient, plain) <= 1e-12
    assert relative_error(plain_gradient(TinyStep(step.backbone), batch)[1], plain) > 1e-2


def test_parameters_of_the_loss_get_their_gradient() -> None:
    loss = InfoNCE(temperature=0.1, learnable_temperature=True)
    step, batch = TinyStep(tiny_bert().double(), loss.double()), random_batch(6, 1)
    _, gradient = cached_gradient(step, batch, GradCache(mini_batch_tokens=30))
    of_temperature = step.loss.log_temperature.grad.item()
    _, plain = plain_gradient(step, batch)
    assert of_temperature == pytest.approx(step.loss.log_temperature.grad.item(), rel=1e-12)
    assert of_temperature != 0
    assert relative_error(gradient, plain) <= 1e-12


@on_stages
@pytest.mark.parametrize("scale", [65536.0, 1 / 3])
def test_a_scale_multiplies_each_gradient_once_and_not_the_loss(stages: int, scale: float) -> None:
    step, batch = make_step(stages), make_batch(stages)
    plain_loss, plain = plain_gradient(step, batch)
    loss, gradient = cached_gradient(step, batch, GradCache(mini_batch_tokens=40), scale=scale)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    assert max(errors(step, gradient, scale * plain)) <= 1e-12


@on_stages
def test_two_forwards_before_the_last_backwards_do_not_mix(stages: int) -> None:
    step, engine = make_step(stages), GradCache(mini_batch_tokens=30, kept_fraction=0.3)
    batches = [make_batch(stages, 5, 1, seed) for seed in (1, 2)]
    expected = sum(plain_gradient(step, batch)[1] for batch in batches)
    step.zero_grad()
    losses = [engine.forward_backward(step, batch).loss for batch in batches]
    sum(losses).backward()
    assert max(errors(step, gradient_vector(step), expected)) <= 1e-12


def test_the_returned_loss_is_of_the_batch_and_its_graph_of_the_last_mini_batch() -> None:
    step, batch, early = TinyStep(tiny_bert().double()), random_batch(6, 2), []
    engine = GradCache(mini_batch_tokens=30)
    output = engine.forward_backward(step, batch, backward=early.append)
    assert len(early) == sum(map(len, engine.plan(batch))) - 1
    assert output.loss.item() == pytest.approx(plain_gradient(step, batch)[0], rel=1e-12)
    assert set(output.terms) == {"accuracy", "positive_score", "no_negative_fraction"}
    assert not any(term.requires_grad for term in output.terms.values())


@on_stages
def test_without_gradients_only_the_loss_is_computed(stages: int) -> None:
    step, batch = make_step(stages), make_batch(stages)
    with torch.no_grad():
        output = GradCache(mini_batch_tokens=30).forward_backward(step, batch)
    assert not output.loss.requires_grad
    assert output.loss.item() == pytest.approx(plain_gradient(step, batch)[0], rel=1e-12)


@on_stages
@pytest.mark.parametrize("kept_fraction", [None, 0.5])
def test_bfloat16_autocast_trains_every_parameter_as_the_plain_step_does(
    stages: int, kept_fraction: float | None
) -> None:
    step, batch = make_step(stages, torch.float32), make_batch(stages, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, gradient = cached_gradient(step, batch, GradCache(30, kept_fraction=kept_fraction))
    missing = {name for name, parameter in step.named_parameters() if parameter.grad is None}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = plain_step(step, batch)
    step.zero_grad()
    output.loss.backward()
    assert missing == {name for name, parameter in step.named_parameters() if parameter.grad is None}
    assert max(errors(step, gradient, gradient_vector(step))) < 0.045  # a cosine of 0.999


@pytest.mark.parametrize("mini_batch_tokens", [40, 15])
def test_a_step_casts_a_trained_weight_once_for_each_pass_and_not_for_each_mini_batch(mini_batch_tokens: int) -> None:
    """Autocast keeps the casts of weights that are trained, not those of frozen ones."""
    step, batch, engine = TinyStep(tiny_bert()), random_batch(8, 1), GradCache(mini_batch_tokens)
    frozen = [name for name, _ in step.named_parameters() if "layer.0." in name]
    for name in frozen:
        step.get_parameter(name).requires_grad_(False)
    with Casts(step) as casts, torch.autocast("cpu", torch.bfloat16):
        engine.step(step, batch)
    num_forwards = 2 * sum(map(len, engine.plan(batch))) - 1
    assert num_forwards > 10
    by_kind = {name in frozen: set[int]() for name in casts.count}
    for name, count in casts.count.items():
        by_kind[name in frozen].add(count)
    assert by_kind == {False: {2}, True: {num_forwards}}


def counting_passes(step: TinyStep) -> dict[bool, int]:
    """Counts the step's embeddings from now on, by whether a graph was built."""
    counts, embed = {True: 0, False: 0}, step.embed

    def counted(tokens: TokenBatch, context: Any = None) -> Representations:
        counts[torch.is_grad_enabled()] += 1
        return embed(tokens, context)

    step.embed = counted
    return counts


@pytest.mark.parametrize(
    ("options", "num_recomputed"),
    [({}, 5), ({"kept_fraction": 0.5}, 2), ({"kept_fraction": 1.0}, 0), ({"kept_gib": 1.0}, 0), ({"kept_gib": 0.0}, 5)],
)
def test_kept_graphs_are_not_recomputed(options: dict[str, Any], num_recomputed: int) -> None:
    records = [Record([7] * 5, [8] * 5) for _ in range(6)]
    step, engine = TinyStep(tiny_bert()), GradCache(mini_batch_tokens=10, **options)
    counts = counting_passes(step)
    engine.step(step, batch_of(records))
    assert counts == {False: num_recomputed, True: 6}


@pytest.mark.parametrize("half", [False, True])
def test_a_memory_budget_keeps_as_many_graphs_as_fit(half: bool) -> None:
    """Weights are cast once a step: their casts do not count as part of a graph."""
    step, batch = TinyStep(tiny_bert(hidden_size=64)), batch_of([Record([7] * 5, [8] * 5) for _ in range(20)])
    one = GraphMemory()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        with one.measured(torch.device("cpu"), step.parameters):
            kept = step.embed(take_texts(batch.query, torch.arange(2)))
        with_casts = one.num_bytes
        one.leave_out_casts([kept.vector_ND])
        assert (3 * one.num_bytes < with_casts) == half
        counts = counting_passes(step)
        GradCache(mini_batch_tokens=10, kept_gib=3.5 * one.num_bytes / 2**30).step(step, batch)
    assert counts == {False: 20 - 3, True: 20}


def test_a_budget_too_small_for_one_graph_is_detected_in_the_first_step() -> None:
    step, batch = TinyStep(tiny_bert()), batch_of([Record([7] * 5, [8] * 5) for _ in range(4)])
    engine = GradCache(mini_batch_tokens=10, kept_gib=1e-7)
    counts = counting_passes(step)
    engine.step(step, batch)
    assert counts == {False: 2, True: 5}
    engine.step(step, batch)
    assert counts == {False: 2 + 3, True: 5 + 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mini_batch_tokens": 0}, "mini_batch_tokens must be >= 1, got 0"),
        ({"mini_batch_texts": 0}, "mini_batch_texts must be >= 1, got 0"),
        ({"kept_fraction": 1.5}, "kept_fraction must be from 0 to 1, got 1.5"),
        ({"kept_fraction": -0.1}, "kept_fraction must be from 0 to 1"),
        ({"kept_gib": -1.0}, r"kept_gib must be >= 0, got -1\.0"),
        ({"kept_gib": float("nan")}, "kept_gib must be >= 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GradCache(**options)


def test_only_the_last_backward_of_the_first_stage_is_left_to_the_caller() -> None:
    step, batch, early = make_step(2), make_batch(2), []
    engine = GradCache(mini_batch_tokens=40)
    stages = engine.plan(batch)
    _, expected = plain_gradient(step, batch)

    def backward(surrogate: Tensor) -> None:
        early.append(gradient_vector(step.first).norm().item())
        surrogate.backward()

    step.zero_grad()
    output = engine.forward_backward(step, batch, backward)
    assert len(early) == sum(map(len, engine.plan(batch))) - 1
    # No backward of the second stage reaches the first encoder.
    assert early[: len(stages[1]) + 1] == [0.0] * (len(stages[1]) + 1)
    assert errors(step, gradient_vector(step), expected)[0] <= 1e-12
    output.loss.backward()
    assert max(errors(step, gradient_vector(step), expected)) <= 1e-12


@pytest.mark.parametrize("num_context", [1, 20])
def test_gradients_are_equal_with_contexts_of_one_and_of_many_documents(num_context: int) -> None:
    step, batch = make_step(2), with_context(random_batch(4, 1), num_context)
    _, found = cached_gradient(step, batch, GradCache(mini_batch_tokens=40))
    assert max(errors(step, found, plain_gradient(step, batch)[1])) <= 1e-12


@pytest.mark.parametrize("frozen", ["first", "backbone"])
def test_freezing_a_stage_does_not_change_the_gradient_of_the_other(frozen: str) -> None:
    step, batch = make_step(2), make_batch(2)
    getattr(step, frozen).requires_grad_(False)
    _, expected = plain_gradient(step, batch)
    assert relative_error(cached_gradient(step, batch, GradCache(mini_batch_tokens=40))[1], expected) <= 1e-12
    assert all(parameter.grad is None for parameter in getattr(step, frozen).parameters())


@pytest.mark.parametrize(
    ("options", "num_recomputed"),
    [({}, 2 + 5), ({"kept_fraction": 0.5}, 0 + 3), ({"kept_fraction": 1.0}, 0), ({"kept_gib": 1.0}, 0)],
)
def test_kept_graphs_of_both_stages_are_not_recomputed(options: dict[str, Any], num_recomputed: int) -> None:
    """Two mini-batches of context (24 tokens), six of both towers (120 tokens); half the tokens keep 2 + 2 graphs."""
    batch = with_context(batch_of([Record([7] * 4, [8] * 4) for _ in range(6)]), 6)
    step, engine, forwards = make_step(2), GradCache(mini_batch_tokens=20, **options), []
    for encoder in (step.backbone, step.first):
        encoder.register_forward_hook(lambda *_: forwards.append(1))
    engine.step(step, batch)
    assert len(forwards) == sum(map(len, engine.plan(batch))) + num_recomputed
