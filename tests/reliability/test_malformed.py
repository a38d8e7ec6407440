"""Every malformed input ends in one short line with its name and the way out, in exit code 2, with nothing written."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.reliability import (
    accepted,
    checkpoints,
    config,
    encoding,
    environment,
    evaluation,
    index,
    relations,
    structure,
    texts,
)
from tests.reliability.cases import Case, Outcome, faults, run_here, tree
from tests.reliability.world import Place

ROOT = Path(__file__).parents[2]
GROUPS = {
    "encoding": (encoding.CASES, 24),
    "structure": (structure.CASES, 36),
    "texts": (texts.CASES, 20),
    "relations": (relations.CASES, 32),
    "config": (config.CASES, 48),
    "checkpoints": (checkpoints.CASES, 28),
    "index": (index.CASES, 20),
    "environment": (environment.CASES, 16),
    "evaluation": (evaluation.CASES, 16),
}
CASES = {f"{group}: {case.name}": case for group, (cases, _) in GROUPS.items() for case in cases}
# Those of each group that go through a process of their own too, which must see no more than files and its arguments.
REAL = (
    "encoding: Latin-1 in a record",
    "structure: a last row that is cut off",
    "config: a YAML bomb",
    "config: a batch of 0",
    "checkpoints: weights cut off",
    "encoding: a row of 100 MB",
    "encoding: half of a character to search for",
    "encoding: a Latin-1 config of a job",
    "structure: gzip that is cut off",
    "structure: Parquet that is cut off",
    "structure: a header alone",
    "texts: an empty query",
    "texts: a prompt as long as the texts",
    "texts: nothing to search for",
    "relations: a negative that is the positive",
    "relations: one class",
    "relations: clusters of another source",
    "relations: fewer documents than negatives",
    "config: an unknown option of the loss",
    "config: a key twice in a sweep",
    "config: an unknown precision",
    "config: a sweep over a key that there is not",
    "checkpoints: weights that are NaN",
    "checkpoints: a shard that is missing",
    "checkpoints: a decoder to convert",
    "index: a vector that is NaN",
    "index: clusters that are cut off",
    "environment: a pipe for records",
    "environment: a file where runs are to lie",
    "environment: a GPU to train on where there is none",
    "evaluation: empty judgments",
    "evaluation: a folder without data",
)
NUM_QUICK = 5


def run_apart(words: list[str]) -> Outcome:
    """Run a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EMBED_IMPORTS": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(ROOT / "main.py"), *map(os.fsencode, words)],
        env=environment, capture_output=True, timeout=200,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Outcome(done.returncode, done.stderr.decode("utf-8", "backslashreplace"), seconds)


def test_every_group_has_its_cases() -> None:
    assert {group: len(cases) >= least for group, (cases, least) in GROUPS.items()} == dict.fromkeys(GROUPS, True)
    assert len(CASES) == sum(len(cases) for cases, _ in GROUPS.values()) >= 240
    assert set(REAL) <= set(CASES)
    assert len(REAL) >= 30


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line_and_nothing_is_written(
    name: str, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    case = prepared(name, place)
    words = place.world.words(case.words)
    before = tree(place.folder)
    capfd.readouterr()
    outcome = run_here(words, lambda: capfd.readouterr().err)
    found = faults(case, outcome, place, before)
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if row < NUM_QUICK else pytest.mark.slow) for row, name in enumerate(REAL)]
)
def test_a_process_of_its_own_refuses_it_too(name: str, place: Place) -> None:
    case = prepared(name, place)
    words = place.world.words(case.words)
    before = tree(place.folder)
    assert faults(case, run_apart(words), place, before) == []


@pytest.mark.parametrize("case", accepted.CASES, ids=[case.name for case in accepted.CASES])
def test_what_is_odd_and_read_on_purpose_is_read(case: Case, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    case.make(place)
    words = place.world.words(case.words)
    capfd.readouterr()
    assert main(words) == case.code
    assert case.says in capfd.readouterr().out


def prepared(name: str, place: Place) -> Case:
    """The case, with its input made."""
    case = CASES[name]
    case.make(place)
    return case
