"""No command replaces a file, link, device or FIFO that it did not write."""

import os
from pathlib import Path

import pytest

from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.common.io import require_own_output
from tests.helpers.refusals import assert_refused, refused
from tests.helpers.runs import write_pairs, write_retrieval_folder


@pytest.fixture
def line(model, tmp_path, tmp_path_factory, monkeypatch):
    """A command line of each kind that writes one file, `out` or `out.jsonl`."""
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path_factory.mktemp("cache")))
    write_retrieval_folder(tmp_path / "data")
    write_pairs(tmp_path / "pairs.jsonl", 12)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("step,train/loss\n0,2.0\n")
    return {
        "evaluate": ["evaluate", "--model", model, "--data", "data", "--output", "out"],
        "anchor-tokens": ["show", "anchor-tokens", "a text", "--model", model, "--output", "out"],
        "curves": ["show", "curves", "--run", "run", "--output", "out"],
        "filter": ["filter", "--input", "pairs.jsonl", "--output", "out.jsonl"],
    }


@pytest.mark.parametrize("command", ["evaluate", "anchor-tokens", "curves", "filter"])
def test_a_file_of_the_user_is_refused_and_kept(command, line, tmp_path, capsys):
    path = Path(line[command][-1])
    path.write_text("mine")
    assert_refused(capsys, tmp_path, str(path), main, line[command])
    assert path.read_text() == "mine"


@pytest.mark.parametrize("command", ["evaluate", "anchor-tokens", "curves"])
def test_the_same_command_replaces_its_own_output(command, line):
    Path("out").touch()
    for _ in range(2):
        assert main(line[command]) == 0
        require_own_output("out")
    assert os.stat("out").st_size > 0


def test_a_link_a_device_a_fifo_and_a_folder_are_refused():
    Path("target").write_text("mine")
    Path("link").symlink_to("target")
    Path("broken").symlink_to("nowhere")
    os.mkfifo("fifo")
    for path in ("link", "broken", "fifo", "/dev/null"):
        refused(InputError, f"--output {path}: is a link or a device, not a file", require_own_output, path)
    refused(InputError, "is a directory, not a file", require_own_output, ".")
