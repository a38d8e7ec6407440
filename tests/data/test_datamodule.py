"""The data module in a config, in a training, and in a training that was killed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning import LightningDataModule
from lightning.pytorch import LightningModule, Trainer

from embeddings.common import BatchNeeds, ContrastiveBatch, InputError, OptionError, TextSettings, UserError
from embeddings.data.datamodule import EmbeddingDataModule
from embeddings.data.samplers import (
    BlendedBatchSampler,
    ClusteredBatchSampler,
    CurriculumBatchSampler,
    HomogeneousBatchSampler,
)
from embeddings.data.sources import SourceConfig
from embeddings.modules import CDEModule, MGHCurriculumModule
from tests.data.killed_runs import LIGHTNING_WARNINGS, Ledger, killed_run
from tests.data.rows import pairs, write_jsonl
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
TOKENIZER = wordpiece_tokenizer()


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceConfig]:
    for name, size in (("first", 15), ("second", 9)):
        lines = [
            {"query": f"{name} {row}", "positive": f"fox {row} {name}", "negatives": ["dog", f"lazy {row}"]}
            for row in range(size)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        SourceConfig("first", str(tmp_path / "first.jsonl"), query_prompt="search_query: "),
        SourceConfig("second", str(tmp_path / "second.jsonl"), in_batch_negatives=False),
    ]


@pytest.fixture
def options(sources: list[SourceConfig], tmp_path: Path) -> dict[str, Any]:
    return {"sources": sources, "batch_size": 4, "num_negatives": 2, "cache_dir": str(tmp_path / "cache"), "seed": 1}


def rows_of(batch: ContrastiveBatch) -> list[int]:
    assert isinstance(batch, ContrastiveBatch)
    return batch.row_B.tolist()


def plan(num_epochs: int, batch_size: int = 4, **sampler: Any) -> list[list[int]]:
    sampler = BlendedBatchSampler([15, 9], batch_size, seed=1, **sampler)
    found = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        found += [[entry.row for entry in batch] for batch in sampler]
    return found


def fit(data: EmbeddingDataModule, module: LightningModule, **trainer: Any) -> None:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    Trainer(**{**defaults, **trainer}).fit(module, data)


def test_a_training_gets_the_batches_of_the_plan_with_the_modules_tokenizer(options: dict[str, Any]) -> None:
    module = Ledger(rows_of, TOKENIZER)
    fit(EmbeddingDataModule(**options), module, max_epochs=2)
    assert module.rows == plan(2)


class Picky(Ledger):
    """A module that says what its batches are to be like."""

    batch_needs = BatchNeeds(gathers_candidates=False, sampler="ClusteredBatchSampler", without_sampler="no topics")


def test_what_a_run_should_know_of_its_plan_is_said_once(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A source too small for a batch, and a sampler that the method is not made for."""
    fit(EmbeddingDataModule(**options), Ledger(rows_of, TOKENIZER), max_epochs=2)
    assert not [record for record in caplog.records if record.module == "datamodule"]
    module = Picky(rows_of, TOKENIZER)
    fit(EmbeddingDataModule(**options | {"sampler": HomogeneousBatchSampler, "batch_size": 10}), module, max_epochs=2)
    assert [record.getMessage() for record in caplog.records if record.module == "datamodule"] == [
        "sources with fewer rows than a batch of 10 are not trained on: second (9)",
        "Picky without data.sampler ClusteredBatchSampler: no topics",
    ]
    assert [max(batch) < 15 for batch in module.rows] == [True, True]


def test_the_methods_name_samplers_that_there_are() -> None:
    assert CDEModule.made_for[0] == ClusteredBatchSampler.__name__
    assert MGHCurriculumModule.made_for[0] == CurriculumBatchSampler.__name__


def test_a_source_without_negatives_ends_the_run_before_its_first_step(options: dict[str, Any], tmp_path: Path) -> None:
    module = Ledger(rows_of, TOKENIZER)
    module.batch_needs = BatchNeeds(in_batch_negatives="off")
    lonely = SourceConfig("lonely", str(write_jsonl(tmp_path / "lonely.jsonl", pairs(20))))
    with pytest.raises(InputError, match="source 'lonely': has neither in-batch nor hard negatives"):
        fit(EmbeddingDataModule(**options | {"sources": [*options["sources"], lonely]}), module, max_epochs=1)
    assert module.rows == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_what_the_sources_say(options: dict[str, Any], tmp_path: Path, num_workers: int) -> None:
    folder = save_backbone(str(tmp_path / "backbone"), tiny_bert(), TOKENIZER)
    data = EmbeddingDataModule(**options, tokenizer=folder, num_workers=num_workers)
    data.prepare_data()
    data.setup()
    batches = list(data.train_dataloader())
    assert [rows_of(batch) for batch in batches] == plan(1)
    for batch in batches:
        assert len(batch.query) == 4
        assert len(batch.candidate) == 12
        assert batch.in_batch_B.tolist() == [row < 15 for row in batch.row_B.tolist()]
        prompted = ~batch.query.padded().pooling_mask_NL[:, 0]
        assert prompted.tolist() == batch.in_batch_B.tolist()


