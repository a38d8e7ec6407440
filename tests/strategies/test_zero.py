"""ZeRO: unsupported combinations and infinite gradients; other tests cover all strategies."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from embeddings.callbacks import GradCacheCallback
from embeddings.common import NumericError, OptionError, UserError
from embeddings.strategies.sharded import _fragments, set_full_state_dict
from tests.helpers.poison import PoisonBackward
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.runs import component, quiet_trainer, run_config, write_config
from tests.strategies.cpu_zero import CpuZero
from tests.strategies.fits import batches, be_launched, methods, train

METHOD = "nv-embed"
QUICK = [(2, "bf16-mixed", False)]
SLOW = [(1, "32-true", False), (3, "32-true", True)]


def test_zero_1_rejects_two_stages_under_gradcache(folder: Path) -> None:
    makers = methods(folder)
    for stage, method in ((1, "nv-embed"), (2, "cde"), (1, "cde")):
        strategy = CpuZero(stage=stage)
        trainer, callback = quiet_trainer(devices=1, strategy=strategy), GradCacheCallback()
        if (stage, method) != (1, "cde"):
            callback.check_run(trainer, makers[method](), None)
            continue
        with pytest.raises(UserError, match=r"ZeRO-1 loses the gradients of the second stage.*stage to 2"):
            callback.check_run(trainer, makers[method](), None)


def test_zero_rejects_weights_in_4_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embeddings.modules.base.is_four_bit", lambda parameter: True)
    module = methods(folder)[METHOD]()
    for strategy in ("auto", CpuZero(stage=2)):
        trainer = quiet_trainer(devices=1, strategy=strategy, max_steps=1)
        if strategy == "auto":
            module.check_run(trainer, module, None)
            continue
        with pytest.raises(OptionError, match=r"trainer\.strategy does not support 4-bit weights, got 'CpuZero'"):
            module.check_run(trainer, module, None)


@pytest.mark.parametrize("num_values", [1, 5, 8])
def test_the_parts_of_stage_3_contain_each_value_once_though_some_ranks_have_none(num_values: int) -> None:
    values, num_ranks, parts = torch.arange(num_values), 4, []
    for rank in range(num_ranks):
        # DeepSpeed pads each parameter to a multiple of the number of ranks.
        optimizer = SimpleNamespace(
            grad_position={0: [0, 0, -(-num_values // num_ranks)]},
            fp32_partitioned_groups_flat=[torch.zeros(8)],
            get_param_id=lambda parameter: parameter.ds_id,
            _get_param_partition_rank=lambda parameter, rank=rank: rank,
        )
        for _, _, start, size in _fragments(optimizer, SimpleNamespace(ds_id=0, ds_numel=num_values)):
            parts.append(values.narrow(0, start, size))
    assert torch.cat(parts).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"weight": torch.zeros(2, 3)}, "weight"), ({"other": torch.zeros(2)}, "other")],
)
def test_weights_of_another_model_are_refused(changes: dict[str, Tensor], names: str) -> None:
    layer = nn.Linear(3, 4)
    says = rf"Error\(s\) in loading state_dict for Linear: missing, unexpected or of another shape: {names}$"
    with pytest.raises(RuntimeError, match=says):
        set_full_state_dict(layer, {**layer.state_dict(), **changes})


class Weights(L.Callback):
    """Stores the weights after each batch, and after an exception."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._keep(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._keep(trainer, pl_module)

    def _keep(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, CpuZero)
        with trainer.strategy.full_weights():
            self.weights.append([value.detach().clone() for value in module.parameters()])


def poisoned(folder: Path, cases: list[Any], rank: int) -> dict[Any, Any]:
    """The error and the weights of each case with an infinite gradient on rank 1, in the first half of step 2."""
    be_launched(rank)
    make = partial(methods(folder)[METHOD], optimizer=partial(torch.optim.AdamW, lr=1e-3))
    results = {}
    for stage, precision, cached in cases:
        weights = Weights()
        callbacks: list[L.Callback] = [PoisonBackward(rank=1, batch=2), weights]
        if cached:
            callbacks.append(GradCacheCallback(mini_batch_tokens=60))
        options = {"callbacks": callbacks, "accumulate_grad_batches": 2, "precision": precision}
        try:
            train(make, batches(METHOD, rank) * 2, CpuZero(stage=stage), 2, 2, **options)
        except NumericError as error:
            results[stage, precision, cached] = str(error), weights.weights
    return results


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_an_infinite_gradient_of_one_rank_ends_all_before_the_update(cases: list[Any], folder: Path) -> None:
    for of_rank in run_on_two_ranks(partial(poisoned, folder, cases)):
        assert list(of_rank) == cases
        for message, (_, first, second, last) in of_rank.values():
            assert message == "gradient is NaN or infinite at step 1: no update was made"
            assert all(map(torch.equal, last, first))
            assert all(map(torch.equal, second, first))
            assert all(bool(value.isfinite().all()) for value in last)


@pytest.mark.slow
def test_the_command_exits_with_70_and_writes_the_rows(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    strategy = component("tests.strategies.cpu_zero.CpuZero", stage=2, process_group_backend="gloo")
    callbacks = [component("tests.helpers.poison.PoisonBackward", rank=1, batch=1), component("RunHealth")]
    config["trainer"] |= {"devices": 2, "strategy": strategy, "callbacks": callbacks}
    environment = {**os.environ, "EMBED_IMPORTS": "tests", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "main.py", "fit", "--config", write_config(tmp_path, config)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert process.returncode == 70, process.stderr[-3000:]
    assert "error: gradient is NaN or infinite at step 1: no update was made" in process.stderr, process.stderr
    for rank in (0, 1):
        (path,) = tmp_path.rglob(f"numeric-error-rank-{rank}.json")
        (batch,) = json.loads(path.read_text())["batches"]
        assert (batch["batch"], len(batch["rows"]["pairs"])) == (1, 8)
