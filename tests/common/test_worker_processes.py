"""Processes that work for this one: all items once, and one line where one of them fails."""

import os
import signal
import subprocess
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from embeddings.common.errors import InputError, WorkerError
from embeddings.common.jobs import spread
from tests.helpers.processes import Command
from tests.helpers.waiting import wait_for

ROOT = Path(__file__).parents[2]


class Refused(OSError):
    """An error that pickle cannot make again."""

    def __init__(self, host, why):
        super().__init__(f"{host} {why}")


def _work(log, number, item):
    """Note the item; a negative one is a way to fail."""
    if item == -1:
        raise InputError("corpus.jsonl:7", "the vector is zero", "check its text")
    if item == -2:
        raise RuntimeError("out of memory")
    if item == -3:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == -4:
        raise Refused("the store", "is closed")
    time.sleep(0.1)
    (log / f"{item}").write_text(f"{number}")
    return item * item


def _make(log, number):
    return partial(_work, log, number)


def makers(log, count):
    return {f"device {number}": partial(_make, log, number) for number in range(count)}


def done(log):
    return sorted(int(path.name) for path in log.iterdir())


def test_each_item_is_worked_on_once_and_read_when_there_is_room(tmp_path):
    read = []

    def items():
        for item in range(9):
            read.append(item)
            yield item

    results = spread(makers(tmp_path, 2), items())
    found = [next(results)]
    assert len(read) <= 5
    found += results
    assert sorted(found) == [item * item for item in range(9)]
    assert done(tmp_path) == list(range(9))
    assert {path.read_text() for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize(
    ("bad", "kind", "says"),
    [
        (-1, InputError, "^corpus.jsonl:7: the vector is zero; check its text$"),
        (-2, WorkerError, "^the process of device 0 met RuntimeError: out of memory; what is finished is kept$"),
        (-3, WorkerError, r"^the process of device 0 was ended by a signal \(SIGKILL\); what is finished is kept$"),
        (-4, WorkerError, "^the process of device 0 met Refused: the store is closed; what is finished is kept$"),
    ],
)
def test_a_process_that_fails_is_named_and_the_others_finish_what_they_have(bad, kind, says, tmp_path):
    found, read = [], []

    def items():
        for item in [bad, *range(100)]:
            read.append(item)
            yield item

    with pytest.raises(kind, match=says):
        found.extend(spread(makers(tmp_path, 2), items()))
    # The other process had two at least, and nothing new was begun.
    assert sorted(found) == [item * item for item in done(tmp_path)]
    assert {0, 2} <= set(done(tmp_path))
    assert len(read) < 100


def test_a_large_item_and_a_large_result_pass_each_other(tmp_path):
    items = [bytes(3_000_000)] * 6
    assert sum(map(len, spread({"one": partial(_make_echo)}, items))) == 18_000_000


def _echo(item):
    return item


def _make_echo():
    return _echo


SCRIPT = """
    import sys, time
    from functools import partial
    from pathlib import Path
    from embeddings.common.io import atomic_path
    from embeddings.common.jobs import spread

    def work(folder, item):
        with atomic_path(folder / "shard.npy"):
            (folder / "begun").touch()
            time.sleep(60)

    def make(folder):
        (folder / f"{__import__('os').getpid()}.pid").touch()
        return partial(work, folder)

    if __name__ == "__main__":
        list(spread({"one": partial(make, Path(sys.argv[1]))}, [1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_ends_with_the_one_it_works_for_and_leaves_no_half_file(number, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "out"
    script.write_text(textwrap.dedent(SCRIPT))
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = Command([script, folder], env=environment, stderr=subprocess.DEVNULL)
    wait_for((folder / "begun").exists, "the first item", 60)
    (process,) = (int(path.stem) for path in folder.glob("*.pid"))
    first.send_signal(number)
    first.wait()
    wait_for(lambda: not _runs(process), "the end of the process", 60)
    assert sorted(path.name for path in folder.iterdir()) == [f"{process}.pid", "begun"]


def _runs(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
