"""The model directory that a run writes when training ends."""

import re
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from embeddings.callbacks.checkpoints import ExportModel, embedder_of
from embeddings.callbacks.run_record import MODEL_RUN_FILE
from embeddings.cli.fit import run_trainer
from embeddings.common import OptionError, UserError, instruction_prompt
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.inference import Encoder
from embeddings.models import Embedder
from tests.cli.test_trainer import parts, trainer
from tests.helpers.runs import component, fit, run_config, write_retrieval_folder
from tests.modules.language_runs import language_config


def test_a_module_without_an_embedder_is_refused_by_name():
    class Bare(L.LightningModule):
        pass

    class Needy(L.Callback):
        pass

    with pytest.raises(UserError, match="Needy needs a module with an embedder, got Bare; remove Needy"):
        embedder_of(Bare(), Needy())


def run_with_export(tmp_path, best, **lengths):
    config = run_config(tmp_path)
    folder = write_retrieval_folder(tmp_path / "eval")
    config["trainer"]["callbacks"] = [
        component("RetrievalEvaluation", folder=str(folder), every_n_steps=1),
        # The maximum loss selects a checkpoint whose weights differ from the last ones.
        component("ModelCheckpoint", monitor="train/loss", mode="max", every_n_train_steps=1, save_top_k=1),
        component("ExportModel", output=str(tmp_path / "model"), best=best, **lengths),
    ]
    return fit(tmp_path, config)


