import pytest
import torch
from torch import Tensor, nn

from embeddings.cli.app import run_trainer
from embeddings.common import InputError
from embeddings.modules import ContrastiveModule, MaskedLMModule
from embeddings.modules.optimized import OptimizedModule
from embeddings.training.schedule import Schedule
from tests.helpers.runs import run_config, write_config


class Line(OptimizedModule):
    """A module with one matrix and one vector."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lambda groups: torch.optim.AdamW(groups, lr=lr, weight_decay=0.5), Schedule(), seed=0)
        self.layer = nn.Linear(2, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value)


def test_both_kinds_of_method_are_optimised_alike() -> None:
    assert issubclass(ContrastiveModule, OptimizedModule)
    assert issubclass(MaskedLMModule, OptimizedModule)


def test_vectors_have_no_weight_decay() -> None:
    matrices, vectors = Line()._make_optimizer().param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)


def test_an_optimiser_that_cannot_be_is_one_line() -> None:
    with pytest.raises(InputError, match=r"model\.optimizer: Invalid learning rate: -1"):
        Line(lr=-1.0)._make_optimizer()


@pytest.mark.parametrize(("batches", "accumulate", "limit", "steps"), [(8, 1, 1.0, 16), (8, 3, 1.0, 6), (8, 1, 5, 10)])
def test_the_length_of_a_run_counts_optimiser_steps(batches, accumulate, limit, steps, tmp_path):
    config = run_config(tmp_path)
    config["trainer"] |= {"max_epochs": 2, "accumulate_grad_batches": accumulate, "limit_train_batches": limit}
    config["trainer"]["max_steps"] = -1
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    assert cli.datamodule.batches_per_epoch == batches
    assert cli.model._trainer_steps() == steps == cli.trainer.global_step
