"""The jobs' configs are what the papers say, and each parses into a plan."""

from pathlib import Path

import pytest
import yaml

from embeddings.cli.main import main

FOLDER = Path(__file__).parents[2] / "lightning_configs" / "jobs"


def test_every_job_config_is_looked_at_here():
    assert {path.name for path in FOLDER.iterdir()} == {"synthesize_mgh.yaml", "synthesize_nv_embed.yaml"}


@pytest.mark.parametrize("name", ["mgh", "nv_embed"])
def test_a_synthesis_config_parses_and_plans(name, capsys, tmp_path):
    config = str(FOLDER / f"synthesize_{name}.yaml")
    line = ["synthesize", "--config", config, "--endpoint", "http://h/v1", "--model", "m"]
    with pytest.raises(SystemExit) as stop:
        main([*line, "--output", str(tmp_path / "out"), "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["method"] == name
    # Sums of examples over categories: 310K with 180M tokens (MGH), 3 x 40,000 over 60,000 tasks (NV-Embed).
    expected = {"mgh": (310_000, None, 180_000_000), "nv_embed": (120_000, 60_000, None)}[name]
    assert (printed["num_examples"], printed["num_tasks"], printed["token_budget"]) == expected