@pytest.mark.parametrize("asks_for_steps", [False, True])
@pytest.mark.parametrize(
    ("limits", "stops"),
    [
        ({"max_epochs": 4}, [3, 5, 15]),
        ({"max_epochs": 4}, [6, 8, 15]),
        ({"max_epochs": -1, "max_steps": 24}, [6, 7, 18]),
    ],
)
def test_a_training_killed_three_times_sees_the_plan_once(
    options: dict[str, Any], tmp_path: Path, limits: dict[str, int], stops: list[int], asks_for_steps: bool
) -> None:
    seen = killed_run(
        tmp_path,
        stops,
        lambda: Ledger(rows_of, TOKENIZER, asks_for_steps),
        lambda: EmbeddingDataModule(**options),
        limits,
    )
    assert seen == plan(4)


def test_resuming_at_every_epochs_end_repeats_no_row(options: dict[str, Any], tmp_path: Path) -> None:
    seen = killed_run(
        tmp_path,
        [6, 12, 18],
        lambda: Ledger(rows_of, TOKENIZER),
        lambda: EmbeddingDataModule(**options),
        {"max_epochs": 4},
    )
    # Lightning's count of epochs falls behind, so that it may go on for longer; the plan goes on with it.
    assert len(seen) >= 24
    assert seen == plan(6)[: len(seen)]


def test_a_config_names_everything(options: dict[str, Any], tmp_path: Path) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.add_argument("--config", action="config")
    config = {
        "class_path": "embeddings.data.datamodule.EmbeddingDataModule",
        "init_args": {
            "sources": [
                {"name": "first", "path": str(tmp_path / "first.jsonl"), "weight": 3},
                {"name": "second", "path": str(tmp_path / "second.jsonl")},
            ],
            "text": {"query_max_length": 8, "prompts": {"query": "q: "}},
            "batch_size": 4,
            "sampler": {
                "class_path": "embeddings.data.samplers.BlendedBatchSampler",
                "init_args": {"proportions": "given", "steps_per_epoch": 2},
            },
            "cache_dir": options["cache_dir"],
            "seed": 1,
        },
    }
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump({"data": config}))
    parsed = parser.parse_args(["--config", str(path), "--data.num_negatives=1"])
    again = parser.parse_string(parser.dump(parsed))
    for data in (parser.instantiate(parsed).data, parser.instantiate(again).data):
        assert isinstance(data, EmbeddingDataModule)
        assert data.text == TextSettings(query_max_length=8, prompts={"query": "q: "})
        module = Ledger(rows_of, TOKENIZER)
        fit(data, module, max_epochs=2)
        assert module.rows == plan(2, proportions="given", weights=[3, 1], steps_per_epoch=2)


def test_a_config_may_leave_the_sampler_out(tmp_path: Path, options: dict[str, Any]) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    parsed = parser.parse_args(
        [
            "--data=embeddings.data.datamodule.EmbeddingDataModule",
            f'--data.sources=[{{"name": "first", "path": "{tmp_path / "first.jsonl"}"}}]',
            f"--data.cache_dir={options['cache_dir']}",
        ]
    )
    assert "BlendedBatchSampler" in parser.dump(parsed)
    data = parser.instantiate(parsed).data
    data.setup()
    assert data.mixture.sizes == (15,)


def test_a_negative_number_of_negatives_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"data\.num_negatives must be >= 0, got -1"):
        EmbeddingDataModule(**{**options, "num_negatives": -1})


@pytest.mark.parametrize(
    ("first", "changes", "message"),
    [
        ({"path": "gone.jsonl"}, {}, r"gone\.jsonl: no such file"),
        ({"surrogate_vectors": "gone"}, {}, "no manifest lies beside"),
        ({"weight": 2.0}, {}, r"data\.sources\[\]\.weight cannot take effect"),
        ({"query_prompt": "q: " * 300}, {}, r"data\.text\.query_max_length must exceed"),
        ({}, {"tokenizer": "gone"}, r"data\.tokenizer gone: "),
    ],
)
def test_what_needs_no_row_is_refused_before_a_source_is_read(
    options: dict[str, Any], first: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer, module = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), Ledger(rows_of, TOKENIZER)
    EmbeddingDataModule(**options).check_run(trainer, module, None)
    options["sources"][0] = replace(options["sources"][0], **first)
    with pytest.raises(UserError, match=message) as raised:
        EmbeddingDataModule(**{**options, **changes}).check_run(trainer, module, None)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "cache").exists()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    data = EmbeddingDataModule([SourceConfig("gone", str(tmp_path / "gone.jsonl"))], cache_dir=str(tmp_path))
    with pytest.raises(InputError, match=r"gone\.jsonl"):
        data.prepare_data()


def test_a_batch_is_carried_to_its_device(options: dict[str, Any]) -> None:
    data = EmbeddingDataModule(**options)
    data.setup()
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.strategy.connect(Ledger(rows_of, TOKENIZER))
    batch = next(iter(data.train_dataloader()))
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved.query.device.type == "meta"
    assert moved.query.lengths_N.device.type == "cpu"
