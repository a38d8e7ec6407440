"""The language-modelling configs hold their sources' numbers and build what they configure, on tiny stand-ins."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning import LightningDataModule, LightningModule

from embeddings.cli.fit import run_trainer
from embeddings.data import TextDataModule
from embeddings.models import load_backbone
from embeddings.models.backbone import BackboneConfig
from embeddings.modules import MaskedLMModule
from embeddings.training.language_task import Masking
from tests.configs.test_nv_embed_configs import flat
from tests.configs.test_nv_embed_tables import CONFIGS, read
from tests.helpers.runs import write_config
from tests.helpers.tiny import wordpiece_tokenizer
from tests.models.language_models import language_model_folder

# The release's train_configs/mntp/Mistral.json and run_mntp.py.
MNTP = {
    "trainer.max_steps": 1000,
    "trainer.val_check_interval": 100,
    "model.init_args.objective": "mntp",
    "model.init_args.backbone.name": "mistralai/Mistral-7B-Instruct-v0.2",
    "model.init_args.backbone.dtype": "bfloat16",
    "model.init_args.masking.probability": 0.8,
    "model.init_args.masking.mask_fraction": 1.0,
    "model.init_args.masking.mask_token": "_",
    "model.init_args.lora.rank": 16,
    "model.init_args.lora.alpha": 32,
    "model.init_args.lora.dropout": 0.05,
    "model.init_args.optimizer.init_args.lr": 5e-5,
}
# §4.1 of the paper, then the released mmlm.yaml.
MLM = {
    "trainer.max_steps": 10_000,
    "trainer.gradient_clip_val": None,
    "model.init_args.objective": "mlm",
    "model.init_args.masking.probability": 0.3,
    "model.init_args.optimizer.init_args.lr": 4e-4,
    "model.init_args.optimizer.init_args.betas": [0.9, 0.98],
    "model.init_args.optimizer.init_args.weight_decay": 0.0,
    "model.init_args.schedule.warmup_steps": 1000,
}


def build(section: str, base: type, config: dict[str, Any]) -> Any:
    parser = ArgumentParser()
    parser.add_subclass_arguments(base, section)
    return parser.instantiate_classes(parser.parse_object({section: config[section]}))[section]


@pytest.mark.parametrize(("name", "expected"), [("mntp", MNTP), ("mlm_adapt", MLM)])
def test_methods_hold_their_sources_numbers(name: str, expected: dict[str, Any]) -> None:
    config = flat(read(CONFIGS / "methods" / f"{name}.yaml"))
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(("name", "kind"), [("mntp", "mistral"), ("mlm_adapt", "bert")])
def test_a_method_is_built_on_a_tiny_stand_in(name: str, kind: str, tmp_path: Path) -> None:
    config = read(CONFIGS / "methods" / f"{name}.yaml")
    config["model"]["init_args"]["backbone"]["name"] = language_model_folder(tmp_path, kind)
    module = build("model", LightningModule, config)
    assert isinstance(module, MaskedLMModule)
    trained = [name for name, weight in module.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in trained) is (name == "mntp")
    optimizer = module._make_optimizer()
    assert isinstance(optimizer, torch.optim.AdamW)
    if name == "mntp":
        assert module.task.masking == Masking(0.8, 1.0, 0.0, "_")
        assert module.task.mask_id == module.tokenizer.get_vocab()["_"]
    else:
        assert optimizer.defaults["betas"] == (0.9, 0.98)


@pytest.mark.parametrize(("name", "row_length", "rows"), [("mntp_wikitext", 512, 32), ("mlm_adapt", 2048, 4096)])
def test_data_holds_the_lengths_and_rows_of_a_step(
    name: str, row_length: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")
    config = read(CONFIGS / "data" / f"{name}.yaml")
    data, trainer = build("data", LightningDataModule, config), config["trainer"]
    assert isinstance(data, TextDataModule)
    assert data.row_length == row_length
    assert data.batch_size * trainer["devices"] * trainer.get("accumulate_grad_batches", 1) == rows


def test_the_adaptation_draws_languages_by_the_power_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")
    data = build("data", LightningDataModule, read(CONFIGS / "data" / "mlm_adapt.yaml"))
    assert isinstance(data, TextDataModule)
    plan = data.sampler([20_000, 200], 20, 0, [1.0, 1.0])
    rows = np.concatenate([plan.global_batch(0, step)[0] for step in range(30)])
    assert (rows >= 20_000).mean() == pytest.approx(1 / (1 + 100**0.3), abs=2 / 600)


def test_the_small_decoder_runs_as_its_file_says_and_its_directory_is_a_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sizes, tokenizer, packages and steps are changed."""
    monkeypatch.chdir(tmp_path)
    wordpiece_tokenizer().save_pretrained(tmp_path / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    with open(CONFIGS / "small_decoder.yaml", encoding="utf-8") as file:
        settings = yaml.safe_load(file)["model"]["init_args"]["from_scratch"]["settings"] | sizes
    small = {
        "trainer": {"max_steps": 3, "val_check_interval": 2, "enable_progress_bar": False, "limit_val_batches": 1},
        "model": {
            "init_args": {
                "from_scratch": {"tokenizer": "tokenizer", "settings": settings},
                "schedule": {"warmup_steps": 1},
            }
        },
        "data": {
            "init_args": {
                "cache_dir": "cache",
                "row_length": 32,
                "sources": [{"name": "packages", "packages": ["jsonargparse"]}],
                "validation_sources": [{"name": "held_out", "packages": ["fsspec"]}],
            }
        },
    }
    path = str((CONFIGS / "small_decoder.yaml").resolve())
    cli = run_trainer(["fit", "--config", path, "--config", write_config(tmp_path, small, "small.yaml")])
    assert cli.trainer.global_step == 3
    assert torch.isfinite(cli.trainer.callback_metrics["val/loss"])
    backbone, _ = load_backbone(BackboneConfig("checkpoints/small_decoder", bidirectional=True))
    assert type(backbone).__name__ == "MistralModel"
    assert backbone.config.hidden_size == 32
