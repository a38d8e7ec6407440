import os
import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from embeddings.cli.resume import keep_on_in_its_folder, newest_checkpoint


def save(path, seconds):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({}, path)
    os.utime(path, (seconds, seconds))
    return str(path)


def test_the_newest_whole_last_checkpoint_at_any_depth_is_taken(tmp_path):
    save(tmp_path / "a" / "version_0" / "last.ckpt", 1)
    newest = save(tmp_path / "a" / "version_1" / "last-v1.ckpt", 3)
    save(tmp_path / "a" / "version_1" / "last.ckpt", 2)
    save(tmp_path / "a" / "epoch=3.ckpt", 4)
    (tmp_path / "last.ckpt").write_bytes(b"half a file")
    assert newest_checkpoint(tmp_path) == newest
    assert newest_checkpoint(f"{tmp_path}/a/../a/") == newest


@pytest.mark.parametrize("folder", ["none", "."])
def test_a_folder_without_one_starts_anew(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_checkpoint(folder) is None
    assert newest_checkpoint(None) is None


def test_checkpoints_go_on_in_the_folder_that_lightning_knows(tmp_path, monkeypatch):
    """The best ones are known again only by the very same name of the folder, absolute or relative."""
    monkeypatch.chdir(tmp_path)
    saved = save(tmp_path / "runs" / "checkpoints" / "last.ckpt", 1)
    for root in ("runs", "./runs", str(tmp_path / "runs")):
        before = ModelCheckpoint(monitor="x")
        options = {"default_root_dir": root, "logger": False, "accelerator": "cpu"}
        trainer = Trainer(callbacks=[before], **options)
        before.setup(trainer, trainer.lightning_module, "validate")
        kept, elsewhere = ModelCheckpoint(monitor="x"), ModelCheckpoint(dirpath=tmp_path / "best")
        trainer = Trainer(callbacks=[kept, elsewhere], **options)
        found = newest_checkpoint(root)
        assert os.path.samefile(found, saved)
        keep_on_in_its_folder(trainer, found)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept.load_state_dict(before.state_dict() | {"best_k_models": {"a.ckpt": 1.0}})
        assert kept.best_k_models
        assert elsewhere.dirpath == str(tmp_path / "best")
