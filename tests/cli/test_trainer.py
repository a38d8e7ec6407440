"""`Trainer` in a script: the same record and bits as `fit`, and resuming."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

import embeddings as emb
from embeddings.callbacks import RunHealth, Throughput
from embeddings.callbacks.run_record import RunRecord
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.cli.parser import CONFIGS
from embeddings.cli.trainer import mixed_precision
from embeddings.common import TextSettings
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.models import LatentAttentionPooling
from tests.helpers.runs import backbone_folder, run_config, write_config, write_pairs

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")


def parts(folder: Path, lr: float = 1e-2, name: str = "backbone", **data: Any) -> tuple[Any, Any]:
    """The module and the data of `run_config`, made in Python."""
    L.seed_everything(0, verbose=False)
    module = emb.NVEmbedModule(
        emb.BackboneConfig(backbone_folder(folder / name, dropout=0.1)),
        pooling=partial(LatentAttentionPooling, num_latents=4, num_heads=2, head_dim=8),
        loss=emb.InfoNCE(0.1),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        schedule=emb.Schedule(1, "linear", total_steps=4),
    )
    pairs = emb.EmbeddingDataModule(
        [emb.SourceConfig("pairs", path=str(write_pairs(folder / "pairs.jsonl")))],
        text=TextSettings(16, 16),
        batch_size=8,
        num_negatives=2,
        cache_dir=str(folder / "cache"),
        **data,
    )
    return module, pairs


def trainer(folder: Path, steps: int, *callbacks: L.Callback, **options: Any) -> emb.Trainer:
    """A trainer on the CPU with a `last.ckpt` after each second step."""
    kept = ModelCheckpoint(every_n_train_steps=2, save_last=True, save_top_k=0)
    usual = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    usual |= {"max_steps": steps, "log_every_n_steps": 1, "default_root_dir": str(folder / "runs")}
    return emb.Trainer([kept, *callbacks], **{**usual, **options})


@pytest.mark.parametrize(
    ("accelerator", "has_cuda", "native", "expected"),
    [
        ("auto", False, "cuda", "32-true"),
        ("cpu", True, "cuda", "32-true"),
        ("auto", False, "cpu", "bf16-mixed"),
        ("auto", True, "cpu", "32-true"),
        ("gpu", True, "cpu", "32-true"),
        ("gpu", True, "cuda", "bf16-mixed"),
        ("gpu", False, "cpu", "bf16-mixed"),
    ],
)
def test_a_device_without_bfloat16_products_computes_in_float32(
    accelerator: str, has_cuda: bool, native: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr("embeddings.cli.trainer.has_native_bfloat16", lambda device: device.type == native)
    assert mixed_precision(accelerator) == expected


@pytest.mark.parametrize(
    ("precision", "has_bfloat16"), [("bf16-mixed", False), ("bf16-mixed", True), ("32-true", False)]
)
def test_a_run_in_emulated_bfloat16_warns(
    precision: str,
    has_bfloat16: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("embeddings.modules.base.has_native_bfloat16", lambda device: has_bfloat16)
    trainer(tmp_path, 1, precision=precision).fit(*parts(tmp_path))
    assert ("this device emulates bfloat16" in caplog.text) is (precision == "bf16-mixed" and not has_bfloat16)


def weights(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").rglob("version_*")
    return run


def test_a_script_trains_to_the_same_bits_as_fit(tmp_path: Path) -> None:
    module, pairs = parts(tmp_path)
    before = weights(module)
    trainer(tmp_path, 4).fit(module, pairs)
    assert not torch.equal(*(state["embedder.pooling.latents"] for state in (before, weights(module))))
    (tmp_path / "fit").mkdir()
    config = run_config(tmp_path / "fit", dropout=0.1)
    config["model"]["init_args"]["schedule"]["total_steps"] = 4
    del config["trainer"]["callbacks"]
    cli = run_trainer(["fit", f"--config={CONFIGS}/base.yaml", "--config", write_config(tmp_path, config)])
    assert_same_bits(weights(module), weights(cli.model))


def test_commands_and_the_model_card_can_read_a_scripts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, pairs = parts(tmp_path)
    trainer(tmp_path, 4, emb.ExportModel(str(tmp_path / "model"))).fit(module, pairs)
    run = run_of(tmp_path)
    assert main(["show", "curves", "--run", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    assert (run / "curves.png").is_file()
    assert "NVEmbedModule" in (run / "report.html").read_text()
    record = json.loads((run / "run.json").read_text())
    assert record["source_rows"] == {"pairs": 64}
    assert record["end"]["how"] == "finished"
    assert record["command"].startswith("python ")
    assert (run / "metrics.csv").read_text().count("\n") > 4
    card = (tmp_path / "model" / "README.md").read_text()
    stated = ("| pairs | files | 64 |", "| loss | InfoNCE |", "| optimiser steps | 4 |", "| seed | 0 |", "lr: 0.01")
    assert [part for part in stated if part not in card] == []
    words = ["export", "--checkpoint", str(next(run.rglob("last.ckpt"))), "--output", str(tmp_path / "exported")]
    assert main(words) == 0
    exported, trained = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("exported", "model"))
    assert exported == trained
    capsys.readouterr()


def test_a_scripts_record_has_all_arguments(tmp_path: Path) -> None:
    module, pairs = parts(tmp_path)
    trainer(tmp_path, 2, precision="bf16-mixed").fit(module, pairs)
    config = yaml.safe_load((run_of(tmp_path) / "config.yaml").read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    assert config["seed_everything"] == 0
    assert model["backbone"]["name"] == str(tmp_path / "backbone")
    assert model["pooling"]["init_args"] == {"num_latents": 4, "num_heads": 2, "head_dim": 8}
    assert model["loss"]["init_args"].items() >= {"temperature": 0.1, "tile_size": None}.items()
    assert model["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert model["optimizer"]["init_args"].items() >= {"lr": 0.01, "weight_decay": 0.01, "betas": [0.9, 0.999]}.items()
    schedule = {"warmup_steps": 1, "decay": "linear", "total_steps": 4, "within_max_time": False}
    assert model["schedule"] == schedule
    assert data["sources"][0].items() >= {"path": str(tmp_path / "pairs.jsonl"), "weight": 1.0}.items()
    assert (data["text"]["query_max_length"], data["batch_size"]) == (16, 8)
    assert data["sampler"] == {"class_path": "embeddings.data.BlendedBatchSampler"}
    assert config["trainer"]["precision"] == "bf16-mixed"
    assert config["trainer"]["gradient_clip_val"] == 1.0
    kept = next(each for each in config["trainer"]["callbacks"] if each["class_path"].endswith("ModelCheckpoint"))
    assert kept["init_args"]["save_last"] is True
    checkpoint = read_checkpoint(next(tmp_path.rglob("last.ckpt")))
    assert checkpoint["run_config"]["model"] == config["model"]


@pytest.mark.parametrize("path", ["auto", "named"])
def test_a_resumed_run_ends_at_the_same_bits_in_its_own_folder(path: str, tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, pairs = parts(tmp_path)
    trainer(tmp_path / "whole", 4).fit(whole, pairs)
    first, pairs = parts(tmp_path)
    trainer(tmp_path / "halves", 2).fit(first, pairs)
    run = run_of(tmp_path / "halves")
    # As after a kill: a named checkpoint of a finished run does not continue in its folder.
    record = json.loads((run / "run.json").read_text())
    del record["end"]
    (run / "run.json").write_text(json.dumps(record))
    second, pairs = parts(tmp_path)
    checkpoint = "auto" if path == "auto" else next(run.rglob("last.ckpt"))
    trainer(tmp_path / "halves", 4).fit(second, datamodule=pairs, ckpt_path=checkpoint)
    assert not torch.equal(*(weights(each)["embedder.pooling.latents"] for each in (first, second)))
    assert_same_bits(weights(second), weights(whole))
    again = json.loads((run_of(tmp_path / "halves") / "run.json").read_text())
    assert again["id"] == record["id"]
    assert len(again["earlier"]) == 1
    curves = [(run_of(tmp_path / name) / "metrics.csv").read_text().splitlines() for name in ("whole", "halves")]
    assert len(curves[0]) == len(curves[1])


def test_default_options_and_callbacks_are_those_of_base_yaml() -> None:
    plain = emb.Trainer(accelerator="cpu")
    kinds = [type(callback) for callback in plain.callbacks]  # type: ignore[attr-defined]
    for kind in (ModelCheckpoint, LearningRateMonitor, RunHealth, Throughput):
        assert kinds.count(kind) == 1
    assert RunRecord.of(plain) is not None
    assert plain.gradient_clip_val == 1.0
    assert plain.num_sanity_val_steps == 0
    own = RunHealth(compare_every_n_steps=7)
    changed = emb.Trainer(own, accelerator="cpu", gradient_clip_val=None, enable_checkpointing=False)
    best = emb.Trainer(ModelCheckpoint(monitor="val/ndcg_at_10"), accelerator="cpu")
    assert {each.monitor for each in best.checkpoint_callbacks} == {None, "val/ndcg_at_10"}  # type: ignore[attr-defined]
    callbacks: list[L.Callback] = changed.callbacks  # type: ignore[attr-defined]
    assert [callback for callback in callbacks if isinstance(callback, RunHealth)] == [own]
    assert not [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    assert changed.gradient_clip_val is None
    assert RunRecord.of(emb.Trainer(accelerator="cpu", fast_dev_run=True)) is None


def test_a_run_that_ended_within_an_epoch_resumes_there_with_more_steps(tmp_path: Path) -> None:
    """`last.ckpt` is from the end of training here, because no earlier step had one."""
    options = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "log_every_n_steps": 1}
    states = []
    for name, steps in (("whole", (4,)), ("halves", (2, 4))):
        for number in steps:
            module, pairs = parts(tmp_path)
            root = str(tmp_path / name / "runs")
            emb.Trainer(max_steps=number, default_root_dir=root, **options).fit(module, pairs, ckpt_path="auto")
        states.append(weights(module))
    assert_same_bits(*states)
    epochs = [line.split(",")[0] for line in (run_of(tmp_path / "halves") / "metrics.csv").read_text().splitlines()]
    assert set(epochs) == {"epoch", "", "0"}
