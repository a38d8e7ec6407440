import json
import subprocess
from pathlib import Path

import torch
import yaml

from embeddings.callbacks.run_record import git_commit
from embeddings.cli.app import run_trainer
from embeddings.common.checkpoint_file import read_checkpoint
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
