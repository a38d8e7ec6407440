from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import nn

from embeddings.callbacks.best_checkpoint import load_best


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


def trainer(*kept: Any) -> Any:
    return SimpleNamespace(checkpoint_callbacks=list(kept))


def test_the_first_monitored_checkpoint_is_loaded(tmp_path: Path) -> None:
    best = Line()
    torch.save({"state_dict": best.state_dict()}, tmp_path / "best.ckpt")
    plain = SimpleNamespace(monitor=None, best_model_path="elsewhere")
    first = SimpleNamespace(monitor="val/loss", best_model_path=str(tmp_path / "best.ckpt"))
    second = SimpleNamespace(monitor="val/accuracy", best_model_path="elsewhere")
    module = Line()
    assert not torch.equal(module.layer.weight, best.layer.weight)
    load_best(trainer(plain, first, second), module)
    assert torch.equal(module.layer.weight, best.layer.weight)


def test_without_one_the_last_weights_stay() -> None:
    module = Line()
    before = module.layer.weight.clone()
    for path in ("", "nowhere.ckpt"):
        load_best(trainer(SimpleNamespace(monitor="val/loss", best_model_path=path)), module)
    load_best(trainer(), module)
    assert torch.equal(module.layer.weight, before)
