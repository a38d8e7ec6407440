"""What ZeRO refuses, and that a gradient that is not finite ends a run; the tests of all strategies have the rest."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from embeddings.callbacks import GradCacheCallback
from embeddings.common import NumericError, UserError
from tests.helpers.poison import PoisonBackward
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.runs import component, quiet_trainer, run_config, write_config
from tests.strategies.cpu_zero import CpuZero
from tests.strategies.fits import batches, be_launched, methods, train

METHOD = "nv-embed"
CASES = [(1, "32-true", False), (2, "bf16-mixed", False), (3, "32-true", True)]


def test_two_stages_under_gradcache_are_refused_where_zero_1_loses_one(folder: Path) -> None:
    made = methods(folder)
    for stage, method in ((1, "nv-embed"), (2, "cde"), (1, "cde")):
        strategy = CpuZero(stage=stage)
        trainer, callback = quiet_trainer(devices=1, strategy=strategy), GradCacheCallback()
        if (stage, method) != (1, "cde"):
            callback.check_run(trainer, made[method](), None)
            continue
        with pytest.raises(UserError, match=r"ZeRO-1 loses the gradients of the second stage.*stage to 2"):
            callback.check_run(trainer, made[method](), None)


class Weights(L.Callback):
    """Keeps the weights after each batch, and those that an exception leaves."""

    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._keep(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._keep(trainer, pl_module)

    def _keep(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, CpuZero)
        with trainer.strategy.full_weights():
            self.kept.append([value.detach().clone() for value in module.parameters()])


def poisoned(folder: Path, rank: int) -> dict[Any, Any]:
    """What each case says of a gradient that is infinite on the second rank, in the first half of the second step."""
    be_launched(rank)
    make = partial(methods(folder)[METHOD], optimizer=partial(torch.optim.AdamW, lr=1e-3))
    found = {}
    for stage, precision, cached in CASES:
        weights = Weights()
        callbacks: list[L.Callback] = [PoisonBackward(rank=1, batch=2), weights]
        if cached:
            callbacks.append(GradCacheCallback(mini_batch_tokens=60))
        options = {"callbacks": callbacks, "accumulate_grad_batches": 2, "precision": precision}
        try:
            train(make, batches(METHOD, rank) * 2, CpuZero(stage=stage), 2, 2, **options)
        except NumericError as error:
            found[stage, precision, cached] = str(error), weights.kept
    return found


def test_an_infinite_gradient_of_one_rank_ends_all_before_the_update(folder: Path) -> None:
    for of_rank in run_on_two_ranks(partial(poisoned, folder)):
        assert list(of_rank) == CASES
        for message, (_, first, second, left) in of_rank.values():
            assert message == "gradient is NaN or infinite at step 1: no update was made"
            assert all(map(torch.equal, left, first))
            assert all(map(torch.equal, second, first))
            assert all(bool(value.isfinite().all()) for value in left)


@pytest.mark.slow
def test_the_command_line_ends_with_70_and_the_rows(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    strategy = component("tests.strategies.cpu_zero.CpuZero", stage=2, process_group_backend="gloo")
    callbacks = [component("tests.helpers.poison.PoisonBackward", rank=1, batch=1), component("RunHealth")]
    config["trainer"] |= {"devices": 2, "strategy": strategy, "callbacks": callbacks}
    environment = {**os.environ, "EMBED_IMPORTS": "tests", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, "main.py", "fit", "--config", write_config(tmp_path, config)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 70, ended.stderr[-3000:]
    assert "error: gradient is NaN or infinite at step 1: no update was made" in ended.stderr, ended.stderr
    for rank in (0, 1):
        (path,) = tmp_path.rglob(f"numeric-error-rank-{rank}.json")
        (read,) = json.loads(path.read_text())["batches"]
        assert (read["batch"], len(read["rows"]["pairs"])) == (1, 8)
