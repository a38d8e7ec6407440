"""The data modules in configs, in training, and in training that is killed and resumed."""

import multiprocessing
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from embeddings.common import BatchNeeds, ContrastiveBatch, InputError, OptionError, TextSettings, UserError
from embeddings.data import (
    BlendedBatchSampler,
    ClusteredBatchSampler,
    CurriculumBatchSampler,
    EmbeddingDataModule,
    HomogeneousBatchSampler,
    SourceConfig,
    TextDataModule,
    TextSource,
)
from embeddings.modules import CDEModule, MGHCurriculumModule
from tests.data.killed_runs import LIGHTNING_WARNINGS, Ledger, attached, configured, killed_run, quiet_trainer
from tests.data.rows import pairs, rows_of, write_jsonl
from tests.helpers.refusals import refused
from tests.helpers.tiny import wordpiece_tokenizer

# The ledger has no validation step.
pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS, "ignore:You passed in a `val_dataloader`")
TOKENIZER = wordpiece_tokenizer()


class Kind(NamedTuple):
    """A data module, its source, and the content of its batches."""

    module: Any
    source: Any
    contents: Callable[[Any], list[int]]
    options: dict[str, Any]

    def make(self, **changes):
        return self.module(**{**self.options, **changes})

    def ledger(self, tokenizer=TOKENIZER):
        return Ledger(self.contents, tokenizer)


@pytest.fixture(params=["pairs", "texts"])
def kind(request, tmp_path):
    lines = [{"query": f"quick {row}", "positive": f"fox {row}", "text": f"the lazy dog {row}"} for row in range(12)]
    path = str(write_jsonl(tmp_path / "lines.jsonl", lines))
    options = {"batch_size": 4, "seed": 1, "cache_dir": str(tmp_path / "cache")}
    if request.param == "texts":
        options |= {"sources": [TextSource("first", path)], "row_length": 4}
        return Kind(TextDataModule, TextSource, lambda batch: batch.input_ids_NL.flatten().tolist(), options)
    options |= {"sources": [SourceConfig("first", path)]}
    return Kind(EmbeddingDataModule, SourceConfig, lambda batch: batch.row_B.tolist(), options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size must be >= 1, got 0"),
        ({"batch_size": None}, r"data\.batch_size must be >= 1, got None"),
        ({"num_workers": -2}, r"data\.num_workers must be >= 0, got -2"),
        ({"sources": []}, r"data\.sources must name at least one source"),
    ],
)
def test_invalid_options_are_refused_at_construction(kind, changes, message):
    refused(OptionError, message, kind.make, **changes)
    says = r"data\.sources must have different names, got 'first'"
    refused(OptionError, says, kind.make, sources=kind.options["sources"] * 2)


def test_a_second_fit_starts_from_the_beginning(kind):
    data, first, second = kind.make(), kind.ledger(), kind.ledger()
    for module in (first, second):
        quiet_trainer(max_epochs=1).fit(module, data)
    assert first.rows == second.rows
    assert len(first.rows) > 1


def test_every_epoch_of_overfit_batches_has_the_same_batches(kind):
    module = kind.ledger()
    quiet_trainer(max_epochs=3, overfit_batches=2).fit(module, kind.make())
    assert module.rows == 3 * module.rows[:2]
    assert module.rows[0] != module.rows[1]


def test_rows_are_numbered_within_their_source(kind):
    path = kind.options["sources"][0].path
    data = attached(kind.make(sources=[kind.source("first", path), kind.source("second", path)]), kind.ledger())
    data.setup()
    size, other = data.sizes
    assert size == other > 3
    assert data.located([3, size + 2, size - 1, size]) == {"first": [3, size - 1], "second": [2, 0]}
    assert data.source_rows == {"first": size, "second": other}


def test_a_batch_larger_than_the_data_and_a_module_without_tokenizer_are_refused(kind):
    data, fit = attached(kind.make(batch_size=1000), kind.ledger()), quiet_trainer(max_epochs=1).fit
    refused(OptionError, r"data\.batch_size must not exceed the", data.prepare_data)
    refused(OptionError, r"model must have a tokenizer", fit, kind.ledger(None), kind.make())


def test_a_worker_ignores_stop_signals_unless_its_parent_sends_them(kind):
    data = attached(kind.make(num_workers=1), kind.ledger())
    data.prepare_data()
    others = multiprocessing.active_children()
    batches = iter(data.train_dataloader())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGUSR1} == set()
    # From a process that is not the parent, as with SLURM or a shell.
    subprocess.run(["sh", "-c", f"kill -TERM {worker.pid}; kill -USR1 {worker.pid}"], check=True)
    assert len(list(batches)) >= 2
    assert worker.is_alive()
    for _ in range(100):
        # On a loaded machine the first signals may still be pending, and a second SIGTERM is then not queued.
        worker.terminate()
        worker.join(0.3)
        if not worker.is_alive():
            break
    assert worker.exitcode == 0


