"""Watches for code that a hostile file brings: processes, connections, foreign modules, what pickle makes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pty.spawn")
_CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "webbrowser.open", "urllib.Request")
# What the commands themselves start: their commit, and what a library asks of the machine.
_OWN = ("git", "lscpu", "ldconfig", "nvidia-smi")


class Watch:
    """An audit hook, which Python never takes away again; it looks only while it is switched on."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        """What happens while the context lasts: foreign code is code from this folder."""
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
