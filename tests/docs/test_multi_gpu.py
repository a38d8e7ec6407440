"""The tables of the page on 8 and 16 GPUs are what `plan` prints today."""

import re
from pathlib import Path

import pytest

from tests.docs.multi_gpu import NUM_GPUS, RECIPES, ROOT, SCALES, recipe_cells, strategy_cells

PAGE = ROOT / "docs" / "multi-gpu.md"


def tables(page: Path) -> list[dict[str, str]]:
    """Of each table of figures the cells behind each title."""
    found: list[dict[str, str]] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        first, _, cells = line.strip("| ").partition(" | ")
        if first in ("recipe", "scale file"):
            found.append({})
        elif found and line.startswith("| `"):
            found[-1] |= dict.fromkeys(re.findall(r"`(\w+)`", first), cells)
        elif line.startswith("| strategy"):
            break
    return found


def test_every_recipe_and_scale_has_its_rows() -> None:
    *of_recipes, of_scales = tables(PAGE)
    assert [list(rows) for rows in of_recipes] == [RECIPES] * len(NUM_GPUS)
    assert list(of_scales) == SCALES


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_planned_as_the_page_says(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")
    for count, rows in zip(NUM_GPUS, tables(PAGE), strict=False):
        assert recipe_cells(recipe, count) == rows[recipe]


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_file_is_planned_as_the_page_says(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")
    assert strategy_cells(scale) == tables(PAGE)[-1][scale]