def test_a_plan_other_than_the_expected_one_is_refused_once_the_sources_are_open(kind):
    data = attached(kind.make(), kind.ledger())
    data.prepare_data()
    data.train_dataloader()
    state = data.state_dict()
    for changes, expected in (({}, state), ({"batch_size": 2}, {})):
        again = attached(kind.make(**changes), kind.ledger())
        again.expect_state(expected)
        again.prepare_data()
    other = attached(kind.make(batch_size=2), kind.ledger())
    other.expect_state(state)
    refused(OptionError, r"data global_batch_size must be 4 as in the checkpoint .*, got 2", other.prepare_data)


@pytest.fixture
def options(tmp_path):
    for name, size in (("first", 15), ("second", 9)):
        lines = [{**pair, "negatives": ["dog", f"lazy {row}"]} for row, pair in enumerate(pairs(size, f"{name} "))]
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    sources = [
        SourceConfig("first", str(tmp_path / "first.jsonl"), query_prompt="search_query: "),
        SourceConfig("second", str(tmp_path / "second.jsonl"), in_batch_negatives=False),
    ]
    return {"sources": sources, "batch_size": 4, "num_negatives": 2, "cache_dir": str(tmp_path / "cache"), "seed": 1}


def rows_in(batch):
    assert isinstance(batch, ContrastiveBatch)
    return batch.row_B.tolist()


def plan(num_epochs, batch_size=4, **sampler):
    sampler = BlendedBatchSampler([15, 9], batch_size, seed=1, **sampler)
    return [rows for epoch in range(num_epochs) for rows in rows_of(sampler, epoch)]


class Picky(Ledger):
    """A module with needs for its batches."""

    batch_needs = BatchNeeds(gathers_candidates=False, sampler="ClusteredBatchSampler", without_sampler="no topics")


def test_remarks_on_the_plan_are_logged_once(options, caplog):
    """A source too small for a batch, and a sampler that does not suit the method."""
    attached(EmbeddingDataModule(**options), Ledger(rows_in, TOKENIZER)).prepare_data()
    assert not [record for record in caplog.records if record.module == "datamodule"]
    module = Picky(rows_in, TOKENIZER)
    data = EmbeddingDataModule(**options | {"sampler": HomogeneousBatchSampler, "batch_size": 10})
    quiet_trainer(max_epochs=2).fit(module, data)
    assert [record.getMessage() for record in caplog.records if record.module == "datamodule"] == [
        "sources with fewer rows than a batch of 10 are not used: second (9)",
        "Picky without data.sampler ClusteredBatchSampler: no topics",
    ]
    assert [max(batch) < 15 for batch in module.rows] == [True, True]
    # The methods name existing samplers.
    assert CDEModule.made_for[0] == ClusteredBatchSampler.__name__
    assert MGHCurriculumModule.made_for[0] == CurriculumBatchSampler.__name__


def test_a_source_without_negatives_ends_the_run_before_its_first_step(options, tmp_path):
    module = Ledger(rows_in, TOKENIZER)
    module.batch_needs = BatchNeeds(in_batch_negatives="off")
    lonely = SourceConfig("lonely", str(write_jsonl(tmp_path / "lonely.jsonl", pairs(20))))
    data = EmbeddingDataModule(**options | {"sources": [*options["sources"], lonely]})
    says = "source 'lonely': has neither in-batch nor hard negatives"
    refused(InputError, says, quiet_trainer(max_epochs=1).fit, module, data)
    assert module.rows == []


def test_a_curriculum_without_hard_negatives_is_refused(options):
    sampler = partial(CurriculumBatchSampler, order="fixed", level=1)
    changes = {"num_negatives": 0, "sampler": sampler, "sources": options["sources"][:1]}
    data = EmbeddingDataModule(**options | changes)
    says = r"data\.num_negatives must be >= 1 for a curriculum"
    refused(OptionError, says, attached(data, Ledger(rows_in, TOKENIZER)).prepare_data)


def test_batches_follow_the_options_of_the_sources(options):
    for num_workers in (0, 2):
        data = attached(EmbeddingDataModule(**options, num_workers=num_workers), Ledger(rows_in, TOKENIZER))
        data.prepare_data()
        loader = data.train_dataloader()
        batches = list(loader)
        if num_workers:
            # The garbage collector would wait five seconds for each worker.
            loader._iterator._shutdown_workers()
        assert [rows_in(batch) for batch in batches] == plan(1)
        for batch in batches:
            assert (len(batch.query), len(batch.candidate)) == (4, 12)
            assert batch.in_batch_B.tolist() == [row < 15 for row in batch.row_B.tolist()]
            prompted = ~batch.query.padded().pooling_mask_NL[:, 0]
            assert prompted.tolist() == batch.in_batch_B.tolist()
    moved = data.transfer_batch_to_device(batches[0], torch.device("meta"), 0)
    assert (moved.query.device.type, moved.query.lengths_N.device.type) == ("meta", "cpu")


