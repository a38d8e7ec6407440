"""Levels of a curriculum, in plans, trainings and resumed trainings."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from embeddings.common import BatchNeeds, InputError, OptionError
from embeddings.common.io import text_hash
from embeddings.data import EmbeddingDataModule, SourceConfig
from embeddings.data.samplers.base import (
    BlendedBatchSampler,
    HomogeneousBatchSampler,
    LevelRule,
    RunLength,
    SourceIdentity,
)
from embeddings.data.samplers.clustered import ClusteredBatchSampler
from embeddings.data.samplers.curriculum import EQUAL_FRACTIONS, CurriculumBatchSampler, level_of, stages
from embeddings.modules import ContrastiveModule
from tests.data.cluster_folders import write_clusters
from tests.data.killed_runs import LIGHTNING_WARNINGS, KilledError, Ledger, killed_run, quiet_trainer
from tests.data.rows import graded, pairs, placed, write_jsonl
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.refusals import refused
from tests.helpers.tiny import wordpiece_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", *LIGHTNING_WARNINGS)
SIZES = [40, 31]
NAMES = ["left", "right"]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clusters")
    for name, size in zip(NAMES, SIZES, strict=True):
        write_clusters(folder / name, [row // 5 for row in range(size)], size // 5 + 1, f"key of {name}")
    return str(folder)


def test_needs_remarks_and_files_are_those_of_the_inner_sampler(clusters):
    inner = partial(ClusteredBatchSampler, clusters=clusters)
    sampler = placed(CurriculumBatchSampler(SIZES, 11, inner=inner), 0, 3)
    sampler.identify([SourceIdentity(name, f"key of {name}") for name in NAMES])
    assert sampler.num_steps == 1
    assert sampler.remarks() == ["sources with fewer rows than a batch of 33 are not used: right (31)"]
    sampler.set_needs(BatchNeeds(gathers_candidates=False))
    assert sampler.num_steps == (40 // 11 + 31 // 11) // 3
    assert sampler.remarks() == []
    # Its files are checked before sources are read.
    sampler.check_sources(NAMES)
    refused(InputError, "nowhere", sampler.check_sources, ["left", "nowhere"])


@pytest.fixture(params=["blended", "clustered", "homogeneous"])
def make(request, clusters):
    """Curricula over each inner sampler, three epochs long."""
    inner = {
        "blended": BlendedBatchSampler,
        "clustered": partial(ClusteredBatchSampler, clusters=clusters),
        "homogeneous": partial(HomogeneousBatchSampler, temperature=0.3),
    }[request.param]

    def maker(batch_size=4, **options):
        sampler = CurriculumBatchSampler(SIZES, batch_size, **{"inner": inner, **options})
        sampler.identify([SourceIdentity(name, f"key of {name}") for name in NAMES])
        sampler.set_run(RunLength(len(sampler), total_steps=3 * len(sampler)))
        return sampler

    return maker


def test_the_rows_are_those_of_the_inner_sampler(make):
    sampler = make(seed=3)
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        sampler.inner.set_epoch(epoch)
        assert [[entry._replace(rule=None) for entry in batch] for batch in sampler] == list(sampler.inner)


def test_a_run_with_another_curriculum_or_other_steps_does_not_resume(make):
    for change in (
        *({"order": "reverse"}, {"order": "fixed", "level": 2}, {"fractions": [0.4, 0.3, 0.2, 0.1]}),
        *({"total_steps": 99}, {"missing_level": "coarser"}),
    ):
        refused(OptionError, "as in the checkpoint", make(**change).check_same_plan, make().plan_fields())
    run = RunLength(batches_per_epoch=10, total_steps=20)
    sampler, other = make(), make()
    sampler.set_run(run)
    other.set_run(run)
    other.check_same_plan(sampler.plan_fields())
    for name, value in (("accumulate_grad_batches", 2), ("total_steps", 30), ("batches_per_epoch", 8)):
        other.set_run(replace(run, **{name: value}))
        says = f"data {name} must be .* as in the checkpoint"
        refused(OptionError, says, other.check_same_plan, sampler.plan_fields())


def rules(run, epochs, **options):
    sampler = CurriculumBatchSampler([40], 4, **options)
    sampler.set_run(run)
    return [sampler.level_rule(epoch, batch) for epoch in range(epochs) for batch in range(run.batches_per_epoch)]


def test_a_batch_has_the_level_of_its_update_and_only_cumulative_curricula_keep_coarser_levels():
    # Ten batches in updates of four: four, four and two; six updates in all.
    found = [rule.level for rule in rules(RunLength(10, 4, 6), 2)]
    assert found == [4] * 8 + [3] * 2 + [2] * 8 + [1] * 2
    run = RunLength(8, 1, 8)
    assert rules(run, 1, order="cumulative") == [LevelRule(level, True) for level in (4, 4, 3, 3, 2, 2, 1, 1)]
    assert rules(run, 1) == [LevelRule(level) for level in (4, 4, 3, 3, 2, 2, 1, 1)]
    assert set(rules(run, 1, order="fixed", level=3)) == {LevelRule(3)}
    assert not any(rule.cumulative for order in ("reverse", "random") for rule in rules(run, 1, order=order))
    # The required levels of records.
    assert CurriculumBatchSampler([8], 2).levels == (1, 2, 3, 4)
    assert CurriculumBatchSampler([8], 2, fractions=[0.5, 0, 0.5, 0]).levels == (2, 4)
    assert CurriculumBatchSampler([8], 2, order="fixed", level=3).levels == (3,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "hardest_first"}, r"sampler\.order must be one of .*'reverse'.*, got 'hardest_first'"),
        ({"fractions": [0.5, 0.5]}, r"sampler\.fractions must be 4 numbers from 0 to 1, one for each level"),
        ({"fractions": [0.5, 0.2, 0.2, 0.2]}, r"sampler\.fractions must sum to 1, not 1\.1, got \[0\.5, 0\.2"),
        ({"fractions": [0.5, 0.5, 0.5, -0.5]}, r"sampler\.fractions must be 4 numbers from 0 to 1"),
        ({"fractions": [0.5, 0.5, 0.0, float("nan")]}, r"sampler\.fractions must be 4 numbers from 0 to 1"),
        ({"order": "fixed"}, r"sampler\.level must be from 1 \(hardest\) to 4 .* with order fixed, got None"),
        ({"order": "fixed", "level": 5}, r"sampler\.level must be from 1 .* got 5"),
        (
            {"order": "fixed", "level": 1, "fractions": [0, 0.5, 0.5, 0]},
            r"sampler\.fractions cannot take effect .* fixed",
        ),
        ({"order": "fixed", "level": 1, "total_steps": 9}, r"sampler\.total_steps cannot take effect .* fixed, got 9"),
        ({"level": 2}, r"sampler\.level cannot take effect with order coarse_to_fine, got 2; set order: fixed"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options, message):
    refused(OptionError, message, CurriculumBatchSampler, [40], 4, **options)


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (RunLength(10), {}, r"trainer\.max_steps must be known .* got None; set it, or max_epochs"),
        (RunLength(10, None, 20), {}, r"GradientAccumulationScheduler.* set trainer\.accumulate_grad_batches"),
    ],
)
def test_a_run_that_a_curriculum_does_not_fit_is_refused(run, options, message):
    refused(OptionError, message, CurriculumBatchSampler([40], 4, **options).set_run, run)


# 24 records with one negative per level: six batches of four per epoch.
NUM_ROWS, NUM_EPOCHS = 24, 4
LEVEL_OF_TEXT = {text_hash(each["text"]): each["level"] for record in graded(NUM_ROWS) for each in record["negatives"]}


def contents(batch):
    """The level of a batch, the levels of all its negatives, and its rows."""
    negatives = batch.candidate_hash_C.tolist()[len(batch) :]
    return [batch.negative_level, [LEVEL_OF_TEXT[text] for text in negatives], batch.row_B.tolist()]


class LevelLedger(Ledger):
    """Records step and contents of each batch, starts batches like our modules, and fails in one batch."""

    def __init__(self, failing: tuple[int, int] | None = None) -> None:
        super().__init__(contents, wordpiece_tokenizer())
        self._seed, self.failing = 0, failing

    def on_train_batch_start(self, batch, batch_idx):
        ContrastiveModule.on_train_batch_start(self, batch, batch_idx)

    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == self.failing:
            raise KilledError
        loss = super().training_step(batch, batch_idx)
        self.rows[-1].insert(0, self.global_step)
        return loss


def data_module(folder, batch_size=4, rows=None, **options):
    return EmbeddingDataModule(
        [SourceConfig("records", str(write_jsonl(folder / "records.jsonl", rows or graded(NUM_ROWS))))],
        batch_size=batch_size,
        num_negatives=1,
        sampler=partial(CurriculumBatchSampler, **options),
        cache_dir=str(folder / "cache"),
    )


def check_ledger(seen, accumulate, order, num_texts=4):
    """Every optimiser step has all its batches, and each of them the level of that step."""
    steps_per_epoch = -(-6 // accumulate)
    total_steps = NUM_EPOCHS * steps_per_epoch
    expected = [epoch * steps_per_epoch + batch // accumulate for epoch in range(NUM_EPOCHS) for batch in range(6)]
    assert [step for step, *_ in seen] == expected
    assert {level for _, level, *_ in seen} == {1, 2, 3, 4}
    for step, level, negatives, _ in seen:
        assert level == level_of(step, total_steps, order, seed=0)
        assert len(negatives) == num_texts
        if order == "cumulative":
            assert all(negative >= level for negative in negatives)
        else:
            assert set(negatives) == {level}


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
def test_a_training_killed_three_times_has_the_level_of_its_optimiser_step(tmp_path, order, accumulate, stops):
    """Killed before, at and after a boundary of levels, and at the end of an epoch with a shorter last update."""
    limits = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": accumulate}
    seen = killed_run(tmp_path / "run", stops, LevelLedger, lambda: data_module(tmp_path, order=order), limits)
    check_ledger(seen, accumulate, order)


def levels_on_two_ranks(rank):
    """DDP training with batches of two per rank and updates of four batches, killed three times."""
    os.environ["LOCAL_RANK"] = str(rank)
    folder = Path(os.environ["LEVELS_FOLDER"])
    limits = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": 4, "devices": 2, "strategy": "ddp"}
    return {"seen": killed_run(folder / "run", [1, 4, 7], LevelLedger, lambda: data_module(folder, 2), limits)}


def test_two_ranks_have_the_level_of_the_optimiser_step_after_three_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("LEVELS_FOLDER", str(tmp_path))
    data_module(tmp_path).prepare_data()
    for result in run_on_two_ranks(levels_on_two_ranks):
        check_ledger(result["seen"], 4, "coarse_to_fine", num_texts=2)


def test_a_curriculum_longer_than_the_run_continues_in_the_next_run(tmp_path):
    """With `total_steps`, a curriculum is longer than a run that ends early."""
    seen = []
    for max_steps, checkpoint in ((7, None), (16, tmp_path / "step=7.ckpt")):
        module = LevelLedger()
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        trainer = quiet_trainer(enable_checkpointing=True, max_steps=max_steps, callbacks=[saving])
        trainer.fit(module, data_module(tmp_path, total_steps=16), ckpt_path=checkpoint)
        seen += module.rows
    assert [row[:2] for row in seen] == [[step, 4 - step // 4] for step in range(16)]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("failing", [(1, 1), (1, 5), (2, 0)])
def test_a_run_resumes_with_the_batch_that_failed(failing, accumulate, tmp_path):
    """The checkpoint after an exception counts neither the failed batch nor its step."""
    runs = []
    for folder, stop, checkpoint in (("whole", None, None), ("run", failing, None), ("again", None, "run")):
        module = LevelLedger(failing=stop)
        saving = ModelCheckpoint(tmp_path / folder, every_n_train_steps=100, filename="{step}", save_on_exception=True)
        limits = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": accumulate}
        trainer = quiet_trainer(enable_checkpointing=True, callbacks=[saving], **limits)
        saved = None if checkpoint is None else next((tmp_path / checkpoint).iterdir())
        with suppress(KilledError):
            trainer.fit(module, data_module(tmp_path), ckpt_path=saved)
        runs.append(module.rows)
    assert len(runs[1]) == 6 * failing[0] + failing[1]
    assert runs[1] + runs[2] == runs[0]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (graded(20) + graded(4, (2, 3, 4)), {}, r"record 21 has no negative of level 1 \(4 of 24 lack one\)"),
        (pairs(24), {"missing_level": "coarser"}, "no source has any"),
    ],
)
def test_a_curriculum_without_levels_ends_the_run_before_its_first_step(rows, options, message, tmp_path):
    module, fit = LevelLedger(), quiet_trainer(max_epochs=4).fit
    refused((InputError, OptionError), message, fit, module, data_module(tmp_path, rows=rows, **options))
    assert module.rows == []


def test_a_coarser_level_replaces_a_missing_one_if_configured(tmp_path):
    rows = graded(12) + [record | {"negatives": record["negatives"][1:]} for record in graded(24)[12:]]
    module = LevelLedger()
    quiet_trainer(max_epochs=4).fit(module, data_module(tmp_path, rows=rows, missing_level="coarser"))
    last = [negative for _, level, negatives, _ in module.rows[-6:] for negative in negatives if level == 1]
    assert sorted(last) == [1] * 12 + [2] * 12
    assert all(set(negatives) == {level} for _, level, negatives, _ in module.rows[:-6])


def levels(total_steps, **options):
    return [level_of(step, total_steps, **options) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("total_steps", "options", "expected"),
    [
        (4, {}, [4, 3, 2, 1]),
        (6, {}, [4, 4, 3, 2, 2, 1]),
        (7, {}, [4, 4, 3, 3, 2, 1, 1]),
        (10, {}, [4, 4, 4, 3, 3, 2, 2, 2, 1, 1]),
        (1, {}, [3]),
        (1600, {}, [4] * 400 + [3] * 400 + [2] * 400 + [1] * 400),  # the paper's
        (8, {"fractions": (0.5, 0, 0.5, 0)}, [4, 4, 4, 4, 2, 2, 2, 2]),
        # In binary, 0.1 + 0.7 is less than 0.8.
        (10, {"fractions": (0.1, 0.7, 0.1, 0.1)}, [4, *[3] * 7, 2, 1]),
        (8, {"order": "reverse"}, [1, 1, 2, 2, 3, 3, 4, 4]),
        (8, {"order": "reverse", "fractions": (0.5, 0.25, 0.125, 0.125)}, [1, 2, 3, 3, 4, 4, 4, 4]),
        (8, {"order": "cumulative"}, [4, 4, 3, 3, 2, 2, 1, 1]),
    ],
)
def test_each_level_has_its_share_to_the_nearest_step_and_a_longer_run_stays_at_the_last(
    total_steps, options, expected
):
    assert levels(total_steps, **options) == expected
    assert {level_of(step, total_steps, **options) for step in (total_steps, total_steps + 999)} == {expected[-1]}


def test_fractions_are_converted_from_their_decimal_notation():
    """Three times the decimal of 1/3 is less than 1."""
    third = 1 / 3
    ends = [end for _, end in stages(10**6, "coarse_to_fine", (third, third, third, 0.0))]
    assert ends == [333333, 666667, 10**6, 10**6]
    for total in range(1, 400):
        for tenths in ((1, 2, 3, 4), (4, 3, 2, 1), (7, 1, 1, 1)):
            ends = [end for _, end in stages(total, "coarse_to_fine", [part / 10 for part in tenths])]
            assert ends == [(2 * total * sum(tenths[: i + 1]) + 10) // 20 for i in range(4)]


@pytest.mark.parametrize("fractions", [EQUAL_FRACTIONS, (0.4, 0.3, 0.2, 0.1), (0.5, 0, 0.5, 0)])
def test_the_random_order_gives_each_level_its_exact_share(fractions):
    found = levels(200, order="random", fractions=fractions, seed=1)
    assert Counter(found) == Counter(levels(200, fractions=fractions))
    assert found == levels(200, order="random", fractions=fractions, seed=1)
    assert found != levels(200, order="random", fractions=fractions, seed=2)
    assert sum(one != other for one, other in pairwise(found)) > 60
    longer = [level_of(step, 200, "random", fractions, seed=1) for step in range(200, 400)]
    assert Counter(longer) == Counter(found)
