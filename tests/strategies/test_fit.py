"""The command line under strategies that cut the weights: scores, the best checkpoint, a resumed run, the export."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.processes import run_command
from tests.helpers.runs import component, run_config, write_config, write_retrieval_folder

DDP = component("lightning.pytorch.strategies.DDPStrategy")
FSDP2 = component("embeddings.strategies.FSDP2Strategy", process_group_backend="gloo")
ZERO_3 = component("tests.strategies.cpu_zero.CpuZero", stage=3, process_group_backend="gloo")


def fit(folder: Path, config: dict[str, Any], *extra: str) -> None:
    path = write_config(folder, config)
    environment = {**os.environ, "EMBED_IMPORTS": "tests", "DS_ACCELERATOR": "cpu"}
    words = ["main.py", "fit", "--config", path, *extra]
    if config["trainer"]["strategy"] == ZERO_3:  # DeepSpeed reads the environment when it is imported
        subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, timeout=280)
    else:
        run_command(words, env=environment, check=True)


def config_of(folder: Path, scores: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    config = run_config(folder)
    kept = {"monitor": "val/ndcg_at_10", "mode": "max", "every_n_train_steps": 2, "save_last": True}
    callbacks = [
        component("GradCacheCallback", mini_batch_tokens=64),
        component("RetrievalEvaluation", folder=str(scores), every_n_steps=2),
        component("ModelCheckpoint", **kept, dirpath=str(folder / "kept")),
        component("ExportModel", output=str(folder / "model"), replace=True),
    ]
    config["trainer"] |= {"devices": 2, "strategy": strategy, "callbacks": callbacks}
    return config


@pytest.mark.parametrize("strategy", [FSDP2, pytest.param(ZERO_3, marks=pytest.mark.slow)], ids=["fsdp2", "zero 3"])
def test_a_run_that_was_cut_short_exports_what_ddp_does(strategy: dict[str, Any], tmp_path: Path) -> None:
    scores = write_retrieval_folder(tmp_path / "retrieval")
    fit(tmp_path, config_of(tmp_path / "ddp", scores, DDP))
    config = config_of(tmp_path / "cut", scores, strategy)
    fit(tmp_path, config, "--trainer.max_steps=2", "--model.init_args.schedule.total_steps=4")
    fit(tmp_path, config, f"--ckpt_path={tmp_path / 'cut' / 'kept' / 'last.ckpt'}")
    found, expected = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("cut", "ddp"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-4)
