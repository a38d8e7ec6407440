"""Run every benchmark and experiment, each in a process of its own: `python -m benchmarks.run [--tiny]`."""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the scripts in the order of their claims; returns 1 if one of them failed."""
    found = Path(__file__).parent.glob("[pe][0-9]*.py")
    scripts = sorted(found, key=lambda path: (path.stem[0] != "p", int(path.stem[1:].split("_")[0])))
    failed = []
    for script in scripts:
        print(f"== {script.stem}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{script.stem}", *sys.argv[1:]]).returncode:
            failed.append(script.stem)
    print(f"{len(scripts) - len(failed)} of {len(scripts)} benchmarks ran" + "".join(f"; failed: {x}" for x in failed))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
