"""Run every benchmark and experiment, each in a process of its own: `python -m benchmarks.run [--tiny]`.

One after another, since they are timed; at tiny sizes, where nothing is, two at a time in processes that begin with the
libraries loaded.
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

# What the scripts share, with most of the library.
LOADED = (
    "sentence_transformers",
    "lightning.pytorch.cli",
    "embeddings.cli.fit",
    "benchmarks.docstring_trials",
    "benchmarks.mgh_trials",
    "benchmarks.moe_trials",
    "benchmarks.workloads",
)
# Its loaders' workers wait five seconds for each batch in a process that is itself a fork.
UNFORKED = ("p12_random_batches",)


def main() -> int:
    """Run the scripts in the order of their claims; returns 1 if one of them failed."""
    found = Path(__file__).parent.glob("[pe][0-9]*.py")
    scripts = sorted(found, key=lambda path: (path.stem[0] != "p", int(path.stem[1:].split("_")[0])))
    is_tiny, failed = "--tiny" in sys.argv, []
    multiprocessing.set_forkserver_preload(list(LOADED))
    with ThreadPoolExecutor(2 if is_tiny else 1) as at_once:
        for script, code in zip(scripts, at_once.map(run_tiny if is_tiny else run, scripts), strict=True):
            if code:
                failed.append(script.stem)
    print(f"{len(scripts) - len(failed)} of {len(scripts)} benchmarks ran" + "".join(f"; failed: {x}" for x in failed))
    return int(bool(failed))


def run(script: Path) -> int:
    """Run one, and return its exit code."""
    print(f"== {script.stem}", flush=True)
    return subprocess.run([sys.executable, "-m", f"benchmarks.{script.stem}", *sys.argv[1:]]).returncode


def run_tiny(script: Path) -> int | None:
    """Run one beside another, print what it printed once it has ended, and return its exit code."""
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
    """Run a script as this process's own, with all that it and its children print in a file."""
    with open(output, "wb", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv[:] = [name, "--tiny"]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    raise SystemExit(main())
