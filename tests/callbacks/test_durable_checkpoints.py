import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO

from embeddings.callbacks.checkpoints import DurableCheckpointIO, finish_writing, make_checkpoints_durable
from embeddings.common import InputError, OptionError
from embeddings.common.checkpoint_file import inspect_checkpoint, read_checkpoint
from embeddings.strategies import FSDP2Strategy


def trainer(**options: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options)


class Held:
    """Holds the thread of an asynchronous writer at a stage until it is let go, and notes the stages."""

    def __init__(self, writer: DurableCheckpointIO, at: str = "write") -> None:
        self.at, self.stages, self.gate = at, list[str](), threading.Event()
        writer.on_stage = self

    def __call__(self, stage: str) -> None:
        self.stages.append(stage)
        if stage == self.at:
            assert self.gate.wait(timeout=60)


@pytest.fixture
def writer() -> Any:
    made = DurableCheckpointIO(asynchronous=True)
    yield made
    made.teardown()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_has_its_name_once_it_is_on_disk(asynchronous: bool, tmp_path: Path, monkeypatch) -> None:
    path, done = tmp_path / "run" / "last.ckpt", []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (done.append(name), real(*args))[1])
    writer = DurableCheckpointIO(asynchronous)
    writer.save_checkpoint({"step": 3}, path)
    writer.wait()
    assert done == ["fsync", "replace", "fsync"]
    assert writer.load_checkpoint(path) == {"step": 3}
    assert os.listdir(path.parent) == ["last.ckpt"]
    writer.teardown()


def test_what_is_not_plain_is_refused_at_once_and_the_old_one_stays(
    tmp_path: Path, writer: DurableCheckpointIO
) -> None:
    path = tmp_path / "last.ckpt"
    for asynchronous in (False, True):
        writer.asynchronous = asynchronous
        writer.save_checkpoint({"step": 1}, path)
        with pytest.raises(InputError, match=r"checkpoint\[callbacks\]\[Mine\]: is a pathlib\.PosixPath, "):
            writer.save_checkpoint({"callbacks": {"Mine": tmp_path}}, path)
        assert writer.load_checkpoint(path) == {"step": 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_remote_place_gets_the_same_file(asynchronous: bool, tmp_path: Path) -> None:
    import fsspec

    writer, content, place = DurableCheckpointIO(asynchronous), {"step": 3, "w": torch.ones(2)}, "memory://run/a.ckpt"
    writer.save_checkpoint(content, place)
    found = writer.load_checkpoint(place)
    assert (found["step"], found["w"].tolist()) == (3, [1.0, 1.0])
    writer.save_checkpoint(content, tmp_path / "a.ckpt")
    writer.wait()
    assert fsspec.filesystem("memory").cat_file("/run/a.ckpt") == (tmp_path / "a.ckpt").read_bytes()
    writer.remove_checkpoint(place)
    with pytest.raises(FileNotFoundError):
        writer.load_checkpoint(place)
    writer.teardown()


def test_single_files_are_written_so_and_another_way_is_refused() -> None:
    chosen: list[dict[str, Any]] = [{}, {"plugins": [TorchCheckpointIO()]}, {"strategy": "ddp"}]
    for options in (*chosen, {"strategy": FSDP2Strategy(process_group_backend="gloo")}):
        made = trainer(devices=1, **options)
        make_checkpoints_durable(made)
        assert type(made.strategy.checkpoint_io) is DurableCheckpointIO
    ours = DurableCheckpointIO(asynchronous=True)
    made = trainer(plugins=[ours])
    make_checkpoints_durable(made)
    assert made.strategy.checkpoint_io is ours
    for other in (AsyncCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())):
        made = trainer(plugins=[other])
        with pytest.raises(
            OptionError, match=r"trainer\.plugins .* got 'AsyncCheckpointIO'; give embeddings.*asynchro"
        ):
            make_checkpoints_durable(made)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_older_one_goes_when_the_newer_is_whole(asynchronous: bool, tmp_path: Path) -> None:
    """Lightning removes after the save, and what is in the way of a name is there until the new one is whole."""
    whole: list[list[int]] = []
    writer = DurableCheckpointIO(asynchronous)

    def look(stage: str) -> None:
        found = [inspect_checkpoint(path)["global_step"] for path in tmp_path.glob("*.ckpt")]
        whole.append(sorted(found))
        assert stage != "prune" or len(set(found)) == 2

    writer.on_stage = look
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last=True)
    run = trainer(max_steps=4, limit_val_batches=0, callbacks=[keep], plugins=[writer])
    run.fit(BoringModel())
    first = next(place for place, found in enumerate(whole) if found)
    assert all(whole[first:])
    assert [max(found) for found in whole[first:]] == sorted(max(found) for found in whole[first:])
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=4.ckpt"]
    assert {read_checkpoint(path)["global_step"] for path in tmp_path.iterdir()} == {4}


