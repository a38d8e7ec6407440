"""How evenly the experts of a model are used while it trains."""

from typing import Any

import lightning as L

from embeddings.common import OptionError, UserError
from embeddings.models.routing_metrics import routing_metrics


class RoutingStatistics(L.Callback):
    """Logs what the routing of a step's tokens came to, layer by layer, every so many optimiser steps.

    For a sparse layer `i`, over all tokens of the step's queries and documents on all ranks:
    - `routing/load_entropy_layer_i`: entropy of the experts' shares of the tokens over its largest value, 0 to 1; 1
      where all are loaded alike.
    - `routing/probability_entropy_layer_i`: the same of the router's mean probabilities.
    - `routing/highest_load_layer_i`: tokens of the busiest expert over an even share; 1 where all are loaded alike.
    - `routing/idle_experts_layer_i`: how many experts were given no token.
    And `routing/load_entropy`, the mean over layers, and `routing/idle_experts`, the sum.

    Args:
        every_n_steps: Optimiser steps between two rows, > 0.

    Distributed: the sums are those of all ranks already.
    Raises:
        OptionError: If `every_n_steps` is not positive.
        UserError: If the module has no sparse layers, or does not keep their sums.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise OptionError("RoutingStatistics.every_n_steps", every_n_steps, "must be >= 1", "try 50")
        self.every_n_steps = every_n_steps
        self._logged_step = -1

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check that there is a routing to log."""
        if not getattr(module, "moe_layers", None) or getattr(module, "load_balancing", None) is None:
            name = type(module).__name__
            raise UserError(
                f"RoutingStatistics needs a module with experts and load_balancing, got {name}; remove the callback"
            )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the same before training."""
        if stage == "fit":
            self.check_run(trainer, pl_module, getattr(trainer, "datamodule", None))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the step that the run begins at for logged."""
        self._logged_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log a row after every `every_n_steps` optimiser steps."""
        step = trainer.global_step
        if step == self._logged_step or step % self.every_n_steps:
            return
        self._logged_step = step
        module: Any = pl_module
        sums = module.routing
        values = routing_metrics(sums["expert_counts"], sums["expert_probabilities"], module.moe_layers)
        # Lightning would file them under the next step that is logged, so they go to the loggers by hand.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        for name, value in values.items():
            pl_module.log(name, value, logger=False)
