import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import nn

from embeddings.callbacks import DurableCheckpointIO
from embeddings.callbacks.checkpoints import load_best
from tests.helpers.checkpoints import save


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


def trainer(*kept: Any, asynchronous: bool = False) -> Any:
    strategy = SimpleNamespace(checkpoint_io=DurableCheckpointIO(asynchronous))
    return SimpleNamespace(checkpoint_callbacks=list(kept), strategy=strategy, global_step=7)


def test_the_first_monitored_checkpoint_is_loaded(tmp_path: Path) -> None:
    best = Line()
    save({"state_dict": best.state_dict(), "global_step": 3}, tmp_path / "best.ckpt")
    plain = SimpleNamespace(monitor=None, best_model_path="elsewhere")
    first = SimpleNamespace(monitor="val/loss", best_model_path=str(tmp_path / "best.ckpt"))
    second = SimpleNamespace(monitor="val/accuracy", best_model_path="elsewhere")
    module = Line()
    assert not torch.equal(module.layer.weight, best.layer.weight)
    assert load_best(trainer(plain, first, second), module) == 3
    assert torch.equal(module.layer.weight, best.layer.weight)


def test_one_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    best, module, path = Line(), Line(), str(tmp_path / "best.ckpt")
    run, gate = trainer(SimpleNamespace(monitor="val/loss", best_model_path=path), asynchronous=True), threading.Event()
    run.strategy.checkpoint_io.on_stage = lambda stage: gate.wait(timeout=60)
    run.strategy.checkpoint_io.save_checkpoint({"state_dict": best.state_dict(), "global_step": 3}, path)
    threading.Timer(0.2, gate.set).start()
    load_best(run, module)
    assert torch.equal(module.layer.weight, best.layer.weight)
    run.strategy.checkpoint_io.teardown()


def test_without_one_the_last_weights_stay() -> None:
    module = Line()
    before = module.layer.weight.clone()
    for path in ("", "nowhere.ckpt"):
        assert load_best(trainer(SimpleNamespace(monitor="val/loss", best_model_path=path)), module) == 7
    assert load_best(trainer(), module) == 7
    assert torch.equal(module.layer.weight, before)
