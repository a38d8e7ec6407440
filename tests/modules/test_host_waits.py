"""Synchronisations of host and device in one step of every method, against the table in the documentation."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from embeddings.callbacks import GradCacheCallback
from embeddings.modules import CDEModule, FirstStageTraining, base
from tests.helpers.runs import quiet_trainer
from tests.helpers.waits import PretendedDevice, as_on_device, declared, of_host
from tests.strategies import fits

METHODS = ["nv-embed", "mgh", "moe", "cde", "cde, words", "language model"]
# The only function that copies to the device: from page-locked memory, without synchronisation.
MOVED = "common/types.py moved"


class CountedStep(L.Callback):
    """Counts synchronisations of the third step; the first two include initialisation."""

    def __init__(self) -> None:
        self.device = PretendedDevice()
        self.forwards = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            models = [part for part in pl_module.modules() if isinstance(part, PreTrainedModel)]
            # Only the innermost model: a model with a head contains another.
            for model in models:
                if sum(isinstance(part, PreTrainedModel) for part in model.modules()) == 1:
                    model.register_forward_hook(self._count)
            self.device.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self.device.__exit__(None, None, None)

    def _count(self, *_: Any) -> None:
        self.forwards += 1


def counted_step(method: str, cached: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CountedStep:
    monkeypatch.setattr(fits, "RATE", 1e-3)
    make: Any = fits.methods(folder)[method]
    if method == "cde":
        make = partial(CDEModule, *make.args, **make.keywords)
    if method == "cde, words":
        make = partial(make, first_stage_training=FirstStageTraining(word_steps=9))
    data = [fits.batches(method, None)[number % 2] for number in range(3)]
    for batch in data:
        of_host(batch)
    step = CountedStep()
    cache = [GradCacheCallback(mini_batch_tokens=60, kept_fraction=0.4)] if cached else []
    trainer = quiet_trainer(callbacks=[step, *cache], max_steps=3, use_distributed_sampler=False, gradient_clip_val=1.0)
    # Whether the first batches had negatives is read once, in the first step in place of the counted one.
    monkeypatch.setattr(base, "FIRST_BATCHES", 1)
    with as_on_device(monkeypatch):
        trainer.fit(make().train(), DataLoader(data, batch_size=None))
    return step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    fits.write_models(path)
    return path


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "gradcache"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_step_synchronises_with_the_device_only_where_documented(
    method: str, cached: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached and method == "language model":
        pytest.skip("GradCache is for contrastive methods")
    step = counted_step(method, cached, folder, monkeypatch)
    assert step.device.reads == declared(method, step.forwards)
    assert step.forwards == 1 if method == "language model" else step.forwards >= (10 if cached else 2)
    assert set(step.device.copies) <= {MOVED}
    assert step.device.copies[MOVED] <= (10 if cached else 4)
