import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embeddings.cli.errors import run_guarded
from embeddings.cli.main import main
from embeddings.common import InputError, NumericError
from embeddings.common.process import answer


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["encode", "--model", "m"], "finished files and shards are kept, and the same command continues after them"),
        (["evaluate", "--tasks", "STS12"], "the same command continues after them"),
        (["evaluate", "--data", "folder"], "the same command starts again from the beginning"),
        (["prepare", "docstrings"], "the same command starts again from the beginning"),
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit"], "SIGINT: stopped after step 3; resume with --ckpt_path a/last.ckpt"),
        (["quickstart"], "SIGINT: stopped after step 3; the same command continues there"),
    ],
)
def test_a_command_that_finds_its_checkpoint_names_no_option(words, says, monkeypatch, capsys):
    def stopped(_):
        raise answer(signal.SIGINT, "stopped after step 3", "a/last.ckpt", is_first=True)

    monkeypatch.setattr("embeddings.cli.main.dispatch", stopped)
    assert main(words) == 130
    assert capsys.readouterr().err.strip() == f"interrupted: {says}"


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


@pytest.mark.parametrize("error", [AssertionError("ours"), AttributeError("x"), TypeError(), PanicException("at once")])
def test_an_error_of_the_program_is_shown_with_its_traceback_and_has_code_1(error, capsys):
    assert run_guarded(raising(error)) == 1
    written = capsys.readouterr().err
    assert written.startswith("Traceback (most recent call last):\n")
    assert "in command\n    raise error\n" in written
    assert written.endswith(f"{type(error).__name__}: {error}\n" if str(error) else "TypeError\n")


def test_a_path_of_an_unknown_user_is_reported_in_one_line(capsys):
    assert main(["passages", "x.txt", "--output", "~nouser-of-this-machine/x.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert run_guarded(lambda: print(Path("~nouser-of-this-machine/x").expanduser())) == 2
    assert capsys.readouterr().err == "error: a path begins with ~ and a name that is no user's; write the whole path\n"


def test_other_base_exceptions_are_not_caught():
    with pytest.raises(GeneratorExit):
        run_guarded(raising(GeneratorExit()))


@pytest.mark.parametrize(
    ("redirection", "words", "ending"),
    [
        (">/dev/full", "print('é')", (74, "error: standard output: No space left on device; free disk space or ")),
        (">/dev/full", "print('é', flush=True)", (74, "error: standard output: No space left on device; free disk ")),
        (">/dev/full 2>&1", "print('é')", (74, "")),
        (">/dev/full 2>&1", "int('x')", (1, "")),
        ("| true", "print('é' * 10**6)", (141, "")),
        ("| true", "[print('é', flush=True) for _ in range(10**6)]", (141, "")),
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


@pytest.mark.parametrize("words", ["--help", pytest.param("encode --help", marks=pytest.mark.slow)])
def test_the_help_ends_quietly_if_nobody_reads_it(words):
    script = f"set -o pipefail; {sys.executable} -m embeddings {words} | sleep 0"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    # argparse ignores the error of its own help.
    assert (ended.returncode in (0, 141), ended.stderr) == (True, "")
