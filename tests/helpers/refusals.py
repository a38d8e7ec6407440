"""A command that is refused: exit code 2, one line that says why, and nothing written."""


def assert_refused(capsys, folder, says, command, *arguments):
    """`command(*arguments)` returns 2, its last line is an error that holds `says`, and `folder` stays as it is."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert command(*arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1].rpartition("\r")[2]
    assert line.startswith("error: ")
    assert says in line
    assert sorted(folder.rglob("*")) == before
