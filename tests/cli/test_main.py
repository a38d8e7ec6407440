"""Dispatch of commands, and the options made from a function's signature."""

import atexit
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from embeddings.cli.errors import ConfigError
from embeddings.cli.main import COMMANDS, Command, main, run_command
from tests.helpers import processes

ROOT = Path(__file__).parents[2]
CALLS = []


@dataclass(frozen=True)
class Drying:
    """How long to wait.

    Args:
        hours: How many hours.
        coats: Shared with the command.
        is_warm: Whether it is warm.
    """

    hours: float | None = 1.5
    coats: int = 7
    is_warm: bool = True


def paint(colour: str, *, coats: int = 1, dry: bool = False, drying: Drying = Drying()) -> None:
    """Paint something.

    Args:
        colour: Which colour.
        coats: How many coats.
        dry: Whether to wait.
        drying: How.
    """
    CALLS.append((colour, coats, dry, drying))


def mix(colours: list[str], parts: int | list[int] = 1) -> None:
    """Mix some colours.

    Args:
        colours: Which colours.
        parts: How much of each.
    """
    CALLS.append((colours, parts))


def spill(colour: str | None = None) -> None:
    """Spill a colour.

    Args:
        colour: Which colour.
    """
    CALLS.append(colour)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    CALLS.clear()
    word, words = ("colour",), ("colours",)
    given = {"paint": (word, False), "mix": (words, False), "mix some": (words, True), "spill": (word, True)}
    for name, (words, is_optional) in given.items():
        command = Command(f"{__name__}:{name.split()[0]}", name, words, is_optional)
        monkeypatch.setitem(COMMANDS, name, command)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[paint.__module__])
    return CALLS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paint red --coats 3", ("red", 3, False, Drying(coats=3))),
        ("paint red --dry --no-is-warm", ("red", 1, True, Drying(coats=1, is_warm=False))),
        ("paint --dry true red --is_warm=false --hours null", ("red", 1, True, Drying(None, 1, is_warm=False))),
        ("paint --dry red --config paint.yaml --coats 5", ("red", 5, True, Drying(hours=4.0, coats=5))),
        ("mix red 12 --parts -1", (["red", "12"], -1)),
        ("mix --parts=[-1,-2] null", (["null"], [-1, -2])),
        ("mix some --parts 2", ([], 2)),
        ("spill", None),
        ("spill null", "null"),
    ],
)
def test_options_positional_arguments_and_dataclass_fields_reach_the_function(line, expected, calls, tmp_path):
    (tmp_path / "paint.yaml").write_text("coats: 4\nhours: 4\n")
    name, *argv = line.split()
    if argv[:1] == ["some"]:
        name, argv = "mix some", argv[1:]
    run_command(name, argv)
    assert calls == [expected]


def test_print_config_and_help_show_all_options_and_run_nothing(calls, capsys):
    for option, shown in (("--print_config", "coats: 1"), ("--help", "--is-warm, --no-is-warm")):
        with pytest.raises(SystemExit) as stop:
            run_command("paint", ["red", option])
        assert stop.value.code == 0
        assert shown in capsys.readouterr().out
    assert calls == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "colour"),
        ("red --coats many", "coats: expected int, got many; --help describes"),
        ("red --coat 3", "did you mean --coats?"),
        ("red --coats null", "coats: expected int, got null"),
        ("red blue", "unrecognized arguments: blue"),
        ("red --config null.yaml", "coats: expected int, got null"),
        ("red --config none.yaml", "--config none.yaml: no such file"),
        ("red --config empty.yaml", "Option 'coat' is not accepted; did you mean coats? --help"),
    ],
)
def test_wrong_arguments_are_refused_before_the_function_runs(line, says, calls, tmp_path):
    texts = {"empty": "coat: {}\n", "null": "coats: null\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises((ConfigError, ValueError)) as caught:
        run_command("paint", line.split())
    assert says in str(caught.value)
    assert calls == []


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([], 0, "usage:"),
        (["--help"], 0, "\n  search "),
        (["--version"], 0, "embeddings "),
        (["show", "--help"], 0, "\n  show anchor-tokens "),
        (["prepare", "--help"], 0, "[--from FROM]"),
        (["train", "--config", "a.yaml"], 2, "there is no command 'train'; did you mean fit? --help lists all"),
        (["show"], 2, "or routing or contextual-shift or clusters, got nothing"),
        (["show", "curve", "--run", "."], 2, "got 'curve'; show --help lists them"),
        (["fit", "--trainer.max_stepz", "3"], 2, "did you mean --trainer.max_steps?"),
        (["fit", "--recipe"], 2, "there is no recipe ''"),
    ],
)
def test_a_command_prints_help_or_a_one_line_error(argv, code, says, capsys, tmp_path):
    assert main(argv) == code
    written = capsys.readouterr()
    assert says in (written.err if code else written.out)
    assert written.err.count("\n") == (1 if code else 0)
    assert len(written.err) <= 320
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--help"], "--recipe RECIPE"), (["--model.help", "NVEmbedModule"], "--model.backbone.name NAME")],
)
def test_the_help_of_fit_lists_recipes_and_accepts_short_class_names(argv, says, capsys):
    assert main(["fit", *argv]) == 0
    assert says in capsys.readouterr().out


def test_a_stop_signal_during_the_exit_changes_nothing():
    late = "import atexit, os, runpy, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGUSR1)"
    script = f"{late}; sys.argv = ['main.py', '--help']; runpy.run_path('main.py', run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, cwd=ROOT).returncode == 0


def end_by(code: int) -> None:
    """End this process as a command with an exit code does."""
    main_module = sys.modules[main.__module__]
    main_module.main = lambda: code
    atexit.register(print, "exit functions ran")
    try:
        main_module.run()
    finally:
        print("unloading the libraries", flush=True)


@pytest.mark.parametrize(("code", "is_unloaded"), [(2, True), (130, False)])
def test_an_interrupted_command_ends_without_unloading_its_libraries(code, is_unloaded):
    with processes.Command([code], function=end_by, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    assert process.returncode == code
    assert ("unloading" in output) == is_unloaded
    assert "exit functions ran" in output
