"""Plain-text training data: sources, one token stream per source on disk, and the data module of packed rows."""

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from embeddings.common.distributed import rank, world_size
from embeddings.common.errors import InputError, OptionError, run_checks
from embeddings.common.io import cache_folder, check_file, check_manifest, lists_of, load_array, write_manifest
from embeddings.common.progress import progress_bar
from embeddings.common.protocols import RowTaskModule
from embeddings.common.types import PackedRows
from embeddings.data.datamodule import (
    PlannedDataModule,
    ResumableLoader,
    ShieldedLoader,
    base_tokenizer,
    check_minimum,
    start_worker,
)
from embeddings.data.documented_functions import (
    HELD_OUT_PACKAGES,
    TRAINING_PACKAGES,
    decoded,
    find_sources,
    is_available,
    require_available,
    sources_digest,
)
from embeddings.data.readers import rows_of
from embeddings.data.records import Cell, valid_text
from embeddings.data.samplers.base import BlendedBatchSampler, PlanEntry, SamplerFactory, SourceIdentity
from embeddings.data.sources import Origin, SourceInputs, check_files, check_names, one_after_another
from embeddings.data.store import converted_folder
from embeddings.data.tokenize import copied_backend

PACKAGE_LISTS = {"training": TRAINING_PACKAGES, "held_out": HELD_OUT_PACKAGES}


@dataclass(frozen=True)
class TextSource(Origin):
    """One source of plain texts; each record or source file is a document.

    Args:
        name: Name in messages, unique in a run.
        path: File, glob, list of these, or `hub:organisation/name`. Environment variables are expanded. A file is
            Parquet, JSON lines or a table, as in `SourceConfig`.
        packages: Instead of `path`: import names of installed packages, `stdlib` for the standard library, `training`
            and `held_out` for the installed packages of the docstring corpus. No package is imported.
        column: Column of the text. Records with an empty or white-space text are skipped.
        subset: Configuration of a Hub data set.
        split: Split of a Hub data set; None for `train`.
        revision: Branch, tag or commit of a Hub data set.
        weight: Relative weight of this source under proportions `given`, > 0.
        max_rows: Use only the first `max_rows` documents; None for all.
    """

    path: str | list[str] | None = None
    packages: list[str] | None = None
    column: str = "text"
    max_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.path) == bool(self.packages):
            actual = "both" if self.path else "neither"
            raise self.fault("path", actual, "or packages must be given", "give exactly one of the two")

    def check(self) -> None:
        """Check that the packages are installed; `check_files` checks files."""
        for package in _packages(self.packages or []):
            require_available(package)


class Documents(SourceInputs):
    """The documents of a source in a fixed order."""

    def __init__(self, source: TextSource, root: Path) -> None:
        super().__init__(source, root)
        self.source = source
        self._modules = [file for package in _packages(source.packages or []) for file in find_sources(package)]
        if source.packages:
            self.identity = [{"packages": sources_digest(self._modules)}]

    def __iter__(self) -> Iterator[str]:
        """The documents that are not blank, with a progress bar over the files that are read."""
        title = f"tokenising {self.source.name}"
        texts = self._module_texts(title) if self.source.packages else self._record_texts(title)
        return islice((text for text in texts if text.strip()), self.source.max_rows)

    def _module_texts(self, title: str) -> Iterator[str]:
        for module in progress_bar(None, title, "document", iterable=self._modules):
            yield decoded(module.path.read_bytes())

    def _record_texts(self, title: str) -> Iterator[str]:
        column = self.source.column
        for where, fields in rows_of(title, self.readers([column], [column])):
            if column not in fields:
                names = ", ".join(map(str, fields))[:80]
                raise InputError(where, f"no column {column!r} among {names}", "set column in the source")
            is_empty_cell = fields[column] is None and any(isinstance(cell, Cell) for cell in fields.values())
            if not is_empty_cell:
                yield valid_text(where, column, fields[column])


def _packages(names: Sequence[str]) -> list[str]:
    """The packages of `names`, with lists expanded and duplicates removed, in order."""
    listed = {name: filter(is_available, packages) for name, packages in PACKAGE_LISTS.items()}
    return list(dict.fromkeys(package for name in names for package in listed.get(name, [name])))


TOKENS_FILE, STARTS_FILE = "tokens.bin", "documents.npy"
SCHEMA_VERSION = 1
_BATCH = 256


