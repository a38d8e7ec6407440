"""Training that is killed and resumed, a module that records its rows, and data modules from a config."""

from collections.abc import Callable
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from transformers import PreTrainedTokenizerBase

from tests.helpers import runs

# The resumed run saves to the folder that it resumes from.
LIGHTNING_WARNINGS = ("ignore:Checkpoint directory",)


class Ledger(LightningModule):
    """Records the rows of each step.

    Args:
        rows_of: Returns the rows of a batch.
        tokenizer: The tokenizer for the data module.
        asks_for_steps: Whether the optimiser asks for the number of steps, as a schedule does.
    """

    def __init__(
        self,
        rows_of: Callable[[Any], list[int]],
        tokenizer: PreTrainedTokenizerBase | None = None,
        asks_for_steps: bool = False,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.rows: list[list[int]] = []
        self.rows_of, self.tokenizer, self.asks_for_steps = rows_of, tokenizer, asks_for_steps

    def training_step(self, batch, batch_idx):
        self.rows.append(self.rows_of(batch))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(**options):
    """A trainer on the CPU without logs, checkpoints and distributed sampler unless the options set them."""
    return runs.quiet_trainer(use_distributed_sampler=False, **options)


def attached(data, module):
    """A data module attached to a trainer and a module."""
    data.trainer = quiet_trainer()
    data.trainer.strategy.connect(module)
    return data


class StopBefore(Callback):
    """Ends a run before a step, like a kill."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise KilledError


class KilledError(Exception):
    """Simulates the end of the process."""


def killed_run(folder, stops, make_module, make_data, limits):
    """The rows of all steps of a training that is killed before each of `stops` and resumed with new objects."""
    seen = []
    checkpoint = None
    for stop in [*stops, None]:
        saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [saving] if stop is None else [saving, StopBefore(stop)]
        trainer = quiet_trainer(enable_checkpointing=True, callbacks=callbacks, **limits)
        module = make_module()
        try:
            trainer.fit(module, make_data(), ckpt_path=checkpoint)
        except KilledError:
            assert trainer.global_step == stop
        seen += module.rows
        checkpoint = str(folder / f"step={stop}.ckpt")
    return seen


def configured(**init_args):
    """The `EmbeddingDataModule` of a config with these arguments, after a round trip through the parser."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    config = {"data": {"class_path": "embeddings.data.EmbeddingDataModule", "init_args": init_args}}
    return parser.instantiate(parser.parse_string(parser.dump(parser.parse_object(config)))).data
