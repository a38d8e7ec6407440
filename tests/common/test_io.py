"""Atomic files and folders, locks, manifests, arrays and metrics on disk."""

import errno
import io
import json
import multiprocessing
import os
import signal
import stat
import subprocess

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.io import (
    atomic_folder,
    atomic_path,
    check_disk_space,
    check_manifest,
    check_vectors,
    file_lock,
    link_or_copy,
    load_array,
    read_metrics,
    remove_abandoned,
    scratch_folder,
    text_hash,
    write_manifest,
    write_text,
)
from tests.helpers.disks import fake_disk
from tests.helpers.processes import Command


def test_a_write_is_atomic_and_a_failure_keeps_only_the_old_file(tmp_path):
    target = tmp_path / "deep" / "value.json"
    with atomic_path(target) as temporary:
        temporary.write_text("old")
        assert not target.exists()

    def fail_half_way():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail_half_way()
    assert target.read_text() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["value.json"]


def test_a_link_of_a_relative_symbolic_link_is_its_file(tmp_path):
    (tmp_path / "blob").write_text("text")
    (tmp_path / "name").symlink_to("blob")
    (tmp_path / "other").mkdir()
    link_or_copy(tmp_path / "name", tmp_path / "other" / "name")
    assert (tmp_path / "other" / "name").read_text() == "text"
    assert not (tmp_path / "other" / "name").is_symlink()


def test_the_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "text")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_text_hash_is_stable_and_ignores_outer_white_space():
    assert text_hash(" abc\n") == text_hash("abc") == 6455300059550759896
    assert text_hash("abc") != text_hash("Abc")
    assert -(2**63) <= text_hash("\ud800 lone surrogate") < 2**63


def test_a_manifest_mismatch_names_the_field_and_both_values(tmp_path):
    write_manifest(tmp_path, {"model": "a", "rows": 3, "words": "x" * 64})
    check_manifest(tmp_path, {"model": "a"})
    with pytest.raises(InputError, match=r"field 'words' is 'x{46}…, expected 'y{46}…; make"):
        check_manifest(tmp_path, {"words": "y" * 64})
    with pytest.raises(InputError, match="field 'rows' is 3, expected 4"):
        check_manifest(tmp_path, {"model": "a", "rows": 4})
    assert json.loads((tmp_path / "manifest.json").read_text())["versions"]["torch"]


def test_a_message_names_what_differs_between_hashes_and_mappings(tmp_path):
    rules = {"margin": 0.95, "keep": {"label": True}}
    write_manifest(tmp_path, {"model_sha256": "a" * 64, "rules": rules})
    with pytest.raises(InputError) as caught:
        check_manifest(tmp_path, {"model_sha256": "b" * 64})
    what = "field 'model_sha256' differs: the output was made with another model; make the output again"
    assert str(caught.value) == f"{tmp_path}/manifest.json: {what}"
    for field, value, says in (
        ("margin", 0.9, "'rules.margin' is 0.95, expected 0.9"),
        ("keep", {"label": False}, "'rules.keep.label' is True, expected False"),
        ("more", 3, "'rules.more' is None, expected 3"),
    ):
        with pytest.raises(InputError, match=f"field {says}; make"):
            check_manifest(tmp_path, {"rules": rules | {field: value}})


def test_a_field_that_is_missing_or_not_an_integer_is_refused(tmp_path):
    write_manifest(tmp_path, {"rows": 3, "name": "a", "none": 0, "flag": True})
    fields = check_manifest(tmp_path, {})
    assert (fields.integer("rows"), fields.integer("none"), fields.get("gone")) == (3, 0, None)
    with pytest.raises(InputError, match=r"manifest\.json: has no field 'gone'; make the output again"):
        fields["gone"]
    for name, minimum in (("name", 0), ("none", 1), ("flag", 0)):
        with pytest.raises(InputError, match=rf"field '{name}' is .*, expected an integer >= {minimum}"):
            fields.integer(name, minimum)


@pytest.mark.parametrize("content", [b"", b'{"kind": "a', b"[1]", b"\xff\xfe"])
def test_a_damaged_manifest_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json: is empty or damaged; make the output again"):
        check_manifest(tmp_path, {})


def test_disk_space_is_checked_at_the_nearest_existing_folder(tmp_path, monkeypatch):
    asked = fake_disk(monkeypatch, free=100)
    path = tmp_path / "not" / "yet" / "there"
    check_disk_space(path, 100)
    with pytest.raises(OSError, match="No space left on device: 1,101 bytes are needed and 100 available") as failure:
        check_disk_space(path, 1101)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, str(path))
    monkeypatch.chdir(tmp_path)
    check_disk_space("folder/file", 1)
    check_disk_space(tmp_path, 1)
    assert asked == [tmp_path] * 4
    fake_disk(monkeypatch, free=0, total=0)
    check_disk_space(path, 10**12)


def content():
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.float32).reshape(2, 3))
    return buffer.getvalue()


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, one=np.ones(2))
    return buffer.getvalue()


class Payload:
    def __reduce__(self):
        return open, ("canary", "w")


def test_an_array_is_loaded_or_mapped(tmp_path):
    (tmp_path / "a.npy").write_bytes(content())
    assert load_array(tmp_path / "a.npy", "x").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(load_array(tmp_path / "a.npy", "x", mapped=True), np.memmap)
    np.savez(tmp_path / "a.npz", one=np.ones(2))
    with load_array(tmp_path / "a.npz", "x") as archive:
        assert archive["one"].tolist() == [1, 1]


