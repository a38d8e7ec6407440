"""P20: `fit` refuses a mistake in a config within 1.5 s.

What is timed is the whole command, from its start to its end, in a process of its own. A mistake that takes a class to
see, in the type of a value or inside a record, waits until torch and Lightning are loaded; the rows say which do.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.harness import Ratio, options, record

ROOT = Path(__file__).parents[1]
QUICKSTART = "lightning_configs/quickstart.yaml"
# What is wrong, the keys that a further config sets, and further words.
KINDS: dict[str, tuple[dict[str, object], list[str]]] = {
    "a config that is not there": ({}, ["--config", "nope.yaml"]),
    "no YAML": ({}, ["--config", "BROKEN"]),
    "an unknown recipe": ({}, ["--recipe", "nope"]),
    "two methods": ({}, ["--config", "lightning_configs/methods/mgh.yaml"]),
    "an unknown key": ({"modle": {}}, []),
    "an unknown key of the trainer": ({"trainer": {"max_stepz": 3}}, []),
    "an unknown option of the trainer": ({}, ["--trainer.max_stepz=3"]),
    "an unknown key of the data": (
        {"data": {"class_path": "embeddings.data.EmbeddingDataModule", "init_args": {"bath_size": 3}}},
        [],
    ),
    "an unknown key of a class named elsewhere": ({"model": {"init_args": {"losss": None}}}, []),
    "an unknown key of a record": ({"model": {"init_args": {"schedule": {"warmup": 3}}}}, []),
    "a value of another type": ({"trainer": {"max_steps": "many"}}, []),
    "a class that is not there": ({"data": {"class_path": "embeddings.data.Nothing"}}, []),
}


def refusal(folder: Path, kind: str) -> list[str]:
    """The command line of a mistake."""
    content, words = KINDS[kind]
    (folder / "broken.yaml").write_text("a: [1,\n", encoding="utf-8")
    (folder / "wrong.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    given = [str(folder / "broken.yaml") if word == "BROKEN" else word for word in words]
    configs = [] if "--recipe" in words else ["--config", QUICKSTART, "--config", str(folder / "wrong.yaml")]
    return ["main.py", "fit", *configs, *given]


def loads_torch(words: list[str]) -> bool:
    """Whether torch is loaded until the message is there.

    Raises:
        RuntimeError: If the command says anything but one line, or ends with another code than 2.
    """
    line = [sys.executable, "-X", "importtime", *words]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    if ended.returncode != 2 or len(said) != 1 or not said[0].startswith("error: "):
        raise RuntimeError(f"{' '.join(words)} is not refused by one line: {ended.returncode}, {said}")
    return any(line.rpartition("|")[2].strip() == "torch" for line in ended.stderr.splitlines())


def seconds(words: list[str]) -> float:
    """Wall time of a command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - start


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """A row for each kind of mistake."""
    for kind in KINDS:
        words = refusal(folder, kind)
        state = "torch loaded" if loads_torch(words) else "torch not loaded"
        taken = [seconds(words) for _ in range(1 if chosen.tiny else chosen.pairs)]
        found = Ratio(statistics.median(taken), min(taken), max(taken), float("nan"))
        record(chosen, f"P20 {kind}, {state}", found, "s", "<=1.5", "torch, lightning")


def main() -> None:
    """Time each kind of mistake."""
    chosen = options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        measure(chosen, Path(folder))


if __name__ == "__main__":
    main()
