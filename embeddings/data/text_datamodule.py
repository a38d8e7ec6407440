"""Plain texts of a run, packed into rows: the rows as a data set, their batches, and the data module."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from embeddings.common.distributed import rank, world_size
from embeddings.common.protocols import RowTaskModule
from embeddings.common.types import PackedRows
from embeddings.data.datamodule import PlannedDataModule, ResumableLoader, ShieldedLoader, check_minimum, start_worker
from embeddings.data.samplers.base import BlendedBatchSampler, PlanEntry, SamplerFactory, SourceIdentity
from embeddings.data.sources import check_files, check_names
from embeddings.data.text_streams import DocumentTokenizer, TextSource, TokenStream, open_stream


class TokenRow(NamedTuple):
    """One row: its tokens, the number of each one's document in the row, the key of its random choices, its number."""

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    draw: int
    row: int


class RowMixture:
    """The rows of all sources one after another; no row holds tokens of two sources."""

    def __init__(self, streams: Sequence[TokenStream], row_length: int) -> None:
        self.streams, self.row_length = tuple(streams), row_length
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stream.num_rows(self.row_length) for stream in self.streams)

    def __getitems__(self, entries: Sequence[PlanEntry]) -> list[TokenRow]:
        """The rows of some entries of a plan; a negative number stands for a row that is all padding."""
        return [self._row(entry) for entry in entries]

    def _row(self, entry: PlanEntry) -> TokenRow:
        if entry.row < 0:
            empty = np.empty(0, dtype=np.int64)
            return TokenRow(empty, empty, entry.draw, entry.row)
        source = bisect_right(self._starts, entry.row) - 1
        ids, documents = self.streams[source].row(entry.row - self._starts[source], self.row_length)
        return TokenRow(ids, documents, entry.draw, entry.row)


