"""A few cases of `tests.reliability.fuzz`, and tests of its checks."""

from pathlib import Path

import pytest

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
