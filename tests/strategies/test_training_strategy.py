"""What modules and callbacks are told of each strategy: this library's, Lightning's that are supported, and others."""

from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from embeddings.strategies import FSDP2Strategy
from embeddings.training.strategy import TrainingStrategy, training_strategy
from tests.strategies.cpu_zero import CpuZero


@pytest.mark.parametrize(
    ("strategy", "is_sharded", "single_file", "gradcache", "context_stage", "equal_mini_batches"),
    [
        (SingleDeviceStrategy("cpu"), False, True, True, True, False),
        (DDPStrategy(), False, True, True, True, False),
        (FSDP2Strategy(), True, True, True, True, True),
        (CpuZero(stage=1), False, True, True, False, False),
        (CpuZero(stage=2), False, True, True, True, True),
        (CpuZero(stage=3), True, True, True, True, True),
        (ModelParallelStrategy(), True, False, False, True, False),
        (FSDPStrategy.__new__(FSDPStrategy), False, False, False, True, False),
    ],
    ids=["one device", "ddp", "fsdp2", "zero 1", "zero 2", "zero 3", "lightning's fsdp2", "lightning's fsdp"],
)
def test_each_strategy_says_what_it_offers(
    strategy: Any, is_sharded: bool, single_file: bool, gradcache: bool, context_stage: bool, equal_mini_batches: bool
) -> None:
    found = training_strategy(strategy)
    assert (found is strategy) == isinstance(strategy, TrainingStrategy)
    assert (found.is_sharded, found.single_file_checkpoints) == (is_sharded, single_file)
    assert (found.supports_gradcache, found.supports_context_stage) == (gradcache, context_stage)
    assert found.equal_mini_batches == equal_mini_batches
    if found is not strategy:
        with found.full_weights() as nothing:
            assert nothing is None
