"""What ZeRO cannot do is refused; its gradients and checkpoints are tested with those of all strategies."""

from pathlib import Path

import lightning as L
import pytest

from embeddings.callbacks import GradCacheCallback
from embeddings.common import UserError
from tests.strategies.cpu_zero import CpuZero
from tests.strategies.fits import methods, write_models


def test_two_stages_under_gradcache_are_refused_where_zero_1_loses_one(tmp_path: Path) -> None:
    write_models(tmp_path)
    made = methods(tmp_path)
    for stage, method in ((1, "nv-embed"), (2, "cde"), (1, "cde")):
        strategy = CpuZero(stage=stage)
        trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
        callback = GradCacheCallback()
        if (stage, method) != (1, "cde"):
            callback.check_run(trainer, made[method](), None)
            continue
        with pytest.raises(UserError, match=r"ZeRO-1 loses the gradients of the second stage.*stage to 2"):
            callback.check_run(trainer, made[method](), None)