class DocumentTokenizer:
    """Converts documents to token ids with the tokenizer's special tokens and, if requested, a final separator.

    A special token in the text of a document (`</s>` in a source file) is tokenised as plain characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> None:
        self._backend = copied_backend(tokenizer)
        self._backend.encode_special_tokens = True
        self._separator: int | None = None
        if append_eos:
            separators = (tokenizer.eos_token_id, tokenizer.sep_token_id)
            self._separator = next((token for token in separators if isinstance(token, int)), None)
            if self._separator is None:
                raise OptionError("data.append_eos", True, "needs a tokenizer with an eos_token", "set it to false")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._backend.to_str()}\0{self._separator}".encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        documents: list[list[int]] = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        if self._separator is not None:
            for ids in documents:
                if ids[-1:] != [self._separator]:
                    ids.append(self._separator)
        return documents


class TokenStream:
    """Memory-mapped reader of a token stream: row r contains tokens r·L … (r+1)·L - 1; the last may be shorter."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key, hint = folder, folder.name, "delete the folder and run again"
        check_manifest(folder, {})
        check_file(folder / TOKENS_FILE, hint)
        self._tokens = np.memmap(folder / TOKENS_FILE, dtype=np.uint32, mode="r")
        self.num_tokens = len(self._tokens)
        self._starts = load_array(folder / STARTS_FILE, hint, mapped=True)

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[Path]]:
        return TokenStream, (self.folder,)

    def num_rows(self, row_length: int) -> int:
        return -(-self.num_tokens // row_length)

    def row(self, index: int, row_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens of a row and the index of each token's document in it, (n,) int64, n <= row_length."""
        start = index * row_length
        stop = min(start + row_length, self.num_tokens)
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        inner = np.asarray(self._starts[first + 1 : last + 1], dtype=np.int64)
        document = np.searchsorted(inner, np.arange(start, stop), side="right")
        return self._tokens[start:stop].astype(np.int64), document.astype(np.int64)


def open_stream(
    source: TextSource, tokenizer: DocumentTokenizer, cache_dir: str | os.PathLike[str] | None = None
) -> TokenStream:
    """A source as a token stream; the first call for this content and tokenizer writes it to the cache."""
    root = cache_folder(cache_dir).absolute()
    documents = Documents(source, root)
    identity = {
        "schema_version": SCHEMA_VERSION,
        "kind": "token stream",
        "tokenizer": tokenizer.fingerprint,
        "column": source.column,
        "inputs": documents.identity,
    }
    if source.max_rows is not None:
        identity["max_rows"] = source.max_rows
    stream = TokenStream(converted_folder(root, identity, partial(_write, documents, tokenizer)))
    documents.remember()
    return stream


def _write(documents: Documents, tokenizer: DocumentTokenizer, folder: Path, identity: dict[str, object]) -> None:
    starts, total = array("q"), 0
    with open(folder / TOKENS_FILE, "wb") as file:
        for texts in lists_of(documents, _BATCH):
            for ids in tokenizer(texts):
                if ids:
                    starts.append(total)
                    total += len(ids)
                    file.write(np.asarray(ids, dtype=np.uint32).tobytes())
    documents.require_unchanged()
    if total == 0:
        raise InputError(f"source {documents.source.name!r}", "contains no text", "use another source, or leave it out")
    np.save(folder / STARTS_FILE, np.frombuffer(starts, dtype=np.int64))
    write_manifest(folder, {**identity, "num_tokens": total, "num_documents": len(starts)})


class TokenRow(NamedTuple):
    """One entry of the plan, with its token ids and the index of the document of each token, (n,) int64."""

    entry: PlanEntry
    ids: NDArray[np.int64]
    documents: NDArray[np.int64]


class RowMixture:
    """The rows of all sources, concatenated; no row contains tokens of two sources."""

    def __init__(self, streams: Sequence[TokenStream], row_length: int) -> None:
        self.streams, self.row_length = tuple(streams), row_length
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stream.num_rows(self.row_length) for stream in self.streams)

    def __getitems__(self, entries: Sequence[PlanEntry]) -> list[TokenRow]:
        """The rows of a batch of entries; a negative row number means a row of padding."""
        return [TokenRow(entry, *self._tokens(entry.row)) for entry in entries]

    def _tokens(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if row < 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        source = bisect_right(self._starts, row) - 1
        return self.streams[source].row(row - self._starts[source], self.row_length)


class RowCollator:
    """Makes `PackedRows` from rows, padded on the right, and applies the task if there is one."""

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
        for index, row in enumerate(rows):
            input_ids_NL[index, : len(row.ids)] = torch.from_numpy(row.ids)
            document_NL[index, : len(row.ids)] = torch.from_numpy(row.documents)
        special_NL = torch.isin(input_ids_NL, self._special_ids) | (document_NL < 0)
        row_N, draw_N = (torch.tensor([row.entry[part] for row in rows]) for part in (0, 1))
        packed = PackedRows(input_ids_NL, document_NL, special_NL, draw_N, row_N)
        return packed if self.task is None else self.task(packed)


class TextDataModule(PlannedDataModule):
    """Batches of packed rows from plain texts: tokenised once, drawn by a plan, resumed exactly.

    The documents of a source are concatenated and split every `row_length` tokens. A row may contain the end of one
    document, several complete ones and the start of another; only the last row of a source has padding. The `task` of
    the trained module masks tokens and sets targets, in the workers.

    Args:
        sources: Training sources.
        validation_sources: Sources for the validation loss; empty for no validation.
        row_length: Tokens per row, L. LLM2Vec: 512; *MoE*'s MLM adaptation: 2048.
        batch_size: Rows in the batch of one rank.
        append_eos: Whether a separator ends each document (see `DocumentTokenizer`). LLM2Vec only puts `<s>` before.
        sampler: As in `EmbeddingDataModule`, over rows.
        num_workers: Processes that make batches ahead of training; 0 does this between the steps.
        cache_dir: Folder of token streams, or None for the default.
        seed: Seed of the row order and of random choices in the rows; None for `seed_everything`.

    Distributed: needs Trainer(use_distributed_sampler=False). Validation rows are split over the ranks; all ranks get
        the same number of batches, and rows of padding, which do not count, fill the last ones.
    """

    sources: list[TextSource]
    row_length: int

    def __init__(
        self,
        sources: list[TextSource],
        validation_sources: list[TextSource] = [],  # noqa: B006 - never mutated
        row_length: int = 512,
        batch_size: int = 32,
        append_eos: bool = True,
        sampler: SamplerFactory = BlendedBatchSampler,
        num_workers: int = 0,
        cache_dir: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(sources, batch_size, sampler, num_workers, cache_dir, seed)
        check_names([source.name for source in validation_sources], "validation_sources")
        check_minimum("row_length", row_length, 2)
        self.validation_sources = validation_sources
        self.row_length, self.append_eos = row_length, append_eos
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rows: RowMixture | None = None
        self._validation_rows: RowMixture | None = None

    def check_before_model(self, trainer: Trainer) -> None:
        sources = [*self.sources, *self.validation_sources]
        run_checks([lambda: check_files(sources), *(source.check for source in sources)])

    def check_run(self, trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
        """Check files, packages and plan as far as possible before tokenising, which may take hours."""
        run_checks(
            [
                lambda: self.check_before_model(trainer),
                lambda: self._check_plan_options(trainer, module),
                lambda: base_tokenizer(module),
            ]
        )

    def prepare_data(self) -> None:
        """Tokenise new sources, on one rank, and check that they fill a batch."""
        self.setup()
        self._check_plan(self._plan())

    def setup(self, stage: str | None = None) -> None:
        base = base_tokenizer(self._trained_module)
        # A second fit may train another module.
        if self._rows is None or base is not self._tokenizer:
            tokenizer, self._tokenizer = DocumentTokenizer(base, self.append_eos), base
            self._rows = self._open(self.sources, tokenizer)
            if self.validation_sources:
                self._validation_rows = self._open(self.validation_sources, tokenizer)
        if self._validation_rows is None and self.trainer is not None:
            self.trainer.limit_val_batches = 0  # Lightning would warn of empty loaders

    @property
    def rows(self) -> RowMixture:
        assert self._rows is not None, "call setup() first"
        return self._rows

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rows.sizes

    def train_dataloader(self) -> ResumableLoader:
        return self._make_loader(self.rows, self._collator())

    def val_dataloader(self) -> list[DataLoader[Any]]:
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
        opened = one_after_another("tokenising", sources)
        return RowMixture([open_stream(source, tokenizer, self.cache_dir) for source in opened], self.row_length)

    def _collator(self) -> RowCollator:
        module = self._trained_module
        task = module.task if isinstance(module, RowTaskModule) else None
        return RowCollator(base_tokenizer(module), self.row_length, task)

    def _identities(self) -> Sequence[SourceIdentity]:
        streams = self.rows.streams
        return [SourceIdentity(source.name, stream.key) for source, stream in zip(self.sources, streams, strict=True)]


def validation_batches(num_rows: int, batch_size: int, rank: int, num_ranks: int) -> list[list[PlanEntry]]:
    """One rank's batches of rows 0 … num_rows-1, as many on every rank; rows with index -1 fill the last ones."""
    batches, step = [], batch_size * num_ranks
    for start in range(rank * batch_size, -(-num_rows // step) * step, step):
        numbers = range(start, start + batch_size)
        batches.append([PlanEntry(row, row) if row < num_rows else PlanEntry(-1, 0) for row in numbers])
    return batches
