"""The data of a run, as Lightning asks for it."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embeddings.common.errors import InputError, OptionError
from embeddings.common.fileio import check_manifest
from embeddings.common.randomness import run_seed
from embeddings.common.text import TextSettings
from embeddings.data.collate import ContrastiveCollator
from embeddings.data.dataset import open_source
from embeddings.data.files import fill_path, resolve_files
from embeddings.data.level_coverage import check_levels
from embeddings.data.loader import Drawable, ResumableLoader
from embeddings.data.mixture import Mixture
from embeddings.data.prompts import check_prompts, warn_of_unnamed_prompts, with_source_prompts
from embeddings.data.run_length import RunLength
from embeddings.data.samplers.base import BatchSampler, SamplerFactory
from embeddings.data.samplers.blended import BlendedBatchSampler
from embeddings.data.samplers.curriculum import CurriculumBatchSampler
from embeddings.data.sources import SourceConfig, check_names
from embeddings.data.tokenize import TextTokenizer


class PlannedDataModule(LightningDataModule):
    """Batches drawn by a plan, made in workers, resumed exactly.

    The place in the plan travels in the checkpoint twice: Lightning keeps the loader's state, but drops it where the
    loader was made before the checkpoint was read (any schedule that asks for the number of steps does that), so this
    module carries it too.

    Args:
        num_workers: Processes that make batches ahead of training; 0 does it between the steps.
        tokenizer: Directory or Hub name of a fast tokenizer, or None for the `tokenizer` of the trained module.
    """

    def __init__(self, num_workers: int, tokenizer: str | None) -> None:
        super().__init__()
        self.num_workers, self.tokenizer = num_workers, tokenizer
        self._loader: ResumableLoader | None = None
        self._pending_state: dict[str, Any] | None = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch on `device`; the copy from page-locked memory does not wait."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def state_dict(self) -> dict[str, Any]:
        """The place in the plan, in plain types."""
        return {} if self._loader is None else {"loader": self._loader.state_dict()}

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

    def _make_loader(self, rows: Drawable, plan: BatchSampler, collate: Callable[[list[Any]], Any]) -> ResumableLoader:
        """The loader of training, at the place where the checkpoint was taken if the run is resumed."""
        self._loader = ResumableLoader(
            rows,
            plan,
            collate,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=single_threaded_tokenizers,
        )
        self._loader.in_flight = self._in_flight
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
            try:
                loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.tokenizer)
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


class EmbeddingDataModule(PlannedDataModule):
    """Sources to contrastive batches: converted once, drawn by a plan, tokenised in workers, resumed exactly.

    `prepare_data` converts the sources to memory-mapped files on one rank; `setup` opens them on every rank.

    Args:
        sources: Where the records come from, and how each is used.
        text: Lengths, prompts and special tokens; the sources' own prompts are added (see `with_source_prompts`).
        batch_size: Queries of one rank's batch.
        num_negatives: Most hard negatives of a query. NV-Embed uses 7.
        sampler: Makes the plan of the rows of each source, batch_size, the seed and the weight of each source. In a
            config: the class of a batch sampler and its other arguments.
        num_workers: Processes that read and tokenise ahead of training; 0 does it between the steps.
        cache_dir: Where converted sources are kept, or None for the default.
        seed: Decides the order of the rows and every random choice in a batch; None for the run's (`seed_everything`).
        tokenizer: Directory or Hub name of a fast tokenizer, or None for the `tokenizer` of the trained module.

    Distributed: needs Trainer(use_distributed_sampler=False): the plan slices the ranks itself.
    Raises:
        OptionError: If a number is out of its range; one line that names the option.
    """

    def __init__(
        self,
        sources: list[SourceConfig],
        text: TextSettings | None = None,
        batch_size: int = 32,
        num_negatives: int = 7,
        sampler: SamplerFactory = BlendedBatchSampler,
        num_workers: int = 0,
        cache_dir: str | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(num_workers, tokenizer)
        if not sources:
            raise OptionError("data.sources", sources, "must name at least one source", "give a file or a data set")
        limits = (("batch_size", batch_size, 1), ("num_negatives", num_negatives, 0), ("num_workers", num_workers, 0))
        for name, value, least in limits:
            # A config's null passes the parser.
            if not isinstance(value, int) or value < least:
                raise OptionError(f"data.{name}", value, f"must be >= {least}", "see the data configs for usual values")
        check_names(sources)
        self.sources, self.text = sources, with_source_prompts(text or TextSettings(), sources)
        self.batch_size, self.num_negatives = batch_size, num_negatives
        self.sampler, self.seed = sampler, run_seed(seed)
        self.cache_dir = cache_dir
        self._mixture: Mixture | None = None

    def check_run(self, trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
        """Check what can be known of files, plan and prompts before a source is read, which may take hours.

        Raises:
            InputError: If a file, a folder of surrogate vectors, or what the sampler keeps is not there.
            OptionError: If the sampler's options do not suit the sources, or a prompt leaves no room for a text.
        """
        for source in self.sources:
            if not source.is_hub:
                resolve_files(source.path)
            if source.surrogate_vectors is not None:
                check_manifest(fill_path(source.surrogate_vectors) / "index", {"kind": "pair_index"})
        # Sizes are not known yet; these suit any batch, so that what is refused is an option.
        sizes = [self.batch_size * trainer.world_size for _ in self.sources]
        plan = self.sampler(sizes, self.batch_size, self.seed, [source.weight for source in self.sources])
        plan.check_sources([source.name for source in self.sources])
        check_prompts(TextTokenizer(self._base_tokenizer(module), self.text), self.sources)

    def prepare_data(self) -> None:
        """Convert the sources, on one rank, where that is still to do, and check that they suit the plan.

        Raises:
            InputError: If a source cannot be used.
            OptionError: If there are fewer rows than one global batch, or a curriculum that cannot take effect.
        """
        self.setup()
        plan = self._plan()
        if isinstance(plan, CurriculumBatchSampler):
            check_levels(self.mixture.sources, plan.levels, stand_in=plan.missing_level == "coarser")
        warn_of_unnamed_prompts(self.text, self.sources)
        if self.num_negatives:
            for source in self.mixture.sources:
                source.warn_of_unscored_negatives()

    def setup(self, stage: str | None = None) -> None:
        """Open the converted sources, once."""
        if self._mixture is None:
            self._mixture = Mixture([open_source(source, self.cache_dir) for source in self.sources])

    @property
    def mixture(self) -> Mixture:
        """The rows of all sources; `setup` opens them."""
        assert self._mixture is not None, "setup() comes first"
        return self._mixture

    @property
    def has_surrogates(self) -> bool:
        """Whether any source brings another model's vectors of its pairs."""
        return any(source.surrogate_vectors is not None for source in self.sources)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one rank in an epoch of the plan."""
        return len(self._plan())

    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer of training: the one named, or else the trained module's."""
        return TextTokenizer(self._base_tokenizer(self._trained_module), self.text)

    def train_dataloader(self) -> ResumableLoader:
        """The batches of this rank, from the place where the checkpoint was taken if the run is resumed.

        Raises:
            OptionError: If there are fewer rows than one global batch, or the checkpoint is of another plan.
        """
        collator = ContrastiveCollator(self.text_tokenizer(), self.num_negatives, self.mixture.surrogate_width)
        return self._make_loader(self.mixture, self._plan(), collator)

    def _plan(self) -> BatchSampler:
        plan = self.sampler(self.mixture.sizes, self.batch_size, self.seed, self.mixture.weights)
        plan.identify(self.mixture.identities)
        if self.trainer is not None:
            plan.set_run(self._run_length(len(plan)))
        return plan

    def _run_length(self, batches_per_epoch: int) -> RunLength:
        run = RunLength.of(self.trainer, batches_per_epoch)
        callbacks = getattr(self.trainer, "callbacks", [])
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            return replace(run, accumulate_grad_batches=None)
        return run


def single_threaded_tokenizers(worker: int) -> None:
    """Keep a forked worker's tokenizer from starting threads of its own (and from warning that it cannot)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
