"""The optimiser's parameter groups and state, and learning-rate schedules over optimiser steps."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from embeddings.common.errors import OptionError, require_minimum


def parameter_groups(module: nn.Module, parts: Mapping[str, nn.Module] | None = None) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: matrices, and biases, vectors and scalars without weight decay.

    Each module in `parts` has two separate groups, whose `part` is its name.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable: the whole model is frozen")
    part_of = {parameter: name for name, part in (parts or {}).items() for parameter in part.parameters()}
    # The biases of experts are the rows of one matrix.
    is_matrix = {
        parameter: parameter.ndim >= 2 and not name.rpartition(".")[2].startswith("bias")
        for name, parameter in module.named_parameters()
    }
    groups: list[dict[str, Any]] = []
    for name in (None, *(parts or {})):
        of_part = [parameter for parameter in trainable if part_of.get(parameter) == name]
        options = {} if name is None else {"part": name}
        if matrices := [parameter for parameter in of_part if is_matrix[parameter]]:
            groups.append({"params": matrices, **options})
        if vectors := [parameter for parameter in of_part if not is_matrix[parameter]]:
            groups.append({"params": vectors, "weight_decay": 0.0, **options})
    return groups


def state_per_weight(make: Callable[[Iterable[Any]], Optimizer]) -> float:
    """The optimiser's state values per trained weight, measured on a small matrix: 2 for AdamW."""
    matrix = nn.Parameter(torch.zeros(64, 64))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = make([matrix])
    try:
        optimizer.step(lambda: 0.0)
    except (RuntimeError, AssertionError):
        return 0.0
    sizes = [value.numel() for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    return round(sum(sizes) / matrix.numel(), 2)


def replaced_options(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """The options of an optimiser that a saved state replaces when it is loaded, as text."""
    replaced = []
    for name, value in optimizer.defaults.items():
        key = "initial_lr" if name == "lr" else name
        before = [group[key] for group in saved["param_groups"] if key in group]
        # Vectors have no weight decay.
        if before and value not in before:
            replaced.append(f"{name} {before[0]}, not {value}")
    return replaced


# (the parameter group's `part`, step, total steps) -> fraction of the peak rate.
PartFactor = Callable[[str | None, int, int], float]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a decay to zero at the last step.

    Args:
        warmup_steps: Optimiser steps (not batches) over which the rate rises linearly. A value below 1 is a fraction of
            the run's steps, rounded down. NV-Embed: 50 (Table 11).
        decay: After the warm-up `linear` (NV-Embed, Appendix C) or `cosine` to zero at `total_steps`, or `constant`.
        total_steps: Optimiser steps of the full run; None for the trainer's.
        within_max_time: Whether the rate also falls to zero by the trainer's `max_time`: its fraction of the peak is
            at most that of a linear decay over the time. A linear decay changes only where the steps fall behind the
            time; such a run is not exactly repeatable.
    """

    warmup_steps: int | float = 0.1
    decay: Literal["linear", "cosine", "constant"] = "linear"
    total_steps: int | None = None
    within_max_time: bool = False

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or (self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps)):
            rule = "must be an integer >= 0, or a fraction of the run below 1"
            raise OptionError("model.schedule.warmup_steps", self.warmup_steps, rule, "NV-Embed uses 50")
        require_minimum("model.schedule.total_steps", self.total_steps, 1, "leave it out", optional=True)

    def num_warmup_steps(self, total_steps: int) -> int:
        # As decimals: in binary, 0.29 * 100 is below 29.
        return int(Fraction(str(self.warmup_steps)) * (total_steps if self.warmup_steps < 1 else 1))

    def factor(self, step: int, total_steps: int) -> float:
        """The fraction of the peak rate, 0 to 1, at optimiser step `step` (0-based); never zero in the warm-up."""
        num_warmup_steps = self.num_warmup_steps(total_steps)
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        if self.decay == "constant":
            return 1.0
        left = max(0.0, (total_steps - step) / max(1, total_steps - num_warmup_steps))
        return left if self.decay == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))

    def scheduler(
        self,
        optimizer: Optimizer,
        trainer_steps: int | None,
        part_factor: PartFactor | None = None,
        time_left: Callable[[], float] = lambda: 1.0,
    ) -> LambdaLR:
        """A PyTorch scheduler that scales the optimiser's peak rates; `part_factor` replaces `factor`.

        `time_left` is the fraction of the trainer's time that is left, for `within_max_time`.
        """
        steps = self._length(trainer_steps) or int(self.warmup_steps) + 1
        # A linear decay begins after the warm-up.
        scale = steps / max(1, steps - self.num_warmup_steps(steps))

        def factor_of_part(part: str | None) -> Callable[[int], float]:
            def factor(step: int) -> float:
                planned = self.factor(step, steps) if part_factor is None else part_factor(part, step, steps)
                return min(planned, scale * time_left()) if self.within_max_time else planned

            return factor

        return LambdaLR(optimizer, [factor_of_part(group.get("part")) for group in optimizer.param_groups])

    def check(self, trainer_steps: int | None, is_exact: bool = False) -> None:
        """Check that a decaying schedule has a last step, and that the warm-up is shorter than the run.

        If `trainer_steps` is the run's exact length and not an upper limit, check that the decay is not shorter.
        """
        total_steps = self._length(trainer_steps)
        if total_steps is not None and 0 < self.warmup_steps >= total_steps:
            rule = f"must be below the run's {total_steps} optimiser steps"
            raise OptionError("model.schedule.warmup_steps", self.warmup_steps, rule, "lower it or train longer")
        if is_exact and self.decay != "constant" and 0 < (self.total_steps or 0) < (trainer_steps or 0):
            rule = f"must not be below the run's {trainer_steps} optimiser steps: the rate of the last ones would be 0"
            hint = "raise it, leave it out, or lower trainer.max_steps"
            raise OptionError("model.schedule.total_steps", self.total_steps, rule, hint)

    def _length(self, trainer_steps: int | None) -> int | None:
        total_steps = self.total_steps or trainer_steps
        if total_steps is None and (self.decay != "constant" or 0 < self.warmup_steps < 1):
            what = "to decay" if self.decay != "constant" else "for a warm-up that is a fraction of it"
            fix = "set trainer.max_steps or max_epochs"
            raise OptionError("model.schedule.total_steps", None, f"must be known {what}", fix)
        return total_steps


def scale_rates(scheduler: Any, peak: float) -> None:
    """Change a `LambdaLR`'s peak rate for its first parameter group, and scale the other groups in proportion."""
    first = scheduler.base_lrs[0]
    scheduler.base_lrs = [peak * (rate / first) for rate in scheduler.base_lrs]
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    for group, rate, factor in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, factors, strict=True):
        group.update(initial_lr=rate, lr=rate * factor)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
