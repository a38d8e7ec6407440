"""CDE on tiny models: its context, the training of its first stage, and full runs."""

import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from embeddings.cli.main import main
from embeddings.common import ContrastiveBatch, InputError, OptionError, TokenBatch
from embeddings.common.io import read_metrics
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.data.tokenize import TextTokenizer
from embeddings.evaluation import evaluate_folder, evaluate_widths
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig
from embeddings.modules import CDEModule, ContextSettings, FirstStageTraining
from embeddings.modules.cde import context_spread
from embeddings.training import gradcache
from embeddings.training.optim import Schedule
from tests.data.surrogates import write_surrogates
from tests.helpers.contrastive import Record, batch_of, random_batch
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, fit, quiet_trainer, write_config, write_retrieval_folder
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.losses.test_prediction import by_loops
from tests.modules.cde_runs import CACHE, CONTEXT, cde_config
from tests.modules.test_checkpoints import Weights, differences_after_resuming


def make(bert: str, seed: int = 0, **context: Any) -> CDEModule:
    return CDEModule(BackboneConfig(bert), context=ContextSettings(**{**CONTEXT, **context}), seed=seed)


def texts(batch: ContrastiveBatch, module: CDEModule, batch_idx: int = 0) -> list[list[int]]:
    context = module.choose_context(batch, batch_idx)
    return [ids.tolist() for ids in context.input_ids_T.split(context.lengths_N.tolist())]


def test_the_context_is_the_batchs_own_documents_in_an_order_that_depends_on_the_step(bert: str) -> None:
    batch = batch_of([Record([5, row], [6, row], [[7, row], [8, row]]) for row in range(9, 20)])
    module = make(bert)
    found = [texts(batch, module, step) for step in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert texts(batch, make(bert, seed=1)) != found[0]
    documents = [[kind, row] for kind in (6, 7, 8) for row in range(9, 20)]
    assert all(len(context) == 6 and all(text in documents for text in context) for context in found)
    assert len({tuple(text) for text in found[0]}) == 6
    assert {text[0] for step in range(20) for text in texts(batch, module, step)} == {6, 7, 8}
    positives = make(bert, include_negatives=False)
    assert {text[0] for step in range(20) for text in texts(batch, positives, step)} == {6}


def test_all_documents_of_a_smaller_batch_are_context_and_null_vectors_fill_the_rest(bert: str) -> None:
    batch, module = random_batch(4, 0), make(bert).eval()
    context = module.choose_context(batch, 0)
    assert len(context) == 4
    vectors = module.embed_context(context)
    filled = torch.cat([vectors, module.embedder.slots.null_H.expand(2, -1)])
    assert torch.equal(module.embed(batch.query, vectors).vector_ND, module.embed(batch.query, filled).vector_ND)
    assert not torch.equal(module.embed(batch.query, vectors).vector_ND, module.embed(batch.query).vector_ND)


def test_a_truncated_document_keeps_its_beginning_and_a_pooled_token(bert: str) -> None:
    batch = batch_of([Record([5], [6, 7, 8]), Record([5], [9])])
    batch.candidate.pooling_mask_T[0] = False
    module = make(bert, max_length=1)
    context = module.choose_context(batch, 0)
    assert sorted(context.input_ids_T.tolist()) == [6, 9]
    assert context.pooling_mask_T.tolist() == [True, True]
    assert not batch.candidate.pooling_mask_T[0]


def test_a_saved_model_truncates_context_documents_as_in_training(bert: str, tmp_path: Path) -> None:
    module = make(bert, max_length=4).eval()
    module.embedder.save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), device="cpu", precision="float32")
    documents = ["the quick brown fox jumps over the lazy dog", "a fox", "one two three four five six seven"]
    tokens = TextTokenizer(module.tokenizer, module.embedder.text)(documents, "document")
    batch = batch_of([Record([5], [6])] * 3)
    context = module.choose_context(replace(batch, candidate=tokens), 0)
    assert context.lengths_N.max() == 4 < tokens.lengths_N.max()
    with torch.no_grad():
        trained = sorted(module.embed_context(context).tolist())
    found = sorted(encoder.encode_context(documents).tolist())
    np.testing.assert_allclose(found, trained, rtol=0, atol=1e-5)
    settings = ContextSettings(**CONTEXT, dropout_fraction=0.25)
    again = CDEModule(BackboneConfig(bert), context=settings, initial_model=str(tmp_path / "model"), seed=2)
    assert again.embedder.first_stage.max_length is None
    assert again.embedder.slots.dropout_fraction == 0.25
    assert all(map(torch.equal, again.parameters(), module.parameters()))


