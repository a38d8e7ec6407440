"""The arithmetic that `Throughput` counts is that of the whole model, however its weights are cut over the ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from embeddings.callbacks.progress import Work, flops
from tests.helpers.ranks import run_on_two_ranks
from tests.strategies.fits import batches, be_launched, methods, train, write_models
from tests.strategies.test_gradients import STRATEGIES

METHOD = "moe"


class Counts(L.Callback):
    """Keeps what is counted for a hundred tokens once a step has been made."""

    found = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.found = flops(pl_module, Work(read=100))


def counted(folder: Path, rank: int) -> dict[str, float]:
    be_launched(rank)
    found = {}
    for name in ("fsdp2", "zero 3"):
        counts = Counts()
        train(methods(folder)[METHOD], batches(METHOD, rank), STRATEGIES[name](), 2, 1, callbacks=[counts])
        found[name] = counts.found
    return found


def test_two_ranks_count_as_one_process_does(tmp_path: Path) -> None:
    write_models(tmp_path)
    whole = flops(methods(tmp_path)[METHOD](), Work(read=100))
    assert whole > 1e6
    assert run_on_two_ranks(partial(counted, tmp_path)) == [{"fsdp2": whole, "zero 3": whole}] * 2
