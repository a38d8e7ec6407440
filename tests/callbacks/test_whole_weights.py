import lightning as L

from embeddings.callbacks.whole_weights import cuts_weights, whole_weights
from embeddings.strategies import FSDP2Strategy
from tests.strategies.cpu_zero import CpuZero


def trainer_of(strategy: object) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)


def test_weights_are_cut_by_fsdp2_and_by_the_third_stage_of_zero_alone() -> None:
    cut = {stage: cuts_weights(trainer_of(CpuZero(stage=stage))) for stage in (1, 2, 3)}
    assert cut == {1: False, 2: False, 3: True}
    assert cuts_weights(trainer_of(FSDP2Strategy()))
    assert not cuts_weights(trainer_of("auto"))


def test_other_strategies_have_whole_weights_anyway() -> None:
    with whole_weights(trainer_of("auto")) as nothing:
        assert nothing is None
