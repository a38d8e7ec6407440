import io

import pytest

from embeddings.cli.search import answer_lines, is_terminal
from embeddings.common import InputError


class Typed(io.TextIOWrapper):
    """Standard input, of a person where `is_terminal` is set."""

    def __init__(self, text, is_terminal=False):
        super().__init__(io.BytesIO(text if isinstance(text, bytes) else text.encode()), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


def answers(monkeypatch, stream):
    found = []
    monkeypatch.setattr("sys.stdin", stream)
    answer_lines(found.append)
    return found


def test_lines_are_answered_until_the_end(monkeypatch, capsys):
    assert answers(monkeypatch, Typed("quick fox\n  lazy dog  \nlast")) == ["quick fox", "lazy dog", "last"]
    written = capsys.readouterr()
    times = written.out.splitlines()
    assert len(times) == 3
    assert all(line.endswith(" ms") and float(line.split()[0]) >= 0 for line in times)
    assert written.err == ""


@pytest.mark.parametrize("text", ["one\n\ntwo\n", "one\n \t\ntwo\n", "one\n"])
def test_an_empty_line_is_the_end(text, monkeypatch):
    assert answers(monkeypatch, Typed(text)) == ["one"]


def test_a_line_is_answered_before_the_next_is_read(monkeypatch):
    events, typed = [], Typed("one\ntwo\n")
    read = typed.buffer.readline
    typed.buffer.readline = lambda: (events.append("read"), read())[1]
    monkeypatch.setattr("sys.stdin", typed)
    answer_lines(events.append)
    assert events == ["read", "one", "read", "two", "read"]


def test_a_person_is_shown_where_to_type(monkeypatch, capsys):
    assert answers(monkeypatch, Typed("one\n", is_terminal=True)) == ["one"]
    assert capsys.readouterr().err == "query> query> "
    assert is_terminal()
    monkeypatch.setattr("sys.stdin", None)
    assert not is_terminal()


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])
def test_a_line_of_another_encoding_is_named(handler, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=handler)
    with pytest.raises(InputError, match=r"^standard input:1: is not valid UTF-8; write it as UTF-8$"):
        answers(monkeypatch, stream)


def test_queries_before_a_line_of_another_encoding_are_answered_and_its_own_number_is_named(monkeypatch):
    found = []
    monkeypatch.setattr("sys.stdin", Typed(b"good one\ncaf\xc3\xa9\nbad \xff\n"))
    with pytest.raises(InputError, match=r"^standard input:3: "):
        answer_lines(found.append)
    assert found == ["good one", "café"]


def test_a_closed_input_is_at_its_end(monkeypatch):
    assert answers(monkeypatch, None) == []
