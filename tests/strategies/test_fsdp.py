"""What FSDP2 cannot do is refused; its gradients and checkpoints are tested with those of all strategies."""

from functools import partial
from pathlib import Path

import lightning as L
import pytest

from embeddings.common import OptionError
from embeddings.losses import InfoNCE
from embeddings.strategies import FSDP2Strategy
from tests.strategies.fits import methods, write_models


def test_a_single_number_that_is_learnt_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_models(tmp_path)
    make = partial(methods(tmp_path)["nv-embed"], loss=InfoNCE(learnable_temperature=True))
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=FSDP2Strategy(), max_steps=1, logger=False, enable_checkpointing=False
    )
    module = make()
    with pytest.raises(OptionError, match=r"cannot cut loss\.log_temperature, a single number.*learnable_temperature"):
        module.check_run(trainer, module, None)