class RowCollator:
    """Makes `PackedRows` of rows, shorter ones padded on the right, and hands them to a task where there is one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, row_length: int, task: Callable[[PackedRows], Any] | None = None
    ) -> None:
        self._special_ids = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        pad = tokenizer.pad_token_id
        self._pad_id = pad if isinstance(pad, int) else 0
        self.row_length, self.task = row_length, task

    def __call__(self, rows: Sequence[TokenRow]) -> Any:
        input_ids_NL = torch.full((len(rows), self.row_length), self._pad_id, dtype=torch.int64)
        document_NL = torch.full_like(input_ids_NL, -1)
        for place, row in enumerate(rows):
            input_ids_NL[place, : len(row.ids)] = torch.from_numpy(row.ids)
            document_NL[place, : len(row.ids)] = torch.from_numpy(row.documents)
        special_NL = torch.isin(input_ids_NL, self._special_ids) | (document_NL < 0)
        draw_N, row_N = torch.tensor([row.draw for row in rows]), torch.tensor([row.row for row in rows])
        packed = PackedRows(input_ids_NL, document_NL, special_NL, draw_N, row_N)
        return packed if self.task is None else self.task(packed)


class TextDataModule(PlannedDataModule):
    """Sources of plain texts to batches of packed rows: tokenised once, drawn by a plan, resumed exactly.

    A source's documents follow each other without a gap and are cut every `row_length` tokens, so a row may hold the
    end of one document, some whole ones and the start of another; only a source's last row has padding. The trained
    module's `task` hides tokens and names targets, in the workers.

    Args:
        sources: What is trained on.
        validation_sources: What the loss is measured on; empty for no validation.
        row_length: Tokens of a row, L. LLM2Vec: 512; *MoE*'s MLM adaptation: 2048.
        batch_size: Rows of one rank's batch.
        append_eos: Whether each document ends in a separator (see `DocumentTokenizer`). LLM2Vec only puts `<s>` before.
        sampler: As in `EmbeddingDataModule`, over rows.
        num_workers: Processes that make batches ahead of training; 0 does it between the steps.
        cache_dir: Where token streams are kept, or None for the default.
        seed: Decides the order of the rows and their random choices; None for the run's (`seed_everything`).
        tokenizer: Directory or Hub name of a fast tokenizer, or None for the `tokenizer` of the trained module.

    Distributed: needs Trainer(use_distributed_sampler=False). Validation rows are split over the ranks; all ranks see
        equally many batches, filled up with rows of padding, which do not count.
    Raises:
        OptionError: If a number is out of its range; one line that names the option.
    """

    row_length: int

    def __init__(
        self,
        sources: list[TextSource],
        validation_sources: list[TextSource] = [],  # noqa: B006 - never changed
        row_length: int = 512,
        batch_size: int = 32,
        append_eos: bool = True,
        sampler: SamplerFactory = BlendedBatchSampler,
        num_workers: int = 0,
        cache_dir: str | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(sources, batch_size, sampler, num_workers, cache_dir, seed, tokenizer)
        check_names([source.name for source in validation_sources], "validation_sources")
        check_minimum("row_length", row_length, 2)
        self.sources, self.validation_sources = sources, validation_sources
        self.row_length, self.append_eos = row_length, append_eos
        self._rows: RowMixture | None = None
        self._validation_rows: RowMixture | None = None

    def check_run(self, trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
        """Check what can be known of files, packages and plan before a source is tokenised, which may take hours."""
        sources = [*self.sources, *self.validation_sources]
        check_files(sources)
        for source in sources:
            source.check()
        self._check_plan_options(trainer, module)
        self._base_tokenizer(module)

    def prepare_data(self) -> None:
        """Tokenise the sources that are not tokenised yet, on one rank, and check that they fill a batch."""
        self.setup()
        self._check_plan(self._plan())

    def setup(self, stage: str | None = None) -> None:
        if self._rows is None:
            tokenizer = DocumentTokenizer(self._base_tokenizer(self._trained_module), self.append_eos)
            self._rows = self._open(self.sources, tokenizer)
            if self.validation_sources:
                self._validation_rows = self._open(self.validation_sources, tokenizer)
        if self._validation_rows is None and self.trainer is not None:
            self.trainer.limit_val_batches = 0  # Lightning would warn of loaders that hold nothing

    @property
    def rows(self) -> RowMixture:
        """The rows of all sources; `setup` opens them."""
        assert self._rows is not None, "setup() comes first"
        return self._rows

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rows.sizes

    def train_dataloader(self) -> ResumableLoader:
        return self._make_loader(self.rows, self._collator())

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """This rank's validation batches, always the same; none where there are no validation sources."""
        if self._validation_rows is None:
            return []
        rows = self._validation_rows
        loader = ShieldedLoader(
            rows,  # type: ignore[arg-type]  # torch calls `__getitems__` alone
            batch_sampler=validation_batches(len(rows), self.batch_size, rank(), world_size()),
            collate_fn=self._collator(),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=start_worker,
            generator=torch.Generator().manual_seed(self.seed),
        )
        return [loader]

    def _open(self, sources: Sequence[TextSource], tokenizer: DocumentTokenizer) -> RowMixture:
        return RowMixture([open_stream(source, tokenizer, self.cache_dir) for source in sources], self.row_length)

    def _collator(self) -> RowCollator:
        module = self._trained_module
        task = module.task if isinstance(module, RowTaskModule) else None
        return RowCollator(self._base_tokenizer(module), self.row_length, task)

    def _identities(self) -> Sequence[SourceIdentity]:
        streams = self.rows.streams
        return [SourceIdentity(source.name, one.key) for source, one in zip(self.sources, streams, strict=True)]


def validation_batches(num_rows: int, batch_size: int, rank: int, num_ranks: int) -> list[list[PlanEntry]]:
    """One rank's batches of rows 0 … num_rows-1: each row in one batch of one rank, equally many batches on each rank.

    A row's random choices are keyed by its number. Rows of number -1 fill up the last batches.
    """
    batches, step = [], batch_size * num_ranks
    for start in range(rank * batch_size, -(-num_rows // step) * step, step):
        numbers = range(start, start + batch_size)
        batches.append([PlanEntry(row, row) if row < num_rows else PlanEntry(-1, 0) for row in numbers])
    return batches
