import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from embeddings.cli.errors import reason, run_guarded, with_way_out
from embeddings.cli.main import call, main
from embeddings.common import InputError, NumericError
from embeddings.common.text import one_line


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a.jsonl:3", "field 'query' is missing", "add it"), 2),
        (NumericError("loss is nan at step 3"), 70),
        (OSError(errno.ENOSPC, "No space left on device", "model.safetensors"), 74),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 74),
        (OSError("We couldn't connect to the hub\nto load this file"), 74),
        (TimeoutError(), 74),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "notes.txt/out"), 2),
        (FileExistsError(errno.EEXIST, "File exists", "notes.txt"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_fault_is_one_line_and_its_own_code(error, code, capsys):
    assert run_guarded(raising(error)) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("error: ")
    assert written.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("cannot connect\nto x"), "error: cannot connect to x; mend the file or the connection"),
        (ConnectionError(), "error: ConnectionError; mend the file or the connection"),
    ],
)
def test_what_a_library_says_of_a_file_is_the_line_where_it_gives_no_number(error, says, capsys):
    run_guarded(raising(error))
    assert capsys.readouterr().err.startswith(says)


class PanicException(BaseException):
    """As a library written in Rust raises it."""


@pytest.mark.parametrize("error", [AssertionError("ours"), RuntimeError("first\nlast"), PanicException("at once")])
def test_an_exception_that_nobody_foresaw_is_one_line_and_its_traceback_is_in_a_file(error, capsys):
    assert run_guarded(raising(error)) == 2
    words = " ".join(str(error).split())
    found = re.fullmatch(
        rf"error: {words} \({type(error).__name__}\); the traceback is in (\S+)\n", capsys.readouterr().err
    )
    assert found is not None
    assert "in command\n    raise error\n" in Path(found[1]).read_text()
    Path(found[1]).unlink()


def test_one_of_a_commands_own_work_is_internal(capsys):
    assert run_guarded(lambda: call(raising(KeyError("name")), {})) == 70
    assert "error: 'name' (KeyError); the traceback is in " in capsys.readouterr().err


def test_a_traceback_lies_beside_the_run_that_it_ended(tmp_path, capsys):
    error = KeyError("name")
    error.run_folder = str(tmp_path)
    run_guarded(raising(error))
    (file,) = tmp_path.iterdir()
    assert str(file) in capsys.readouterr().err


def test_another_base_exception_passes():
    with pytest.raises(GeneratorExit):
        run_guarded(raising(GeneratorExit()))


@pytest.mark.parametrize(
    ("redirection", "words", "ending"),
    [
        (">/dev/full", "print('é')", (74, "error: standard output: No space left on device; free its disk or give ")),
        (">/dev/full", "print('é', flush=True)", (74, "error: standard output: No space left on device; free its ")),
        (">/dev/full", "sys.exit(print('é'))", (74, "error: standard output: No space left on device; free its ")),
        (">/dev/full 2>&1", "print('é')", (74, "")),
        (">/dev/full 2>&1", "int('x')", (2, "")),
        ("| true", "print('é' * 10**6)", (74, "error: Broken pipe; ")),
        (">&-", "sys.stdout.write('é')", (0, "")),
        ("| cat >&2", "print('é')", (0, "\\xe9")),
    ],
)
def test_standard_output_that_is_ascii_full_or_closed_is_no_traceback(redirection, words, ending):
    guarded = f"import sys; from embeddings.cli.errors import run_guarded as run; sys.exit(run(lambda: {words}))"
    script = f'set -o pipefail; {sys.executable} -c "{guarded}" {redirection}'
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, text=True)
    assert ended.returncode == ending[0]
    assert ended.stderr.startswith(ending[1])
    assert ended.stderr.count("\n") == bool(ending[1])


def test_an_exit_that_lightning_made_of_an_interrupt_is_an_interrupt(capsys):
    def command():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(1)  # noqa: B904 - as Lightning does

    assert run_guarded(command) == 130
    assert "interrupted; " in capsys.readouterr().err


def test_another_exit_keeps_its_code():
    def command():
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_guarded(command)


def test_success_is_zero():
    assert run_guarded(lambda: None) == 0


def test_a_temporary_file_goes_by_the_name_that_it_was_to_have(capsys):
    error = OSError(errno.ENOSPC, "No space left on device", "out/.scores.json.x7_abc9.tmp")
    assert run_guarded(raising(error)) == 74
    assert capsys.readouterr().err.startswith("error: out/scores.json: No space left on device; ")


