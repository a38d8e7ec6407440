"""Run every benchmark and experiment, each in a separate process: `python -m benchmarks.run [--tiny] [p | e]`.

`p` runs the benchmarks alone, `e` the experiments.

They run one after another, because they are timed. Tiny runs are not timed: two scripts run at the same time, in
processes forked from a server that has loaded the libraries.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Modules that the fork server loads: those that the scripts share.
PRELOADED = (
    "sentence_transformers",
    "lightning.pytorch.cli",
    "embeddings.cli.fit",
    "benchmarks.docstring_trials",
    "benchmarks.mgh_trials",
    "benchmarks.moe_trials",
    "benchmarks.workloads",
)
# The workers of its loaders wait five seconds for each batch if their parent is itself a fork.
UNFORKED = ("p12_random_batches",)
# Tiny runs start with the longest scripts, so that both processes end together. The very first needs no fork server: it
# runs while the server loads.
FIRST = (*UNFORKED, "e17_compression", "p16_encode", "e23_mined_negatives", "e19_stages", "e5_pooling_and_mask")


def main() -> int:
    """Run the benchmarks, then the experiments, by number; returns 1 if a script failed."""
    kinds = "".join(word for word in sys.argv[1:] if word in ("p", "e")) or "pe"
    paths = Path(__file__).parent.glob(f"[{kinds}][0-9]*.py")
    scripts = sorted(paths, key=lambda path: (path.stem[0] != "p", int(path.stem[1:].split("_")[0])))
    is_tiny, failed = "--tiny" in sys.argv, []
    if is_tiny:
        scripts.sort(key=lambda path: FIRST.index(path.stem) if path.stem in FIRST else len(FIRST))
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with ThreadPoolExecutor(2 if is_tiny else 1) as pool:
        for script, code in zip(scripts, pool.map(run_tiny if is_tiny else run, scripts), strict=True):
            if code:
                failed.append(script.stem)
    print(f"{len(scripts) - len(failed)} of {len(scripts)} benchmarks ran" + "".join(f"; failed: {x}" for x in failed))
    return int(bool(failed))


def run(script: Path) -> int:
    """Run a script, and return its exit code."""
    print(f"== {script.stem}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script.stem}", *(["--tiny"] * ("--tiny" in sys.argv))]
    ).returncode


def run_tiny(script: Path) -> int | None:
    """Run a script in a forked process, print its output when it has ended, and return its exit code."""
    if script.stem in UNFORKED:
        return run(script)
    start = time.monotonic()
    with tempfile.NamedTemporaryFile() as output:
        child = multiprocessing.get_context("forkserver").Process(target=_run_here, args=(script.stem, output.name))
        child.start()
        child.join()
        printed = Path(output.name).read_text(encoding="utf-8", errors="replace")
    print(f"== {script.stem}: {time.monotonic() - start:.0f} s\n{printed}", flush=True)
    return child.exitcode


def _run_here(name: str, output: str) -> None:
    """Run a script as the main module of this process; its output and that of its children goes to a file."""
    with open(output, "wb", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv[:] = [name, "--tiny"]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    raise SystemExit(main())
