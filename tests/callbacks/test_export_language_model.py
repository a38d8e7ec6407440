from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embeddings.cli.fit import run_trainer
from embeddings.common import OptionError, UserError
from embeddings.common.checkpoint_file import read_checkpoint
from tests.helpers.runs import run_config, write_config
from tests.modules.language_runs import language_config


def export(folder: Path, best: bool = False) -> dict[str, Any]:
    init_args = {"output": str(folder / "model"), "best": best}
    return {"class_path": "embeddings.callbacks.ExportLanguageModel", "init_args": init_args}


@pytest.mark.parametrize("best", [False, True])
def test_the_best_or_the_last_weights_are_written(best: bool, tmp_path: Path) -> None:
    config = language_config(tmp_path, "mlm")
    config["trainer"] |= {"max_steps": 3, "val_check_interval": 1, "check_val_every_n_epoch": None}
    keep = {"monitor": "val/loss", "mode": "max", "save_on_train_epoch_end": False}
    config["trainer"]["callbacks"] = [
        # The highest loss is the first one's, so that best and last differ.
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep},
        export(tmp_path, best),
    ]
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    written = load_file(tmp_path / "model" / "model.safetensors")
    path = cli.trainer.checkpoint_callback.best_model_path
    kept = read_checkpoint(path)["state_dict"]
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(written[name], kept[f"language_model.model.{name}"]) is best
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    config = language_config(tmp_path, "mlm")
    config["trainer"] |= {"fast_dev_run": True, "logger": False}
    config["trainer"]["callbacks"] = [export(tmp_path)]
    run_trainer(["fit", "--config", write_config(tmp_path, config)])
    assert not (tmp_path / "model").exists()


def test_a_module_without_a_language_model_and_a_file_in_the_way_are_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [export(tmp_path)]
    with pytest.raises(UserError, match="NVEmbedModule trains none; use ExportModel"):
        run_trainer(["fit", "--config", write_config(tmp_path, config)])
    config = language_config(tmp_path, "mlm")
    config["trainer"]["callbacks"] = [export(tmp_path)]
    (tmp_path / "model").write_text("mine")
    with pytest.raises(OptionError, match="which is no folder"):
        run_trainer(["fit", "--config", write_config(tmp_path, config)])


def test_another_runs_language_model_stays(tmp_path: Path) -> None:
    config = language_config(tmp_path, "mlm")
    config["trainer"]["callbacks"] = [export(tmp_path)]
    words = ["fit", "--config", write_config(tmp_path, config), "--trainer.max_steps=2"]
    run_trainer(words)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(OptionError, match="must not hold a model of another run"):
        run_trainer(words)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
