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
    "encoding": encoding.CASES,
    "structure": structure.CASES,
    "texts": texts.CASES,
    "relations": relations.CASES,
    "config": config.CASES,
    "checkpoints": checkpoints.CASES,
    "index": index.CASES,
    "environment": environment.CASES,
    "evaluation": evaluation.CASES,
}
CASES = {f"{group}: {case.name}": case for group, cases in GROUPS.items() for case in cases}
# Those that go through a process of their own too, which sees no more than files and its arguments.
REAL = ("config: a batch of 0",)


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
    assert all(len(cases) >= 10 for cases in GROUPS.values())
    assert len(CASES) == sum(map(len, GROUPS.values())) >= 180


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


@pytest.mark.parametrize("name", REAL)
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
