"""The progress of a run: steps of the whole run, not batches of an epoch, whatever stderr is."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from embeddings.callbacks import StepProgress
from embeddings.cli.fit import TrainerCLI, run_trainer
from embeddings.common import OptionError
from tests.helpers.runs import run_config, write_config

EACH_STEP: dict[str, Any] = {"class_path": "embeddings.callbacks.StepProgress", "init_args": {"every_seconds": 0}}


def fit(folder: Path, *arguments: str, callbacks: list[dict[str, Any]], **trainer: Any) -> TrainerCLI:
    config = run_config(folder)
    config["trainer"] |= {"enable_progress_bar": None, "callbacks": callbacks, **trainer}
    return run_trainer(["fit", "--config", write_config(folder, config), *arguments])


def steps_shown(stderr: str) -> list[str]:
    return [found[1] for line in stderr.splitlines() if (found := re.match(r"training:.*?(\d+/[\d?]+) \[", line))]


def test_a_log_gets_one_line_a_step_with_loss_and_time_left(tmp_path, capsys):
    fit(tmp_path, callbacks=[EACH_STEP])
    stderr = capsys.readouterr().err
    assert steps_shown(stderr) == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    lines = [line for line in stderr.split("\n") if "training:" in line]
    assert not any("\r" in line for line in lines)
    assert all(re.search(r"train/loss=\d", line) for line in lines[1:])
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, ", lines[2])  # time taken < time left


def test_lines_come_no_oftener_than_asked(tmp_path, capsys):
    rare = EACH_STEP | {"init_args": {"every_seconds": 3600.0}}
    fit(tmp_path, callbacks=[rare])
    assert steps_shown(capsys.readouterr().err) == ["0/4", "4/4"]


def test_an_accumulated_batch_is_no_step_and_epochs_are_one_run(tmp_path, capsys):
    fit(tmp_path, callbacks=[EACH_STEP], max_steps=-1, max_epochs=2, accumulate_grad_batches=4)
    stderr = capsys.readouterr().err
    assert steps_shown(stderr) == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    epochs = re.findall(r"(\d)/4 \[.*epoch=(\d)", stderr)
    assert epochs == [("1", "0"), ("2", "0"), ("3", "1"), ("4", "1")]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_begins_at_its_step(tmp_path, capsys):
    checkpoint = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(tmp_path / "kept"), "save_last": True, "every_n_train_steps": 2},
    }
    fit(tmp_path, callbacks=[EACH_STEP, checkpoint], max_steps=2)
    capsys.readouterr()
    config = str(tmp_path / "config.yaml")
    run_trainer(
        ["fit", "--config", config, "--trainer.max_steps", "4", "--ckpt_path", str(tmp_path / "kept/last.ckpt")]
    )
    assert steps_shown(capsys.readouterr().err) == ["2/4", "3/4", "4/4"]


def test_a_terminal_gets_one_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(tmp_path, callbacks=[])
    bars = [line for line in capsys.readouterr().err.split("\n") if "training:" in line]
    assert len(bars) == 1
    assert bars[0].count("\r") > 1
    assert re.search(r"4/4 \[[^\r]*$", bars[0])


@pytest.mark.parametrize(
    ("callbacks", "enabled", "expected"),
    [
        ([], None, StepProgress),
        ([], False, type(None)),
        ([{"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}], None, TQDMProgressBar),
    ],
)
def test_the_command_line_shows_it_unless_told_otherwise(tmp_path, callbacks, enabled, expected):
    trainer = fit(tmp_path, callbacks=callbacks, enable_progress_bar=enabled, max_steps=2).trainer
    assert type(trainer.progress_bar_callback) is expected


def test_other_ranks_show_nothing(tmp_path, capsys):
    bar = StepProgress(every_seconds=0)
    bar.disable()
    trainer = fit(tmp_path, callbacks=[], max_steps=2).trainer
    capsys.readouterr()
    bar.setup(trainer, trainer.lightning_module, "fit")
    bar.on_train_start(trainer, trainer.lightning_module)
    bar.on_train_end(trainer, trainer.lightning_module)
    assert capsys.readouterr().err == ""


def test_negative_seconds_are_refused():
    with pytest.raises(OptionError, match=r"StepProgress\.every_seconds"):
        StepProgress(every_seconds=-1)
