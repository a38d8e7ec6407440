"""Every benchmark and experiment runs at a tiny size; no test depends on times."""

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import harness, p17_checkpoints
from benchmarks.harness import Ratio

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[pe][0-9]*.py"))
NEEDS_DATA = {"p2_peer_gradcache"}


def test_there_are_benchmark_scripts() -> None:
    assert len(SCRIPTS) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_at_a_tiny_size_and_writes_no_row(script: str) -> None:
    if script in NEEDS_DATA and "EMBED_DATA" not in os.environ:
        pytest.skip("set EMBED_DATA to the folder of real pairs")
    results = ROOT / "benchmarks" / "results.csv"
    before = results.read_bytes()
    command = [sys.executable, "-m", f"benchmarks.{script}", "--tiny"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert script.split("_")[0].upper() in finished.stdout
    assert results.read_bytes() == before


def test_a_void_comparison_is_repeated_and_fails_after_three_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    controls = iter([0.9, 1.01, 0.9, 1.2, 0.9])

    def timed(*arguments: object) -> dict[str, Ratio]:
        return {"ours": Ratio(0.5, 0.4, 0.6, next(controls))}

    monkeypatch.setattr(harness, "_timed", timed)
    chosen = Namespace(tiny=False)
    assert harness.compare(print, print, chosen).control == 1.01
    with pytest.raises(RuntimeError, match="void 3 times"):
        harness.compare(print, print, chosen)


def test_an_unsteady_disk_makes_a_comparison_void() -> None:
    found = p17_checkpoints.ratio_of([1.0, 2.0, 3.0], [10.0, 10.0, 10.0], [12.0, 9.0, 12.4])
    assert found == Ratio(0.2, 0.1, 0.3, 1.2)
    with pytest.raises(RuntimeError, match=r"void: the control is 1\.260"):
        p17_checkpoints.ratio_of([1.0], [10.0], [12.6])
    assert p17_checkpoints.ratio_of([1.0], [10.0], [12.6], tiny=True).control == 1.26


def process_facts(number: int) -> Callable[[int], tuple[int, int, int]]:
    return lambda other: (os.getpid(), torch.get_num_threads(), number + other)


@pytest.mark.slow
def test_a_side_of_a_comparison_runs_in_a_separate_process_with_the_threads_of_the_command() -> None:
    with harness.separate_process(Namespace(tiny=False, threads=2), process_facts, 40) as run:
        first, second = run(1), run(2)
    assert first == (second[0], 2, 41)
    assert second[2] == 42
    assert first[0] != os.getpid()


def test_a_separate_process_needs_a_wall_clock() -> None:
    with (
        pytest.raises(ValueError, match="--threads must be >= 2"),
        harness.separate_process(Namespace(tiny=False, threads=1), process_facts, 40),
    ):
        pass
