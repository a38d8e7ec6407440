import json
import subprocess
from datetime import datetime
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from embeddings.callbacks import run_record
from embeddings.callbacks.run_record import RunRecord, git_commit
from embeddings.cli.fit import run_trainer
from embeddings.common import PreemptedError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.common.process import cpu_name
from tests.helpers.runs import run_config, write_config


def test_a_run_says_what_it_was(tmp_path):
    path = write_config(tmp_path, run_config(tmp_path))
    cli = run_trainer(["fit", "--config", path, "--trainer.max_steps", "2"])
    run = Path(cli.trainer.log_dir)
    record = json.loads((run / "run.json").read_text())
    assert record["command"] == f"python main.py fit --config {path} --trainer.max_steps 2"
    assert record["versions"]["torch"] == torch.__version__
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 2
    (checkpoint,) = run.rglob("*.ckpt")
    state = read_checkpoint(checkpoint)
    assert state["run_config"]["model"]["class_path"] == "embeddings.modules.NVEmbedModule"
    assert state["run_config"]["trainer"]["max_steps"] == 2


def test_a_second_run_keeps_the_first_ones_folder(tmp_path):
    path = write_config(tmp_path, run_config(tmp_path))
    first = run_trainer(["fit", "--config", path]).trainer.log_dir
    second = run_trainer(["fit", "--config", path]).trainer.log_dir
    assert first != second
    assert (Path(first) / "run.json").is_file()
    assert (Path(second) / "run.json").is_file()


def test_the_commit_is_marked_where_files_have_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    for command in (["init", "-q"], ["config", "user.name", "n"], ["config", "user.email", "e@example.org"]):
        subprocess.run(["git", *command], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run("git add file && git commit -qm one", shell=True, check=True)
    clean = git_commit()
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert git_commit() == clean + "+"


def test_a_run_notes_its_machine_its_size_its_data_and_its_end(tmp_path):
    cli = run_trainer(["fit", "--config", write_config(tmp_path, run_config(tmp_path))])
    record = json.loads((Path(cli.trainer.log_dir) / "run.json").read_text())
    weights = list(cli.model.parameters())
    total = sum(weight.numel() for weight in weights)
    assert record["parameters"] == {"total": total, "active": total, "trained": total}
    assert record["source_rows"] == {"pairs": 64}
    assert record["hardware"] == cpu_name()
    assert {name: record["end"][name] for name in ("step", "how", "why")} == {"step": 4, "how": "finished", "why": ""}
    assert datetime.fromisoformat(record["started"]) <= datetime.fromisoformat(record["end"]["time"])


class Raises(L.Callback):
    """Raises an error at the end of the second step."""

    def __init__(self, kind: str) -> None:
        self.error = {"failed": ValueError("bad"), "interrupted": PreemptedError("SIGTERM: stopped", 75)}[kind]

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            raise self.error


@pytest.mark.parametrize(("how", "why"), [("failed", "ValueError: bad"), ("interrupted", "SIGTERM: stopped")])
@pytest.mark.parametrize("is_full", [False, True])
def test_how_a_run_ended_before_its_time_is_noted_where_the_disk_takes_a_note(is_full, how, why, tmp_path, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [{"class_path": f"{__name__}.Raises", "init_args": {"kind": how}}]
    if is_full:
        written = run_record.write_json

        def write_json(path, value):
            if "end" in value:
                raise OSError("no space left")
            written(path, value)

        monkeypatch.setattr(run_record, "write_json", write_json)
    with pytest.raises((ValueError, PreemptedError)) as error:
        run_trainer(["fit", "--config", write_config(tmp_path, config)])
    assert not isinstance(error.value, OSError)
    (path,) = tmp_path.rglob("run.json")
    end = json.loads(path.read_text()).get("end")
    assert end is None if is_full else (end["how"], end["why"], end["step"]) == (how, why, 2)


def test_what_ends_before_the_folder_is_known_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = RunRecord(LightningArgumentParser(), {}, ["main.py"])
    record.on_exception(L.Trainer(logger=False, accelerator="cpu"), L.LightningModule(), ValueError("early"))
    assert list(tmp_path.iterdir()) == []
