import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from embeddings.callbacks.checkpoints import check_checkpoint_room, checkpoint_bytes
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.modules.checkpoint import configured_module
from tests.helpers.disks import fake_disk
from tests.helpers.runs import run_config, write_config


def kept_config(folder: Path, **options: Any) -> dict[str, Any]:
    config = run_config(folder)
    keep = {"every_n_train_steps": 1, "save_last": True, "save_top_k": 0, **options}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep}
    config["trainer"] |= {"callbacks": [callback], "max_steps": 2}
    return config


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("optimizer", [{"class_path": "torch.optim.AdamW"}, {"class_path": "torch.optim.SGD"}])
def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(
    optimizer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = kept_config(tmp_path, dirpath=str(tmp_path / "kept"))
    config["model"]["init_args"]["optimizer"] = {**optimizer, "init_args": {"lr": 0.01}}
    words = ["fit", "--config", write_config(tmp_path, config)]
    cli = run_trainer(words)
    (last,) = tmp_path.rglob("last.ckpt")
    size, estimate = last.stat().st_size, checkpoint_bytes(cli.model)
    assert 0.8 * size < estimate < 1.2 * size
    needed, before = int(2.2 * estimate), files(tmp_path)
    capsys.readouterr()
    fake_disk(monkeypatch, needed - 1)
    assert main(words) == 74
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    says = f"No space left on device: {needed:,} bytes are needed and {needed - 1:,} available"
    assert line.startswith(f"error: {tmp_path / 'kept'}: {says}; ")
    assert files(tmp_path) == before
    fake_disk(monkeypatch, needed)
    assert main(words) == 0
    # A run that goes on has one of the two already.
    fake_disk(monkeypatch, needed - size)
    check_checkpoint_room(cli.trainer, cli.model, resumed=str(last))
    elsewhere = shutil.copyfile(last, tmp_path / "last.ckpt")
    for resumed in ("best", str(elsewhere)):
        with pytest.raises(OSError, match="No space left"):
            check_checkpoint_room(cli.trainer, cli.model, resumed)


def test_the_frozen_base_of_lora_takes_no_room(tmp_path: Path) -> None:
    module = configured_module({"run_config": run_config(tmp_path, "mistral")}, "config")
    trained = sum(4 * parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in module.buffers())
    assert checkpoint_bytes(module) == 3 * trained + buffers  # AdamW keeps two numbers a weight
    module.frozen_base = None
    assert checkpoint_bytes(module) > 4 * trained


def test_a_run_that_keeps_no_checkpoint_here_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_disk(monkeypatch, 0)
    module: Any = nn.Linear(2, 3)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    with pytest.raises(OSError, match=r"132 bytes are needed and 0 available"):
        check_checkpoint_room(L.Trainer(**options), _with_state(module))
    check_checkpoint_room(L.Trainer(**options, enable_checkpointing=False), module)
    remote = L.pytorch.callbacks.ModelCheckpoint("memory://run")
    check_checkpoint_room(L.Trainer(**options, callbacks=[remote]), module)
    monkeypatch.setenv("SLURM_PROCID", "1")
    check_checkpoint_room(L.Trainer(**options), module)


def _with_state(module: Any) -> Any:
    """A matrix of six numbers that is frozen, and three that are trained and have two of the optimiser's each."""
    module.weight.requires_grad_(False)
    module.state_per_weight = lambda: 2.0
    return module


def test_half_precision_halves_the_numbers() -> None:
    module = _with_state(nn.Linear(2, 3))
    module.register_buffer("rows", torch.zeros(5, dtype=torch.int64))
    assert checkpoint_bytes(module) == 4 * (6 + 3 * 3) + 40
    assert checkpoint_bytes(module, "bf16-mixed") == 4 * (6 + 3 * 3) + 40
    assert checkpoint_bytes(module, "bf16-true") == 2 * (6 + 3 * 3) + 40
