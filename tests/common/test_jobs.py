"""Sharded jobs of several tasks, jobs that write one file, and worker processes."""

import json
import os
import signal
import subprocess
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.errors import UserError, WorkerError
from embeddings.common.io import file_sha256, write_file_manifest
from embeddings.common.jobs import (
    ArrayTask,
    ShardedJob,
    TaskOptions,
    discard_on_user_error,
    finished_manifest,
    manifest_path,
    require_free,
    spread,
)
from tests.helpers.processes import Command, run_command
from tests.helpers.refusals import refused
from tests.helpers.waiting import wait_for

ROOT = Path(__file__).parents[2]
FIELDS = {"kind": "letters", "seed": 3}


def write_letter(shard, path):
    path.write_text(chr(97 + shard))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"ID": "2", "MIN": "0", "COUNT": "4"}, (2, 4)),
        ({"ID": "7", "MIN": "5", "COUNT": "3"}, (2, 3)),
        ({"ID": "9", "MIN": "1", "COUNT": "3", "STEP": "4"}, (2, 3)),
    ],
)
def test_the_task_comes_from_the_slurm_array(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    task = TaskOptions().resolve()
    assert (task.index, task.count) == expected
    assert TaskOptions(1, 2).resolve() == ArrayTask(1, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((2, 2), "task_index must be from 0 to 1"),
        ((0, 0), "num_tasks must be >= 1"),
        ((1, None), "task_index needs num_tasks"),
        ((None, None), "SLURM_ARRAY_TASK_ID is not in an array of 3 tasks with a constant step, got 9"),
    ],
)
def test_an_invalid_task_and_an_array_with_gaps_are_refused(given, says, monkeypatch):
    for name, value in {"ID": "9", "MIN": "1", "COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    with pytest.raises(OptionError, match=says):
        TaskOptions(*given).resolve()


def test_a_finished_job_is_not_changed_by_another_run(tmp_path):
    merged = []
    job = ShardedJob(tmp_path / "job", FIELDS, 3, suffix=".txt")
    assert job.missing() == [0, 1, 2]
    assert not job.finish()
    job.run(write_letter)
    assert job.missing() == []
    assert not job.complete
    assert job.finish(lambda: merged.append(1) or {"total": 3})
    assert [job.path(shard).read_text() for shard in range(3)] == ["a", "b", "c"]
    before = content(tmp_path / "job")
    assert set(before) == {"manifest.json", *(f"shard-0000{shard}.txt" for shard in range(3))}
    assert json.loads(before["manifest.json"])["total"] == 3
    again = ShardedJob(tmp_path / "job", FIELDS, 3, suffix=".txt")
    again.run(lambda *_: pytest.fail("made again"))
    assert again.finish(lambda: merged.append(2) or {})
    assert merged == [1]
    assert content(tmp_path / "job") == before


def test_the_first_process_sets_a_default_and_the_others_read_it(tmp_path):
    first = ShardedJob(tmp_path / "job", FIELDS, 1, defaults={"budget": 64})
    second = ShardedJob(tmp_path / "job", FIELDS, 1, defaults={"budget": 512})
    assert first.fields["budget"] == second.fields["budget"] == 64
    second.run(write_letter)
    second.finish()
    assert json.loads((tmp_path / "job" / "manifest.json").read_text())["budget"] == 64
    assert ShardedJob(tmp_path / "job", FIELDS, 1, defaults={"budget": 8}).fields["budget"] == 64


def test_tasks_in_any_order_write_the_same_bytes_as_one_process(tmp_path):
    whole = ShardedJob(tmp_path / "whole", FIELDS, 5)
    whole.run(write_letter)
    whole.finish()
    for index in (2, 0, 1):
        job = ShardedJob(tmp_path / "parts", FIELDS, 5)
        job.run(write_letter, ArrayTask(index, 3))
        assert job.finish() == (index == 1)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_a_failed_shard_is_missing_and_is_made_next_time(tmp_path):
    def fail_at_one(shard, path):
        path.write_text("half")
        if shard == 1:
            raise KeyboardInterrupt
        write_letter(shard, path)

    job = ShardedJob(tmp_path, FIELDS, 3)
    with pytest.raises(KeyboardInterrupt):
        job.run(fail_at_one)
    assert job.missing() == [1, 2]
    job.run(write_letter)
    assert job.path(1).read_text() == "b"


def test_missing_shards_of_others_are_made_and_their_current_ones_are_awaited(tmp_path):
    job = ShardedJob(tmp_path, FIELDS, 4)
    started, released, made = threading.Event(), threading.Event(), []

    def slow(shard, path):
        started.set()
        assert released.wait(20)
        time.sleep(0.2)
        write_letter(shard, path)

    def own(shard, path):
        made.append(shard)
        if shard == 3:
            released.set()
        write_letter(shard, path)

    other = threading.Thread(target=ShardedJob(tmp_path, FIELDS, 4).run, args=(slow, ArrayTask(1, 4)))
    other.start()
    assert started.wait(20)
    job.run(own, ArrayTask(0, 4), take_over=True)
    assert job.missing() == []
    assert made == [0, 2, 3]
    other.join()


def test_a_job_with_other_fields_is_refused_and_the_field_is_named(tmp_path):
    ShardedJob(tmp_path / "job", FIELDS, 3)
    before = content(tmp_path / "job")
    with pytest.raises(InputError, match="field 'seed' is 3, expected 4; name a new folder, or remove this one"):
        ShardedJob(tmp_path / "job", {**FIELDS, "seed": 4}, 3)
    with pytest.raises(InputError, match="field 'num_shards' is 3, expected 2"):
        ShardedJob(tmp_path / "job", FIELDS, 2)
    assert content(tmp_path / "job") == before


def test_a_path_with_other_content_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path / "notes.txt", tmp_path):
        with pytest.raises(InputError, match="already exists and has no manifest"):
            ShardedJob(path, FIELDS, 3)