def test_the_reason_of_a_union_error_is_its_first_types():
    inner = (
        "Does not fit\n    Errors:\n      - batch_size must be >= 1, got 0;\n        lower it\n      - Expected a int"
    )
    message = f"Does not fit\nErrors:\n  - {inner}\n  - Expected a None\nGiven value type: dict"
    assert one_line(reason(message)) == "batch_size must be >= 1, got 0; lower it"


PRECISION = """Parser key "trainer.precision":
  Does not validate against any of the Union subtypes
  Subtypes: [typing.Literal['bf16'], <class 'int'>, <class 'NoneType'>]
  Errors:
    - Expected a typing.Literal['bf16']
    - Expected a <class 'int'>
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: fp99"""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (PRECISION, "trainer.precision: expected 'bf16' or int or null, got fp99"),
        ("Parser key \"max_steps\":\n  Expected a <class 'int'>. Got value: abc", "max_steps: expected int, got abc"),
    ],
)
def test_a_value_of_a_wrong_type_keeps_its_key_and_lists_the_types(message, says):
    assert reason(message) == says
    assert with_way_out(message, []) == f"{says}; --help says what each option takes"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Subcommand 'fit' does not accept option 'trainer.max_stepz'", "did you mean trainer.max_steps? --help"),
        (
            "Problem with given class_path 'embeddings.data.SourceConfig':\n  Option 'colums' is not accepted",
            "Option 'colums' is not accepted by SourceConfig; did you mean columns? --help",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_most_like_it(message, says):
    assert says in with_way_out(message, ["--help", "--trainer.max_steps"])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("module 'embeddings.common' has no attribute 'UserEror'", "'UserEror'; did you mean UserError? --help lists"),
        ("Import path x.Y does not correspond to a subclass of Z.", "a subclass of Z; --help lists the options"),
        ("temperature must be > 0, got 0; try 0.05", "temperature must be > 0, got 0; try 0.05"),
    ],
)
def test_a_librarys_message_gets_a_way_out_where_it_has_none(message, says):
    assert says in with_way_out(message, [])


def test_no_class_is_imported_for_its_arguments_that_a_config_may_not_name(tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    message = "Problem with given class_path 'foreign.Thing':\n  Option 'colour' is not accepted"
    assert "Option 'colour' is not accepted by Thing" in with_way_out(message, [])


def test_a_plain_message_is_its_own_reason():
    assert reason("Option 'x' is not accepted") == "Option 'x' is not accepted"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("unrecognized arguments: --top_q 3", "did you mean --top_k? --help lists the options"),
        ("unrecognized arguments: --nearduplicates=0.8", "did you mean --near_duplicates?"),
        ("unrecognized arguments: --zzzzzzzz 3", "--zzzzzzzz 3; --help lists the options"),
        ("unrecognized arguments: --near 3", "did you mean --near_duplicates?"),
        ("unrecognized arguments: --m=3", "did you mean --margin or --model? --help"),
        ("expected one argument", "expected one argument"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_most_like_it(message, says):
    line = with_way_out(message, ["--help", "--top_k", "--near_duplicates", "--margin", "--model", "--margin"])
    assert line.endswith(says) or says in line
    assert line.startswith(message)


@pytest.mark.parametrize(
    "argv",
    [
        ["filter", "--input", "a", "--output", "b", "--nearduplicates", "0.8"],
        ["fit", "--trianer.max_steps", "3"],
    ],
)
def test_a_mistyped_option_ends_in_one_line_with_a_way_out(argv, capsys):
    assert main(argv) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: unrecognized arguments: --")
    assert line.endswith("--help lists the options")
    assert argv[0] == "fit" or "did you mean --near_duplicates?" in line


@pytest.mark.parametrize(
    "says",
    [
        "Group 'backbone' does not accept option 'nmae'",
        "unrecognized arguments: --backbone.nmae=x",
        "unrecognized arguments: --backbone.nmae",
    ],
)
def test_an_unknown_option_of_a_record_names_the_record(says):
    message = f"Parser key \"model\": Problem with given class_path 'embeddings.modules.NVEmbedModule': {says}"
    expected = (
        "model.backbone: Option 'nmae' is not accepted by BackboneConfig; did you mean name? --help lists the options"
    )
    assert with_way_out(message, []) == expected
    other = message.replace("embeddings.modules.NVEmbedModule", "torch.optim.AdamW")
    assert with_way_out(other, []).startswith(f"model: {says}" if "Group" in says else "model: unrecognized")
