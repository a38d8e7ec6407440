"""CDE through the real command line, on tiny stand-ins: what its context is, and that it trains as it should."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embeddings.cli.main import main
from embeddings.common import ContextualStep, ContrastiveBatch, OptionError
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.data.tokenize import TextTokenizer
from embeddings.evaluation import evaluate_folder, evaluate_widths
from embeddings.inference import Encoder
from embeddings.models import BackboneConfig, ContextualEmbedder
from embeddings.modules import CDEModule, ContextSettings
from tests.data.surrogates import write_surrogates
from tests.helpers.contrastive import Record, batch_of, random_batch
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, fit, write_config, write_retrieval_folder
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.modules.cde_runs import CACHE, CONTEXT, cde_config


def make(bert: str, seed: int = 0, **context: Any) -> CDEModule:
    return CDEModule(BackboneConfig(bert), context=ContextSettings(**{**CONTEXT, **context}), seed=seed)


def texts(batch: ContrastiveBatch, module: CDEModule, batch_idx: int = 0) -> list[list[int]]:
    context = module.choose_context(batch, batch_idx)
    return [ids.tolist() for ids in context.input_ids_T.split(context.lengths_N.tolist())]


def test_the_module_is_a_step_of_two_stages_whose_weights_are_apart(bert: str) -> None:
    module = make(bert)
    assert isinstance(module, ContextualStep)
    assert isinstance(module.embedder, ContextualEmbedder)
    first, second = module.embedder.first_stage.backbone, module.embedder.backbone
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert pairs
    assert all(torch.equal(one, other) and one is not other for one, other in pairs)


def test_the_context_is_a_batchs_own_documents_in_an_order_that_follows_from_the_step(bert: str) -> None:
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


def test_a_smaller_batch_is_context_as_a_whole_and_null_vectors_fill_the_rest(bert: str) -> None:
    batch, module = random_batch(4, 0), make(bert).eval()
    context = module.choose_context(batch, 0)
    assert len(context) == 4
    vectors = module.embed_context(context)
    filled = torch.cat([vectors, module.embedder.slots.null_H.expand(2, -1)])
    assert torch.equal(module.embed(batch.query, vectors).vector_ND, module.embed(batch.query, filled).vector_ND)
    assert not torch.equal(module.embed(batch.query, vectors).vector_ND, module.embed(batch.query).vector_ND)


def test_a_cut_document_keeps_its_beginning_and_a_pooled_token(bert: str) -> None:
    batch = batch_of([Record([5], [6, 7, 8]), Record([5], [9])])
    batch.candidate.pooling_mask_T[0] = False
    module = make(bert, max_length=1)
    context = module.choose_context(batch, 0)
    assert sorted(context.input_ids_T.tolist()) == [6, 9]
    assert context.pooling_mask_T.tolist() == [True, True]
    assert not batch.candidate.pooling_mask_T[0]


def test_a_saved_model_reads_as_much_of_a_context_document_as_in_training(bert: str, tmp_path: Path) -> None:
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
    with pytest.raises(OptionError, match=r"model\.context\.max_length must be >= 1, got 0"):
        ContextSettings(max_length=0)
    make(bert).embedder.save_pretrained(tmp_path / "one")
    settings = ContextSettings(**{**CONTEXT, name: value})
    with pytest.raises(OptionError, match=rf"model\.context\.{name} must be what .*one was trained with"):
        CDEModule(BackboneConfig(bert), context=settings, initial_model=str(tmp_path / "one"))


def test_eight_pairs_are_learnt_by_heart_and_every_part_is_trained(tmp_path: Path) -> None:
    # Eight documents leave two places to null vectors.
    config = cde_config(tmp_path, num_context=10)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()[:8]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    config["data"]["init_args"] |= {"batch_size": 8, "num_negatives": 0}
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    start = fit(tmp_path, config, "--trainer.max_steps", "0").model.state_dict()
    config["trainer"] |= {"max_steps": 40}
    cli = fit(tmp_path, config)
    # Mini-batches are cut by all that the second stage reads.
    assert cli.model.read_batch.num_extra_tokens == 10 + CONTEXT["num_soft_prompts"]
    assert cli.trainer.callback_metrics["train/accuracy"] == 1.0
    assert cli.trainer.callback_metrics["train/loss"] < 0.1
    trained = dict(cli.model.named_parameters())
    unchanged = [name for name, value in trained.items() if torch.equal(value, start[name])]
    assert any("first_stage" in name for name in trained)
    # Positions after the longest text are never read; nothing else stays as it was.
    assert [name for name in unchanged if "position" not in name] == []


@pytest.mark.parametrize(("size", "expected"), [(None, CONTEXT["num_context"]), (3, 3), (0, None)])
def test_scores_during_training_are_behind_a_context_of_the_folder(
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


@pytest.mark.parametrize("place", ["current_epoch", "global_rank"])
def test_another_epoch_or_rank_draws_another_context(place: str, bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = make(bert), random_batch(16, 2)
    first = texts(batch, module)
    monkeypatch.setattr(CDEModule, place, property(lambda self: 1))
    assert texts(batch, module) != first


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


def test_longer_documents_than_the_first_stage_has_positions_are_cut_where_the_context_has_a_limit(
    short_bert: str, tmp_path: Path
) -> None:
    config = cde_config(tmp_path, max_length=24)
    config["model"]["init_args"]["first_stage_backbone"] = {"name": short_bert}
    config["data"]["init_args"]["text"]["document_max_length"] = 60
    lines = (tmp_path / "pairs.jsonl").read_text().replace("the ", "the quick brown fox " * 10)
    (tmp_path / "pairs.jsonl").write_text(lines)
    config["trainer"]["max_steps"] = 2
    assert fit(tmp_path, config).trainer.global_step == 2


def test_a_surrogates_vectors_reach_the_loss(tmp_path: Path) -> None:
    """All pairs have one surrogate vector, so that every candidate is as good as the positive: nothing is learnt."""
    config = cde_config(tmp_path, dropout=0.1)
    data = config["data"]["init_args"]
    (source,) = data["sources"]
    folder = write_surrogates(tmp_path / "surrogates", open_cached(SourceConfig(**source), data["cache_dir"]))
    for path in folder.rglob("vectors-*.npy"):
        np.save(path, np.full_like(np.load(path), 0.5))
    data["num_negatives"] = 0
    source["surrogate_vectors"] = str(folder)
    config["trainer"] |= {"max_steps": 2, "callbacks": [CACHE]}
    assert fit(tmp_path, config).trainer.callback_metrics["train/loss"] > 0.1
    config["model"]["init_args"]["loss"]["init_args"]["false_negative_filter"] = {"margin": 0.0}
    assert fit(tmp_path, config).trainer.callback_metrics["train/loss"] == 0
