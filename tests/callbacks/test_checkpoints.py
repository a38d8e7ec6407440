"""Durable checkpoints, written by training or by a thread, and the best one loaded after training."""

import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

from embeddings.callbacks import checkpoints
from embeddings.callbacks.checkpoints import DurableCheckpointIO, load_best, make_checkpoints_durable
from embeddings.common import InputError, OptionError
from embeddings.common.checkpoint_file import inspect_checkpoint, read_checkpoint, write_checkpoint
from embeddings.strategies import FSDP2Strategy
from tests.helpers.checkpoints import save
from tests.helpers.disks import fake_disk
from tests.helpers.runs import quiet_trainer

trainer = partial(quiet_trainer, enable_checkpointing=True)


class Held:
    """Stops writes of checkpoints until `gate` is set, and counts those that began."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_writes, self.gate = 0, threading.Event()
        patch.setattr(checkpoints, "write_checkpoint", self)

    def __call__(self, content: Any, path: Any) -> None:
        self.num_writes += 1
        assert self.gate.wait(timeout=60)
        write_checkpoint(content, path)


@pytest.fixture
def writer() -> Any:
    made = DurableCheckpointIO(asynchronous=True)
    yield made
    made.teardown()


def test_content_that_is_not_plain_is_refused_at_once_and_the_old_file_remains(
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
def test_a_remote_path_receives_the_same_file(asynchronous: bool, tmp_path: Path) -> None:
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


def test_single_file_checkpoints_are_durable_and_other_plugins_are_refused() -> None:
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
        with pytest.raises(OptionError, match=r"plugins .* got 'AsyncCheckpointIO'; use embeddings.*asynchro"):
            make_checkpoints_durable(made)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_older_checkpoint_is_removed_once_the_newer_is_complete(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []
    remove = checkpoints._remove

    def look(*arguments: Any) -> None:
        for task in arguments[1:]:
            task.result()
        seen.append({inspect_checkpoint(path)["global_step"] for path in tmp_path.glob("*.ckpt")})
        remove(*arguments)

    monkeypatch.setattr(checkpoints, "_remove", look)
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last=True)
    run = trainer(max_steps=4, limit_val_batches=0, callbacks=[keep], plugins=[DurableCheckpointIO(asynchronous)])
    run.fit(BoringModel())
    assert seen == [{1, 2}, {2, 3}, {3, 4}]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=4.ckpt"]
    assert {read_checkpoint(path)["global_step"] for path in tmp_path.iterdir()} == {4}


def test_changes_after_an_asynchronous_save_are_not_saved(
    tmp_path: Path, writer: DurableCheckpointIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
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


def test_a_save_waits_for_the_current_write(
    tmp_path: Path, writer: DurableCheckpointIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    writer.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    second = threading.Thread(target=writer.save_checkpoint, args=({"step": 2}, tmp_path / "b.ckpt"))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    assert held.num_writes == 1
    held.gate.set()
    second.join(timeout=60)
    assert not second.is_alive()
    assert writer.load_checkpoint(tmp_path / "b.ckpt") == {"step": 2}
    assert read_checkpoint(tmp_path / "a.ckpt") == {"step": 1}


def test_removals_wait_for_the_write_and_are_cancelled_if_it_fails(
    tmp_path: Path, writer: DurableCheckpointIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    writer.save_checkpoint({"step": 1}, old)
    writer.wait()
    held = Held(monkeypatch)
    writer.save_checkpoint({"step": 2}, new)
    writer.remove_checkpoint(old)
    assert old.exists()
    held.gate.set()
    writer.wait()
    assert os.listdir(tmp_path) == ["new.ckpt"]

    with monkeypatch.context() as patch:
        fake_disk(patch, 0)
        writer.save_checkpoint({"weight": torch.zeros(9)}, tmp_path / "newer.ckpt")
        writer.remove_checkpoint(new)
        with pytest.raises(OSError, match=r"No space left on device: .* available.*newer\.ckpt"):
            writer.save_checkpoint({"step": 4}, tmp_path / "newest.ckpt")
    assert os.listdir(tmp_path) == ["new.ckpt"]
    writer.save_checkpoint({"step": 4}, tmp_path / "newest.ckpt")
    writer.wait()
    assert sorted(os.listdir(tmp_path)) == ["new.ckpt", "newest.ckpt"]


def test_teardown_waits_and_raises_an_error_of_the_thread_once(
    tmp_path: Path, writer: DurableCheckpointIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
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


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


def monitored(path: object, monitor: str | None = "val/loss") -> ModelCheckpoint:
    kept = ModelCheckpoint(monitor=monitor)
    kept.best_model_path = str(path)
    return kept


def stub(*kept: ModelCheckpoint, asynchronous: bool = False) -> Any:
    strategy = SimpleNamespace(checkpoint_io=DurableCheckpointIO(asynchronous))
    return SimpleNamespace(checkpoint_callbacks=list(kept), strategy=strategy, global_step=7)


def test_the_first_monitored_checkpoint_is_loaded(tmp_path: Path) -> None:
    best = Line()
    save({"state_dict": best.state_dict(), "global_step": 3}, tmp_path / "best.ckpt")
    plain = monitored("elsewhere", monitor=None)
    first = monitored(tmp_path / "best.ckpt")
    second = monitored("elsewhere", "val/accuracy")
    module = Line()
    assert not torch.equal(module.layer.weight, best.layer.weight)
    assert load_best(stub(plain, first, second), module) == 3
    assert torch.equal(module.layer.weight, best.layer.weight)


def test_loading_waits_for_a_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, module, path = Line(), Line(), str(tmp_path / "best.ckpt")
    run, gate = stub(monitored(path), asynchronous=True), Held(monkeypatch).gate
    run.strategy.checkpoint_io.save_checkpoint({"state_dict": best.state_dict(), "global_step": 3}, path)
    threading.Timer(0.2, gate.set).start()
    load_best(run, module)
    assert torch.equal(module.layer.weight, best.layer.weight)
    run.strategy.checkpoint_io.teardown()


def test_a_remote_best_checkpoint_is_loaded() -> None:
    best, module, path = Line(), Line(), "memory://run/best.ckpt"
    DurableCheckpointIO().save_checkpoint({"state_dict": best.state_dict(), "global_step": 3}, path)
    assert load_best(stub(monitored(path)), module) == 3
    assert torch.equal(module.layer.weight, best.layer.weight)


def test_without_a_best_checkpoint_the_last_weights_remain(caplog: pytest.LogCaptureFixture) -> None:
    module = Line()
    before = module.layer.weight.clone()
    for path in ("", "nowhere.ckpt"):
        assert load_best(stub(monitored(path)), module) == 7
    start, end = "there is no checkpoint with the best val/loss", ": the last weights are used"
    assert caplog.messages == [start + end, f"{start} (nowhere.ckpt is missing){end}"]
    assert load_best(stub(), module) == 7
    assert torch.equal(module.layer.weight, before)
