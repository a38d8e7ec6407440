"""No file has code run: the canary stays untouched, no process or connection is begun, nothing foreign imported."""

import pytest

from embeddings.cli.main import main
from tests.reliability import hostile, hostile_inputs
from tests.reliability.cases import Case, Outcome, faults, tree
from tests.reliability.watch import WATCH
from tests.reliability.world import Place

ALL = [*hostile.CASES, *hostile_inputs.CASES]
CASES = {case.name: case for case in ALL}


def test_there_are_fifty_of_them() -> None:
    assert len(CASES) == len(ALL) >= 50
    assert len([case for case in ALL if case.code]) >= 40


def test_the_watch_sees_what_the_payload_does(place: Place) -> None:
    import pickle

    with WATCH.over(place.folder) as seen:
        pickle.loads(hostile.PICKLE)
    assert any("os.system" in event for event in seen)
    assert (place.folder / hostile.CANARY).exists()


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_or_passed_over_and_runs_nothing(
    name: str, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    case: Case = CASES[name]
    case.make(place)
    words = place.world.words(case.words)
    before = tree(place.folder)
    capfd.readouterr()
    with WATCH.over(place.folder) as seen:
        code = main(words)
    written = capfd.readouterr()
    assert seen == []
    assert not (place.folder / hostile.CANARY).exists()
    assert "\x1b" not in written.out + written.err
    if case.code == 0:
        assert code == 0
    else:
        assert faults(case, Outcome(code, written.err, 0.0), place, before) == []
