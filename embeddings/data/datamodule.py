"""The data of a run, as Lightning asks for it."""

from lightning import LightningDataModule, LightningModule, Trainer

from embeddings.common.fileio import check_manifest
from embeddings.common.text import TextSettings
from embeddings.data.collate import ContrastiveCollator
from embeddings.data.dataset import open_source
from embeddings.data.files import fill_path, resolve_files
from embeddings.data.loader import ResumableLoader
from embeddings.data.mixture import Mixture
from embeddings.data.negative_coverage import check_levels, check_negatives_asked_for, check_negatives_found
from embeddings.data.planned_datamodule import PlannedDataModule, batch_needs, check_least
from embeddings.data.prompts import check_instruction, check_prompts, warn_of_unnamed_prompts, with_source_prompts
from embeddings.data.run_length import RunLength
from embeddings.data.samplers.base import BatchSampler, SamplerFactory
from embeddings.data.samplers.blended import BlendedBatchSampler
from embeddings.data.samplers.curriculum import CurriculumBatchSampler
from embeddings.data.sources import SourceConfig
from embeddings.data.tokenize import TextTokenizer


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
        num_in_context_examples: Most solved examples of the batch before a query (see `ContrastiveCollator`).

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
        num_in_context_examples: int = 0,
    ) -> None:
        super().__init__(sources, batch_size, sampler, num_workers, cache_dir, seed, tokenizer)
        check_least("num_negatives", num_negatives, 0)
        check_least("num_in_context_examples", num_in_context_examples, 0)
        self.num_in_context_examples = num_in_context_examples
        self.sources, self.text = sources, with_source_prompts(text or TextSettings(), sources)
        self.num_negatives = num_negatives
        self._mixture: Mixture | None = None

    def check_run(self, trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
        """Check what can be known of files, plan and prompts before a source is read, which may take hours.

        Raises:
            InputError: If a file, a folder of surrogate vectors, or what the sampler keeps is not there, or a source
                has neither in-batch nor hard negatives.
            OptionError: If the sampler's options do not suit the sources, or a prompt leaves no room for a text.
        """
        check_negatives_asked_for(self.sources, batch_needs(module), self.num_negatives)
        for source in self.sources:
            if not source.is_hub:
                resolve_files(source.path)
            if source.surrogate_vectors is not None:
                check_manifest(fill_path(source.surrogate_vectors) / "index", {"kind": "pair_index"})
        self._check_plan(trainer, module)
        check_prompts(self._tokenizer_for(module), self.sources)

    def prepare_data(self) -> None:
        """Convert the sources, on one rank, where that is still to do, and check that they suit the plan.

        Raises:
            InputError: If a source cannot be used, has neither in-batch nor hard negatives, or a record's own
                instruction leaves no room for its query.
            OptionError: If there are fewer rows than one global batch, a curriculum cannot take effect, or the run is
                to go on in another plan (see `expect_state`).
        """
        needs = batch_needs(self._trained_module)
        check_negatives_asked_for(self.sources, needs, self.num_negatives)
        self.setup()
        check_negatives_found(self.mixture.sources, needs)
        plan = self._plan()
        if isinstance(plan, CurriculumBatchSampler):
            check_levels(self.mixture.sources, plan.levels, stand_in=plan.missing_level == "coarser")
        self._check_expected(plan)
        self._remark(plan)
        for source in self.mixture.sources:
            if source.cached.longest_instruction is not None:
                check_instruction(self.text_tokenizer(), *source.cached.longest_instruction)
        warn_of_unnamed_prompts(self.text, self.sources)
        for source in self.mixture.sources:
            source.warn_of_unused_columns(self.num_negatives)
        if self.num_negatives:
            for source in self.mixture.sources:
                source.warn_of_unscored_negatives()

    def setup(self, stage: str | None = None) -> None:
        """Open the converted sources, once."""
        if self._mixture is None:
            self._mixture = Mixture([open_source(source, self.cache_dir, self.text) for source in self.sources])

    @property
    def mixture(self) -> Mixture:
        """The rows of all sources; `setup` opens them."""
        assert self._mixture is not None, "setup() comes first"
        return self._mixture

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each source; `setup` opens them."""
        return self.mixture.sizes

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
        return self._tokenizer_for(self._trained_module)

    def _tokenizer_for(self, module: LightningModule | None) -> TextTokenizer:
        """The tokenizer for a module, pooling by the rule of the model that it starts from where none is given."""
        model = getattr(module, "text", None)
        text = self.text.following(model) if isinstance(model, TextSettings) else self.text
        return TextTokenizer(self._base_tokenizer(module), text)

    def train_dataloader(self) -> ResumableLoader:
        """The batches of this rank, from the place where the checkpoint was taken if the run is resumed.

        Raises:
            OptionError: If there are fewer rows than one global batch, or the checkpoint is of another plan.
        """
        collator = ContrastiveCollator(
            self.text_tokenizer(), self.num_negatives, self.mixture.surrogate_width, self.num_in_context_examples
        )
        return self._make_loader(self.mixture, self._plan(), collator)

    def _plan(self) -> BatchSampler:
        plan = self._make_plan(self.sizes)
        plan.identify(self.mixture.identities)
        if self.trainer is not None:
            plan.set_run(RunLength.of(self.trainer, len(plan)))
        return plan
