import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from embeddings.cli.errors import run_guarded
from embeddings.cli.main import call, main
from embeddings.common import InputError, NumericError


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["encode", "--model", "m"], "finished files and shards are kept, and the same command continues after them"),
        (["compress"], "the same command continues after them"),
        (["evaluate", "--tasks", "STS12"], "the same command continues after them"),
        (["evaluate", "--data", "folder"], "the same command starts again from the beginning"),
        (["prepare", "docstrings"], "the same command starts again from the beginning"),
        (["prepare", "cde"], "the same command continues after them"),
        (["show", "curves"], "the same command starts again from the beginning"),
    ],
)
def test_after_ctrl_c_the_line_says_whether_the_same_command_continues(words, says, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("embeddings.cli.main.dispatch", interrupted)
    assert main(words) == 130
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: interrupted; ")
    assert line.endswith(says)


def raising(error):
    def command():
        raise error

    return command


LIGHTNINGS = SystemExit(1)
LIGHTNINGS.__context__ = KeyboardInterrupt()
TEMPORARY = "out/.scores.json.x7_abc9.tmp"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("a.jsonl:3", "field 'query' is missing", "add it"), 2, "a.jsonl:3: field"),
        (NumericError("loss is nan at step 3"), 70, "loss is nan"),
        (OSError(errno.ENOSPC, "No space left on device", TEMPORARY), 74, "out/scores.json: No space left on device; "),
        (OSError("cannot connect\nto x"), 74, "cannot connect to x; correct the named file or connection"),
        (TimeoutError(), 74, "TimeoutError; correct the named file or connection"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "notes.txt/out"), 2, "notes.txt/out: Not a directory"),
        (FileExistsError(errno.EEXIST, "File exists", "notes.txt"), 2, "notes.txt: File exists"),
        (KeyboardInterrupt(), 130, "interrupted; "),
        (LIGHTNINGS, 130, "interrupted; "),
        (SystemExit(3), 3, None),
    ],
)
def test_each_error_is_reported_in_one_line_with_its_exit_code(error, code, says, capsys):
    assert run_guarded(raising(error)) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"error: {says}" if says else "")
    assert written.err.count("\n") == bool(says)


class PanicException(BaseException):
    """Like the exception of a library written in Rust."""


@pytest.mark.parametrize("error", [AssertionError("ours"), RuntimeError("first\nlast"), PanicException("at once")])
def test_an_unexpected_exception_is_reported_in_one_line_and_its_traceback_is_in_a_file(error, capsys):
    assert run_guarded(raising(error)) == 2
    words = " ".join(str(error).split())
    found = re.fullmatch(
        rf"error: {words} \({type(error).__name__}\); the traceback is in (\S+)\n", capsys.readouterr().err
    )
    assert found is not None
    assert "in command\n    raise error\n" in Path(found[1]).read_text()
    Path(found[1]).unlink()


def test_an_unexpected_exception_in_the_commands_work_has_code_70(capsys):
    assert run_guarded(lambda: call(raising(KeyError("name")), {})) == 70
    assert "error: 'name' (KeyError); the traceback is in " in capsys.readouterr().err


def test_the_traceback_of_a_run_is_in_its_folder(tmp_path, capsys):
    error = KeyError("name")
    error.run_folder = str(tmp_path)
    run_guarded(raising(error))
    (file,) = tmp_path.iterdir()
    assert str(file) in capsys.readouterr().err


def test_other_base_exceptions_are_not_caught():
    with pytest.raises(GeneratorExit):
        run_guarded(raising(GeneratorExit()))


@pytest.mark.parametrize(
    ("redirection", "words", "ending"),
    [
        (">/dev/full", "print('é')", (74, "error: standard output: No space left on device; free disk space or ")),
        (">/dev/full", "print('é', flush=True)", (74, "error: standard output: No space left on device; free disk ")),
        (">/dev/full", "sys.exit(print('é'))", (74, "error: standard output: No space left on device; free disk ")),
        (">/dev/full 2>&1", "print('é')", (74, "")),
        (">/dev/full 2>&1", "int('x')", (2, "")),
        ("| true", "print('é' * 10**6)", (74, "error: Broken pipe; ")),
        (">&-", "sys.stdout.write('é')", (0, "")),
        ("| cat >&2", "print('é')", (0, "\\xe9")),
    ],
)
def test_ascii_full_and_closed_standard_output_end_without_a_traceback(redirection, words, ending):
    guarded = f"import sys; from embeddings.cli.errors import run_guarded as run; sys.exit(run(lambda: {words}))"
    script = f'set -o pipefail; {sys.executable} -c "{guarded}" {redirection}'
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, text=True)
    assert ended.returncode == ending[0]
    assert ended.stderr.startswith(ending[1])
    assert ended.stderr.count("\n") == bool(ending[1])
