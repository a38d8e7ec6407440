"""How CDE's first stage is trained: words first, then frozen or slowly, the same by every way through a step."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from embeddings.common import ContrastiveBatch, OptionError, TokenBatch
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig
from embeddings.modules import CDEModule, ContextSettings, FirstStageTraining
from embeddings.modules.cde import context_spread
from embeddings.training import gradcache
from embeddings.training.optim import Schedule
from tests.helpers.contrastive import random_batch
from tests.helpers.runs import fit, quiet_trainer
from tests.losses.test_prediction import by_loops
from tests.modules.cde_runs import CACHE, CONTEXT, cde_config
from tests.modules.test_checkpoints import Weights, differences_after_resuming

WORDS_THEN_FROZEN = {"word_steps": 2, "frozen_steps": None}
ALL_PHASES = {"word_steps": 2, "frozen_steps": 2, "learning_rate_factor": 0.1}


def make(bert: str, rate: float = 1e-2, **training: Any) -> CDEModule:
    return CDEModule(
        BackboneConfig(bert),
        context=ContextSettings(**CONTEXT),
        first_stage_training=FirstStageTraining(**training),
        loss=InfoNCE(temperature=0.1),
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.1),
        schedule=Schedule(warmup_steps=0, decay="constant"),
        seed=0,
    )


def train(module: CDEModule, batches: list[ContrastiveBatch]) -> list[dict[str, Tensor]]:
    kept = Weights()
    trainer = quiet_trainer(max_steps=len(batches), callbacks=[kept])
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return kept.seen


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The stages of which a weight changed."""
    return {
        "first" if name.startswith("embedder.first_stage") else "second"
        for name in before
        if not torch.equal(before[name], after[name])
    }


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, ["both"] * 4),
        (WORDS_THEN_FROZEN, ["first", "first", "second", "second"]),
        ({"word_steps": 1, "frozen_steps": 2}, ["first", "second", "second", "both"]),
        ({"frozen_steps": None}, ["second"] * 4),
        ({"frozen_steps": 3}, ["second", "second", "second", "both"]),
    ],
)
def test_each_step_moves_the_stages_of_its_phase_and_no_weight_of_the_other(
    training: dict[str, Any], expected: list[str], bert: str
) -> None:
    """Weight decay and the optimiser's momentum move nothing either."""
    states = train(make(bert, **training), [random_batch(8, 1, seed=step) for step in range(4)])
    found = [moved(before, after) for before, after in pairwise(states)]
    assert found == [{"first", "second"} if stage == "both" else {stage} for stage in expected]


def test_the_factor_acts_on_the_groups_of_the_first_stage_alone(bert: str) -> None:
    # The paper's training has the groups of any module.
    assert [group.get("part") for group in make(bert)._make_optimizer().param_groups] == [None, None]
    module = make(bert, rate=2.0, learning_rate_factor=0.25, word_steps=20, frozen_steps=5)
    module._schedule = Schedule(warmup_steps=10, decay="linear")
    module.trainer = L.Trainer(accelerator="cpu", max_steps=125, logger=False, enable_checkpointing=False)
    made: Any = module.configure_optimizers()
    scheduler = made["lr_scheduler"]["scheduler"]
    first = {id(parameter) for parameter in module.embedder.first_stage.parameters()}
    groups = made["optimizer"].param_groups
    assert [{id(p) in first for p in group["params"]} for group in groups] == [{False}, {False}, {True}, {True}]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))

    def rates(step: int) -> list[float]:
        return [2.0 * factor(step) for factor in scheduler.lr_lambdas]

    plain = Schedule(warmup_steps=10)
    assert [rates(step)[0] for step in (0, 19)] == [0.0, 0.0]
    assert [rates(step)[2] for step in (0, 1, 2, 11)] == pytest.approx([1.0, 2.0, 2.0, 1.0])
    assert [rates(step)[2] for step in (20, 24)] == [0.0, 0.0]
    for step in (20, 24, 25, 80, 124):
        assert rates(step)[0] == rates(step)[1] == pytest.approx(2.0 * plain.factor(step - 20, 105))
    for step in (25, 80, 124):
        assert rates(step)[2] == rates(step)[3] == pytest.approx(0.25 * rates(step)[0])


