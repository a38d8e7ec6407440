import json
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from embeddings.callbacks import RetrievalEvaluation, retrieval_eval
from embeddings.callbacks.retrieval_eval import METRICS
from embeddings.common import InputError, OptionError
from embeddings.evaluation import evaluate_folder, evaluate_widths
from embeddings.inference import Encoder
from tests.helpers.runs import component, fit, logged_rows, quiet_trainer, run_config, write_retrieval_folder
from tests.inference.models import counted_encodings


@pytest.fixture
def folder(tmp_path):
    return str(write_retrieval_folder(tmp_path / "eval", num_queries=15))


def scored_run(tmp_path, widths=None, trainer=None, words=(), **options):
    config = run_config(tmp_path)
    config["trainer"] |= trainer or {}
    if widths:
        config["model"]["init_args"]["loss"] = component("embeddings.losses.MatryoshkaInfoNCE", widths=widths)
    keep = {"monitor": "val/ndcg_at_10", "mode": "max", "every_n_train_steps": 2, "save_top_k": -1, "save_last": True}
    callbacks = [component("RetrievalEvaluation", **options), component("ModelCheckpoint", **keep)]
    config["trainer"]["callbacks"] = callbacks
    return fit(tmp_path, config, *words)


def scores_of(tmp_path):
    rows = logged_rows(tmp_path, "val/ndcg_at_10")
    found = {int(row["step"]): float(row["val/ndcg_at_10"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_scores_are_logged_at_the_start_and_every_n_steps_and_choose_the_checkpoint(tmp_path, folder):
    cli = scored_run(tmp_path, trainer={"limit_train_batches": 4}, folder=folder, every_n_steps=2)
    scores = scores_of(tmp_path)
    assert sorted(scores) == [0, 2, 4]
    assert all(module.training for module in cli.model.modules())
    # After an epoch other callbacks read the newest score, not a mean.
    assert cli.trainer.fit_loop.epoch_progress.current.completed == 1
    assert len(set(scores.values())) > 1
    for seen in (cli.trainer.callback_metrics, cli.trainer.progress_bar_metrics):
        assert float(seen["val/ndcg_at_10"]) == pytest.approx(scores[4], abs=1e-6)
    expected = evaluate_folder(Encoder(cli.model.embedder), folder).metrics["ndcg_at_10"]
    assert scores[4] == pytest.approx(expected, abs=1e-6)
    best = cli.trainer.checkpoint_callback
    assert len(best.best_k_models) == 2
    assert best.best_model_score == pytest.approx(max(scores[2], scores[4]), abs=1e-6)


def test_the_prompt_is_that_of_an_evaluation_of_the_folder(tmp_path, folder):
    config = run_config(tmp_path)
    # A source with the name of the folder.
    config["data"]["init_args"]["text"]["prompts"] = {"eval": "fox dog lazy "}
    config["trainer"]["callbacks"] = [component("RetrievalEvaluation", folder=folder, every_n_steps=2)]
    module = fit(tmp_path, config).model
    expected = evaluate_folder(Encoder(module.embedder), folder).metrics["ndcg_at_10"]
    assert scores_of(tmp_path)[4] == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_scored_as_they_are_saved(tmp_path, folder, monkeypatch):
    scored = []

    def recorded(encoder, *arguments, **options):
        scored.append([weight.detach().clone() for weight in encoder.embedder.parameters()])
        return evaluate_widths(encoder, *arguments, **options)

    monkeypatch.setattr(retrieval_eval, "evaluate_widths", recorded)
    config = run_config(tmp_path)
    scores = component("RetrievalEvaluation", folder=folder, every_n_steps=2)
    config["trainer"]["callbacks"] = [scores, component("EMAWeightAveraging", decay=0.9)]
    # The run leaves the averages in the module.
    module = fit(tmp_path, config).model
    assert all(map(torch.equal, scored[-1], module.embedder.parameters()))


def test_without_a_number_of_steps_each_epoch_is_scored_and_early_stopping_reads_the_score(tmp_path, folder):
    config = run_config(tmp_path)
    config["trainer"] |= {"max_steps": -1, "max_epochs": 5, "limit_train_batches": 2}
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.0  # no score exceeds the first
    stop = {"monitor": "val/ndcg_at_10", "mode": "max", "patience": 2, "check_on_train_epoch_end": True}
    scored = component("RetrievalEvaluation", folder=folder, every_n_steps=None)
    config["trainer"]["callbacks"] = [component("EarlyStopping", **stop), scored]
    fit(tmp_path, config)
    assert sorted(scores_of(tmp_path)) == [0, 2, 4, 6]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_does_not_score_its_first_step_again(tmp_path, folder):
    options = {"folder": folder, "every_n_steps": 2, "trainer": {"accumulate_grad_batches": 2, "max_steps": 2}}
    scored_run(tmp_path, **options)
    assert sorted(scores_of(tmp_path)) == [0, 2]
    options["trainer"]["max_steps"] = 4
    scored_run(tmp_path, words=["--ckpt_path", "auto"], **options)
    assert sorted(scores_of(tmp_path)) == [0, 2, 4]


def test_a_model_of_several_widths_is_scored_at_each_from_one_encoding(tmp_path, folder, monkeypatch):
    encoded = counted_encodings(monkeypatch)
    cli = scored_run(tmp_path, widths=[32, 4], folder=folder, every_n_steps=2)
    # Queries and documents, before training and after steps 2 and 4.
    assert len(encoded) == 6
    rows = logged_rows(tmp_path, "val/ndcg_at_10")
    assert len(rows) == 3
    full, truncated = (
        result.metrics["ndcg_at_10"] for result in evaluate_widths(Encoder(cli.model.embedder), folder, [32, 4])
    )
    for name, expected in (("val/ndcg_at_10", full), ("val/ndcg_at_10_4", truncated)):
        assert float(rows[-1][name]) == pytest.approx(expected, abs=1e-6)
    assert rows[-1]["val/ndcg_at_10"] != rows[-1]["val/ndcg_at_10_4"]
    assert {"val/mrr_at_10_4", "val/recall_at_10_4"} <= set(rows[0])
    assert not any(name.endswith("_32") for name in rows[0] if name.startswith("val/"))


def test_an_error_in_the_folder_or_an_option_ends_the_run_before_its_first_step(tmp_path):
    with pytest.raises(OptionError, match="every_n_steps must be >= 1, got 0"):
        RetrievalEvaluation("folder", every_n_steps=0)
    folder = write_retrieval_folder(tmp_path / "eval")
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tnowhere\t1\n")
    with pytest.raises(InputError, match=r"qrels\.tsv:2"):
        scored_run(tmp_path, folder=str(folder))


@pytest.mark.parametrize(
    ("every_n_steps", "keep", "says"),
    [
        (2, {}, r"every_n_train_steps must be a multiple of 2, .*, to choose the best val/mrr_at_10, got 0"),
        (2, {"every_n_train_steps": 3}, r"every_n_train_steps must be a multiple of 2, .* got 3"),
        (None, {"every_n_train_steps": 3}, r"every_n_steps must be set to choose the best val/mrr_at_10 within"),
        (None, {"train_time_interval": timedelta(minutes=1)}, r"every_n_steps must be set to choose the best"),
        (2, {"every_n_train_steps": 4}, None),
        (None, {}, None),
        (2, {"monitor": "val/loss"}, None),
    ],
)
def test_weights_that_are_not_scored_are_no_candidates_for_the_best(folder, every_n_steps, keep, says):
    callback = RetrievalEvaluation(folder, every_n_steps=every_n_steps)
    trainer = quiet_trainer(
        enable_checkpointing=True, callbacks=[callback, ModelCheckpoint(**{"monitor": "val/mrr_at_10", **keep})]
    )
    with pytest.raises(OptionError, match=says) if says else nullcontext():
        callback.check_before_model(trainer)


def test_two_folders_need_two_names(tmp_path, folder):
    config, other = run_config(tmp_path), write_retrieval_folder(tmp_path / "other")
    config["trainer"]["callbacks"] = [component("RetrievalEvaluation", folder=str(each)) for each in (folder, other)]
    with pytest.raises(
        OptionError, match=r"RetrievalEvaluation\.name must differ between .*eval and .*other, got 'val'"
    ):
        fit(tmp_path, config)
    config["trainer"]["callbacks"][1]["init_args"]["name"] = "other"
    fit(tmp_path, config)
    assert logged_rows(tmp_path, "other/ndcg_at_10")


def test_a_run_that_only_lowered_the_score_ends_with_a_warning(tmp_path, folder, caplog, monkeypatch):
    scores = iter([0.9, 0.3, 0.5])

    def evaluate(*_, **__):
        return [SimpleNamespace(dimensions=8, metrics=dict.fromkeys(METRICS, next(scores)))]

    monkeypatch.setattr(retrieval_eval, "evaluate_widths", evaluate)
    with caplog.at_level("WARNING", "embeddings"):
        scored_run(tmp_path, folder=folder, every_n_steps=2)
    line = f"training lowered nDCG@10 on {folder}: 0.900 before, 0.500 at best (step 4); lower the "
    assert any(message.startswith(f"warning: {line}") for message in caplog.messages)
    (path,) = tmp_path.rglob("run.json")
    end = json.loads(path.read_text())["end"]
    assert end["how"] == "finished"
    assert end["why"].startswith(line)


def test_a_run_that_ends_before_its_first_score_says_so(tmp_path, folder, caplog):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component("RetrievalEvaluation", folder=folder, every_n_steps=100)]
    with caplog.at_level("WARNING", "embeddings"):
        fit(tmp_path, config)
    assert f"warning: no step of the run was scored on {folder}; lower every_n_steps, 100" in caplog.messages
