import csv
from pathlib import Path
from typing import Any

import pytest

from embeddings.callbacks import RoutingStatistics
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.common import OptionError
from tests.helpers.runs import run_config, write_config
from tests.modules.moe_modules import moe_config

CALLBACK = {"class_path": "embeddings.callbacks.RoutingStatistics", "init_args": {"every_n_steps": 2}}


def logged_rows(folder: Path, config: dict[str, Any], *words: str) -> dict[int, dict[str, str]]:
    """What a run logs of its routing, by step."""
    cli = run_trainer(["fit", "--config", write_config(folder, config), *words])
    with open(Path(str(cli.trainer.log_dir)) / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("routing/load_entropy")]
    found = {int(row["step"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def logging_config(folder: Path) -> dict[str, Any]:
    config = moe_config(folder)
    config["trainer"] |= {"accumulate_grad_batches": 2}
    config["trainer"]["callbacks"] = [config["trainer"]["callbacks"][0], CALLBACK]
    return config


def test_a_run_logs_a_row_every_so_many_optimiser_steps(tmp_path: Path) -> None:
    rows = logged_rows(tmp_path, logging_config(tmp_path))
    assert sorted(rows) == [2, 4]
    assert 0 < float(rows[4]["routing/load_entropy_layer_1"]) <= 1
    assert float(rows[4]["routing/highest_load_layer_1"]) >= 1


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_does_not_log_the_step_where_it_begins_again(tmp_path: Path) -> None:
    config = logging_config(tmp_path)
    options = {"every_n_train_steps": 2, "save_last": True}
    saving = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}
    config["trainer"]["callbacks"].append(saving)
    config["trainer"]["max_steps"] = 2
    assert sorted(logged_rows(tmp_path, config)) == [2]
    config["trainer"]["max_steps"] = 4
    assert sorted(logged_rows(tmp_path, config, "--ckpt_path", "auto")) == [2, 4]


def test_a_module_without_experts_is_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [CALLBACK]
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 2
    says = "RoutingStatistics needs a module with experts and load_balancing, got NVEmbedModule; remove the callback"
    assert says in capsys.readouterr().err


def test_a_step_of_zero_is_refused() -> None:
    with pytest.raises(OptionError, match=r"RoutingStatistics.every_n_steps must be >= 1, got 0"):
        RoutingStatistics(every_n_steps=0)