@pytest.mark.parametrize("mapped", [False, True])
def test_a_damaged_array_is_refused_in_one_line(mapped, tmp_path):
    whole = content()
    changes = {b"(2, 3)": b"(2, 3*", b"'<f4'": b"'<q9'", b"}": b" "}
    for data in (b"", whole[:-5], whole[:20], archive(), *(whole.replace(*each) for each in changes.items())):
        (tmp_path / "a.npy").write_bytes(data)
        with pytest.raises(InputError, match=r"a\.npy: is missing, empty or damaged; make it again$"):
            load_array(tmp_path / "a.npy", "make it again", mapped)


def test_a_missing_file_an_array_of_objects_and_another_format_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "a.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    (tmp_path / "a.npz").write_bytes(content())
    for name in ("a.npy", "gone.npy", "a.npz"):
        with pytest.raises(InputError, match=rf"{name}: is missing, empty or damaged"):
            load_array(tmp_path / name, "x")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (np.nan, "not finite")])
def test_a_zero_or_infinite_vector_is_refused_with_its_row(value, kind):
    vectors = np.ones((4, 3), np.float32)
    check_vectors(vectors, "documents")
    vectors[2] = value
    for where, options in ((12, {"first_row": 10}), (3, {"row_N": np.array([7, 1, 3, 5])})):
        with pytest.raises(InputError, match=rf"documents:{where}: the vector is {kind}"):
            check_vectors(vectors, "documents", **options)


def test_a_vector_that_is_not_of_unit_length_is_refused_only_on_request():
    vectors = np.diag([1, 2, 1]).astype(np.float32)
    check_vectors(vectors, "documents")
    with pytest.raises(InputError, match="documents:1: the vector is of length 2"):
        check_vectors(vectors, "documents", unit=True)


WHOLE = "step,train/loss\r\n0,2.5\r\n1,\r\n"
ROWS = [{"step": "0", "train/loss": "2.5"}, {"step": "1", "train/loss": ""}]


@pytest.mark.parametrize("torn", ["", "20,1.", "\0\0\0"])
def test_a_truncated_last_line_is_ignored(torn, tmp_path):
    (tmp_path / "metrics.csv").write_text(WHOLE + torn, newline="")
    assert list(read_metrics(tmp_path / "metrics.csv")) == ROWS
    (tmp_path / "metrics.csv").write_text(torn)
    reader = read_metrics(tmp_path / "metrics.csv")
    assert (reader.fieldnames, list(reader)) == (None, [])


COUNT = """
import sys
from pathlib import Path
from embeddings.common.io import file_lock
lock, count = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(50):
    with file_lock(lock):
        count.write_text(str(int(count.read_text()) + 1))
        lock.unlink()
"""


def test_one_process_holds_a_lock_at_a_time(tmp_path):
    with file_lock(tmp_path / "lock") as first, file_lock(tmp_path / "lock", wait=False) as second:
        assert (first, second) == (True, False)
    with file_lock(tmp_path / "lock", wait=False) as third:
        assert third


def test_no_update_is_lost_if_each_process_unlinks_the_lock(tmp_path):
    (tmp_path / "count").write_text("0")
    command = ["-c", COUNT, str(tmp_path / "lock"), str(tmp_path / "count")]
    processes = [Command(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "150"


HANGING = """
import sys, time
from pathlib import Path
from embeddings.common.io import atomic_folder, atomic_path
target = Path(sys.argv[1])
with atomic_folder(target) as folder, atomic_path(target.with_suffix(".txt")) as file:
    (folder / "half").write_text("half")
    file.write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_renamed_when_complete_and_an_error_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "deep" / "target") as folder:
        (folder / "missing" / "file").write_text("content")
    assert os.listdir(tmp_path) == []
    with atomic_folder(tmp_path / "deep" / "target") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "deep" / "target").exists()
    assert os.listdir(tmp_path / "deep") == ["target"]
    assert os.listdir(tmp_path / "deep" / "target") == ["file"]


def test_a_scratch_folder_is_separate_and_removed_afterwards(tmp_path):
    with scratch_folder(tmp_path / "deep" / "target") as first:
        (first / "file").write_text("first")
        with scratch_folder(tmp_path / "deep" / "target") as second:
            assert first != second
        assert (first / "file").read_text() == "first"
        remove_abandoned(tmp_path / "deep")
        assert (first / "file").exists()
    assert os.listdir(tmp_path / "deep") == []


def _write_each(parent, barrier):
    for index in range(30):
        barrier.wait()
        with atomic_folder(parent / str(index)) as folder:
            (folder / "file").write_text("content")


def test_processes_can_write_the_same_folders_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3, timeout=60)
    writers = [context.Process(target=_write_each, args=(tmp_path, barrier)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sorted(os.listdir(tmp_path), key=int) == [str(index) for index in range(30)]
    assert all(os.listdir(tmp_path / str(index)) == ["file"] for index in range(30))


def test_the_next_writer_in_a_folder_removes_what_killed_writers_left_and_nothing_else(tmp_path):
    with Command(["-c", HANGING, str(tmp_path / "living")], stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout.readline() == "ready\n"
        with Command(["-c", HANGING, str(tmp_path / "target")], stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout.readline() == "ready\n"
            killed.send_signal(signal.SIGKILL)
        assert sum(name.endswith(".tmp") for name in os.listdir(tmp_path)) == 4
        (tmp_path / ".notes.tmp").write_text("mine")
        write_text(tmp_path / "other", "whole")
        left = sorted(name for name in os.listdir(tmp_path) if not name.endswith(".lock"))
        names = [name.split(".")[1] if name.startswith(".") else name for name in left]
        assert names == ["living", "living", "notes", "other"]
        living.send_signal(signal.SIGKILL)
