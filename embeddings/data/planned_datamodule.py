"""What all data modules share: batches that a plan draws from sources, and the place in it."""

import gc
import os
import signal
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embeddings.common.errors import InputError, OptionError
from embeddings.common.log import logger
from embeddings.common.protocols import BatchNeeds, NeedsBatches
from embeddings.common.randomness import run_seed
from embeddings.common.stopping import STOP_SIGNALS
from embeddings.common.text import check_tokenizer_files
from embeddings.data.loader import Drawable, ResumableLoader
from embeddings.data.samplers.base import BatchSampler, SamplerFactory
from embeddings.data.sources import check_names


class PlannedSource(Protocol):
    """What a plan asks of a source."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...


class PlannedDataModule(LightningDataModule):
    """Batches drawn by a plan from sources, made in workers, resumed exactly.

    The place in the plan travels in the checkpoint twice: Lightning keeps the loader's state, but drops it where the
    loader was made before the checkpoint was read (any schedule that asks for the number of steps does that), so this
    module carries it too.

    Args:
        sources: What is trained on.
        batch_size: Entries of one rank's batch.
        sampler: Makes the plan of the rows of each source, batch_size, the seed and the weight of each source.
        num_workers: Processes that make batches ahead of training; 0 does it between the steps.
        cache_dir: Where converted sources are kept, or None for the default.
        seed: Decides the order of the rows and every random choice; None for the run's (`seed_everything`).
        tokenizer: Directory or Hub name of a fast tokenizer, or None for the `tokenizer` of the trained module.

    Raises:
        OptionError: If a number is out of its range, or two sources have one name.
    """

    def __init__(
        self,
        sources: Sequence[PlannedSource],
        batch_size: int,
        sampler: SamplerFactory,
        num_workers: int,
        cache_dir: str | None,
        seed: int | None,
        tokenizer: str | None,
    ) -> None:
        super().__init__()
        if not sources:
            raise OptionError("data.sources", sources, "must name at least one source", "give a file or a data set")
        check_names([source.name for source in sources])
        check_least("batch_size", batch_size, 1)
        check_least("num_workers", num_workers, 0)
        self._planned_sources = sources
        self.batch_size, self.sampler, self.num_workers = batch_size, sampler, num_workers
        self.cache_dir, self.seed, self.tokenizer = cache_dir, run_seed(seed), tokenizer
        self._loader: ResumableLoader | None = None
        self._pending_state: dict[str, Any] | None = None
        self._expected_plan: dict[str, int | str] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each source; `setup` opens them."""
        raise NotImplementedError

    @property
    def source_rows(self) -> dict[str, int]:
        """The number of rows of each source, by its name; `setup` opens them."""
        return dict(zip((source.name for source in self._planned_sources), self.sizes, strict=True))

    def located(self, rows: Iterable[int]) -> dict[str, list[int]]:
        """Rows that were drawn, by the name of their source, numbered within it from 0."""
        starts = [0, *accumulate(self.sizes)]
        found: dict[str, list[int]] = {}
        for row in rows:
            source = bisect_right(starts, row) - 1
            found.setdefault(self._planned_sources[source].name, []).append(row - starts[source])
        return found

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch on `device`; the copy from page-locked memory does not wait."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def state_dict(self) -> dict[str, Any]:
        """The place in the plan, in plain types."""
        return {} if self._loader is None else {"loader": self._loader.state_dict()}

    def expect_state(self, state_dict: dict[str, Any]) -> None:
        """Learn, before the run, the state that it will go on from: `prepare_data` then refuses another plan.

        The trainer loads the state itself, after it has made the run's folder.
        """
        if "loader" in state_dict:
            self._expected_plan = state_dict["loader"]["plan"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the place in the plan when training is resumed (a checkpoint that is only scored has no say in it)."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING or "loader" not in state_dict:
            return
        if self._loader is not None:
            self._loader.load_state_dict(state_dict["loader"])
        else:
            self._pending_state = state_dict["loader"]

    def teardown(self, stage: str) -> None:
        """Let go of the loader: another fit begins at the start, or where its own checkpoint says."""
        if stage == "fit":
            self._loader = None

    def _check_plan(self, trainer: Trainer, module: LightningModule) -> None:
        """Check the sampler's options before the number of rows is known; these sizes suit any batch.

        Raises:
            OptionError: If they do not suit the sources.
            InputError: If what the sampler keeps is not there.
        """
        plan = self._make_plan([self.batch_size * trainer.world_size for _ in self._planned_sources], module)
        plan.check_sources([source.name for source in self._planned_sources])

    def _make_plan(self, sizes: Sequence[int], module: LightningModule | None = None) -> BatchSampler:
        """The plan over sources of these sizes, for a module, or else the one that is trained."""
        plan = self.sampler(sizes, self.batch_size, self.seed, [source.weight for source in self._planned_sources])
        plan.set_needs(batch_needs(module or self._trained_module))
        return plan

    def _remark(self, plan: BatchSampler) -> None:
        """Say what somebody who starts the run should know of its plan."""
        needs, kinds = batch_needs(self._trained_module), plan.kinds()
        remarks = plan.remarks()
        if needs.sampler is not None and needs.sampler not in kinds:
            name = type(self._trained_module).__name__
            remarks.append(f"{name} without data.sampler {needs.sampler}: {needs.without_sampler}")
        for remark in remarks:
            logger.warning("%s", remark)

    def _check_expected(self, plan: BatchSampler) -> None:
        """Check the plan over the sources that are there against that of the state that is expected.

        Raises:
            OptionError: If it is another.
        """
        if self._expected_plan is not None:
            plan.check_same_plan(self._expected_plan)

    def _make_loader(self, rows: Drawable, plan: BatchSampler, collate: Callable[[list[Any]], Any]) -> ResumableLoader:
        """The loader of training, at the place where the checkpoint was taken if the run is resumed."""
        self._loader = ResumableLoader(
            rows,
            plan,
            collate,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=start_worker,
        )
        self._loader.in_flight = self._in_flight
        callbacks: Any = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        self._loader.tries_batch_sizes = any(isinstance(callback, BatchSizeFinder) for callback in callbacks)
        if self._pending_state is not None:
            self._loader.load_state_dict(self._pending_state)
            self._pending_state = None
        return self._loader

    @property
    def _trained_module(self) -> LightningModule | None:
        return self.trainer.lightning_module if self.trainer is not None else None

    def _in_flight(self) -> int:
        """Batches that the trainer has begun and not trained on: one where an exception ends its step."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)

    def _base_tokenizer(self, module: LightningModule | None) -> PreTrainedTokenizerBase:
        if self.tokenizer is not None:
            check_tokenizer_files(Path(self.tokenizer))
            try:
                loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.tokenizer, trust_remote_code=False)
            except (OSError, ValueError) as error:
                fix = "name the directory or Hub name of a tokenizer"
                what = (str(error).splitlines() or [type(error).__name__])[0]
                raise InputError(f"data.tokenizer {self.tokenizer}", what, fix) from error
            return loaded
        found = getattr(module, "tokenizer", None)
        if not isinstance(found, PreTrainedTokenizerBase):
            rule = "must be given where the trained module has no tokenizer of its own"
            raise OptionError("data.tokenizer", None, rule, "name the backbone's directory or Hub name")
        return found


def batch_needs(module: LightningModule | None) -> BatchNeeds:
    """What a module says of its batches, or what holds where it says nothing."""
    return module.batch_needs if isinstance(module, NeedsBatches) else BatchNeeds()


def check_least(option: str, value: int, least: int) -> None:
    """Check a whole number; a config's null passes the parser.

    Raises:
        OptionError: If it is none, or below `least`.
    """
    if not isinstance(value, int) or value < least:
        raise OptionError(f"data.{option}", value, f"must be >= {least}", "see the data configs for usual values")


def start_worker(worker: int) -> None:
    """Make a forked worker a lean one.

    Its tokenizer starts no threads of its own (and does not warn that it cannot), and what it has of its parent is left
    out of garbage collection, which would copy that memory page by page as it walks over it. It ends when its parent
    says so, as a forked worker of torch's does; a stop signal of anybody else's is left to the run.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    """Wait for the parent's word, with the signals held back from all threads."""
    while True:
        told = signal.sigwaitinfo(STOP_SIGNALS)
        if told.si_signo == signal.SIGTERM and told.si_pid == parent:
            os._exit(0)
