"""Packed rows in a training, in one that was killed, and in validation."""

import multiprocessing
import subprocess
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from lightning.pytorch import Trainer

from embeddings.common import InputError, OptionError
from embeddings.common.types import PackedRows
from embeddings.data import BlendedBatchSampler, TextDataModule, TextSource
from embeddings.data.samplers.base import PlanEntry
from embeddings.data.text_datamodule import validation_batches
from tests.data.killed_runs import LIGHTNING_WARNINGS, Ledger, killed_run
from tests.data.test_token_stream import TEXTS, source
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer

# The ledger only trains.
pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS, "ignore:You passed in a `val_dataloader`")
TOKENIZER = wordpiece_tokenizer()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    sources = [source(tmp_path, TEXTS * 2, "a.jsonl"), TextSource("other", source(tmp_path, TEXTS, "b.jsonl").path)]
    return {"sources": sources, "row_length": 8, "batch_size": 4, "cache_dir": str(tmp_path / "cache"), "seed": 1}


def content(batch: PackedRows) -> list[int]:
    """The tokens of a batch, as the ledger's rows."""
    return batch.input_ids_NL.flatten().tolist()


def fit(data: LightningDataModule, module: Ledger, **limits: Any) -> None:
    Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **limits,
    ).fit(module, data)


def test_an_epoch_holds_every_row_once_but_for_those_that_fill_no_batch(options: dict[str, Any]) -> None:
    data, module = TextDataModule(**options), Ledger(content, TOKENIZER)
    fit(data, module, max_epochs=2)
    num_rows, length = len(data.rows), 8
    assert data.batches_per_epoch == num_rows // 4 > 5
    first = module.rows[: data.batches_per_epoch]
    seen = [tuple(batch[start : start + length]) for batch in first for start in range(0, 32, length)]
    collate = data._collator()
    every = [tuple(content(collate([data.rows[PlanEntry(row, 0)]]))) for row in range(num_rows)]
    left = list(every)
    for row in seen:
        left.remove(row)
    assert len(left) == num_rows % 4
    assert seen != every[: len(seen)]
    assert module.rows[data.batches_per_epoch :] != first


def test_a_training_killed_three_times_sees_the_plan_once(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Ledger(content, TOKENIZER)
    fit(TextDataModule(**options), whole, max_epochs=3)
    stops = [2, len(whole.rows) // 3, len(whole.rows) - 1]
    seen = killed_run(
        tmp_path / "run",
        stops,
        lambda: Ledger(content, TOKENIZER, asks_for_steps=True),
        lambda: TextDataModule(**options),
        {"max_epochs": 3},
    )
    assert seen == whole.rows


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_modules_task_is_applied_in_the_workers(options: dict[str, Any], num_workers: int) -> None:
    module = Ledger(lambda batch: batch.tolist(), TOKENIZER)
    module.task = sums  # type: ignore[assignment]
    fit(TextDataModule(**options, num_workers=num_workers), module, max_steps=3)
    plain = Ledger(content, TOKENIZER)
    fit(TextDataModule(**options), plain, max_steps=3)
    assert module.rows == [torch.tensor(row).view(4, 8).sum(1).tolist() for row in plain.rows]


def sums(rows: PackedRows) -> torch.Tensor:
    return rows.input_ids_NL.sum(1)


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(1, 1), (8, 2), (9, 2), (3, 4), (17, 3)])
def test_validation_rows_are_dealt_out_once_in_equally_many_batches(num_rows: int, num_ranks: int) -> None:
    dealt = [validation_batches(num_rows, 2, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(batches) for batches in dealt} == {-(-num_rows // (2 * num_ranks))}
    assert {len(batch) for batches in dealt for batch in batches} == {2}
    rows = [entry.row for batch in chain(*dealt) for entry in batch]
    assert sorted(row for row in rows if row >= 0) == list(range(num_rows))


def test_validation_batches_are_the_same_every_time(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_backbone(str(tmp_path / "backbone"), tiny_bert(), TOKENIZER)
    data = TextDataModule(**options, validation_sources=options["sources"], tokenizer=folder)
    data.setup()
    (loader,) = data.val_dataloader()
    first, second = ([content(batch) for batch in loader] for _ in range(2))
    assert first == second
    assert len(loader) == -(-len(data.rows) // 4)
    assert TextDataModule(**options, tokenizer=folder).val_dataloader() == []


def test_a_worker_of_validation_leaves_stop_signals_to_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_backbone(str(tmp_path / "backbone"), tiny_bert(), TOKENIZER)
    data = TextDataModule(**options, validation_sources=options["sources"], tokenizer=folder, num_workers=1)
    data.setup()
    (loader,) = data.val_dataloader()
    others = multiprocessing.active_children()
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    # From a process that is not its parent, as SLURM and a shell send them.
    subprocess.run(["sh", "-c", f"kill -TERM {worker.pid}; kill -USR1 {worker.pid}"], check=True)
    assert len(list(batches)) == len(loader) - 1
    assert set(multiprocessing.active_children()) <= set(others)


def test_what_only_texts_have_is_checked_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"data\.row_length must be >= 2, got 1"):
        TextDataModule(**{**options, "row_length": 1})
    with pytest.raises(OptionError, match=r"data\.validation_sources must have different names"):
        TextDataModule(**options, validation_sources=[TextSource("a", "x"), TextSource("a", "y")])


def test_an_empty_corpus_is_refused_before_training(options: dict[str, Any], tmp_path: Path) -> None:
    empty = [source(tmp_path, [""], "empty.jsonl")]
    with pytest.raises(InputError, match="holds no text"):
        fit(TextDataModule(**{**options, "sources": empty}), Ledger(content, TOKENIZER), max_steps=1)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"sources": [TextSource("a", "nowhere.jsonl")]}, InputError, "nowhere.jsonl: no such file"),
        ({"validation_sources": [TextSource("b", "nowhere.jsonl")]}, InputError, "nowhere.jsonl: no such file"),
        ({"sources": [TextSource("a", packages=["jsonargprase"])]}, OptionError, "did you mean jsonargparse"),
        ({"sampler": partial(BlendedBatchSampler, steps_per_epoch=0)}, OptionError, "steps_per_epoch"),
        ({"tokenizer": "nowhere"}, InputError, "data.tokenizer nowhere"),
    ],
)
def test_a_run_is_refused_before_a_source_is_tokenised(
    change: dict[str, Any], error: type[Exception], says: str, options: dict[str, Any], tmp_path: Path
) -> None:
    data, module = TextDataModule(**{**options, **change}), Ledger(content, TOKENIZER)
    with pytest.raises(error, match=says):
        data.check_run(Trainer(accelerator="cpu", logger=False), module, data)
    assert not (tmp_path / "cache").exists()