@pytest.mark.parametrize(
    ("name", "value"), [("num_context", 7), ("num_soft_prompts", 3), ("residual_projection", False)]
)
def test_another_architecture_than_the_initial_models_is_refused(
    name: str, value: Any, bert: str, tmp_path: Path
) -> None:
    make(bert).embedder.save_pretrained(tmp_path / "one")
    settings = ContextSettings(**{**CONTEXT, name: value})
    with pytest.raises(OptionError, match=rf"model\.context\.{name} must equal that of .*one"):
        CDEModule(BackboneConfig(bert), context=settings, initial_model=str(tmp_path / "one"))


def test_a_first_stage_beside_an_initial_model_is_refused(bert: str) -> None:
    backbone = BackboneConfig(bert)
    with pytest.raises(OptionError, match=r"model\.first_stage_backbone has no effect with initial_model"):
        CDEModule(backbone, first_stage_backbone=backbone, initial_model=bert)


def test_eight_pairs_are_overfitted_and_every_part_is_trained(tmp_path: Path) -> None:
    # Null vectors fill two of the ten slots.
    config = cde_config(tmp_path, num_context=10)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()[:8]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    config["data"]["init_args"] |= {"batch_size": 8, "num_negatives": 0}
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    start = fit(tmp_path, config, "--trainer.max_steps", "0").model.state_dict()
    config["trainer"] |= {"max_steps": 40}
    cli = fit(tmp_path, config)
    # Mini-batches count all positions of the second stage.
    assert cli.model.read_batch.num_extra_tokens == 10 + CONTEXT["num_soft_prompts"]
    assert cli.trainer.callback_metrics["train/accuracy"] == 1.0
    assert cli.trainer.callback_metrics["train/loss"] < 0.1
    trained = dict(cli.model.named_parameters())
    unchanged = [name for name, value in trained.items() if torch.equal(value, start[name])]
    assert any("first_stage" in name for name in trained)
    # Only the embeddings of unused positions are unchanged.
    assert [name for name in unchanged if "position" not in name] == []


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(None, CONTEXT["num_context"], marks=pytest.mark.slow),
        (3, 3),
        pytest.param(0, None, marks=pytest.mark.slow),
    ],
)
def test_scores_during_training_use_a_context_of_the_evaluation_folder(
    size: int | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found = evaluate_widths(*arguments, **options)
        results.extend(found)
        return found

    monkeypatch.setattr("embeddings.callbacks.retrieval_eval.evaluate_widths", noted)
    folder = write_retrieval_folder(tmp_path / "eval", num_queries=15)
    config = cde_config(tmp_path)
    options = {"folder": str(folder), "every_n_steps": 2, "at_start": False, "context_size": size}
    config["trainer"]["callbacks"] = [component("RetrievalEvaluation", **options)]
    cli = fit(tmp_path, config)
    last = evaluate_folder(Encoder(cli.model.embedder), folder, context_size=expected)
    assert [result.counts.get("num_context") for result in results] == [expected, expected]
    assert float(cli.trainer.callback_metrics["val/ndcg_at_10"]) == pytest.approx(last.metrics["ndcg_at_10"], abs=1e-6)
    config["trainer"]["callbacks"][0]["init_args"]["context_size"] = 7
    with pytest.raises(OptionError, match="must be from 1 to the model's 6 context documents"):
        fit(tmp_path, config)


@pytest.fixture(scope="module")
def short_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A backbone of 24 positions."""
    folder = tmp_path_factory.mktemp("short")
    return save_backbone(str(folder), tiny_bert(num_positions=24), wordpiece_tokenizer())


@pytest.mark.parametrize(
    ("document_max_length", "max_length", "exported", "says"),
    [
        (25, None, None, "data.text.document_max_length must be <= 24, the positions that the first stage has for a"),
        (16, 25, None, "context.max_length must be <= 24, the positions that the first stage has, got 25; lower it"),
        (24, None, 25, "ExportModel.document_max_length must be <= 24, the positions that the first stage has for a"),
        (129, 24, None, "data.text.document_max_length must be <= 128, the positions that the backbone has beside"),
    ],
)
def test_documents_that_the_first_stage_has_no_positions_for_are_refused_before_anything_is_written(
    document_max_length: int,
    max_length: int | None,
    exported: int | None,
    says: str,
    short_bert: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = cde_config(tmp_path, max_length=max_length)
    config["model"]["init_args"]["first_stage_backbone"] = {"name": short_bert}
    config["data"]["init_args"]["text"]["document_max_length"] = document_max_length
    if exported is not None:
        export = component("ExportModel", output=str(tmp_path / "model"), document_max_length=exported)
        config["trainer"]["callbacks"] = [export]
    assert_refused(capsys, tmp_path, says, main, ["fit", "--config", write_config(tmp_path, config)])


def test_a_surrogates_vectors_reach_the_loss(tmp_path: Path) -> None:
    """With equal surrogate vectors every candidate scores as high as the positive, so the filter removes all."""
    config = cde_config(tmp_path, dropout=0.1)
    data = config["data"]["init_args"]
    (source,) = data["sources"]
    folder = write_surrogates(tmp_path / "surrogates", open_cached(SourceConfig(**source), data["cache_dir"]))
    for path in folder.rglob("vectors-*.npy"):
        np.save(path, np.full_like(np.load(path), 0.5))
        rewrite_manifest(path.parent / "manifest.json")
    data["num_negatives"] = 0
    source["surrogate_vectors"] = str(folder)
    config["trainer"] |= {"max_steps": 2, "callbacks": [CACHE]}
    assert fit(tmp_path, config).trainer.callback_metrics["train/loss"] > 0.1
    config["model"]["init_args"]["loss"]["init_args"]["false_negative_filter"] = {"margin": 0.0}
    with pytest.raises(InputError, match="in the first 2 batches the loss is 0 or no query has a negative"):
        fit(tmp_path, config)


def test_a_row_of_metrics_contains_only_values_of_its_step(tmp_path: Path) -> None:
    config = cde_config(tmp_path)
    config["model"]["init_args"]["first_stage_training"] = {"word_steps": 2}
    fit(tmp_path, config)
    (path,) = tmp_path.rglob("metrics.csv")
    rows = list(read_metrics(path))
    assert [bool(row["train/word_loss"]) for row in rows] == [True, True, False, False]
    assert [bool(row["train/accuracy"]) for row in rows] == [False, False, True, True]
    assert all(row["train/loss"] for row in rows)


WORDS_THEN_FROZEN = {"word_steps": 2, "frozen_steps": None}
ALL_PHASES = {"word_steps": 2, "frozen_steps": 2, "learning_rate_factor": 0.1}


def staged(bert: str, rate: float = 1e-2, **training: Any) -> CDEModule:
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
    """The stages with a changed weight."""
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
def test_each_step_changes_only_the_stages_of_its_phase(
    training: dict[str, Any], expected: list[str], bert: str
) -> None:
    """Weight decay and momentum must not change a frozen stage either."""
    states = train(staged(bert, **training), [random_batch(8, 1, seed=step) for step in range(4)])
    found = [moved(before, after) for before, after in pairwise(states)]
    assert found == [{"first", "second"} if stage == "both" else {stage} for stage in expected]


def test_the_factor_applies_to_the_groups_of_the_first_stage_only(bert: str) -> None:
    # The default training has no separate group for the first stage.
    assert [group.get("part") for group in staged(bert)._make_optimizer().param_groups] == [None, None]
    module = staged(bert, rate=2.0, learning_rate_factor=0.25, word_steps=20, frozen_steps=5)
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


@pytest.mark.parametrize(
    ("settings", "option", "value", "says"),
    [
        (FirstStageTraining, "learning_rate_factor", 0.0, "must be > 0 and finite, got 0.0; frozen_steps: null"),
        (FirstStageTraining, "word_steps", -1, "must be >= 0, got -1"),
        (FirstStageTraining, "frozen_steps", -1, "must be >= 0, got -1"),
        (ContextSettings, "max_length", 0, "must be >= 1, got 0"),
        (ContextSettings, "dropout_fraction", 1.5, "must be in [0, 1], got 1.5"),
    ],
)
def test_invalid_settings_are_refused(settings: Any, option: str, value: Any, says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f".{option} {says}")):
        settings(**{option: value})


def test_a_word_step_is_the_mean_over_all_truncated_texts(bert: str) -> None:
    """Against a loop over single texts that are truncated like context documents."""
    module, batch = staged(bert, word_steps=1, frozen_steps=None), random_batch(3, 1)
    module.context = ContextSettings(**CONTEXT, max_length=5)
    found = gradient_of_a_step(module, batch)
    texts = [
        ids[:5].tolist()
        for tokens in (batch.query, batch.candidate)
        for ids in tokens.input_ids_T.split(tokens.lengths_N.tolist())
    ]
    assert max(map(len, texts)) == 5
    module = staged(bert)
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
    """The gradients before the first optimiser step."""
    seen: dict[str, Tensor] = {}

    class Seen(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            seen.update({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    trainer = quiet_trainer(max_steps=2, max_epochs=1, callbacks=[Seen()])
    trainer.fit(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    return seen


def test_gradcache_trains_to_the_weights_of_the_plain_step_in_every_phase(tmp_path: Path) -> None:
    config = cde_config(tmp_path, max_length=6)
    config["model"]["init_args"]["first_stage_training"] = ALL_PHASES
    config["trainer"] |= {"precision": "64-true", "gradient_clip_val": 0.05, "max_steps": 6}
    config["trainer"]["accumulate_grad_batches"] = 2
    config["model"]["init_args"]["optimizer"]["init_args"]["eps"] = 1e-6
    plain = fit(tmp_path, config).model.state_dict()
    config["trainer"]["callbacks"] = [CACHE]
    cached = fit(tmp_path, config).model.state_dict()
    assert [name for name, value in plain.items() if (cached[name] - value).abs().max() > 1e-10] == []


def test_a_run_resumed_within_and_between_phases_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = cde_config(tmp_path, dropout=0.1)
    config["model"]["init_args"]["first_stage_training"] = ALL_PHASES
    config["trainer"] |= {"callbacks": [CACHE], "max_steps": 6}
    assert differences_after_resuming(tmp_path, config, 1, 2, 4) == {}


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


def test_the_sensitivity_is_one_minus_the_mean_cosine_with_two_contexts(bert: str) -> None:
    module, batch = staged(bert).eval(), random_batch(11, 0)
    own, other = (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = module._sensitivity(batch, own, other)
    cosines = []
    for ids in batch.query.input_ids_T.split(batch.query.lengths_N.tolist())[:8]:
        text = TokenBatch.from_lists([ids.tolist()], [[True] * len(ids)]).padded()
        first, second = module.embedder(text, own)[0], module.embedder(text, other)[0]
        cosines.append(math.fsum((first * second).tolist()))
    assert found.item() == pytest.approx(1 - sum(cosines) / 8, abs=1e-5)
    assert module._sensitivity(batch, own, own).item() == pytest.approx(0.0, abs=1e-6)


def test_a_collapsed_context_is_warned_about_once(
    bert: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("embeddings.modules.cde.MEASURED_EVERY", 1)
    batches = [random_batch(8, 1, seed=step) for step in range(3)]
    module = staged(bert, rate=1e-5)
    train(module, batches)
    assert "has collapsed" not in caplog.text
    for parameter in module.embedder.first_stage.projection[2].parameters():
        torch.nn.init.ones_(parameter)
    torch.nn.init.zeros_(module.embedder.first_stage.projection[2].weight)
    train(module, batches)
    assert caplog.text.count("the context has collapsed: the cosine between two of its vectors is 1.000") == 1
    assert "model.first_stage_training={word_steps: N, frozen_steps: null}" in caplog.text


@pytest.mark.slow
def test_word_steps_and_freezing_prevent_the_collapse_of_the_context(bert: str) -> None:
    spreads = []
    for training in ({}, {"word_steps": 40, "frozen_steps": None}):
        module = staged(bert, rate=3e-3, **training)
        train(module, [random_batch(8, 1, seed=step) for step in range(15 + training.get("word_steps", 0))])
        documents = random_batch(8, 1, seed=100).candidate
        spreads.append(float(context_spread(module.eval().embed_context(documents).detach())))
    collapsed, kept = spreads
    assert collapsed < 0.05
    assert kept > 0.3


def test_word_steps_without_contrastive_steps_are_refused(tmp_path: Path) -> None:
    config = cde_config(tmp_path)
    config["model"]["init_args"]["first_stage_training"] = {"word_steps": 3}
    with pytest.raises(OptionError, match="word_steps plus the schedule's warm-up steps must be < 4, the optimiser"):
        fit(tmp_path, config)


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
        module, batch = staged(bert, frozen_steps=frozen), random_batch(6, 1)
        module._phase = module.first_stage_training.phase(0)
        batch = replace(batch, context=module.choose_context(batch, 0), num_extra_tokens=8)
        gradcache.GradCache(mini_batch_tokens=10_000, mini_batch_texts=2, **kept).step(module, batch)
        if frozen is None:
            assert seen == [(2, False)] * 3
        else:
            assert sum(count for count, has_graph in seen if has_graph) == 6
