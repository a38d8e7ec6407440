"""P20: `fit` answers a mistake in a config with its line within 1.5 s, and without torch.

Timed is the whole command, from its start to its end, in a process of its own; a further run of each lists its imports
(`-X importtime`); the rows say whether torch is among them.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from tqdm import tqdm

from benchmarks.harness import Ratio, options, record

ROOT = Path(__file__).parents[1]
QUICKSTART = ["--config", "lightning_configs/quickstart.yaml"]
# What a further config sets.
KEYS: dict[str, dict[str, object]] = {
    "an unknown key": {"modle": {"init_args": {"seed": 1}}},
    "an unknown key of the trainer": {"trainer": {"max_stepz": 3}},
    "an unknown key of the data": {"data": {"init_args": {"batchsize": 3}}},
    "an unknown key of the loss": {"model": {"init_args": {"loss": {"init_args": {"temprature": 1}}}}},
    "a class that is not there": {"data": {"class_path": "embeddings.data.EmbedingDataModule"}},
    "an unknown key of a source": {"data": {"init_args": {"sources": [{"name": "a", "path": "a", "instrution": "b"}]}}},
    "a value of another type": {"trainer": {"max_steps": "many"}},
    "a value of another type in the loss": {"model": {"init_args": {"loss": {"init_args": {"temperature": "hot"}}}}},
    "a value of another type in a source": {"data": {"init_args": {"sources": [{"name": "a", "weight": "much"}]}}},
}
# Whole lines.
LINES: dict[str, list[str]] = {
    "an unknown command": ["fti", *QUICKSTART],
    "a config that is not there": ["fit", *QUICKSTART, "--config", "nope.yaml"],
    "an unknown recipe": ["fit", "--recipe", "nope"],
    "two methods": ["fit", *QUICKSTART, "--config", "lightning_configs/methods/mgh.yaml"],
    "an unknown option": ["fit", *QUICKSTART, "--conf=a.yaml"],
    "an unknown option of the trainer": ["fit", *QUICKSTART, "--trainer.max_ep", "3"],
    "an unknown option of the data": ["fit", *QUICKSTART, "--data.init_args.batchsize=3"],
    "an option of another type": ["fit", *QUICKSTART, "--data.init_args.batch_size=1.5"],
}


def command_lines(folder: Path) -> dict[str, list[str]]:
    """The line of each mistake."""
    found = {name: list(words) for name, words in LINES.items()}
    for number, (name, content) in enumerate(KEYS.items()):
        path = folder / f"{number}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        found[name] = ["fit", *QUICKSTART, "--config", str(path)]
    (folder / "broken.yaml").write_text("a: [1,\n", encoding="utf-8")
    return found | {"a config that is no YAML": ["fit", "--config", str(folder / "broken.yaml")]}


def refused(words: list[str], *flags: str) -> tuple[float, list[str]]:
    """Seconds of a command, and the modules that it imports where a flag lists them.

    Raises:
        RuntimeError: If it ends with another code than 2, or its last line is no error's.
    """
    start = time.perf_counter()
    line = [sys.executable, *flags, "main.py", *words]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    lines = ended.stderr.splitlines()
    imports = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
    said = [line for line in lines if not line.startswith("import time:")]
    if ended.returncode != 2 or not said or not said[-1].startswith("error: "):
        raise RuntimeError(f"{' '.join(words)} is not refused: code {ended.returncode}, {said[-1:]}")
    return seconds, imports


def loads_torch(words: list[str]) -> bool:
    """Whether torch is imported before the message."""
    _, imported = refused(words, "-X", "importtime")
    if "embeddings.cli.main" not in imported:
        raise RuntimeError("the imports are not listed")
    return "torch" in imported


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """A row for each kind of mistake; the kinds take turns."""
    lines = command_lines(folder)
    loaded = {name: loads_torch(words) for name, words in lines.items()}
    taken: dict[str, list[float]] = {name: [] for name in lines}
    for _ in tqdm(range(1 if chosen.tiny else chosen.pairs), desc="rounds", disable=chosen.tiny):
        for name, words in lines.items():
            taken[name].append(refused(words)[0])
    for name, seconds in taken.items():
        found = Ratio(statistics.median(seconds), min(seconds), max(seconds), float("nan"))
        state = "loaded" if loaded[name] else "not loaded"
        record(chosen, f"P20 time to the line of {name}, torch {state}", found, "s", "<=1.5", "torch, lightning")


def main() -> None:
    """Time each kind of mistake."""
    chosen = options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        measure(chosen, Path(folder))


if __name__ == "__main__":
    main()
