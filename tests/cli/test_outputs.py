"""No command replaces a file, link, device or FIFO that it did not write."""

import os
from pathlib import Path

import pytest

from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.common.io import require_own_output
from tests.helpers.refusals import assert_refused, refused
from tests.helpers.runs import write_pairs, write_retrieval_folder


def lines(model, output):
    """A command line of each kind that writes one file."""
    return {
        "evaluate": ["evaluate", "--model", model, "--data", "data", "--output", output],
        "anchor-tokens": ["show", "anchor-tokens", "a text", "--model", model, "--output", output],
        "curves": ["show", "curves", "--run", "run", "--output", output],
        "mine": ["mine", "--model", model, "--input", "pairs.jsonl", "--output", f"{output}.jsonl", "--margin", "null"],
        "filter": ["filter", "--input", "pairs.jsonl", "--output", f"{output}.jsonl"],
    }


def write_curve(run):
    run.mkdir()
    (run / "metrics.csv").write_text("step,train/loss\n0,2.0\n")


@pytest.mark.parametrize("command", lines("", ""))
@pytest.mark.parametrize("kind", ["file", "link", "broken link", "fifo", "device", "folder"])
def test_a_file_link_device_or_fifo_of_the_user_is_refused_and_kept(
    command, kind, model, tmp_path, tmp_path_factory, capsys, monkeypatch
):
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path_factory.mktemp("cache")))
    write_retrieval_folder(tmp_path / "data")
    write_pairs(tmp_path / "pairs.jsonl", 12)
    write_curve(tmp_path / "run")
    line = lines(model, "out")[command]
    path = Path(line[line.index("--output") + 1])
    Path("target").write_text("mine")
    make = {
        "file": lambda: path.write_text("mine"),
        "link": lambda: path.symlink_to("target"),
        "broken link": lambda: path.symlink_to("nowhere"),
        "fifo": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/null"),
        "folder": path.mkdir,
    }
    make[kind]()
    before = os.lstat(path)
    assert_refused(capsys, tmp_path, str(path), main, line)
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert Path("target").read_text() == "mine"


@pytest.mark.parametrize("command", [name for name in lines("", "") if name not in ("mine", "filter")])
def test_the_same_command_replaces_its_own_output(command, model, tmp_path):
    write_retrieval_folder(tmp_path / "data")
    write_curve(tmp_path / "run")
    Path("out").touch()
    for _ in range(2):
        assert main(lines(model, "out")[command]) == 0
        first = os.stat("out")
        require_own_output("out")
    assert first.st_size > 0


def test_a_device_is_refused():
    refused(InputError, "--output /dev/null: is a link or a device, not a file", require_own_output, "/dev/null")
