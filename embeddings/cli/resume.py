"""Where a run goes on: `--ckpt_path FILE` checked before it begins, and `--ckpt_path auto`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embeddings.cli.same_run import first_difference
from embeddings.common import InputError
from embeddings.common.slurm import is_first_process

if TYPE_CHECKING:
    import lightning as L

AUTO = "auto"

# What Lightning asks of a checkpoint to go on from; one of the weights alone lacks some.
_RESUMED = {"pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"}


def check_resumable(path: Path, run: Mapping[str, Any] | None = None) -> None:
    """Read a whole checkpoint, and check that training can go on from it.

    DeepSpeed's checkpoints are folders, and are taken for whole.

    Args:
        path: The checkpoint.
        run: The config of the run that it is to be of, as plain types; None for any.

    Raises:
        InputError: If it is damaged, none of this library's, one of the weights alone, or of another run.
    """
    from embeddings.common.checkpoint_file import inspect_checkpoint

    if path.is_dir():
        return
    content = inspect_checkpoint(path)
    missing = ", ".join(sorted(_RESUMED - content.keys()))
    if missing:
        what = f"cannot be gone on from, it holds no {missing}"
        raise InputError(str(path), what, "give a run's last.ckpt, or leave it out to start anew")
    saved = content.get("run_config")
    difference = first_difference(saved, run) if isinstance(saved, dict) and run is not None else None
    if difference is not None:
        raise InputError(str(path), f"is of another run: {difference}", "restore it, or name the file by --ckpt_path")


def newest_checkpoint(folder: str | Path | None, run: Mapping[str, Any] | None = None) -> str | None:
    """The newest `*.ckpt` at any depth of a folder from which the run can go on, or None: it then starts anew.

    One that cannot be used is left out, with one line on standard error; so is one of another run, which was given
    another model, other data or another seed (see `first_difference`). One that does not say what its run was given
    is taken.

    Args:
        folder: `trainer.default_root_dir`, which should be this run's alone; None for the working folder.
        run: The run's config as plain types; None where the folder has no other run's checkpoints.
    """
    # Lightning's own spelling of the folder, by which it knows a run's folder again.
    root = os.path.normpath(os.path.expanduser(folder or "."))
    found = [path for path in Path(root).rglob("*.ckpt") if path.exists()]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_resumable(path, run)
        except InputError as error:
            if is_first_process():
                print(f"left out: {error}", file=sys.stderr)
        else:
            return str(path)
    return None


def found_by_auto(folder: str | Path | None, run: Mapping[str, Any]) -> str | None:
    """What `--ckpt_path auto` stands for (see `newest_checkpoint`).

    None is told in one line on standard error, to somebody whose checkpoints lie elsewhere.
    """
    found = newest_checkpoint(folder, run)
    if found is None and is_first_process():
        print(f"nothing to go on from below {Path(folder or '.').resolve()}: the run begins anew", file=sys.stderr)
    return found


def show_place(data: Any, checkpoint: str | None) -> None:
    """Show a data module the place that its run goes on from, so that it refuses another plan before a file is written.

    Of a checkpoint that is one file only the header is read; others are left to the trainer.

    Args:
        data: The data module, one with `expect_state`; of another there is nothing to check.
        checkpoint: What the run goes on from, checked by `check_resumable`, or None.
    """
    expect = getattr(data, "expect_state", None)
    if expect is None or checkpoint is None or not Path(checkpoint).is_file():
        return
    from embeddings.common.checkpoint_file import peek_checkpoint

    # The name under which the trainer keeps a data module's state.
    expect(peek_checkpoint(checkpoint).get(type(data).__qualname__, {}))


def keep_on_in_its_folder(trainer: "L.Trainer", checkpoint: str) -> None:
    """Have the run keep its next checkpoints beside the one that it goes on from.

    A logger takes a new folder each time. In another folder Lightning would forget which checkpoints were the best.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    for kept in trainer.checkpoint_callbacks:
        if isinstance(kept, ModelCheckpoint) and kept.dirpath is None:
            kept.dirpath = str(Path(checkpoint).parent)
