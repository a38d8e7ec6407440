"""What is refused: an error on one line, or a command with exit code 2, one line that says why, and nothing written."""

import pytest


def refused(kind, says, call, *arguments, **options):
    """`call(*arguments, **options)` raises an error of a kind, on one line that matches `says`; returns the line."""
    with pytest.raises(kind, match=says) as raised:
        call(*arguments, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def assert_refused(capsys, folder, says, command, *arguments):
    """`command(*arguments)` returns 2, its last line is an error that holds `says`, and `folder` stays as it is."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert command(*arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1].rpartition("\r")[2]
    assert line.startswith("error: ")
    assert says in line
    assert sorted(folder.rglob("*")) == before
