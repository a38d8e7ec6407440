"""What was answered is on disk, once, whatever ends the process."""

import os
from contextlib import suppress

import pytest

from embeddings.common import InputError
from embeddings.synthesis.runner import Journal, open_journal
from embeddings.synthesis.validate import Answer

FULL = Answer('two\nlines, half a character \ud800, "quotes"', "stop", None, 11, 5)
REFUSED = Answer(None, None, "status 400: no", None, None)


def test_answers_come_back_as_they_were_in_a_later_process_too(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
        journal.append("b", REFUSED)
        assert journal.get("a") == FULL
    with open_journal(path) as journal:
        assert (journal.get("a"), journal.get("b"), journal.get("c")) == (FULL, REFUSED, None)
        assert "a" in journal
        assert "c" not in journal
        assert (len(journal), journal.num_answers) == (2, 1)
        assert (journal.prompt_tokens, journal.completion_tokens) == (11, 5)
        journal.append("c", Answer("x", prompt_tokens=1))
        assert journal.prompt_tokens == 12
        assert journal.get("a") == FULL
        assert journal.get("c") == Answer("x", prompt_tokens=1)


def test_every_cut_of_the_last_line_leaves_the_lines_before(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
        first = path.stat().st_size
        journal.append("b", FULL)
    whole = path.read_bytes()
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        with open_journal(path) as journal:
            assert ("a" in journal, "b" in journal) == (True, False)
            journal.append("b", FULL)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:first] + b'{"key": \x00\x00\n')
    with open_journal(path) as journal:
        assert len(journal) == 1


def test_a_damaged_line_before_the_last_is_named_and_left_alone(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
    whole = path.read_bytes()
    path.write_bytes(b"[1]\n" + whole)
    with pytest.raises(InputError, match=r"journal.jsonl:1: is no answer"), open_journal(path):
        pass
    assert path.read_bytes() == b"[1]\n" + whole


def test_two_processes_do_not_hold_one_journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path), pytest.raises(InputError, match="another process is at work"):
        Journal(path)
    with open_journal(path) as journal:
        assert len(journal) == 0


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
        size = path.stat().st_size

        def full(handle):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append("b", FULL)
        assert path.stat().st_size == size
        assert "b" not in journal
        monkeypatch.undo()
        with suppress(OSError):
            journal.append("b", FULL)
        assert journal.get("b") == FULL


def test_an_answer_is_on_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle)))
    with open_journal(tmp_path / "journal.jsonl") as journal:
        synced.clear()
        journal.append("a", FULL)
        assert synced == [(tmp_path / "journal.jsonl").stat().st_size]
