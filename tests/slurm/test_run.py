"""The check of the batch files where SLURM is not installed."""

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import run


def test_without_the_packages_it_says_so_starts_nothing_and_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: pytest.fail("it made a folder"))
    assert run.main() == 0
    assert capsys.readouterr().out.startswith("skipped: munged, slurmctld, slurmd, sbatch, ")


@pytest.mark.parametrize("while_starting", [False, True])
def test_whatever_a_check_meets_the_logs_are_kept_and_named(
    while_starting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def meet(*_: object) -> str:
        raise subprocess.TimeoutExpired("scontrol", 60)

    @contextlib.contextmanager
    def started(folder: Path) -> Iterator[None]:
        if while_starting:
            meet()
        yield

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "missing_programs", list)
    monkeypatch.setattr(run, "started", started)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(tmp_path))
    for name in ("array", "ddp", "preemption", "time_limit", "late_warning"):
        monkeypatch.setattr(run, name, meet)
    assert run.main() == 1
    *failed, last = capsys.readouterr().out.splitlines()
    assert len(failed) == (1 if while_starting else 5)
    assert all(line.startswith("FAILED: ") and "TimeoutExpired: Command 'scontrol'" in line for line in failed)
    assert last == f"the daemons' logs and the runs: {tmp_path}"
    assert tmp_path.exists()
