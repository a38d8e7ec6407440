import sys

import pytest

from embeddings.cli import main as commands
from embeddings.cli.errors import ConfigError
from embeddings.cli.main import COMMANDS, Command, run_command, underscored

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


def mix(colours: list[str], parts: int | list[int] = 1) -> None:
    """Mix some colours.

    Args:
        colours: Which colours.
        parts: How much of each.
    """
    CALLS.append((colours, parts))


def test_several_words_may_be_one_parameter(painted, monkeypatch):
    monkeypatch.setitem(COMMANDS, "paint mix", Command(f"{__name__}:mix", "mix", ("colours",)))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[mix.__module__])
    run_command("paint mix", ["red", "12", "--parts", "-1"])
    run_command("paint mix", ["--parts=[-1,-2]", "null"])
    assert painted == [(["red", "12"], -1), (["null"], [-1, -2])]
    with pytest.raises(ConfigError):
        run_command("paint mix", ["--parts", "2"])


def test_several_words_may_be_none_where_the_command_says_so(painted, monkeypatch):
    spray = Command(f"{__name__}:mix", "mix", ("colours",), may_be_none=True)
    monkeypatch.setitem(COMMANDS, "paint mix", spray)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[mix.__module__])
    run_command("paint mix", ["--parts", "2"])
    run_command("paint mix", ["--parts", "3", "red", "blue"])
    run_command("paint mix", ["red", "--parts", "4"])
    assert painted == [([], 2), (["red", "blue"], 3), (["red"], 4)]


def spill(colour: str | None = None) -> None:
    """Spill a colour.

    Args:
        colour: Which colour.
    """
    CALLS.append(colour)


def test_a_word_that_may_be_left_out_is_a_word_where_it_is_null(painted, monkeypatch):
    monkeypatch.setitem(COMMANDS, "spill", Command(f"{__name__}:spill", "spill", ("colour",), may_be_none=True))
    for argv in ([], ["null"], ["red"], ["~"]):
        run_command("spill", argv)
    assert painted == [None, "null", "red", "~"]


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


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["red", "--coats", "many"],
        ["red", "--brush", "x"],
        ["red", "blue"],
        ["red", "--coat", "3"],
        ["red", "--coats", "null"],
    ],
)
def test_a_wrong_line_is_refused_before_the_function_runs(painted, argv):
    with pytest.raises(ConfigError):
        run_command("paint", argv)
    assert painted == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--coat", "3"], r"did you mean --coats\?"),
        (["--coats", "null"], "coats: expected int, got null; "),
        (["--config", "null.yaml"], "coats: expected int, got null; give one, or leave the option out"),
        (["--config", "empty.yaml"], r"^Option 'coat' is not accepted by paint; did you mean coats\?"),
    ],
)
def test_what_the_parser_would_let_pass_is_refused_by_name(painted, argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("coats: 2\ncoat: {}\n")
    (tmp_path / "null.yaml").write_text("coats: null\n")
    with pytest.raises(ConfigError, match=says):
        run_command("paint", ["red", *argv])
    assert painted == []


def test_every_command_loads_and_documents_itself():
    assert len(COMMANDS) >= 7
    for name, command in COMMANDS.items():
        function = command.load()
        assert function.__doc__, name
        assert set(command.positional) <= set(function.__annotations__), name
    assert commands.__doc__


def test_an_option_may_be_written_with_dashes():
    words = ["--context-size", "a-b", "--top-k=a-b", "-5", "--", "--as-it-is"]
    assert underscored(words) == ["--context_size", "a-b", "--top_k=a-b", "-5", "--", "--as-it-is"]
    assert words[0] == "--context-size"
