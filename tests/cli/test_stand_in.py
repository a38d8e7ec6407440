"""The options that make a run small."""

from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.helpers.runs import run_config, write_config


def small(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Run a small run's config; returns the exit code and the changes."""
    capsys.readouterr()
    code = main(["fit", "--config", write_config(folder, run_config(folder, "mistral")), *words])
    lines = capsys.readouterr().err.splitlines()
    changes = [line.removeprefix("changed ") for line in lines if line.startswith("changed ")]
    return code, changes or lines[-1:]


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_option_changes_its_own_and_says_each_change_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small(tmp_path, capsys, "--check")
    before = sorted(tmp_path.rglob("*"))
    cut = (0, ["data.sources: 1 of 1 cut to at most 9 rows each"])
    assert small(tmp_path, capsys, "--limit-data", "9", "--check") == cut
    code, changes = small(tmp_path, capsys, "--stand-in", "tiny", "--check")
    assert code == 0
    assert changes[0].startswith(f"model.backbone.name: {tmp_path / 'backbone'} -> ")
    assert changes[1:] == ["data.batch_size: 8 -> 4"]
    assert sorted(tmp_path.rglob("*")) == before


def test_what_the_command_line_gives_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--stand-in=tiny", "--trainer.max_steps=7", "--data.batch_size", "5", "--check")
    code, changes = small(tmp_path, capsys, *words)
    assert (code, [line.partition(":")[0] for line in changes]) == (0, ["model.backbone.name"])
    # A model that is given is what the stand-in is made of.
    words = ("--stand-in", "tiny", "--model.backbone.name", str(tmp_path / "backbone"), "--check")
    code, changes = small(tmp_path, capsys, *words)
    assert code == 0
    assert changes[0].startswith(f"model.backbone.name: {tmp_path / 'backbone'} -> ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--limit-data", "0"), "limit_data must be >= 1, got 0; 2000 is enough"),
        (("--stand-in", "small"), "stand_in"),
        (("--stand-in", "tiny", "--model.backbone.name", "a/b"), "a/b: is not here, and its architecture is not known"),
    ],
)
def test_a_bad_value_is_refused_in_a_line(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, run_config(tmp_path, "mistral"))
    before = sorted(tmp_path.rglob("*"))
    code, lines = small(tmp_path, capsys, *words)
    assert code == 2
    assert lines[-1].startswith("error: ")
    assert says in lines[-1]
    assert sorted(tmp_path.rglob("*")) == before