def test_what_changes_after_the_save_is_saved_as_it_was(tmp_path: Path, writer: DurableCheckpointIO) -> None:
    held = Held(writer)
    weight, tied, plain = torch.ones(2, 3), torch.ones(1), [1, {"a": 2}]
    for path, value in ((tmp_path / "a.ckpt", 1.0), (tmp_path / "b.ckpt", 2.0)):
        held.gate.clear()
        weight.fill_(value)
        plain[0] = value
        writer.save_checkpoint({"weight": weight.T, "tied": [tied, tied], "plain": plain}, path)
        weight.fill_(-1.0)
        tied.add_(1.0)
        plain[0] = None
        plain[1]["a"] += 1  # type: ignore[index]
        held.gate.set()
        writer.wait()
    one, two = (read_checkpoint(tmp_path / name) for name in ("a.ckpt", "b.ckpt"))
    assert (one["weight"].unique().tolist(), one["plain"], float(one["tied"][0])) == ([1.0], [1.0, {"a": 2}], 1.0)
    assert (two["weight"].unique().tolist(), two["plain"], float(two["tied"][0])) == ([2.0], [2.0, {"a": 3}], 2.0)


def test_one_write_is_under_way_and_the_next_save_waits(tmp_path: Path, writer: DurableCheckpointIO) -> None:
    held = Held(writer)
    writer.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    second = threading.Thread(target=writer.save_checkpoint, args=({"step": 2}, tmp_path / "b.ckpt"))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    assert held.stages == ["write"]
    held.gate.set()
    second.join(timeout=60)
    assert not second.is_alive()
    assert writer.load_checkpoint(tmp_path / "b.ckpt") == {"step": 2}
    assert read_checkpoint(tmp_path / "a.ckpt") == {"step": 1}
    assert [stage for stage in held.stages if stage in ("write", "done")] == ["write", "done", "write", "done"]


def test_removals_wait_for_the_write_and_are_dropped_if_it_fails(tmp_path: Path, writer: DurableCheckpointIO) -> None:
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    writer.save_checkpoint({"step": 1}, old)
    writer.wait()
    held = Held(writer, at="rename")
    writer.save_checkpoint({"step": 2}, new)
    writer.remove_checkpoint(old)
    assert old.exists()
    held.gate.set()
    writer.wait()
    assert held.stages[-4:] == ["sync folder", "done", "prune", "pruned"]
    assert os.listdir(tmp_path) == ["new.ckpt"]

    def full(stage: str) -> None:
        if stage == "sync":
            raise OSError(errno.ENOSPC, "No space left on device")

    writer.on_stage = full
    writer.save_checkpoint({"step": 3}, tmp_path / "newer.ckpt")
    writer.remove_checkpoint(new)
    with pytest.raises(OSError, match=r"No space left on device: .* available.*newer\.ckpt"):
        writer.save_checkpoint({"step": 4}, tmp_path / "newest.ckpt")
    assert os.listdir(tmp_path) == ["new.ckpt"]
    writer.on_stage = lambda stage: None
    writer.save_checkpoint({"step": 4}, tmp_path / "newest.ckpt")
    writer.wait()
    assert sorted(os.listdir(tmp_path)) == ["new.ckpt", "newest.ckpt"]


def test_the_end_waits_and_raises_what_the_thread_met_once(tmp_path: Path, writer: DurableCheckpointIO) -> None:
    held = Held(writer)
    writer.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    threading.Timer(0.2, held.gate.set).start()
    writer.teardown()
    assert read_checkpoint(tmp_path / "a.ckpt") == {"step": 1}
    (tmp_path / "file").touch()
    writer.save_checkpoint({"step": 1}, tmp_path / "file" / "a.ckpt")
    with pytest.raises(OSError, match=r"file/a\.ckpt"):
        writer.teardown()
    writer.teardown()
    threads = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("checkpoint") for name in threads)


def test_waiting_for_a_trainers_checkpoints(tmp_path: Path, writer: DurableCheckpointIO) -> None:
    finish_writing(trainer())
    held = Held(writer)
    made = trainer(plugins=[writer])
    writer.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    threading.Timer(0.2, held.gate.set).start()
    finish_writing(made)
    assert read_checkpoint(tmp_path / "a.ckpt") == {"step": 1}
