"""What every trained module has, whatever it learns: optimiser, schedule, and random choices that a step decides."""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import lightning as L
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embeddings.common import InputError, NumericError, OptionError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.common.distributed import reduce_int
from embeddings.common.random import derive_seed, run_seed
from embeddings.common.text import one_line
from embeddings.data.datamodule import PlannedDataModule
from embeddings.data.samplers.base import accumulated_batches, batches_since_step, run_steps
from embeddings.models.hub import FrozenBase
from embeddings.models.layers import is_compiled
from embeddings.models.lora import frozen_weights
from embeddings.training.optim import parameter_groups, state_per_weight
from embeddings.training.schedule import Schedule, scale_rates
from embeddings.training.sharding import shard

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

# What a checkpoint may name to be made of: nothing that it asks for runs any other code.
ALLOWED_CLASSES = ("embeddings.", "torch.optim.")

# Where a checkpoint holds weights: the second where Lightning's `WeightAveraging` puts its average into the first.
_WEIGHTS = ("state_dict", "current_model_state")


class OptimizedModule(L.LightningModule):
    """A module with Lightning's automatic optimisation over its trainable parameters.

    Determinism: every random choice of a step (dropout) follows from (seed, epoch, batch, rank), so a resumed run
    draws what the uninterrupted run would have drawn.

    Args:
        optimizer: Makes the optimiser from parameter groups.
        schedule: Learning-rate schedule in optimiser steps.
        seed: Seed of the step's random choices, None for the run's (`seed_everything`).
    """

    def __init__(self, optimizer: OptimizerFactory, schedule: Schedule, seed: int | None) -> None:
        super().__init__()
        # Inside a function, which a deep copy of the module shares: a config's factory holds its parser, which cannot
        # be copied, and callbacks that average weights copy the module.
        self._optimizer: OptimizerFactory = lambda groups: optimizer(groups)
        self._schedule = schedule
        self._seed = run_seed(seed)
        self.frozen_base: FrozenBase | None = None
        self._found_rate: float | None = None

    @property
    def lr(self) -> float:
        """The peak learning rate of the first parameter group; one that a `LearningRateFinder` sets scales them all."""
        if self._found_rate is not None:
            return self._found_rate
        return float(self._make_optimizer().param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float) -> None:
        self._found_rate = rate

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check optimiser and schedule against what the trainer and the data say of themselves.

        Raises:
            OptionError: If the schedule does not fit the run, the strategy cannot cut a parameter, weights in half
                precision would lose their updates, or layers are to be compiled and there is no compiler.
            InputError: If the optimiser refuses its options.
        """
        self._check_strategy(trainer)
        self._check_precision(trainer)
        self._check_callbacks(trainer)
        self._check_compiler(trainer)
        self._make_optimizer()
        if trainer.max_steps > 0 or trainer.max_epochs == -1:
            self._check_schedule(trainer, trainer.max_steps if trainer.max_steps > 0 else None)

    def prepare_data(self) -> None:
        """Check all of this, and the schedule against the length of the data, before anything of the run is written."""
        self.check_run(self.trainer, self, getattr(self.trainer, "datamodule", None))
        self._check_schedule(self.trainer, self._trainer_steps())

    def configure_model(self) -> None:
        """Cut the weights over the ranks where the strategy is FSDP2."""
        mesh = self.device_mesh
        product_dtype = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None
        for part, entries in self.sharded_parts():
            if mesh is not None and not isinstance(part, FSDPModule):
                shard(part, mesh["data_parallel"], entries, product_dtype)

    def sharded_parts(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """The modules that hold the weights, and of each the methods beside `forward` that use them."""
        raise NotImplementedError

    def parts_of_own_rate(self) -> Mapping[str, nn.Module]:
        """The modules inside whose learning rate `rate_factor` tells from the rest's, by name."""
        return {}

    def rate_factor(self, part: str | None, step: int, total_steps: int) -> float:
        """The share of the peak learning rate at an optimiser step, for a part of its own or, where None, the rest."""
        return self._schedule.factor(step, total_steps)

    def on_fit_start(self) -> None:
        """Switch dropout on: Lightning leaves modes as they are, and a model that was loaded is in evaluation mode."""
        self.train()

    def on_train_start(self) -> None:
        """Set the epoch's accumulation: its scheduler does so as an epoch begins, which a resumed run has behind it."""
        self.trainer.accumulate_grad_batches = accumulated_batches(self.trainer, self.current_epoch)
        if self._found_rate is not None:
            # Lightning has set the optimiser's rate and not the schedule's, which would go back with the next step.
            for config in self.trainer.lr_scheduler_configs:
                scale_rates(config.scheduler, self._found_rate)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the step's random choices from what the step is, not from what ran before."""
        progress: Any = self.trainer.fit_loop.epoch_progress
        if progress.current.ready == progress.current.processed:
            # Lightning 2.6 does not count an epoch that begins after a resume from the end of another, and would then
            # drop the loader's place from the next checkpoint.
            progress.increment_ready()
            progress.increment_started()
        torch.manual_seed(derive_seed(self._seed, "step", self.current_epoch, batch_idx, self.global_rank))

    def check_loss(self, loss: Tensor) -> None:
        """Stop the step where the loss of any rank is no number: all ranks stop together, and nothing is updated.

        Distributed: one all-reduce of a number.
        Raises:
            NumericError: If it is not.
        """
        is_finite = bool(torch.isfinite(loss))
        if reduce_int(int(is_finite), "min", loss.device):
            return
        whose = f"loss is {loss.item()}" if not is_finite else "loss of another rank is no number"
        raise NumericError(f"{whose} at step {self.global_step}: no update was made")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop before an update by a gradient that is no number; the ranks' gradients are one, so all of them stop.

        Loss scaling of float16 finds such gradients itself and leaves the update out. ZeRO, under which they are not
        one yet, finds them in its engine's step.

        Raises:
            NumericError: If it is not.
        """
        scales = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if scales or getattr(self.trainer.strategy, "checks_gradients", False):
            return
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        )
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not torch.isfinite(norm):
            raise NumericError(f"gradient is {norm.item()} at step {self.global_step}: no update was made")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser over trainable parameters and its schedule, stepped once an optimiser step."""
        optimizer = self._make_optimizer()
        scheduler = self._schedule.scheduler(optimizer, self._trainer_steps(), self.rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out the weights that the files of a frozen base hold, and gradients that are being accumulated.

        A checkpoint within an accumulation resumes at its first batch.
        """
        left_out = self.frozen_names()
        for key in _WEIGHTS if left_out else ():
            if key in checkpoint:
                checkpoint[key] = {name: value for name, value in checkpoint[key].items() if name not in left_out}
        if self.frozen_base is not None and self.trainer.is_global_zero:
            checkpoint["frozen_base"] = self.frozen_base.to_dict()
        num_batches = batches_since_step(self.trainer)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if num_batches and isinstance(data, PlannedDataModule):
            loops = checkpoint["loops"]["fit_loop"]
            _set_back(loops, num_batches)
            states = loops["state_dict"].get("combined_loader", [])
            for loader in (checkpoint[type(data).__qualname__]["loader"], *states):
                loader["delivered"] -= num_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the frozen base's weights, which this module has from its files, beside those of a checkpoint.

        Raises:
            InputError: If the checkpoint was trained on other weights.
        """
        saved = checkpoint.get("frozen_base")
        if saved is None or self.frozen_base is None:
            return
        self.frozen_base.check(saved)
        own, names = self.state_dict(), self.frozen_names()
        for key in _WEIGHTS:
            if key in checkpoint:
                checkpoint[key] = {**{name: own[name] for name in names}, **checkpoint[key]}

    def frozen_names(self) -> set[str]:
        """The weights that a checkpoint leaves out, since the files of a frozen base hold them."""
        return frozen_weights(self) if self.frozen_base is not None else set()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """The module of a checkpoint with its weights.

        Args:
            checkpoint_path: A file that `fit` wrote.
            map_location: The device, None for the CPU.
            hparams_file: Not used: a checkpoint has its configuration inside.
            strict: Whether the weights must be those that the module has; None for yes.
            weights_only: Changes nothing: reading a checkpoint never runs code.
            arguments: All arguments of the module; without any, the configuration that `fit` has put inside.

        Raises:
            InputError: If it is no checkpoint of such a module.
        """
        if hparams_file is not None:
            raise OptionError("hparams_file", hparams_file, "is not used", "leave it out, or give the arguments")
        content, path = read_checkpoint(checkpoint_path), os.fspath(checkpoint_path)
        module = cls(**arguments) if arguments else configured_module(content, path)
        if not isinstance(module, cls):
            rule = f"holds a {type(module).__name__}, not a {cls.__name__}"
            raise InputError(path, rule, f"call {type(module).__name__}.load_from_checkpoint")
        set_weights(module, content, path, strict=strict is not False)
        return module if map_location is None else module.to(map_location)

    def state_per_weight(self) -> float:
        """How many numbers the optimiser keeps for each that it trains."""
        return state_per_weight(self._optimizer)

    def _check_strategy(self, trainer: L.Trainer) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            for name, parameter in self.named_parameters():
                if parameter.ndim == 0:
                    rule = f"cannot cut {name}, a single number"
                    fix = "set learnable_temperature: false, or take ddp"
                    raise OptionError("trainer.strategy", type(trainer.strategy).__name__, rule, fix)

    def _check_precision(self, trainer: L.Trainer) -> None:
        """Refuse to train weights in half precision without a float32 copy, unless a `…-true` precision asks for it.

        An update smaller than 1/512 of a weight is rounded away in bfloat16: at a learning rate of 2e-5 that is most.
        """
        keeps_copy = getattr(trainer.strategy, "keeps_float32_weights", False) and trainer.precision != "32-true"
        half = {str(weight.dtype).removeprefix("torch.") for weight in self.parameters() if weight.requires_grad}
        half &= {"bfloat16", "float16"}
        if half and not keeps_copy and not str(trainer.precision).endswith("16-true"):
            rule = "loses most updates of weights that are trained in it"
            fix = (
                "set float32 with trainer.precision bf16-mixed, or add lora; bf16-true trains in bfloat16 all the same"
            )
            raise OptionError("model.backbone.dtype", half.pop(), rule, fix)

    def _check_callbacks(self, trainer: L.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                rule = "would train weights that the optimiser and its schedule do not have from the first step"
                fix = "leave it out; lora trains little of the backbone"
                raise OptionError("trainer.callbacks", type(callback).__name__, rule, fix)

    def _check_compiler(self, trainer: L.Trainer) -> None:
        name = os.environ.get("CXX", "g++")
        if is_compiled(self) and trainer.strategy.root_device.type == "cpu" and shutil.which(name) is None:
            raise OptionError(
                "model.backbone.compile", True, f"needs {name} on a processor", "install it, or leave it out"
            )

    def _make_optimizer(self) -> Optimizer:
        groups, fix = parameter_groups(self, self.parts_of_own_rate()), "the method configs hold usual values"
        try:
            optimizer = self._optimizer(groups)
        except ValueError as error:
            raise InputError("model.optimizer", str(error), fix) from error
        for name, value in optimizer.defaults.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError("model.optimizer", f"Invalid {name}: {value}", fix)
        return optimizer

    def _check_schedule(self, trainer: L.Trainer, steps: int | None) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._schedule.check(steps)

    def _trainer_steps(self) -> int | None:
        """Optimiser steps of the run, None where the trainer sets no end."""
        batches = getattr(getattr(self.trainer, "datamodule", None), "batches_per_epoch", None)
        return run_steps(self.trainer, batches)


def configured_module(content: Mapping[str, Any], source: str, explain: Callable[[str], str] = str) -> OptimizedModule:
    """The module that the configuration inside a checkpoint makes, without the checkpoint's weights.

    Args:
        content: The checkpoint.
        source: Its file.
        explain: Makes a reason of what the parser says.

    Raises:
        InputError: If there is none, it makes nothing that trains a model, or it names a class that it may not.
    """
    config = content.get("run_config")
    if not isinstance(config, dict) or "model" not in config:
        raise InputError(source, "holds no run_config", "give one that `main.py fit` wrote, or the module's arguments")
    for class_path in class_paths(config["model"]):
        if not class_path.startswith(ALLOWED_CLASSES):
            raise InputError(source, f"asks for the class {class_path}", "load it only by a config you wrote")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningModule, "model")
    try:
        module = parser.instantiate(parser.parse_object({"model": config["model"]})).model
    except (ArgumentError, TypeError) as error:
        what = f"its config makes no model: {one_line(explain(str(error)), 120)}"
        raise InputError(source, what, "load it with the version that wrote it") from error
    if not isinstance(module, OptimizedModule):
        raise InputError(source, f"holds a {type(module).__name__}, which trains no model", "give another")
    return module


def set_weights(module: OptimizedModule, content: dict[str, Any], source: str, strict: bool = True) -> None:
    """Give a module the weights of a checkpoint, those of a frozen base from its files.

    Raises:
        InputError: If they are of another module, or the base has other weights.
    """
    try:
        module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"], strict=strict)
    except (KeyError, RuntimeError, TypeError) as error:
        what = f"its content does not fit its config: {one_line(str(error), 100)}"
        raise InputError(source, what, "give another") from error


def class_paths(value: Any) -> list[str]:
    """Every `class_path` inside nested plain types."""
    if isinstance(value, dict):
        found = [value["class_path"]] if isinstance(value.get("class_path"), str) else []
        return found + [path for item in value.values() for path in class_paths(item)]
    if isinstance(value, list):
        return [path for item in value for path in class_paths(item)]
    return []


def _set_back(fit_loop: dict[str, Any], num_batches: int) -> None:
    """Set the state of Lightning's loops back to where the last optimiser step had ended, so many batches before."""
    batches = fit_loop["epoch_loop.batch_progress"]
    for counts in (batches["total"], batches["current"]):
        last = counts["processed"] - num_batches
        # At the end of a step's last batch, as `ModelCheckpoint` saves: `completed` is one behind.
        counts.update(ready=last, started=last, processed=last, completed=last - 1)
    batches["is_last_batch"] = False
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    cleared = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    for counts in (cleared["total"], cleared["current"]):
        counts.update({name: count - 1 for name, count in counts.items()})