KILLED = """
import os, signal, sys
from embeddings.common.jobs import ShardedJob
def make(shard, path):
    path.write_text(chr(97 + shard)[: len(sys.argv[2])])
    if shard == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
ShardedJob(sys.argv[1], {"kind": "letters", "seed": 3}, 4).run(make)
"""


def test_a_killed_process_leaves_complete_shards_and_its_locks_are_released(tmp_path):
    whole = ShardedJob(tmp_path / "whole", FIELDS, 4)
    whole.run(write_letter)
    whole.finish()
    for shard in (0, 2):
        ended = run_command(["-c", KILLED, str(tmp_path / "killed"), str(shard)])
        assert ended.returncode == -signal.SIGKILL
    job = ShardedJob(tmp_path / "killed", FIELDS, 4)
    assert job.missing() == [2, 3]
    assert any(name.endswith(".tmp") for name in os.listdir(tmp_path / "killed"))
    job.run(write_letter)
    assert job.finish()
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_file_is_complete_if_its_manifest_and_content_match(tmp_path):
    output, fields = tmp_path / "a.parquet", {"seed": 1, "rules": {"top_k": 2}}
    write_file_manifest(manifest_path(output), fields)
    assert finished_manifest(output, fields) is None
    output.write_text("content")
    write_file_manifest(manifest_path(output), {**fields, "output_sha256": file_sha256(output), "count": 3})
    assert finished_manifest(output, fields)["count"] == 3
    with pytest.raises(InputError, match=r"a\.parquet\.manifest\.json: field 'seed' is 1, expected 2"):
        finished_manifest(output, {**fields, "seed": 2})
    output.write_text("other content")
    with pytest.raises(InputError, match="is not the file that its manifest describes; delete it"):
        finished_manifest(output, fields)
    # An output of another format is another output.
    assert finished_manifest(output.with_suffix(".jsonl"), {"seed": 2}) is None
    assert manifest_path(output) != manifest_path(output.with_suffix(".jsonl"))
    manifest_path(output).unlink()
    with pytest.raises(InputError, match="already exists and has no manifest; name a new file"):
        finished_manifest(output, fields)


@pytest.mark.parametrize("error", [InputError("where", "what", "fix"), KeyboardInterrupt(), RuntimeError()])
def test_new_folders_are_removed_after_a_user_error_and_stay_otherwise(error, tmp_path):
    old, empty, new = tmp_path / "old", tmp_path / "empty", tmp_path / "parent" / "new"
    old.mkdir()
    empty.mkdir()
    (old / "earlier shard").write_text("x")

    def work():
        for folder in (old, empty, new):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "shard").write_text("x")
        raise error

    with pytest.raises(type(error)), discard_on_user_error(old, empty, new):
        work()
    stays = not isinstance(error, InputError)
    assert (old / "shard").exists()
    assert new.exists() == empty.exists() == stays


class Refused(OSError):
    """An error that pickle cannot restore."""

    def __init__(self, host, why):
        super().__init__(f"{host} {why}")


def _work(log, number, item):
    """Record the item; each negative item fails in a different way."""
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


def on_two(log, items):
    return spread([partial(_make, log, number) for number in range(2)], items)


def done(log):
    return sorted(int(path.name) for path in log.iterdir())


def noted(items, read):
    for item in items:
        read.append(item)
        yield item


def test_each_item_is_processed_once_and_read_when_a_process_is_free(tmp_path):
    read = []
    results = on_two(tmp_path, noted(range(9), read))
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
        (-2, RuntimeError, r'(?s)^a worker process failed:\nTraceback.* in _work\n.*"out of memory".*'),
        (-3, WorkerError, r"^a worker process was ended by a signal \(SIGKILL\); finished results are kept$"),
        (-4, OSError, "^the store is closed$"),
    ],
)
def test_a_failed_process_ends_the_work_with_its_error(bad, kind, says, tmp_path):
    found, read = [], []
    with pytest.raises(kind, match=says):
        found.extend(on_two(tmp_path, noted([bad, *range(100)], read)))
    assert set(found) <= {item * item for item in done(tmp_path)}
    assert len(read) < 100


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
        list(spread([partial(make, Path(sys.argv[1]))], [1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_ends_with_its_parent_and_leaves_no_partial_file(number, tmp_path):
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


def test_a_folder_that_another_task_begins_meanwhile_is_free(tmp_path, monkeypatch):
    """Its manifest may appear between the two looks at the folder."""
    listed = Path.iterdir

    def begun(folder):
        (folder / "manifest.json").write_text("{}")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", begun)
    require_free(tmp_path)


@pytest.mark.parametrize(("task", "is_left"), [(ArrayTask(0, 1), False), (ArrayTask(1, 4), True)])
def test_a_refusal_in_one_task_leaves_the_folder_of_the_others(task, is_left, tmp_path):
    def refuse():
        with discard_on_user_error(tmp_path / "work", task=task):
            (tmp_path / "work").mkdir()
            (tmp_path / "work" / "shard-00000.npy").touch()
            raise UserError("no")

    refused(UserError, "no", refuse)
    assert (tmp_path / "work" / "shard-00000.npy").exists() == is_left
