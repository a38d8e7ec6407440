import subprocess
import sys

import pytest

from embeddings.cli.main import main


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in (
        "fit",
        "prepare",
        "quickstart",
        "encode",
        "search",
        "evaluate",
        "export",
        "import",
        "convert",
        "show",
    ):
        assert f"\n  {command} " in text
    assert "predict" not in text


def test_help_of_a_first_word_lists_what_may_follow(capsys):
    assert main(["show", "--help"]) == 0
    text = capsys.readouterr().out
    assert "\n  show curves " in text
    assert "\n  show anchor-tokens " in text
    assert "\n  show routing " in text
    assert "encode" not in text


def test_no_arguments_is_help(capsys):
    assert main([]) == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fti"], "there is no command 'fti'"),
        (["validate"], "validate: no module has such a loop; train with fit"),
        (["test"], "test: no module has such a loop"),
        (["predict", "--config", "a.yaml"], "use its model with encode"),
        (["search", "--modle", "x", "words"], "modle"),
        (["prepare", "nothing"], "docstrings"),
        (["show"], "or routing or contextual-shift or clusters, got nothing"),
        (["show", "curve", "--run", "."], "or clusters, got 'curve'; show --help lists them"),
        (["fit", "--config", "no/such.yaml"], "no/such.yaml: no such file"),
        (["fit", "--trainer.max_stepz", "3"], "max_stepz"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(argv, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert len(written.err) <= 320
    assert list(tmp_path.iterdir()) == []


def test_a_stop_signal_on_the_way_out_changes_nothing() -> None:
    late = "import atexit, os, runpy, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGUSR1)"
    script = f"{late}; sys.argv = ['main.py', '--help']; runpy.run_path('main.py', run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0