def exported(tmp_path):
    return load_file(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize("best", [True, False])
def test_the_best_or_the_last_weights_are_written_with_a_card_and_the_export_length(best, tmp_path):
    cli = run_with_export(tmp_path, best, document_max_length=60)
    kept = read_checkpoint(cli.trainer.checkpoint_callback.best_model_path)
    states, steps = (cli.model.state_dict(), kept["state_dict"]), (cli.trainer.global_step, kept["global_step"])
    found = exported(tmp_path)
    assert len(found) > 10
    assert all(torch.equal(value, states[best][f"embedder.backbone.{name}"]) for name, value in found.items())
    # With `best`, the module has the best weights too.
    if not best:
        assert any(not torch.equal(value, states[1][f"embedder.backbone.{name}"]) for name, value in found.items())
    text = (tmp_path / "model" / "README.md").read_text()
    assert f"| optimiser steps | {steps[best]} |" in text
    assert "| pairs | files | 64 | unknown |" in text
    assert re.search(rf"Validation nDCG@10 during training, .*: [01]\.\d+ after {steps[best]} steps", text)
    assert f"SentenceTransformer({str(tmp_path / 'model')!r}, trust_remote_code=True)" in text
    assert cli.datamodule.text.document_max_length != 60
    written = Embedder.from_pretrained(tmp_path / "model").text
    assert written == replace(cli.datamodule.text, document_max_length=60)


def two_exports(folder, first, second):
    """A run of `Trainer` with two exports whose best weights are not the last ones; returns the module."""
    kept = ModelCheckpoint(monitor="train/loss", mode="max", every_n_train_steps=1, filename="best")
    exports = [ExportModel(str(folder / "first"), **first), ExportModel(str(folder / "second"), **second)]
    module, data = parts(folder)
    trainer(folder, 4, kept, *exports).fit(module, data)
    return module


def test_the_last_weights_are_exported_beside_the_best(tmp_path):
    two_exports(tmp_path, {"best": True}, {"best": False})
    last = read_checkpoint(next(tmp_path.rglob("last.ckpt")))["state_dict"]
    written = load_file(tmp_path / "second" / "model.safetensors")
    assert all(torch.equal(value, last[f"embedder.backbone.{name}"]) for name, value in written.items())
    best = load_file(tmp_path / "first" / "model.safetensors")
    assert any(not torch.equal(best[name], value) for name, value in written.items())


def test_lengths_of_an_export_do_not_change_the_model(tmp_path):
    module = two_exports(tmp_path, {"best": False, "document_max_length": 60}, {"best": False})
    lengths = [Embedder.from_pretrained(tmp_path / name).text.document_max_length for name in ("first", "second")]
    assert lengths == [60, 16]
    assert module.embedder.text.document_max_length == 16


def test_a_fast_development_run_writes_nothing(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["fast_dev_run"] = True
    config["trainer"]["callbacks"] = [component("ExportModel", output=str(tmp_path / "model"))]
    fit(tmp_path, config)
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("remote_code")
def test_the_exported_model_has_the_prompts_of_its_sources(tmp_path):
    config = run_config(tmp_path)
    config["data"]["init_args"]["sources"][0] |= {"instruction": "Find it", "document_prompt": "passage: "}
    config["trainer"]["callbacks"] = [component("ExportModel", output=str(tmp_path / "model"))]
    fit(tmp_path, config)
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32")
    prompt = instruction_prompt("Find it")
    assert encoder.embedder.text.prompts == {"pairs": prompt, "query": prompt, "document": "passage: "}
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        assert abs(encoder.encode(["the quick fox"], role=role) - encode(["the quick fox"])).max() <= 1e-5
    plain = Embedder.from_pretrained(tmp_path / "model")
    plain.text = replace(plain.text, prompts={})
    without = Encoder(plain, precision="float32").encode(["the quick fox"], role="query")
    assert abs(encoder.encode(["the quick fox"], role="query") - without).max() > 1e-3


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_model_of_another_run_is_replaced_only_on_request(tmp_path):
    run_with_export(tmp_path, best=False)
    before = exported(tmp_path)
    words = ["fit", "--config", str(tmp_path / "config.yaml")]
    with pytest.raises(OptionError, match=r"ExportModel\.output must not contain a model of another run, got "):
        run_trainer([*words, "--seed_everything=5"])
    assert all(torch.equal(value, before[name]) for name, value in exported(tmp_path).items())
    assert [path.name for path in (tmp_path / "run" / "tiny").iterdir()] == ["version_0"]
    # The same run, resumed, writes its own model again.
    trainer = run_trainer([*words, "--ckpt_path=auto", "--trainer.max_steps=5"]).trainer
    assert trainer.global_step == 5
    resumed = exported(tmp_path)
    assert any(not torch.equal(resumed[name], before[name]) for name in before)
    # A model without a run id counts as another run's.
    (tmp_path / "model" / MODEL_RUN_FILE).unlink()
    with pytest.raises(OptionError, match=r"ExportModel\.output must not contain a model of another run, got "):
        run_trainer([*words, "--ckpt_path=auto", "--trainer.max_steps=6"])
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["trainer"]["callbacks"][2]["init_args"]["replace"] = True
    fit(tmp_path, config, "--seed_everything=5")
    assert any(not torch.equal(value, resumed[name]) for name, value in exported(tmp_path).items())


@pytest.mark.parametrize("best", [False, True])
def test_the_best_or_the_last_language_model_is_written(best: bool, tmp_path: Path) -> None:
    config = language_config(tmp_path, "mlm")
    config["trainer"] |= {"max_steps": 3, "val_check_interval": 1, "check_val_every_n_epoch": None}
    # The first loss is the highest, so best and last differ.
    keep = component("ModelCheckpoint", monitor="val/loss", mode="max", save_on_train_epoch_end=False)
    export = component("ExportLanguageModel", output=str(tmp_path / "model"), best=best)
    config["trainer"]["callbacks"] = [keep, export]
    cli = fit(tmp_path, config)
    written = load_file(tmp_path / "model" / "model.safetensors")
    kept = read_checkpoint(cli.trainer.checkpoint_callback.best_model_path)["state_dict"]
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(written[name], kept[f"language_model.model.{name}"]) is best
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_module_without_a_language_model_and_a_file_at_the_output_are_refused(tmp_path: Path) -> None:
    export = component("ExportLanguageModel", output=str(tmp_path / "model"))
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [export]
    with pytest.raises(UserError, match="a module with a language model, got NVEmbedModule; use ExportModel"):
        fit(tmp_path, config)
    config = language_config(tmp_path, "mlm")
    config["trainer"]["callbacks"] = [export]
    (tmp_path / "model").write_text("mine")
    with pytest.raises(OptionError, match="which is not a folder"):
        fit(tmp_path, config)


def test_a_trial_replaces_the_trial_before_and_no_model_of_a_whole_run(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component("ExportModel", output=str(tmp_path / "model"))]
    fit(tmp_path, config)
    before = exported(tmp_path)
    parts, stand_in = ("--limit_data=20", "--trainer.limit-train-batches=2"), "--stand_in=tiny"
    for option in (*parts, stand_in, stand_in):
        caplog.clear()
        with caplog.at_level("INFO", "embeddings"):
            fit(tmp_path, config, option, "--trainer.max_steps=2")
        folder = "stand_in" if option == stand_in else "trials"
        assert f"model directory: checkpoints/{folder}/model" in caplog.messages
    assert all(torch.equal(value, before[name]) for name, value in exported(tmp_path).items())


def test_a_later_export_replaces_an_earlier_one(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component("ExportModel", output=str(tmp_path / name)) for name in ("a", "b")]
    fit(tmp_path, config)
    assert (tmp_path / "b" / "config.json").is_file()
    assert not (tmp_path / "a").exists()
