import os
import signal
from contextlib import suppress

import pytest

from embeddings.common import PreemptedError
from embeddings.common.process import STOP_SIGNALS, answer, block_signals, handle_preemption, stop_request
from tests.common.test_process import NAMES


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch):
    """A run that was stopped ignores signals until its process ends, which is the tests' here."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def import_that_is_interrupted():
    with suppress(SystemExit):
        send(signal.SIGTERM)
    raise ImportError("half a module")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_training_ends_the_run_where_it_is(number, code):
    with pytest.raises(PreemptedError) as stop, handle_preemption():
        send(number)
    assert (stop.value.exit_code, stop.value.line) == (code, f"{number.name}: stopped before its first step")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_ranks_only_notes_a_signal_before_training(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with handle_preemption():
        send(signal.SIGUSR1)
        assert stop_request.first == signal.SIGUSR1
    # What ends it then is not the signal.
    with pytest.raises(ImportError), handle_preemption():
        import_that_is_interrupted()


def test_what_the_interrupted_code_made_of_it_is_still_the_signals_end():
    with pytest.raises(PreemptedError), handle_preemption():
        import_that_is_interrupted()


def test_nothing_comes_between_a_stop_and_the_exit():
    with pytest.raises(PreemptedError), handle_preemption():
        send(signal.SIGUSR1)
    send(signal.SIGTERM, signal.SIGUSR1)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == [signal.SIG_IGN] * 3


def test_during_training_the_first_signal_is_noted_and_no_more():
    with handle_preemption():
        stop_request.deferred = True
        send(signal.SIGUSR1, signal.SIGTERM)
        assert stop_request.first == signal.SIGUSR1


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_run_without_a_signal_gives_the_handlers_back(error):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    if error is None:
        with handle_preemption():
            assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    else:
        with pytest.raises(error), handle_preemption():
            raise error
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_forked_child_ends_as_if_nobody_listened():
    with handle_preemption():
        stop_request.deferred = True
        child = os.fork()
        if child == 0:
            send(signal.SIGTERM)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert stop_request.first == 0
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_a_child_that_is_started_while_signals_are_held_back_never_hears_them():
    with handle_preemption():
        stop_request.deferred = True
        with block_signals():
            child = os.fork()
            if child == 0:
                send(*STOP_SIGNALS)
                os._exit(7)
        send(signal.SIGUSR1)
        _, status = os.waitpid(child, 0)
        assert stop_request.first == signal.SIGUSR1
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_rank_that_is_not_the_first_asks_and_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol here
    assert "scontrol requeue 12 failed" in answer(signal.SIGTERM, "stopped", "a.ckpt", is_first=True).line
    assert answer(signal.SIGTERM, "stopped", "a.ckpt", is_first=False).line == ""


def test_ctrl_c_is_noted_once_and_ends_the_process_the_second_time(capfd):
    with handle_preemption():
        stop_request.deferred = True
        send(signal.SIGINT)
        assert stop_request.first == signal.SIGINT
        assert "Ctrl-C again stops at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it():
    """As a shell's background jobs do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with handle_preemption():
        stop_request.deferred = True
        send(signal.SIGINT, signal.SIGINT)
        assert stop_request.first == 0
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
