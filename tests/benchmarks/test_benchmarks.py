"""Every benchmark and experiment runs at a tiny size; no test depends on times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[pe][0-9]*.py"))
NEEDS_DATA = {"p2_peer_gradcache"}


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
