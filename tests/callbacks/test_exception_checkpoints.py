from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from embeddings.callbacks.checkpoints import write_none_on_exception


class Refuses(L.Callback):
    """Ends a run at its second step, and says in time whether that is worth a checkpoint."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            raise ArithmeticError

    def on_exception(self, trainer: L.Trainer, *_: object) -> None:
        if self.silent:
            write_none_on_exception(trainer)


@pytest.mark.parametrize("silent", [False, True])
def test_a_callback_can_keep_checkpoints_from_being_written(silent: bool, tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    trainer = L.Trainer(accelerator="cpu", callbacks=[kept, Refuses(silent)], max_steps=4, **options)
    with pytest.raises(ArithmeticError):
        trainer.fit(BoringModel())
    assert [path.name for path in tmp_path.iterdir()] == ([] if silent else ["step=2.ckpt"])
