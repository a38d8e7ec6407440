"""A run's page through the command line; what it says is tested beside its code."""

import sys

import pytest

from embeddings.cli.main import main
from tests.figures.run_folders import write_run


def test_a_page_lies_in_the_run_unless_named(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "name" / "version_0")
    assert main(["report", "name/version_0"]) == 0
    assert capsys.readouterr().out == "wrote name/version_0/report.html\n"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(run), "--output", "pages/one.html"]) == 0
    assert (tmp_path / "pages" / "one.html").read_text() == (run / "report.html").read_text()
    monkeypatch.chdir(run)
    assert main(["report", "."]) == 0
    assert "<h1>name/version_0</h1>" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "run"),
        (["none"], "none: is no folder; give that of a run of fit"),
        (["file"], "file: is no folder"),
        (["empty"], "empty/config.yaml: no such file; give the folder of a run of fit"),
        (["run", "--output", "empty"], "--output empty: is a directory; name an HTML file"),
        (["run", "--output", "file/a.html"], "leads through"),
    ],
)
def test_what_is_no_run_is_one_line_and_nothing_is_written(words, says, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *words]) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert (written.out, sorted(tmp_path.rglob("*"))) == ("", before)


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 2
    assert "matplotlib is not installed; run: pip install" in capsys.readouterr().err
    assert not (run / "report.html").exists()
