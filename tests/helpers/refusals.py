"""Checks of errors: a one-line exception, or a command with exit code 2, a one-line error and no written files."""

import pytest


def refused(kind, pattern, call, /, *arguments, **options):
    """Check that a call raises a one-line error of type `kind` that matches `pattern`; returns the message."""
    with pytest.raises(kind, match=pattern) as raised:
        call(*arguments, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def assert_refused(capsys, folder, message, command, *arguments):
    """Check that a command returns 2, its last line is an error with `message`, and `folder` does not change."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert command(*arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1].rpartition("\r")[2]
    assert line.startswith("error: ")
    assert message in line
    assert sorted(folder.rglob("*")) == before
