"""FSDP2 in bfloat16 with a memory budget, and unsupported parameters; other tests cover all strategies."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, Strategy

from embeddings.callbacks import GradCacheCallback
from embeddings.common import OptionError
from embeddings.losses import InfoNCE
from embeddings.strategies import FSDP2Strategy
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.runs import quiet_trainer
from tests.strategies.cpu_zero import CpuZero
from tests.strategies.fits import batches, be_launched, methods, relative_error, train

# Tolerances. The bias that experts share is rounded to bfloat16 with their matrices; all else is as under DDP.
METHODS = {"nv-embed, whole backbone": 2e-3, "moe": 2e-2}


def updates(folder: Path, name: str, rank: int) -> dict[Any, Any]:
    be_launched(rank)
    make, states = methods(folder)[name], {}
    for strategy in (DDPStrategy, FSDP2Strategy):
        cache = GradCacheCallback(mini_batch_tokens=60, kept_gib=1e-4)
        options: dict[str, Any] = {"callbacks": [cache], "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
        states[strategy] = train(make, batches(name, rank), strategy(), 2, 1, **options)
    return states


@pytest.mark.parametrize("name", ["nv-embed, whole backbone", pytest.param("moe", marks=pytest.mark.slow)])
def test_with_bfloat16_and_kept_graphs_the_update_equals_ddp(name: str, folder: Path) -> None:
    start = {key: value.detach() for key, value in methods(folder)[name]().named_parameters()}
    for of_rank in run_on_two_ranks(partial(updates, folder, name)):
        assert relative_error(of_rank[FSDP2Strategy], of_rank[DDPStrategy], start) < METHODS[name]


@pytest.mark.parametrize("strategy", [FSDP2Strategy(), CpuZero(stage=1), CpuZero(stage=3)])
def test_a_learnable_scalar_is_rejected_before_training(strategy: Strategy, folder: Path) -> None:
    make = partial(methods(folder)["nv-embed"], loss=InfoNCE(learnable_temperature=True))
    module, trainer = make(), quiet_trainer(devices=2, strategy=strategy, max_steps=1)
    with pytest.raises(OptionError, match=r"cannot shard the scalar loss\.log_temperature.*learnable_temperature"):
        module.check_run(trainer, module, None)
