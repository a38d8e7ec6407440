import errno

import pytest

from embeddings.cli.errors import one_line, reason, run_guarded
from embeddings.common import InputError, NumericError


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
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_fault_is_one_line_and_its_own_code(error, code, capsys):
    assert run_guarded(raising(error)) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("error: ")
    assert written.err.count("\n") == 1


def test_a_defect_of_ours_keeps_its_traceback():
    with pytest.raises(AssertionError):
        run_guarded(raising(AssertionError("ours")))


def test_an_exit_that_lightning_made_of_an_interrupt_is_an_interrupt(capsys):
    def command():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(1)  # noqa: B904 - as Lightning does

    assert run_guarded(command) == 130
    assert "--ckpt_path" in capsys.readouterr().err


def test_another_exit_keeps_its_code():
    def command():
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_guarded(command)


def test_success_is_zero():
    assert run_guarded(lambda: None) == 0


def test_a_long_message_keeps_its_start_and_its_end():
    line = one_line("start\n  " + "x" * 1000 + "\nend", limit=50)
    assert len(line) <= 50
    assert line.startswith("start xxx")
    assert line.endswith("xxx end")


def test_the_reason_of_a_union_error_is_its_first_types():
    inner = (
        "Does not fit\n    Errors:\n      - batch_size must be >= 1, got 0;\n        lower it\n      - Expected a int"
    )
    message = f"Does not fit\nErrors:\n  - {inner}\n  - Expected a None\nGiven value type: dict"
    assert one_line(reason(message)) == "batch_size must be >= 1, got 0; lower it"


def test_a_plain_message_is_its_own_reason():
    assert reason("Option 'x' is not accepted") == "Option 'x' is not accepted"
