from datetime import timedelta

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from embeddings.strategies import FSDP2Strategy
from embeddings.strategies.ranks import set_up_ranks


@pytest.mark.parametrize(
    ("strategy", "minutes"),
    [("ddp", 10), (DDPStrategy(timeout=timedelta(minutes=3)), 3), (FSDP2Strategy(), 10)],
    ids=["ddp", "its own", "fsdp2"],
)
def test_ranks_wait_ten_minutes_unless_told_otherwise(strategy: object, minutes: int) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    set_up_ranks(trainer)
    assert trainer.strategy._timeout == timedelta(minutes=minutes)


def test_a_single_process_waits_for_nobody() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    set_up_ranks(trainer)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
