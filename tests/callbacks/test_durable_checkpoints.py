import os

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO

from embeddings.callbacks.durable_checkpoints import DurableCheckpointIO, make_checkpoints_durable


def trainer(**options) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)


def test_a_checkpoint_has_its_name_once_it_is_on_disk(tmp_path, monkeypatch):
    path, done = tmp_path / "run" / "last.ckpt", []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (done.append(name), real(*args))[1])
    DurableCheckpointIO().save_checkpoint({"step": 3}, path)
    assert done == ["fsync", "replace", "fsync"]
    assert DurableCheckpointIO().load_checkpoint(path) == {"step": 3}
    assert os.listdir(path.parent) == ["last.ckpt"]


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_write_that_fails_is_an_error_and_leaves_the_old_checkpoint(error, tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    torch.save({"step": 1}, path)

    def refuse(*args):
        raise error("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(error):
        DurableCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_equal_checkpoints_are_equal_files(tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        DurableCheckpointIO().save_checkpoint({"weight": torch.arange(3)}, tmp_path / name)
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()


def test_a_remote_place_is_left_to_lightning():
    DurableCheckpointIO().save_checkpoint({"step": 3}, "memory://run/last.ckpt")
    assert DurableCheckpointIO().load_checkpoint("memory://run/last.ckpt") == {"step": 3}


@pytest.mark.parametrize(("plugins", "kind"), [([], DurableCheckpointIO), ([AsyncCheckpointIO()], AsyncCheckpointIO)])
def test_a_trainers_own_way_is_replaced_and_a_chosen_one_is_left(plugins: list[CheckpointIO], kind: type):
    made = trainer(plugins=plugins)
    make_checkpoints_durable(made)
    assert type(made.strategy.checkpoint_io) is kind
