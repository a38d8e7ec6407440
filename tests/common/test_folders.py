import multiprocessing
import os
import signal
import subprocess

import pytest

from embeddings.common.io import atomic_folder, remove_abandoned, scratch_folder
from tests.helpers.processes import Command

HANGING = """
import sys, time
from pathlib import Path
from embeddings.common.io import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_folder_appears_whole_under_its_name(tmp_path):
    with atomic_folder(tmp_path / "deep" / "target") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "deep" / "target").exists()
    assert os.listdir(tmp_path / "deep") == ["target"]
    assert os.listdir(tmp_path / "deep" / "target") == ["file"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "target") as folder:
        (folder / "missing" / "file").write_text("content")
    assert os.listdir(tmp_path) == []


def test_the_first_to_finish_wins(tmp_path):
    with atomic_folder(tmp_path / "target") as slow:
        (slow / "file").write_text("slow")
        with atomic_folder(tmp_path / "target") as fast:
            (fast / "file").write_text("fast")
    assert (tmp_path / "target" / "file").read_text() == "fast"
    assert os.listdir(tmp_path) == ["target"]


def test_a_killed_writer_leaves_no_target_and_the_next_one_tidies_up(tmp_path):
    with Command(["-c", HANGING, str(tmp_path / "target")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        with atomic_folder(tmp_path / "other"):
            assert len(os.listdir(tmp_path)) == 4
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "target").exists()
    assert any(name.startswith(".target.") for name in os.listdir(tmp_path))
    with atomic_folder(tmp_path / "target") as folder:
        (folder / "file").write_text("whole")
    assert sorted(os.listdir(tmp_path)) == ["other", "target"]


def test_a_living_writer_is_left_alone(tmp_path):
    with atomic_folder(tmp_path / "target") as first:
        (first / "file").write_text("first")
        with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "target"):
            raise ZeroDivisionError
        assert (first / "file").read_text() == "first"
    assert (tmp_path / "target" / "file").read_text() == "first"


def test_a_scratch_folder_is_one_processs_own_and_gone_afterwards(tmp_path):
    with scratch_folder(tmp_path / "deep" / "target") as first:
        (first / "file").write_text("first")
        with scratch_folder(tmp_path / "deep" / "target") as second:
            assert first != second
        assert (first / "file").read_text() == "first"
        remove_abandoned(tmp_path / "deep" / "target")
        assert (first / "file").exists()
    assert os.listdir(tmp_path / "deep") == []


def _write_each(parent, barrier):
    for index in range(100):
        barrier.wait()
        with atomic_folder(parent / str(index)) as folder:
            (folder / "file").write_text("content")


def test_processes_that_write_the_same_folders_at_once_leave_each_others_alone(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3, timeout=60)
    writers = [context.Process(target=_write_each, args=(tmp_path, barrier)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sorted(os.listdir(tmp_path), key=int) == [str(index) for index in range(100)]
    assert all(os.listdir(tmp_path / str(index)) == ["file"] for index in range(100))
