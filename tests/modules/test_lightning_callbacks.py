"""Lightning's own callbacks around our modules: averages of weights, and searches for a rate and a batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.cli.main import main
from embeddings.common.checkpoint_file import read_checkpoint
from tests.helpers.runs import fit, run_config, write_config

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:The dirpath has changed",
    # Advice on layers that are sharded as they are made; these are made before, and not sharded.
    "ignore:You're using the WeightAveraging callback with a model that overrides",
    "ignore:SWA is currently only supported every epoch",
)


def with_callback(folder: Path, name: str, kind: str = "bert", **options: Any) -> dict[str, Any]:
    """A tiny run with one of Lightning's callbacks, and a checkpoint after each step."""
    config = run_config(folder, kind)
    module = "lightning.pytorch.callbacks"
    keep = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", "dirpath": str(folder / "kept")}
    config["trainer"]["callbacks"] = [
        {"class_path": f"{module}.ModelCheckpoint", "init_args": keep},
        {"class_path": f"{module}.{name}", "init_args": options},
    ]
    return config


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_averaged_weights_are_saved_resumed_and_left_in_the_model(kind: str, tmp_path: Path) -> None:
    config = with_callback(tmp_path, "EMAWeightAveraging", kind, decay=0.5)
    whole = fit(tmp_path, config).model.state_dict()
    last = read_checkpoint(tmp_path / "kept" / "step=4.ckpt")
    assert [name for name, value in last["state_dict"].items() if not torch.equal(value, whole[name])] == []
    assert any(not torch.equal(value, whole[name]) for name, value in last["current_model_state"].items())
    is_lora = kind == "mistral"
    assert (len(last["state_dict"]) < len(whole)) == (len(last["current_model_state"]) < len(whole)) == is_lora
    resumed = fit(tmp_path, config, "--ckpt_path", str(tmp_path / "kept" / "step=2.ckpt")).model.state_dict()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_stochastic_weight_averaging_runs_and_is_saved(tmp_path: Path) -> None:
    config = with_callback(tmp_path, "StochasticWeightAveraging", swa_lrs=1e-3, swa_epoch_start=1)
    config["trainer"] |= {"max_epochs": 3, "max_steps": -1}
    config["trainer"]["callbacks"][0]["init_args"] |= {"every_n_train_steps": None, "every_n_epochs": 1}
    assert fit(tmp_path, config).trainer.global_step == 24
    states = [read_checkpoint(path)["callbacks"] for path in (tmp_path / "kept").iterdir()]
    counts = {state["StochasticWeightAveraging"]["n_averaged"] for state in states}
    assert counts == {1, 2, 3}


def test_a_found_learning_rate_is_the_peak_of_the_schedule(tmp_path: Path) -> None:
    config = with_callback(tmp_path, "LearningRateFinder", num_training_steps=20, max_lr=0.1, early_stop_threshold=None)
    trainer = fit(tmp_path, config).trainer
    finder = next(one for one in trainer.callbacks if type(one).__name__ == "LearningRateFinder")
    found = finder.optimal_lr.suggestion()
    assert found is not None
    assert trainer.global_step == 4
    assert trainer.lr_scheduler_configs[0].scheduler.base_lrs == [found, found]


def test_a_found_batch_size_is_that_of_the_plan(tmp_path: Path) -> None:
    config = with_callback(tmp_path, "BatchSizeFinder", max_trials=3, steps_per_trial=1, init_val=3)
    cli = fit(tmp_path, config)
    assert cli.datamodule.batch_size == 12
    assert cli.trainer.global_step == 4
    states = read_checkpoint(tmp_path / "kept" / "step=4.ckpt")
    assert states["EmbeddingDataModule"]["loader"]["delivered"] == 4


def test_a_callback_that_changes_what_is_trained_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_callback(tmp_path, "BackboneFinetuning")
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 2
    assert "error: trainer.callbacks would train weights that the optimiser" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
