"""A run goes on with another number of ranks and the same global batch: the same examples in the same steps."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import component, run_config
from tests.strategies.test_fit import DDP, fit

LEDGER = "tests.reliability.kills.Ledger"


def config_of(folder: Path, ranks: int, ledger: Path, sampler: str) -> dict[str, Any]:
    """Six steps of eight pairs, six and a half of them an epoch, spread over so many ranks."""
    config = run_config(folder, dropout=0.1)
    keep = {"dirpath": str(folder / "kept"), "every_n_train_steps": 3, "save_last": True, "save_top_k": 0}
    config["trainer"] |= {
        "max_steps": 6,
        "devices": ranks,
        "strategy": DDP if ranks > 1 else "auto",
        "callbacks": [
            component(LEDGER, path=str(ledger), seconds=0.0),
            component("ModelCheckpoint", **keep),
        ],
    }
    config["data"]["init_args"] |= {"batch_size": 8 // ranks, "sampler": {"class_path": f"embeddings.data.{sampler}"}}
    return config


def rows_of_steps(ledger: Path) -> dict[int, list[int]]:
    """The rows of each step, of all ranks."""
    found = defaultdict(list)
    for line in ledger.read_text().splitlines():
        entry = json.loads(line)
        found[entry["step"]] += entry["rows"]
    return {step: sorted(rows) for step, rows in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "sampler"), [(2, 1, "BlendedBatchSampler"), (1, 2, "HomogeneousBatchSampler")]
)
def test_the_examples_of_a_step_do_not_depend_on_the_ranks(
    before: int, after: int, sampler: str, tmp_path: Path
) -> None:
    ledgers = [tmp_path / f"{name}.jsonl" for name in ("whole", "changed")]
    fit(tmp_path, config_of(tmp_path, 1, ledgers[0], sampler))
    three = ("--trainer.max_steps=3", "--model.init_args.schedule.total_steps=6")
    fit(tmp_path, config_of(tmp_path, before, ledgers[1], sampler), *three)
    last = max((tmp_path / "kept").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    fit(tmp_path, config_of(tmp_path, after, ledgers[1], sampler), f"--ckpt_path={last}")
    whole, changed = map(rows_of_steps, ledgers)
    assert list(changed) == [1, 2, 3, 4, 5, 6]
    assert changed == whole
    assert len({row for rows in whole.values() for row in rows}) > 40