def test_a_word_step_is_the_mean_over_all_texts_as_the_first_stage_reads_them(bert: str) -> None:
    """Against each text by itself, cut as a context document is."""
    module, batch = make(bert, word_steps=1, frozen_steps=None), random_batch(3, 1)
    module.context = ContextSettings(**CONTEXT, max_length=5)
    found = gradient_of_a_step(module, batch)
    texts = [
        ids[:5].tolist()
        for tokens in (batch.query, batch.candidate)
        for ids in tokens.input_ids_T.split(tokens.lengths_N.tolist())
    ]
    assert max(map(len, texts)) == 5
    module = make(bert)
    alone = [TokenBatch.from_lists([text], [[True] * len(text)]).padded() for text in texts]
    vectors = torch.cat([module.embedder.embed_context(text) for text in alone])
    table = module.embedder.backbone.get_input_embeddings().weight.detach()
    by_loops(table, vectors, texts, module.tokenizer.all_special_ids).backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(name.startswith("embedder.first_stage") for name in found)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def gradient_of_a_step(module: CDEModule, batch: ContrastiveBatch) -> dict[str, Tensor]:
    """The gradients that the optimiser sees at the first step."""
    seen: dict[str, Tensor] = {}

    class Seen(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            seen.update({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    trainer = quiet_trainer(max_steps=2, max_epochs=1, callbacks=[Seen()])
    trainer.fit(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("training", [WORDS_THEN_FROZEN, ALL_PHASES])
def test_gradcache_trains_to_the_weights_of_the_plain_step_in_every_phase(
    training: dict[str, Any], tmp_path: Path
) -> None:
    config = cde_config(tmp_path, max_length=6)
    config["model"]["init_args"]["first_stage_training"] = training
    config["trainer"] |= {"precision": "64-true", "gradient_clip_val": 0.05, "max_steps": 6}
    config["trainer"]["accumulate_grad_batches"] = 2
    config["model"]["init_args"]["optimizer"]["init_args"]["eps"] = 1e-6
    plain = fit(tmp_path, config).model.state_dict()
    config["trainer"]["callbacks"] = [CACHE]
    cached = fit(tmp_path, config).model.state_dict()
    assert [name for name, value in plain.items() if (cached[name] - value).abs().max() > 1e-10] == []


@pytest.mark.parametrize("kept", [{}, {"kept_fraction": 1.0}])
def test_gradcache_embeds_a_frozen_first_stage_once_and_without_a_graph(
    kept: dict[str, float], bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_context, seen = CDEModule.embed_context, []

    def noted(self: CDEModule, tokens: TokenBatch) -> Tensor:
        vectors = embed_context(self, tokens)
        seen.append((len(tokens), vectors.requires_grad))
        return vectors

    monkeypatch.setattr(CDEModule, "embed_context", noted)
    for frozen in (0, None):
        seen.clear()
        module, batch = make(bert, frozen_steps=frozen), random_batch(6, 1)
        module._phase = module.first_stage_training.phase(0)
        batch = replace(batch, context=module.choose_context(batch, 0), num_extra_tokens=8)
        gradcache.GradCache(mini_batch_tokens=10_000, mini_batch_texts=2, **kept).step(module, batch)
        if frozen is None:
            assert seen == [(2, False)] * 3
        else:
            assert sum(count for count, has_graph in seen if has_graph) == 6


def test_a_run_resumed_at_any_boundary_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = cde_config(tmp_path, dropout=0.1)
    config["model"]["init_args"]["first_stage_training"] = ALL_PHASES
    config["trainer"] |= {"callbacks": [CACHE], "max_steps": 6}
    assert differences_after_resuming(tmp_path, config, 1, 2, 3, 4, 5) == {}


def test_the_spread_is_one_minus_the_mean_cosine_of_all_pairs() -> None:
    vectors = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    pairs = [(vectors[i], vectors[j]) for i in range(5) for j in range(5) if i != j]
    cosines = [torch.nn.functional.cosine_similarity(*pair, dim=0) for pair in pairs]
    assert context_spread(vectors).item() == pytest.approx(1 - torch.stack(cosines).mean().item(), abs=1e-6)
    assert context_spread(torch.eye(2)).item() == pytest.approx(1.0)
    assert context_spread(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).item() == pytest.approx(0.0, abs=1e-6)


def test_spread_and_sensitivity_are_logged_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cde_config(tmp_path, dropout=0.1)
    before = fit(tmp_path, config)
    assert 0.0 < before.trainer.callback_metrics["train/context_spread"] < 1.0
    assert "train/context_sensitivity" not in before.trainer.callback_metrics
    monkeypatch.setattr("embeddings.modules.cde.MEASURED_EVERY", 2)
    after = fit(tmp_path, config)
    assert 0.0 < after.trainer.callback_metrics["train/context_sensitivity"] < 1.0
    expected, found = before.model.state_dict(), after.model.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_the_sensitivity_is_one_minus_the_mean_cosine_behind_two_contexts(bert: str) -> None:
    module, batch = make(bert).eval(), random_batch(11, 0)
    own, other = (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = module._sensitivity(batch, own, other)
    cosines = []
    for ids in batch.query.input_ids_T.split(batch.query.lengths_N.tolist())[:8]:
        text = TokenBatch.from_lists([ids.tolist()], [[True] * len(ids)]).padded()
        first, second = module.embedder(text, own)[0], module.embedder(text, other)[0]
        cosines.append(math.fsum((first * second).tolist()))
    assert found.item() == pytest.approx(1 - sum(cosines) / 8, abs=1e-5)
    assert module._sensitivity(batch, own, own).item() == pytest.approx(0.0, abs=1e-6)


def test_a_dead_context_is_told_once_with_what_to_do(
    bert: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("embeddings.modules.cde.MEASURED_EVERY", 1)
    batches = [random_batch(8, 1, seed=step) for step in range(3)]
    module = make(bert, rate=1e-5)
    train(module, batches)
    assert "died" not in caplog.text
    for parameter in module.embedder.first_stage.projection[2].parameters():
        torch.nn.init.ones_(parameter)
    torch.nn.init.zeros_(module.embedder.first_stage.projection[2].weight)
    train(module, batches)
    assert caplog.text.count("the context has collapsed: the cosine between two of its vectors is 1.000") == 1
    assert "model.first_stage_training={word_steps: N, frozen_steps: null}" in caplog.text


def test_a_context_that_collapses_under_the_contrastive_loss_stays_apart_behind_words_and_a_freeze(bert: str) -> None:
    spreads = []
    for training in ({}, {"word_steps": 40, "frozen_steps": None}):
        module = make(bert, rate=3e-3, **training)
        train(module, [random_batch(8, 1, seed=step) for step in range(15 + training.get("word_steps", 0))])
        documents = random_batch(8, 1, seed=100).candidate
        spreads.append(float(context_spread(module.eval().embed_context(documents).detach())))
    collapsed, kept = spreads
    assert collapsed < 0.05
    assert kept > 0.3


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"word_steps": -1}, "word_steps must be >= 0"),
        ({"frozen_steps": -1}, "frozen_steps must be >= 0"),
        ({"learning_rate_factor": 0.0}, "learning_rate_factor must be > 0 and finite, got 0.0; frozen_steps: null"),
        ({"frozen_steps": None, "learning_rate_factor": 0.1}, "applies to no step where the first stage is"),
    ],
)
def test_impossible_settings_are_refused(training: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        FirstStageTraining(**training)


def test_word_steps_that_leave_no_contrastive_ones_are_refused(tmp_path: Path) -> None:
    config = cde_config(tmp_path)
    config["model"]["init_args"]["first_stage_training"] = {"word_steps": 3}
    with pytest.raises(OptionError, match="must leave more than the schedule's warm-up of the run's 4 optimiser steps"):
        fit(tmp_path, config)
