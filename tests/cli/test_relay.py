import os
import signal
import subprocess
import threading
import time

import pytest

from embeddings.cli.sweep_runs import FORWARDED, SignalForwarder
from embeddings.common import PreemptedError


@pytest.fixture(autouse=True)
def _own_signals():
    """What a forwarder leaves ignored until its process ends, which is the tests' here."""
    handlers = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


# A few seconds that a signal ends with code 7.
CHILD = "trap 'exit 7' {number}; touch {ready}; for _ in $(seq 200); do sleep 0.02; done"


def handlers():
    return [signal.getsignal(number) for number in FORWARDED]


def send(number):
    os.kill(os.getpid(), getattr(signal, f"SIG{number}"))


def send_once_there(path, number):
    def wait():
        while not path.exists():
            time.sleep(0.01)
        send(number)

    sender = threading.Thread(target=wait)
    sender.start()
    return sender


def test_a_process_says_how_it_ended():
    before = handlers()
    with SignalForwarder() as forwarder:
        assert forwarder.run(["sh", "-c", "exit 3"], []) == 3
        assert forwarder.run(["sh", "-c", "kill -9 $$"], []) == 137
    assert handlers() == before


@pytest.mark.parametrize("number", ["INT", "TERM", "HUP", "USR1"])
def test_what_this_process_is_sent_is_passed_on(number, tmp_path):
    ready = tmp_path / "ready"
    with SignalForwarder() as forwarder:
        sender = send_once_there(ready, number)
        assert forwarder.run(["sh", "-c", CHILD.format(number=number, ready=ready)], []) == 7
        sender.join()
    assert forwarder.received == [getattr(signal, f"SIG{number}")]


@pytest.mark.parametrize(("number", "code"), [("INT", 130), ("USR1", 138)])
def test_after_a_signal_no_process_begins(number, code, tmp_path):
    with SignalForwarder() as forwarder:
        send(number)
        assert forwarder.run(["touch", str(tmp_path / "begun")], []) == code
    assert not (tmp_path / "begun").exists()


def test_a_signal_that_comes_while_a_process_begins_is_passed_on(tmp_path, monkeypatch):
    begin = subprocess.Popen

    def begin_and_be_told(*words, **options):
        process = begin(*words, **options)
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        send("USR1")
        return process

    monkeypatch.setattr(subprocess, "Popen", begin_and_be_told)
    with SignalForwarder() as forwarder:
        assert forwarder.run(["sh", "-c", CHILD.format(number="USR1", ready=tmp_path / "ready")], []) == 7


def left_by(error, number=None):
    with SignalForwarder():
        if number:
            send(number)
        raise error


@pytest.mark.parametrize(("error", "number"), [(PreemptedError("", 75), None), (OSError("full"), "TERM")])
def test_nothing_comes_between_a_stop_and_the_exit(error, number):
    with pytest.raises(type(error)):
        left_by(error, number)
    assert handlers() == [signal.SIG_IGN] * len(FORWARDED)


def test_an_error_without_a_signal_gives_the_handlers_back():
    before = handlers()
    with pytest.raises(OSError, match="full"):
        left_by(OSError("full"))
    assert handlers() == before
