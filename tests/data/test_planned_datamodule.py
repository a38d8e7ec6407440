"""What holds for the data module of pairs and for that of plain texts alike."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from embeddings.common import InputError, OptionError
from embeddings.data import EmbeddingDataModule, SourceConfig, TextDataModule, TextSource
from embeddings.data.datamodule import PlannedDataModule, start_worker
from tests.data.killed_runs import LIGHTNING_WARNINGS, Ledger
from tests.helpers.tiny import wordpiece_tokenizer

# The ledger only trains.
pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS, "ignore:You passed in a `val_dataloader`")
TOKENIZER = wordpiece_tokenizer()


class Kind:
    """A data module, its source, and the content of its batches."""

    def __init__(self, module: Any, source: Any, path: Path, contents: Any, options: dict[str, Any]) -> None:
        self.module, self.source, self.contents = module, source, contents
        self.options = {"sources": [source("first", str(path))], "batch_size": 4, "seed": 1, **options}

    def make(self, **changes: Any) -> PlannedDataModule:
        return self.module(**{**self.options, **changes})

    def ledger(self, **options: Any) -> Ledger:
        return Ledger(self.contents, **options)


@pytest.fixture(params=["pairs", "texts"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    lines = [{"query": f"quick {row}", "positive": f"fox {row}", "text": f"the lazy dog {row}"} for row in range(12)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cache = {"cache_dir": str(tmp_path / "cache")}
    if request.param == "texts":
        contents = lambda batch: batch.input_ids_NL.flatten().tolist()  # noqa: E731
        return Kind(TextDataModule, TextSource, path, contents, {**cache, "row_length": 4})
    return Kind(EmbeddingDataModule, SourceConfig, path, lambda batch: batch.row_B.tolist(), cache)


def fit(data: PlannedDataModule, module: Ledger) -> None:
    Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        max_epochs=1,
    ).fit(module, data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size must be >= 1, got 0"),
        ({"batch_size": None}, r"data\.batch_size must be >= 1, got None"),
        ({"num_workers": -2}, r"data\.num_workers must be >= 0, got -2"),
        ({"sources": []}, r"data\.sources must name at least one source"),
    ],
)
def test_impossible_options_are_refused_at_once(kind: Kind, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        kind.make(**changes)
    assert "\n" not in str(raised.value)


def test_two_sources_of_one_name_are_refused_at_once(kind: Kind) -> None:
    with pytest.raises(OptionError, match=r"data\.sources must have different names, got 'first'"):
        kind.make(sources=kind.options["sources"] * 2)


def test_a_second_fit_begins_at_the_start_again(kind: Kind) -> None:
    data, (first, second) = kind.make(), (kind.ledger(tokenizer=TOKENIZER) for _ in range(2))
    fit(data, first)
    fit(data, second)
    assert first.rows == second.rows
    assert len(first.rows) > 1


def test_rows_are_numbered_within_their_source(kind: Kind) -> None:
    path = kind.options["sources"][0].path
    data = kind.make(sources=[kind.source("first", path), kind.source("second", path)], tokenizer=None)
    fit(data, kind.ledger(tokenizer=TOKENIZER))
    size, other = data.sizes
    assert size == other > 3
    assert data.located([3, size + 2, size - 1, size]) == {"first": [3, size - 1], "second": [2, 0]}
    assert data.source_rows == {"first": size, "second": other}


def test_a_batch_larger_than_the_data_is_refused(kind: Kind) -> None:
    with pytest.raises(OptionError, match=r"data\.batch_size must not exceed the"):
        fit(kind.make(batch_size=1000), kind.ledger(tokenizer=TOKENIZER))


def test_a_module_without_a_tokenizer_needs_one_named(kind: Kind) -> None:
    with pytest.raises(OptionError, match=r"data\.tokenizer must be given"):
        fit(kind.make(), kind.ledger())


def test_a_named_folder_whose_tokenizer_json_is_missing_beside_a_vocabulary_is_one_line(
    kind: Kind, tmp_path: Path
) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nfox\n")
    with pytest.raises(InputError, match=r"holds vocab\.txt and no tokenizer\.json; take a whole copy"):
        fit(kind.make(tokenizer=str(tmp_path / "named")), kind.ledger())


def test_a_worker_collects_none_of_its_parents_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking over inherited objects would copy their memory: 60 MiB a worker in P12."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    frozen = gc.get_freeze_count()
    try:
        start_worker(0)
        assert gc.get_freeze_count() > frozen + 1000
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    finally:
        gc.unfreeze()


def test_batches_are_made_in_workers_that_are_started_so(kind: Kind) -> None:
    data = kind.make(num_workers=1)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.strategy.connect(kind.ledger(tokenizer=TOKENIZER))
    data.prepare_data()
    assert data.train_dataloader().worker_init_fn is start_worker


def test_a_worker_leaves_stop_signals_to_the_run_and_obeys_its_parent(kind: Kind) -> None:
    data = kind.make(num_workers=1)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.strategy.connect(kind.ledger(tokenizer=TOKENIZER))
    data.prepare_data()
    others = multiprocessing.active_children()
    batches = iter(data.train_dataloader())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    assert worker.pid is not None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGUSR1} == set()
    # From a process that is not its parent, as SLURM and a shell send them.
    subprocess.run(["sh", "-c", f"kill -TERM {worker.pid}; kill -USR1 {worker.pid}"], check=True)
    assert len(list(batches)) >= 2
    assert worker.is_alive()
    worker.terminate()
    worker.join(5)
    assert worker.exitcode == 0


def test_a_plan_other_than_the_expected_one_is_refused_once_the_sources_are_open(kind: Kind) -> None:
    data, module = kind.make(), kind.ledger(tokenizer=TOKENIZER)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.strategy.connect(module)
    data.prepare_data()
    data.train_dataloader()
    state = data.state_dict()
    same, other, without = kind.make(), kind.make(batch_size=2), kind.make(batch_size=2)
    for again, expected in ((same, state), (other, state), (without, {})):
        again.trainer = data.trainer
        again.expect_state(expected)
    same.prepare_data()
    without.prepare_data()
    with pytest.raises(OptionError, match=r"data global_batch_size must be 4 as in the checkpoint .*, got 2"):
        other.prepare_data()
