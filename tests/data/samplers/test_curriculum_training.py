"""The level of a curriculum at every optimiser step of a training, killed, resumed, on two ranks, and refused."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning import LightningDataModule
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor

from embeddings.common import ContrastiveBatch, InputError, OptionError
from embeddings.common.io import text_hash
from embeddings.data import EmbeddingDataModule, SourceConfig
from embeddings.data.samplers import BlendedBatchSampler, CurriculumBatchSampler
from embeddings.data.samplers.curriculum import level_of
from embeddings.modules import ContrastiveModule
from tests.data.killed_runs import LIGHTNING_WARNINGS, KilledError, Ledger, killed_run
from tests.data.rows import graded, pairs, write_jsonl
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.tiny import wordpiece_tokenizer

# 24 records with one negative a level, six batches of four an epoch.
NUM_ROWS, NUM_EPOCHS = 24, 4
LEVEL_OF_TEXT = {
    text_hash(negative["text"]): negative["level"] for record in graded(NUM_ROWS) for negative in record["negatives"]
}


def levels_of(batch: ContrastiveBatch) -> list[int]:
    """The level that the batch names, and those of all its negatives."""
    negatives = batch.candidate_hash_C.tolist()[len(batch) :]
    return [batch.negative_level, *(LEVEL_OF_TEXT[text] for text in negatives)]


class LevelLedger(Ledger):
    """Notes the optimiser step and the levels of each batch, and begins a batch as all our modules do."""

    def __init__(self) -> None:
        super().__init__(levels_of, wordpiece_tokenizer())
        self._seed = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        ContrastiveModule.on_train_batch_start(self, batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.rows[-1].insert(0, self.global_step)
        return loss


def records_file(folder: Path, rows: list[dict[str, Any]] | None = None) -> str:
    path = folder / "records.jsonl"
    return str(path if path.exists() else write_jsonl(path, graded(NUM_ROWS) if rows is None else rows))


def data_module(folder: Path, batch_size: int = 4, **options: Any) -> EmbeddingDataModule:
    return EmbeddingDataModule(
        [SourceConfig("records", records_file(folder))],
        batch_size=batch_size,
        num_negatives=1,
        sampler=partial(CurriculumBatchSampler, **options),
        cache_dir=str(folder / "cache"),
    )


def check_ledger(seen: list[list[int]], accumulate: int, order: Any, num_texts: int = 4) -> None:
    """Every optimiser step has all its batches, and each of them the level of that step."""
    steps_per_epoch = -(-6 // accumulate)
    total_steps = NUM_EPOCHS * steps_per_epoch
    expected = [epoch * steps_per_epoch + batch // accumulate for epoch in range(NUM_EPOCHS) for batch in range(6)]
    assert [step for step, *_ in seen] == expected
    assert {level for _, level, *_ in seen} == {1, 2, 3, 4}
    for step, level, *negatives in seen:
        assert level == level_of(step, total_steps, order, seed=0)
        assert len(negatives) == num_texts
        if order == "cumulative":
            assert all(negative >= level for negative in negatives)
        else:
            assert set(negatives) == {level}


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
@pytest.mark.parametrize(
    ("order", "accumulate", "stops"),
    [
        ("coarse_to_fine", 1, [5, 6, 18]),
        ("coarse_to_fine", 4, [1, 4, 7]),
        ("coarse_to_fine", 4, [2, 4, 6]),
        ("reverse", 5, [3, 4, 5]),
        ("random", 2, [1, 5, 11]),
        ("cumulative", 3, [2, 3, 7]),
    ],
)
def test_a_training_killed_three_times_has_the_level_of_its_optimiser_step_throughout(
    tmp_path: Path, order: Any, accumulate: int, stops: list[int]
) -> None:
    """Killed before a boundary, at it and after it, and at the end of an epoch whose last update is a short one."""
    seen = killed_run(
        tmp_path / "run",
        stops,
        LevelLedger,
        lambda: data_module(tmp_path, order=order),
        {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": accumulate},
    )
    check_ledger(seen, accumulate, order)


def levels_on_two_ranks(rank: int) -> dict[str, Any]:
    """A training under DDP of batches of two on each rank and updates of four batches, killed three times."""
    os.environ["LOCAL_RANK"] = str(rank)
    folder = Path(os.environ["LEVELS_FOLDER"])
    limits = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": 4, "devices": 2, "strategy": "ddp"}
    return {"seen": killed_run(folder / "run", [1, 4, 7], LevelLedger, lambda: data_module(folder, 2), limits)}


def test_two_ranks_have_the_level_of_the_optimiser_step_after_three_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEVELS_FOLDER", str(tmp_path))
    data_module(tmp_path).prepare_data()
    for result in run_on_two_ranks(levels_on_two_ranks):
        check_ledger(result["seen"], 4, "coarse_to_fine", num_texts=2)


def test_a_config_names_the_curriculum_and_the_sampler_inside(tmp_path: Path) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    inner = {"class_path": "embeddings.data.BlendedBatchSampler", "init_args": {"steps_per_epoch": 5}}
    sampler = {"inner": inner, "order": "fixed", "level": 2}
    init_args = {
        "sources": [{"name": "records", "path": records_file(tmp_path)}],
        "batch_size": 3,
        "sampler": {"class_path": "embeddings.data.CurriculumBatchSampler", "init_args": sampler},
        "cache_dir": str(tmp_path / "cache"),
    }
    config = {"data": {"class_path": "embeddings.data.EmbeddingDataModule", "init_args": init_args}}
    data = parser.instantiate(parser.parse_string(parser.dump(parser.parse_object(config)))).data
    data.prepare_data()
    plan = data._plan()
    assert isinstance(plan, CurriculumBatchSampler)
    assert isinstance(plan.inner, BlendedBatchSampler)
    assert (len(plan), plan.batch_size, plan.inner.batch_size, plan.levels) == (5, 3, 3, (2,))


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
def test_epochs_cut_short_by_the_trainer_count_the_steps_that_are_made(tmp_path: Path) -> None:
    limits = {"max_epochs": 4, "limit_train_batches": 3, "accumulate_grad_batches": 2}
    seen = killed_run(tmp_path / "run", [3], LevelLedger, lambda: data_module(tmp_path), limits)
    assert [row[:2] for row in seen] == [[step, 4 - step // 2] for step in (0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7)]


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
def test_a_curriculum_longer_than_the_run_is_left_in_its_middle_and_resumed(tmp_path: Path) -> None:
    """With a length of its own a curriculum outlasts a run that ends early, and the next run goes on in it."""

    seen = []
    for max_steps, checkpoint in ((7, None), (16, tmp_path / "step=7.ckpt")):
        module = LevelLedger()
        trainer = quiet_trainer(
            max_steps=max_steps,
            callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}")],
        )
        trainer.fit(module, data_module(tmp_path, total_steps=16), ckpt_path=checkpoint)
        seen += module.rows
    assert [row[:2] for row in seen] == [[step, 4 - step // 4] for step in range(16)]


class FailingLedger(LevelLedger):
    """Notes the rows too, and fails in one batch."""

    failing: tuple[int, int] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (self.current_epoch, batch_idx) == self.failing:
            raise KilledError
        loss = super().training_step(batch, batch_idx)
        self.rows[-1] += batch.row_B.tolist()
        return loss


@pytest.mark.filterwarnings("ignore:The dirpath has changed", *LIGHTNING_WARNINGS)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("failing", [(1, 1), (1, 5), (2, 0)])
def test_a_run_goes_on_with_the_batch_that_failed(failing: tuple[int, int], accumulate: int, tmp_path: Path) -> None:
    """The checkpoint of an exception counts neither the batch nor its step; the level goes on with the step."""
    runs: list[list[list[int]]] = []
    for folder, stop, checkpoint in (("whole", None, None), ("run", failing, None), ("again", None, "run")):
        module = FailingLedger()
        module.failing = stop
        saving = ModelCheckpoint(tmp_path / folder, every_n_train_steps=100, filename="{step}", save_on_exception=True)
        trainer = quiet_trainer(max_epochs=NUM_EPOCHS, accumulate_grad_batches=accumulate, callbacks=[saving])
        saved = None if checkpoint is None else next((tmp_path / checkpoint).iterdir())
        with suppress(KilledError):
            trainer.fit(module, data_module(tmp_path), ckpt_path=saved)
        runs.append(module.rows)
    assert len(runs[1]) == 6 * failing[0] + failing[1]
    assert runs[1] + runs[2] == runs[0]


def quiet_trainer(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


def refusal(folder: Path, rows: list[dict[str, Any]], callbacks: Any = None, **changes: Any) -> str:
    """The message that ends a run before its first step."""
    limits = {"max_epochs": 4, **changes.pop("limits", {})}
    module = LevelLedger()
    trainer = quiet_trainer(enable_checkpointing=False, callbacks=callbacks, **limits)
    records_file(folder, rows)
    with pytest.raises((InputError, OptionError)) as raised:
        trainer.fit(module, data_module(folder, **changes))
    assert module.rows == []
    return str(raised.value)


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
def test_what_a_curriculum_cannot_use_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).mkdir()
    partial_rows = graded(20) + graded(4, (2, 3, 4))
    assert "record 21 has no negative of level 1 (4 of 24 lack one)" in refusal(tmp_path / "a", partial_rows)
    assert "no source has any" in refusal(tmp_path / "b", pairs(24), missing_level="coarser")
    assert "none of the 2 optimiser steps" in refusal(tmp_path / "c", graded(24), limits={"max_steps": 2})
    scheduler = [GradientAccumulationScheduler({0: 1, 2: 4})]
    assert "GradientAccumulationScheduler" in refusal(tmp_path / "d", graded(24), callbacks=scheduler)


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
def test_a_coarser_level_stands_in_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = graded(12) + [record | {"negatives": record["negatives"][1:]} for record in graded(24)[12:]]
    records_file(tmp_path, rows)
    module = LevelLedger()
    quiet_trainer(enable_checkpointing=False, max_epochs=4).fit(module, data_module(tmp_path, missing_level="coarser"))
    last = [negative for _, level, *negatives in module.rows[-6:] for negative in negatives if level == 1]
    assert sorted(last) == [1] * 12 + [2] * 12
    assert all(set(negatives) == {level} for _, level, *negatives in module.rows[:-6])
