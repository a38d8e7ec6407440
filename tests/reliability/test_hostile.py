"""No input file can run code: no canary, no new process or connection, no foreign import."""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from embeddings.cli.main import main
from tests.reliability import hostile
from tests.reliability.cases import by_name, faults, tree
from tests.reliability.world import Place

_PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "webbrowser.open", "urllib.Request")
# Programs that the commands and libraries start themselves.
_OWN = ("git", "lscpu", "ldconfig", "nvidia-smi")


class Watch:
    """An audit hook, active only inside `over`.

    Python cannot remove it, and calls it for each of very many events: it is added at its first use.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        self._is_added = False

    @contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        """A context that records suspicious events; code from this folder is foreign."""
        if not self._is_added:
            self._is_added = True
            sys.addaudithook(self._hook)
        self.folder, self.seen = folder, []
        try:
            yield self.seen
        finally:
            self.folder = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in _PROCESSES:
            program = arguments[0] if arguments else ""
            if Path(str(program)).name not in _OWN:
                self.seen.append(f"{event} {arguments[:2]!r}")
        elif event in _CONNECTIONS:
            self.seen.append(f"{event} {arguments[1:]!r}")
        elif event == "exec" and str(self.folder) in str(getattr(arguments[0], "co_filename", "")):
            self.seen.append(f"exec {arguments[0].co_filename}")
        elif event == "import" and str(arguments[1] or "").startswith(str(self.folder)):
            self.seen.append(f"import {arguments[0]}")
        elif event == "pickle.find_class" and arguments[0] in ("os", "posix", "builtins", "subprocess"):
            self.seen.append(f"pickle {arguments!r}")


WATCH = Watch()
CASES = by_name(hostile.CASES)


def test_the_audit_hook_records_what_the_payload_does(place: Place) -> None:
    with WATCH.over(place.folder) as seen:
        pickle.loads(hostile.PICKLE)
    assert any("os.system" in event for event in seen)
    assert (place.folder / hostile.CANARY).exists()


@pytest.mark.parametrize("name", CASES)
def test_hostile_input_is_rejected_or_ignored_and_runs_nothing(
    name: str, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    case.make(place)
    words = place.world.words(case.line)
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
        assert faults(case, code, written.err, place, before) == []
