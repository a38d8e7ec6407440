"""The sweeps that come with the library are sweeps, and their first points parse."""

from pathlib import Path

import pytest

from embeddings.cli.fit import check_arguments
from embeddings.cli.sweep_file import read_sweep
from embeddings.cli.sweep_runs import runs_of

FOLDER = Path("lightning_configs/sweeps")
SIZES = {"pooling": 9, "temperature": 12}


def test_every_sweep_is_looked_at_here():
    assert {path.stem for path in FOLDER.iterdir()} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_sweep_has_its_runs_and_parses(name, tmp_path):
    runs = runs_of(read_sweep(FOLDER / f"{name}.yaml"), tmp_path)
    assert len({run.folder for run in runs}) == SIZES[name]
    for run in runs[:: SIZES[name] // 3]:
        check_arguments(run.words)
    assert list(tmp_path.iterdir()) == []
