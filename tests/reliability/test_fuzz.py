"""A few cases of `tests.reliability.fuzz`, and tests of its checks."""

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embeddings.cli.errors import run_guarded
from embeddings.common import InputError
from tests.reliability import fuzz
from tests.reliability.cases import tree
from tests.reliability.world import World


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_a_damaged_file_ends_with_an_exit_code_and_without_a_traceback(world: World, first: int) -> None:
    cases = [fuzz.run_case(world, 0, index) for index in range(first, first + 10)]
    assert [case for case in cases if "fault" in case] == []
    assert {case["code"] for case in cases} <= set(fuzz.ENDINGS)


def test_a_case_is_reproducible(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    def note(words: list[str]) -> int:
        seen.append((words, tree(Path.cwd())))
        return 0

    monkeypatch.setattr(fuzz, "main", note)
    twice = [[fuzz.run_case(world, 0, index) for index in range(10)] for _ in range(2)]
    assert twice[0] == twice[1]
    assert seen[:10] == seen[10:]
    assert len({(case["line"], case["file"]) for case in twice[0]}) > 5
    assert fuzz.run_case(world, 1, 0) != twice[0][0]


def test_a_mutation_changes_its_file() -> None:
    content = b'{"query": "a fox", "positive": "the den", "negatives": []}\n' * 5
    changed = [fuzz.mutated(content, random.Random(f"0/{row}"), True) != content for row in range(50)]
    assert sum(changed) > 45


@pytest.mark.parametrize("guard", [lambda command: command(), run_guarded], ids=["raised", "printed"])
def test_a_traceback_is_found(guard: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("name")

    monkeypatch.setattr(fuzz, "main", lambda words: guard(broken))
    assert "KeyError" in fuzz.run_case(world, 0, 0)["fault"]


def _spin() -> None:
    while True:
        pass


def _spin_and_refuse() -> None:
    try:
        _spin()
    except BaseException:
        raise InputError("x.json", "is damaged", "make it again") from None


@pytest.mark.parametrize("command", [_spin, _spin_and_refuse])
def test_a_command_that_never_ends_is_found(
    command: Callable[[], None], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "main", lambda words: run_guarded(command))
    assert re.search("_Overtime|took more than 0.2 s", fuzz.run_case(world, 0, 0)["fault"])


def _die(*case: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_case_in_a_separate_process_has_the_same_result_and_a_crash_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fuzz.run_apart(world.root, 0, 0) == fuzz.run_case(world, 0, 0)
    monkeypatch.setattr(fuzz, "_print_case", _die)
    assert "the process ended with -9" in fuzz.run_apart(world.root, 0, 0)["fault"]
