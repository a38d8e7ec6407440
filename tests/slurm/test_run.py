"""The check of the batch files where SLURM is not installed."""

import tempfile

import pytest

from tests.slurm import run


def test_without_the_packages_it_says_so_starts_nothing_and_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: pytest.fail("it made a folder"))
    assert run.main() == 0
    assert capsys.readouterr().out.startswith("skipped: munged, slurmctld, slurmd, sbatch, ")
