import sys

import pytest

from embeddings.cli import commands
from embeddings.cli.commands import COMMANDS, Command, run_command, underscored
from embeddings.cli.errors import ConfigError

CALLS = []


def paint(colour: str, *, coats: int = 1, dry: bool = False) -> None:
    """Paint something.

    Args:
        colour: Which colour.
        coats: How many coats.
        dry: Whether to wait.
    """
    CALLS.append((colour, coats, dry))


@pytest.fixture
def painted(monkeypatch):
    CALLS.clear()
    monkeypatch.setitem(COMMANDS, "paint", Command(f"{__name__}:paint", "paint", ("colour",)))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[paint.__module__])
    return CALLS


def test_options_and_positions_reach_the_function(painted):
    run_command("paint", ["red", "--coats", "3"])
    assert painted == [("red", 3, False)]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--top-k", "--top_k"),
        ("--out-put=a-b--c", "--out_put=a-b--c"),
        ("a-b", "a-b"),
        ("-1", "-1"),
        ("--config", "--config"),
    ],
)
def test_dashes_in_the_name_of_an_option_are_underscores(word, expected):
    assert underscored(word) == expected


def test_a_config_file_sets_options_and_the_line_wins(painted, tmp_path):
    (tmp_path / "paint.yaml").write_text("coats: 4\ndry: true\n")
    run_command("paint", ["red", "--config", str(tmp_path / "paint.yaml"), "--coats", "5"])
    assert painted == [("red", 5, True)]


def test_print_config_shows_the_options(painted, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command("paint", ["red", "--print_config"])
    assert stop.value.code == 0
    assert "coats: 1" in capsys.readouterr().out
    assert painted == []


@pytest.mark.parametrize("argv", [[], ["red", "--coats", "many"], ["red", "--brush", "x"], ["red", "blue"]])
def test_a_wrong_line_is_refused_before_the_function_runs(painted, argv):
    with pytest.raises(ConfigError):
        run_command("paint", argv)
    assert painted == []


def test_every_command_loads_and_documents_itself():
    assert len(COMMANDS) >= 7
    for name, command in COMMANDS.items():
        function = command.load()
        assert function.__doc__, name
        assert set(command.positional) <= set(function.__annotations__), name
    assert commands.__doc__
