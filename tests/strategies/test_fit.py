"""`fit` on two ranks: evaluation, checkpoints, export, and resuming on another number of ranks."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embeddings.common.io import read_metrics
from tests.helpers.processes import run_command
from tests.helpers.runs import component, run_config, write_config, write_retrieval_folder

DDP = component("lightning.pytorch.strategies.DDPStrategy")
FSDP2 = component("embeddings.strategies.FSDP2Strategy", process_group_backend="gloo")
ZERO_3 = component("tests.strategies.cpu_zero.CpuZero", stage=3, process_group_backend="gloo")


def fit(folder: Path, config: dict[str, Any], *extra: str) -> None:
    path = write_config(folder, config)
    environment = {**os.environ, "EMBED_IMPORTS": "tests", "DS_ACCELERATOR": "cpu"}
    command = ["main.py", "fit", "--config", path, *extra]
    if config["trainer"]["strategy"] == ZERO_3:  # DeepSpeed reads the environment when it is imported
        subprocess.run([sys.executable, *command], env=environment, check=True, capture_output=True, timeout=280)
    else:
        run_command(command, env=environment, check=True)


def config_of(folder: Path, scores: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    config = run_config(folder)
    keep = {"monitor": "val/ndcg_at_10", "mode": "max", "every_n_train_steps": 2, "save_last": True}
    callbacks = [
        component("GradCacheCallback", mini_batch_tokens=64),
        component("RetrievalEvaluation", folder=str(scores), every_n_steps=2),
        component("ModelCheckpoint", **keep, dirpath=str(folder / "kept")),
        component("ExportModel", output=str(folder / "model"), replace=True),
    ]
    config["trainer"] |= {"devices": 2, "strategy": strategy, "callbacks": callbacks}
    return config


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP2, ZERO_3], ids=["fsdp2", "zero 3"])
def test_a_resumed_run_exports_the_weights_of_ddp(strategy: dict[str, Any], tmp_path: Path) -> None:
    scores = write_retrieval_folder(tmp_path / "retrieval")
    fit(tmp_path, config_of(tmp_path / "ddp", scores, DDP))
    config = config_of(tmp_path / "resumed", scores, strategy)
    fit(tmp_path, config, "--trainer.max_steps=2", "--model.init_args.schedule.total_steps=4")
    fit(tmp_path, config, f"--ckpt_path={tmp_path / 'resumed' / 'kept' / 'last.ckpt'}")
    actual, expected = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("resumed", "ddp"))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=2e-4)


def logged(folder: Path, ranks: int, strategy: Any, *callbacks: dict[str, Any]) -> list[dict[str, float]]:
    """The training metrics of each step of a run with eight pairs a step."""
    folder.mkdir()
    config = run_config(folder, batch_size=8 // ranks)
    config["trainer"] |= {"max_steps": 3, "devices": ranks, "strategy": strategy, "callbacks": list(callbacks)}
    fit(folder, config)
    (path,) = folder.rglob("metrics.csv")
    rows = [{name: float(row[name]) for name in row if name.startswith("train/")} for row in read_metrics(path)]
    assert len(rows) == 3
    assert {"train/loss", "train/accuracy", "train/positive_score"} <= rows[0].keys()
    return rows


CACHE = component("GradCacheCallback", mini_batch_tokens=64)


@pytest.mark.parametrize(
    ("strategy", "callbacks"),
    [
        pytest.param(DDP, [], id="ddp"),
        pytest.param(DDP, [CACHE], id="ddp, gradcache", marks=pytest.mark.slow),
        pytest.param(FSDP2, [CACHE], id="fsdp2, gradcache", marks=pytest.mark.slow),
        pytest.param(ZERO_3, [CACHE], id="zero 3, gradcache", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_log_the_values_of_one_rank_with_both_batches(
    strategy: dict[str, Any], callbacks: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = logged(tmp_path / "one", 1, "auto", *callbacks)
    for found, expected in zip(logged(tmp_path / "two", 2, strategy, *callbacks), alone, strict=True):
        assert found == pytest.approx(expected, rel=2e-3)


LEDGER = "tests.reliability.kills.Ledger"


def elastic_config(folder: Path, ranks: int, ledger: Path, sampler: str) -> dict[str, Any]:
    """Six steps of eight pairs on the given number of ranks; an epoch has six and a half steps."""
    config = run_config(folder, dropout=0.1)
    keep = {"dirpath": str(folder / "kept"), "every_n_train_steps": 3, "save_last": True, "save_top_k": 0}
    callbacks = [component(LEDGER, path=str(ledger), seconds=0.0), component("ModelCheckpoint", **keep)]
    strategy = DDP if ranks > 1 else "auto"
    config["trainer"] |= {"max_steps": 6, "devices": ranks, "strategy": strategy, "callbacks": callbacks}
    config["data"]["init_args"] |= {"batch_size": 8 // ranks, "sampler": {"class_path": f"embeddings.data.{sampler}"}}
    return config


def rows_of_steps(ledger: Path) -> dict[int, list[int]]:
    """The rows of each step, of all ranks."""
    rows_of = defaultdict(list)
    for line in ledger.read_text().splitlines():
        entry = json.loads(line)
        rows_of[entry["step"]] += entry["rows"]
    return {step: sorted(rows) for step, rows in rows_of.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "sampler"), [(2, 1, "BlendedBatchSampler"), (1, 2, "HomogeneousBatchSampler")]
)
def test_the_examples_of_a_step_do_not_depend_on_the_ranks(
    before: int, after: int, sampler: str, tmp_path: Path
) -> None:
    ledgers = [tmp_path / f"{name}.jsonl" for name in ("whole", "changed")]
    fit(tmp_path, elastic_config(tmp_path, 1, ledgers[0], sampler))
    three = ("--trainer.max_steps=3", "--model.init_args.schedule.total_steps=6")
    fit(tmp_path, elastic_config(tmp_path, before, ledgers[1], sampler), *three)
    last = max((tmp_path / "kept").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    fit(tmp_path, elastic_config(tmp_path, after, ledgers[1], sampler), f"--ckpt_path={last}")
    whole, changed = map(rows_of_steps, ledgers)
    assert list(changed) == [1, 2, 3, 4, 5, 6]
    assert changed == whole
    assert len({row for rows in whole.values() for row in rows}) > 40
