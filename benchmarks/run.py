"""Run every benchmark and experiment, each in a process of its own: `python -m benchmarks.run [--tiny]`.

One after another, since they are timed; at tiny sizes, where nothing is, two at a time.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> int:
    """Run the scripts in the order of their claims; returns 1 if one of them failed."""
    found = Path(__file__).parent.glob("[pe][0-9]*.py")
    scripts = sorted(found, key=lambda path: (path.stem[0] != "p", int(path.stem[1:].split("_")[0])))
    failed = []
    with ThreadPoolExecutor(2 if "--tiny" in sys.argv else 1) as at_once:
        for script, code in zip(scripts, at_once.map(run, scripts), strict=True):
            if code:
                failed.append(script.stem)
    print(f"{len(scripts) - len(failed)} of {len(scripts)} benchmarks ran" + "".join(f"; failed: {x}" for x in failed))
    return int(bool(failed))


def run(script: Path) -> int:
    """Run one, and return its exit code."""
    words = [sys.executable, "-m", f"benchmarks.{script.stem}", *sys.argv[1:]]
    if "--tiny" not in sys.argv:
        print(f"== {script.stem}", flush=True)
        return subprocess.run(words).returncode
    start = time.monotonic()
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"== {script.stem}: {time.monotonic() - start:.0f} s\n{ended.stdout}", flush=True)
    return ended.returncode


if __name__ == "__main__":
    raise SystemExit(main())
