import errno
import fcntl
import os
import subprocess
import threading

import pytest

from embeddings.common.file_lock import file_lock, passing_lock, process_lock
from tests.helpers.processes import Command

COUNT = """
import sys
from pathlib import Path
from embeddings.common.file_lock import passing_lock
lock, count = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(200):
    with passing_lock(lock):
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_one_holds_the_lock_at_a_time_and_its_file_stays(tmp_path):
    with file_lock(tmp_path / "lock") as first, file_lock(tmp_path / "lock", wait=False) as second:
        assert (first, second) == (True, False)
    with file_lock(tmp_path / "lock", wait=False) as third:
        assert third
    assert (tmp_path / "lock").exists()


@pytest.mark.parametrize("lock", [file_lock, passing_lock])
def test_a_link_in_the_locks_place_is_not_followed(lock, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "lock").symlink_to("mine")
    with pytest.raises(OSError, match="symbolic links"), lock(tmp_path / "lock"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_passing_lock_is_gone_whatever_happens_under_it(tmp_path):
    with pytest.raises(FileNotFoundError), passing_lock(tmp_path / "lock"):
        os.rename(tmp_path / "lock", tmp_path / "none" / "lock")
    assert list(tmp_path.iterdir()) == []


def test_processes_that_take_turns_by_a_passing_lock_lose_nothing(tmp_path):
    (tmp_path / "count").write_text("0")
    command = ["-c", COUNT, str(tmp_path / "lock"), str(tmp_path / "count")]
    processes = [Command(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "600"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_a_passing_lock_is_waited_for(tmp_path):
    entered = threading.Event()

    def enter():
        with passing_lock(tmp_path / "lock"):
            entered.set()

    with passing_lock(tmp_path / "lock"):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()


@pytest.mark.parametrize(("code", "is_taken"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_has_none(code, is_taken, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(code, "no")

    monkeypatch.setattr(fcntl, "flock", fail)
    if is_taken:
        with passing_lock(tmp_path / "lock"):
            pass
    else:
        with pytest.raises(OSError, match="no"), passing_lock(tmp_path / "lock"):
            pass


HOLD = """
import os, sys, time
from pathlib import Path
from embeddings.common.file_lock import process_lock
held = process_lock(Path(sys.argv[1]))
print(held is not None, flush=True)
if os.fork() == 0:
    time.sleep(60)
time.sleep(60)
"""


def test_a_process_lock_ends_with_its_process_and_not_with_a_child_that_outlives_it(tmp_path):
    path = tmp_path / "lock"
    with Command(["-c", HOLD, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"True\n"
        assert process_lock(path) is None
        child = int(subprocess.run(["pgrep", "-P", str(holder.pid)], capture_output=True, text=True).stdout or 0)
        holder.kill()
        holder.wait()
        held = process_lock(path)
        assert held is not None
        held.close()
        if child:
            os.kill(child, 9)


def test_a_process_lock_needs_no_locks_of_the_file_system(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with process_lock(tmp_path / "lock") as file:
        assert file is not None
