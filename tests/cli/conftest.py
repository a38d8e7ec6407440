"""A model directory, sweeps of tiny runs, and faked runs of sweeps."""

import json
import os

import pytest
import yaml

from embeddings.models import BackboneConfig, Embedder, MeanPooling, load_backbone
from tests.helpers.runs import backbone_folder, run_config, write_config


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path, monkeypatch):
    """Commands run in the test's folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model directory that mean-pools a tiny BERT."""
    folder = tmp_path_factory.mktemp("model")
    backbone, tokenizer = load_backbone(BackboneConfig(backbone_folder(folder / "backbone")))
    Embedder(backbone, tokenizer, MeanPooling(32)).save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a sweep of tiny runs; returns its path."""
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"every_n_train_steps": 1, "save_last": True, "monitor": "train/loss"},
        },
        {"class_path": "tests.cli.test_sweep.CutShort"},
        {"class_path": "embeddings.callbacks.ExportModel", "init_args": {"output": "elsewhere/model"}},
    ]
    path = write_config(tmp_path, config, "tiny.yaml")

    def write(parameters, **more):
        content = {"configs": [path], "parameters": parameters, "metric": {"column": "train/loss", "mode": "min"}}
        (tmp_path / "tried.yaml").write_text(yaml.safe_dump(content | more))
        return "tried.yaml"

    return write


@pytest.fixture
def faked(monkeypatch):
    """The runs' folders in the order of the runs, and a dict of endings; nothing is trained or checked.

    An ending of a point is the exit code of its run and the signals that are sent to the sweep during the run.
    """
    folders, endings = [], {}

    def train(run, lock, forwarder):
        folders.append(run.folder)
        code, *signals = endings.get(run.index, (0,))
        for number in signals:
            os.kill(os.getpid(), number)
        if code == 0:
            loss = run.point.get("a", 0) + run.point.get("seed_everything", 0) / 10
            summary = dict.fromkeys(("last", "min", "max"), loss) | {"min_step": 3}
            record = {"seconds": 1.0, "metrics": {"train/loss": summary}}
            (run.folder / "done.json").write_text(json.dumps(record))
        return code

    monkeypatch.setattr("embeddings.cli.sweep.train", train)
    monkeypatch.setattr("embeddings.cli.sweep.check_runs", lambda *_: None)
    return folders, endings
