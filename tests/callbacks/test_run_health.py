"""Numeric errors stop all ranks before an update and are recorded with their rows; routing statistics are logged."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from embeddings.callbacks import RoutingStatistics, RunHealth
from embeddings.callbacks.run_health import weights_checksum
from embeddings.cli.main import main
from embeddings.common import NumericError, OptionError
from embeddings.common.checkpoint_file import read_checkpoint
from tests.helpers.processes import run_command
from tests.helpers.runs import component, fit, logged_rows, run_config, write_config
from tests.modules.language_runs import language_config
from tests.modules.moe_modules import moe_config

HEALTH = component("RunHealth", compare_every_n_steps=1)


def checkpoint(every_n_steps):
    return component("ModelCheckpoint", every_n_train_steps=every_n_steps, save_last=True, save_on_exception=True)


def poison(name, **arguments):
    return component(f"tests.helpers.poison.{name}", **arguments)


def written(folder):
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.rglob("numeric-error-rank-*.json"))}


@pytest.mark.parametrize(
    ("callback", "message", "first_batch"),
    [
        (poison("PoisonLoss", rank=0, batch=3), "loss is nan at step 3: no update was made", 3),
        (poison("PoisonGradient", batch=2), "gradient is inf at step 2: no update was made", 2),
    ],
)
def test_a_numeric_error_stops_the_run_and_the_rows_are_recorded(callback, message, first_batch, tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [callback, HEALTH, checkpoint(every_n_steps=2)]
    with pytest.raises(NumericError, match=message):
        fit(tmp_path, config)
    found = written(tmp_path)["numeric-error-rank-0.json"]
    assert (found["error"], found["step"], found["rank"]) == (message, first_batch, 0)
    assert [read["batch"] for read in found["batches"]] == [first_batch]
    rows = found["batches"][0]["rows"]["pairs"]
    assert len(set(rows)) == 8
    assert all(0 <= row < 64 for row in rows)
    # The checkpoints are from before the error, and finite.
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["epoch=0-step=2.ckpt", "last.ckpt"]
    state = read_checkpoint(next(tmp_path.rglob("last.ckpt")))
    assert state["global_step"] == 2
    assert all(value.isfinite().all() for value in state["state_dict"].values() if value.is_floating_point())


def test_rows_of_plain_texts_are_recorded_too(tmp_path):
    config = language_config(tmp_path, "mlm")
    config["trainer"]["callbacks"] = [poison("PoisonLoss", rank=0, batch=2), HEALTH]
    with pytest.raises(NumericError, match="loss is nan at step 2"):
        fit(tmp_path, config)
    (read,) = written(tmp_path)["numeric-error-rank-0.json"]["batches"]
    rows = read["rows"]["texts"]
    assert (read["batch"], len(rows), len(set(rows))) == (2, 8, 8)
    assert min(rows) >= 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_rows_of_all_accumulated_batches_are_recorded_after_a_resume_too(tmp_path):
    config = run_config(tmp_path)
    config["trainer"] |= {"accumulate_grad_batches": 2, "max_steps": 2}
    config["trainer"]["callbacks"] = [checkpoint(every_n_steps=2)]
    fit(tmp_path, config)
    config["trainer"]["callbacks"] += [poison("PoisonLoss", rank=0, batch=5), HEALTH]
    with pytest.raises(NumericError, match="at step 2"):
        fit(tmp_path, config, "--trainer.max_steps=4", "--ckpt_path", "auto")
    assert [read["batch"] for read in written(tmp_path)["numeric-error-rank-0.json"]["batches"]] == [4, 5]


@pytest.mark.parametrize(
    ("callback", "line"),
    [
        (poison("PoisonLoss", rank=1, batch=1), "loss of another rank is NaN or infinite at step 1: no update was"),
        (poison("DriftingWeight", step=2), "the weights of rank 1 differ from those of rank 0 after step 2"),
    ],
)
def test_all_ranks_stop_if_one_has_a_numeric_error(callback, line, tmp_path):
    config = run_config(tmp_path)
    config["trainer"] |= {"devices": 2, "strategy": "ddp"}
    config["trainer"]["callbacks"] = [callback, HEALTH, checkpoint(every_n_steps=500)]
    ended = run_command(["main.py", "fit", "--config", write_config(tmp_path, config)])
    assert ended.returncode == 70, ended.stderr
    assert line in ended.stderr
    assert sorted(written(tmp_path)) == ["numeric-error-rank-0.json", "numeric-error-rank-1.json"]
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_a_killed_data_worker_is_reported_at_once(tmp_path):
    config = run_config(tmp_path, num_workers=2)
    config["trainer"]["callbacks"] = [poison("KillWorker", batch=1)]
    start = time.monotonic()
    ended = run_command(["main.py", "fit", "--config", write_config(tmp_path, config)])
    assert ended.returncode == 70, ended.stderr
    worker = re.search(r"worker (\d+)", ended.stdout)[1]
    *_, line = ended.stderr.strip().splitlines()
    assert line.startswith(f"error: a data loader worker, process {worker}, was killed by a signal (Killed); lower")
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - start < 30 + 20


def test_a_flipped_bit_and_a_swap_of_two_parameters_change_the_checksum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    before = weights_checksum(model)
    assert before == weights_checksum(model)
    with torch.no_grad():
        bits = model[0].weight.view(-1).view(torch.int16)
        for bit in range(15):
            bits[5] ^= 1 << bit
            assert weights_checksum(model) != before
            bits[5] ^= 1 << bit
    assert weights_checksum(model) == before
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    assert weights_checksum(model) != before


def test_invalid_options_are_refused():
    with pytest.raises(OptionError, match=r"RunHealth\.compare_every_n_steps must be >= 1, got 0"):
        RunHealth(0)
    # The parser accepts null in the arguments of a class.
    for value in (0, None):
        with pytest.raises(OptionError, match=rf"RoutingStatistics\.every_n_steps must be >= 1, got {value}"):
            RoutingStatistics(every_n_steps=value)


CALLBACK = component("RoutingStatistics", every_n_steps=2)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_routing_is_logged_every_n_steps_and_once_per_step_after_a_resume(tmp_path: Path) -> None:
    config = moe_config(tmp_path)
    keep = component("ModelCheckpoint", every_n_train_steps=2, save_last=True)
    config["trainer"]["callbacks"] = [config["trainer"]["callbacks"][0], CALLBACK, keep]
    config["trainer"] |= {"accumulate_grad_batches": 2, "max_steps": 2}
    fit(tmp_path, config)
    assert [row["step"] for row in logged_rows(tmp_path, "routing/load_entropy")] == ["2"]
    fit(tmp_path, config, "--trainer.max_steps=4", "--ckpt_path", "auto")
    rows = logged_rows(tmp_path, "routing/load_entropy")
    assert [row["step"] for row in rows] == ["2", "4"]
    assert 0 < float(rows[1]["routing/load_entropy_layer_1"]) <= 1
    assert float(rows[1]["routing/highest_load_layer_1"]) >= 1


def test_a_module_without_experts_is_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [CALLBACK]
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 2
    says = "RoutingStatistics needs a module with experts and load_balancing, got NVEmbedModule; remove the callback"
    assert says in capsys.readouterr().err