@pytest.mark.parametrize(
    ("limits", "stops", "asks_for_steps"),
    [
        ({"max_epochs": 4}, [3, 5, 15], True),
        ({"max_epochs": 4}, [6, 8, 15], False),
        # Lightning's epoch count falls behind at the end of an epoch, so the run may be longer; the plan continues.
        ({"max_epochs": 4}, [6, 12, 18], False),
        ({"max_epochs": -1, "max_steps": 24}, [6, 7, 18], True),
        ({"max_epochs": 3, "limit_train_batches": 4}, [2, 3, 9], False),
    ],
)
def test_a_training_killed_three_times_sees_the_plan_once(options, tmp_path, limits, stops, asks_for_steps):
    make_module = lambda: Ledger(rows_in, TOKENIZER, asks_for_steps)  # noqa: E731
    seen = killed_run(tmp_path, stops, make_module, lambda: EmbeddingDataModule(**options), limits)
    taken = limits.get("limit_train_batches", 6)
    expected = [batch for number, batch in enumerate(plan(6)) if number % 6 < taken]
    assert len(seen) >= 24 if stops == [6, 12, 18] else len(seen) == taken * (4 if taken == 6 else 3)
    assert seen == expected[: len(seen)]


class Templated(Ledger):
    """A module whose initial model has text settings."""

    def __init__(self, template):
        super().__init__(lambda batch: batch.query.input_ids_T.tolist(), TOKENIZER)
        self.text = TextSettings(instruction_template=template)


def test_instructions_of_records_that_encoding_does_not_use_are_warned_of(tmp_path, caplog):
    for added, is_warned in (({}, False), ({"instruction": "find"}, True)):
        caplog.clear()
        path = write_jsonl(tmp_path / f"{is_warned}.jsonl", [row | added for row in pairs(8)])
        data = EmbeddingDataModule([SourceConfig("a", str(path))], batch_size=4, cache_dir=str(tmp_path / "cache"))
        quiet_trainer(max_steps=1).fit(Templated("do {instruction} "), data)
        assert ("records have instructions" in caplog.text) == is_warned


def test_instructions_are_in_the_template_of_the_module_in_each_fit(options):
    options["sources"] = [SourceConfig("first", options["sources"][0].path, instruction="how do I")]
    data, alone = EmbeddingDataModule(**options), EmbeddingDataModule(**options)
    quiet_trainer(max_steps=1).fit(Templated("pad {instruction} "), data)
    first, second = Templated("one {instruction} "), Templated("one {instruction} ")
    quiet_trainer(max_steps=3).fit(first, data)
    quiet_trainer(max_steps=3).fit(second, alone)
    assert first.rows == second.rows


def test_a_config_can_set_every_option(options):
    first, second = (source.path for source in options["sources"])
    sampler = {"proportions": "given", "steps_per_epoch": 2}
    data = configured(
        sources=[{"name": "first", "path": first, "weight": 3}, {"name": "second", "path": second}],
        text={"query_max_length": 8, "prompts": {"query": "q: "}},
        batch_size=4,
        num_negatives=1,
        sampler={"class_path": "embeddings.data.BlendedBatchSampler", "init_args": sampler},
        cache_dir=options["cache_dir"],
        seed=1,
    )
    assert isinstance(data, EmbeddingDataModule)
    assert data.text == TextSettings(query_max_length=8, prompts={"query": "q: "})
    module = Ledger(rows_in, TOKENIZER)
    quiet_trainer(max_epochs=2).fit(module, data)
    assert module.rows == plan(2, weights=[3, 1], **sampler)


@pytest.mark.parametrize(
    ("first", "changes", "message"),
    [
        ({"path": "gone.jsonl"}, {}, r"gone\.jsonl: no such file"),
        (
            {"path": ["gone.jsonl", "data/docstrings/train.jsonl.gz", "a*.none", "${TEST_UNSET}/x"]},
            {},
            r"4 errors: gone\.jsonl: no such file; .*check the pattern .* TEST_UNSET is not set",
        ),
        ({"surrogate_vectors": "gone"}, {}, "this output has no manifest"),
        ({"weight": 2.0}, {}, r"data\.sources\[\]\.weight cannot take effect"),
        ({"query_prompt": "q: " * 300}, {}, r"data\.text\.query_max_length must exceed"),
        ({}, {"num_negatives": -1}, r"data\.num_negatives must be >= 0, got -1"),
    ],
)
def test_errors_that_need_no_rows_are_raised_before_a_source_is_read(options, first, changes, message, tmp_path):
    trainer, module = quiet_trainer(), Ledger(rows_in, TOKENIZER)
    EmbeddingDataModule(**options).check_run(trainer, module, None)
    options["sources"][0] = replace(options["sources"][0], **first)
    refused(UserError, message, lambda: EmbeddingDataModule(**options | changes).check_run(trainer, module, None))
    assert not (tmp_path / "cache").exists()
