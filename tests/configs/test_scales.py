"""Every scale config goes with every method it can, as `fit` parses them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from embeddings.cli.fit import check_arguments

CONFIGS = Path("lightning_configs")
CUT = ("h100x8_fsdp2", "h100x16_fsdp2", "h100x8_zero1", "h100x8_zero2", "h100x16_zero3")
METHODS = ("nv_embed_stage1", "mgh", "moe_finetune")


@pytest.mark.parametrize("scale", CUT)
def test_a_scale_that_cuts_weights_parses_with_each_method(scale: str) -> None:
    for method in METHODS:
        parts = ("base", f"methods/{method}", f"scales/{scale}", f"data/{method}")
        check_arguments(["fit", *(f"--config={CONFIGS}/{part}.yaml" for part in parts)])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("scales/*.yaml")), ids=lambda path: path.stem)
def test_a_scale_names_as_many_devices_as_its_strategy_shares(path: Path) -> None:
    trainer: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"]
    num_ranks = trainer["devices"] * trainer.get("num_nodes", 1)
    assert path.stem == "cpu" or path.stem.startswith(f"h100x{num_ranks}")
    assert ("strategy" in trainer) == (num_ranks > 1)
    assert trainer["precision"] == "bf16-mixed"
