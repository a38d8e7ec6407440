"""GradCache under Lightning's automatic optimisation."""

import re
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

from embeddings.common import ContextualStep, OptionError, UserError, require_minimum
from embeddings.common.distributed import reduce_int
from embeddings.common.process import logger, trim_malloc
from embeddings.common.protocols import RunData, run_data
from embeddings.training.gradcache import GradCache, GradCacheModule
from embeddings.training.strategy import training_strategy

# Fraction of the memory that is free after the first step; the remainder is for longer texts and other uses.
KEPT_FRACTION = 0.5


class GradCacheCallback(L.Callback):
    """Trains any contrastive module in mini-batches with the gradient of the full batch.

    The memory of the embeddings then limits the batch size, not that of the encoder's activations.

    Args:
        mini_batch_tokens: Maximum number of padded tokens in a mini-batch, including context slots and soft prompts.
        mini_batch_texts: Maximum number of texts in a mini-batch; None for no limit.
        kept_fraction: Fraction of all padded tokens, 0 to 1, whose graphs may be kept instead of recomputed.
        kept_gib: Memory for kept graphs, in GiB per rank; 0 or None keeps at most the last graph. `auto` is half of the
            memory that is free after the first optimiser step, the minimum over ranks; with `kept_fraction`, `auto`
            means None.
        equal_mini_batches: Whether all ranks run the same number of mini-batches; always true under FSDP2, ZeRO-2 and
            ZeRO-3.
        gpu_mini_batch_tokens: `mini_batch_tokens` on a CUDA GPU, where larger ones are faster; None for the same.

    The order of sums depends on which graphs are kept, so checkpoints contain the value that `auto` measured.
    """

    def __init__(
        self,
        mini_batch_tokens: int = 8192,
        mini_batch_texts: int | None = None,
        kept_fraction: float | None = None,
        kept_gib: float | Literal["auto"] | None = "auto",
        equal_mini_batches: bool = False,
        gpu_mini_batch_tokens: int | None = None,
    ) -> None:
        require_minimum(
            "gpu_mini_batch_tokens", gpu_mini_batch_tokens, 1, "leave it out for mini_batch_tokens", optional=True
        )
        if isinstance(kept_gib, str) and kept_gib != "auto":
            raise OptionError("kept_gib", kept_gib, "must be a number, auto or null", "auto depends on the free memory")
        self._is_auto = kept_gib == "auto" and kept_fraction is None
        limit = None if isinstance(kept_gib, str) else kept_gib
        self.engine = GradCache(mini_batch_tokens, mini_batch_texts, kept_fraction, limit, equal_mini_batches)
        self._gpu_mini_batch_tokens = gpu_mini_batch_tokens
        self._measured_gib: float | None = None
        self._first_step = 0

    def check_before_model(self, trainer: L.Trainer) -> None:
        if not training_strategy(trainer.strategy).supports_gradcache:
            name = type(trainer.strategy).__name__
            fix = "set trainer.strategy to ddp, or to embeddings.strategies.FSDP2Strategy or ZeroStrategy"
            raise UserError(f"GradCacheCallback does not run under {name}; {fix}")

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        if not isinstance(module, GradCacheModule):
            name = type(module).__name__
            raise UserError(f"GradCacheCallback needs a contrastive module, got {name}; remove the callback")
        self.check_before_model(trainer)
        strategy = training_strategy(trainer.strategy)
        if isinstance(module, ContextualStep) and not strategy.supports_context_stage:
            what = "ZeRO-1 loses the gradients of the second stage, because the last backward pass does not reach it"
            raise UserError(f"GradCacheCallback: {what}; set trainer.strategy.init_args.stage to 2")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.check_run(trainer, pl_module, run_data(trainer))
        assert isinstance(pl_module, GradCacheModule)
        self.engine.equal_mini_batches |= training_strategy(trainer.strategy).equal_mini_batches
        pl_module.grad_cache = self.engine
        if self._gpu_mini_batch_tokens is not None and trainer.strategy.root_device.type == "cuda":
            self.engine.mini_batch_tokens = self._gpu_mini_batch_tokens
        if self._is_auto:
            self._measured_gib, self.engine.budget.kept_gib = None, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {} if self._measured_gib is None else {"kept_gib": self._measured_gib}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._is_auto and "kept_gib" in state_dict:
            self._measured_gib = self.engine.budget.kept_gib = float(state_dict["kept_gib"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Discard a restored value that was measured on a machine with more memory."""
        self._first_step = trainer.global_step
        if self._measured_gib is not None and self._measured_gib * KEPT_FRACTION > self._kept_gib(trainer, pl_module):
            self._measured_gib, self.engine.budget.kept_gib = None, 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Free the heap; measure after the first optimiser step, when gradients and optimiser state exist."""
        if pl_module.device.type == "cpu":
            # Mini-batches of changing lengths leave gaps: over five steps of the quickstart the heap grew by 1 GiB.
            trim_malloc()
        if not self._is_auto or self._measured_gib is not None or trainer.global_step == self._first_step:
            return
        self._measured_gib = self.engine.budget.kept_gib = self._kept_gib(trainer, pl_module)
        if trainer.is_global_zero:
            line = "GradCache keeps graphs in up to %.2f GiB per rank, half of the memory free after the first step"
            logger.info(line, self._measured_gib)

    def _kept_gib(self, trainer: L.Trainer, module: L.LightningModule) -> float:
        """`KEPT_FRACTION` of the free memory, in GiB, the minimum over ranks; ranks on a CPU share its memory."""
        free = KEPT_FRACTION * free_memory_bytes(module.device)
        if module.device.type == "cpu":
            free /= trainer.num_devices
        return reduce_int(int(free // 2**20), "min", module.device) / 1024

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, GradCacheModule)
        pl_module.grad_cache = None


def free_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that a process can still allocate beyond its peak so far; 0 if unknown.

    On a CPU: the minimum of `MemAvailable` and the free memory of the process's cgroup (version 2) and its parents.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    available = re.search(r"^MemAvailable:\s+(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    limits = [1024 * int(available[1])] if available else []
    own = re.search(r"^0::/(.*)", _text(root / "proc/self/cgroup"), re.MULTILINE)
    groups = root / "sys/fs/cgroup"
    # Inside a container the group itself is mounted as the root.
    folders = [groups / own[1], *(groups / own[1]).parents] if own else []
    for folder in folders:
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            cached = re.search(r"^inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            limits.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return max(0, min(limits, default=0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
