"""Checkpoints of full runs through the command line: content, disk space, full disks, and asynchronous writes."""

import errno
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from embeddings.callbacks import preemption
from embeddings.callbacks.checkpoints import check_checkpoint_room, checkpoint_bytes
from embeddings.cli.main import main
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.modules.checkpoint import configured_module
from tests.callbacks.preempted_runs import fit_words, preempted_config, signalled
from tests.helpers.checkpoints import save
from tests.helpers.disks import fake_disk
from tests.helpers.runs import component, fit, quiet_trainer, run_config, write_config

ASYNCHRONOUS = component("embeddings.callbacks.DurableCheckpointIO", asynchronous=True)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:Starting from v1.9.0, `tensorboardX`", "ignore:The dirpath has changed"
)


def checkpointed(folder: Path, asynchronous: bool = False, **options: Any) -> dict[str, Any]:
    """A run of four steps with a `last.ckpt` after each."""
    config = run_config(folder, dropout=0.1)
    keep = {"every_n_train_steps": 1, "save_last": True, "save_top_k": 0, **options}
    config["trainer"]["callbacks"] = [component("ModelCheckpoint", **keep)]
    config["trainer"]["plugins"] = [ASYNCHRONOUS] if asynchronous else None
    return config


def exit_code(folder: Path, config: dict[str, Any], *words: str) -> int:
    return main(["fit", "--config", write_config(folder, config), *words])


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_ends_the_run_with_code_74_and_the_previous_checkpoint_remains(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_writes, save = [0], torch.save

    def full(content: Any, file: Any) -> None:
        if "loops" in content:  # not the weights after training
            num_writes[0] -= 1
            if num_writes[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    for step in (2, 3):  # 2: another save follows the failed one; 3: the failed one is the last of the run
        num_writes[0] = step
        folder = tmp_path / str(step)
        folder.mkdir()
        assert exit_code(folder, checkpointed(folder, asynchronous)) == 74
        assert "last.ckpt: No space left on device" in error_line(capsys)
        (path,) = folder.rglob("*.ckpt")
        assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []
        assert read_checkpoint(path)["global_step"] == step


def test_a_checkpoint_cannot_change_the_arguments_of_the_module(tmp_path: Path) -> None:
    """Lightning would pass the file's `hyper_parameters` to the module."""
    config = checkpointed(tmp_path)
    assert exit_code(tmp_path, config) == 0
    content = read_checkpoint(next(tmp_path.rglob("last.ckpt")))
    content["hyper_parameters"] = {"_class_path": "os.system", "command": "touch canary", "seed": 9}
    path = save(content, tmp_path / "hostile.ckpt")
    cli = fit(tmp_path, config, "--ckpt_path", path)
    assert cli.model._seed == 0


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (time.sleep(0.05), real(handle))[1])


def state(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "final.pt", weights_only=True)
    return found


@pytest.mark.usefixtures("slow_disk")
def test_a_stop_waits_for_the_thread_and_the_resumed_run_is_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preempted_config(tmp_path)
    assert exit_code(tmp_path, config) == 0
    uninterrupted, real, answered = state(tmp_path), preemption.answer, list[int]()

    def answer(number: int, where: str, checkpoint: Any, is_first: bool) -> Any:
        answered.append(read_checkpoint(checkpoint)["global_step"])
        return real(number, where, checkpoint, is_first)

    monkeypatch.setattr(preemption, "answer", answer)
    (tmp_path / "run").rename(tmp_path / "uninterrupted")
    config["trainer"]["callbacks"][0]["init_args"] |= {"every_n_train_steps": 2}
    config["trainer"]["plugins"] = [ASYNCHRONOUS]
    assert main(fit_words(tmp_path, signalled(config, step=3, numbers=[10]))) == 75
    assert answered == [3]
    assert main(fit_words(tmp_path, config)) == 0
    resumed = state(tmp_path)
    assert [name for name in uninterrupted if not torch.equal(uninterrupted[name], resumed[name])] == []
    found = sorted(path.name for path in (tmp_path / "run").rglob("*.ckpt"))
    assert found == ["epoch=1-step=6.ckpt", "last.ckpt"]


class SavesOwn(Callback):
    """Saves a checkpoint of the user's own beside those of `ModelCheckpoint`."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        kept: Any = trainer.checkpoint_callback
        if trainer.global_step == 2:
            trainer.save_checkpoint(Path(kept.dirpath) / "mine.ckpt")


def test_a_copy_and_a_users_own_checkpoint_remain_when_the_run_is_resumed(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    config["trainer"]["callbacks"].append(component("tests.callbacks.test_checkpoint_runs.SavesOwn"))
    assert exit_code(tmp_path, signalled(config, step=3, numbers=[10])) == 75
    (last,) = tmp_path.rglob("last.ckpt")
    copy = shutil.copyfile(last, last.with_name("copy.ckpt"))
    assert exit_code(tmp_path, config, "--ckpt_path", str(copy)) == 0
    found = sorted(path.name for path in (tmp_path / "run").rglob("*.ckpt"))
    assert found == ["copy.ckpt", "last.ckpt", "mine.ckpt"]


def test_too_little_disk_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = checkpointed(tmp_path, dirpath=str(tmp_path / "kept"))
    cli = fit(tmp_path, config)
    (last,) = tmp_path.rglob("last.ckpt")
    size, estimate = last.stat().st_size, checkpoint_bytes(cli.model)
    assert 0.8 * size < estimate < 1.2 * size
    needed, before = int(2.2 * estimate), sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    fake_disk(monkeypatch, needed - 1)
    assert exit_code(tmp_path, config) == 74
    line = error_line(capsys)
    says = f"No space left on device: {needed:,} bytes are needed and {needed - 1:,} available"
    assert line.startswith(f"error: {tmp_path / 'kept'}: {says}; ")
    assert sorted(tmp_path.rglob("*")) == before
    fake_disk(monkeypatch, needed)
    assert exit_code(tmp_path, config) == 0
    # A resumed run already has one of the two checkpoints.
    fake_disk(monkeypatch, needed - size)
    check_checkpoint_room(cli.trainer, cli.model, resumed=str(last))
    elsewhere = shutil.copyfile(last, tmp_path / "last.ckpt")
    for resumed in ("best", str(elsewhere)):
        with pytest.raises(OSError, match="No space left"):
            check_checkpoint_room(cli.trainer, cli.model, resumed)


def test_the_checkpoints_that_are_kept_need_disk_space(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = _with_state(nn.Linear(2, 3))
    size, of_weights = checkpoint_bytes(module), checkpoint_bytes(module, weights_only=True)
    assert (size, of_weights) == (4 * (6 + 3 * 3), 4 * 9)
    base, timed = (
        ModelCheckpoint("kept", save_last=True),
        ModelCheckpoint("kept", train_time_interval=timedelta(minutes=1)),
    )
    light = ModelCheckpoint("light", save_top_k=2, monitor="loss", save_weights_only=True)
    for callbacks, needed in (
        ([base], 3.2 * size),
        ([base, timed], 4.2 * size),
        ([light], 1.2 * size + 2 * of_weights),
    ):
        run = quiet_trainer(enable_checkpointing=True, callbacks=callbacks)
        fake_disk(monkeypatch, int(needed))
        check_checkpoint_room(run, module)
        fake_disk(monkeypatch, int(needed) - 1)
        with pytest.raises(OSError, match="No space left"):
            check_checkpoint_room(run, module)


def test_the_frozen_base_of_lora_needs_no_disk_space(tmp_path: Path) -> None:
    module = configured_module({"run_config": run_config(tmp_path, "mistral")}, "config")
    trained = sum(4 * parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in module.buffers())
    assert checkpoint_bytes(module) == 3 * trained + buffers  # AdamW has two numbers per weight
    module.frozen_base = None
    assert checkpoint_bytes(module) > 4 * trained


def test_a_run_without_local_checkpoints_needs_no_disk_space(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_disk(monkeypatch, 0)
    module: Any = nn.Linear(2, 3)
    keeping = quiet_trainer(enable_checkpointing=True)
    with pytest.raises(OSError, match=r"132 bytes are needed and 0 available"):
        check_checkpoint_room(keeping, _with_state(module))
    check_checkpoint_room(quiet_trainer(), module)
    remote = ModelCheckpoint("memory://run")
    check_checkpoint_room(quiet_trainer(enable_checkpointing=True, callbacks=[remote]), module)
    monkeypatch.setenv("SLURM_PROCID", "1")
    check_checkpoint_room(keeping, module)


def _with_state(module: Any) -> Any:
    """Freeze the matrix of six numbers; the three trained ones have two numbers of the optimiser each."""
    module.weight.requires_grad_(False)
    module.state_per_weight, module.frozen_names = lambda: 2.0, set
    return module


def test_half_precision_halves_the_estimate() -> None:
    module = _with_state(nn.Linear(2, 3))
    module.register_buffer("rows", torch.zeros(5, dtype=torch.int64))
    assert checkpoint_bytes(module) == 4 * (6 + 3 * 3) + 40
    assert checkpoint_bytes(module, "bf16-mixed") == 4 * (6 + 3 * 3) + 40
    assert checkpoint_bytes(module, "bf16-true") == 2 * (6 + 3 * 3) + 40
