"""Bars, lines in a log, the time left, bars inside an item of another bar, and commands without a bar."""

import re
import sys
import time

import pytest

from embeddings.common import progress
from embeddings.common.progress import progress_bar, reported, stop_reporting, tracked
from tests.helpers.waiting import wait_for


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves: its one element is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_log_gets_a_line_every_half_minute_and_the_last_one(is_renamed, clock, capsys):
    with progress_bar(20, "work", "row") as bar:
        for _ in range(20):
            clock[0] += 5.0
            bar.update()
            if is_renamed:
                bar.set_description(f"row {bar.n}")
    written = capsys.readouterr().err
    assert "\r" not in written
    found = [re.search(r"(\d+)/20 \[(\S+)<(\S+), ", line).groups() for line in written.splitlines()]
    assert found == [
        ("6", "00:30", "01:10"),
        ("12", "01:00", "00:40"),
        ("18", "01:30", "00:10"),
        ("20", "01:40", "00:00"),
    ]


def test_work_of_less_than_half_a_minute_writes_no_line_to_a_log(clock, capsys):
    for _ in progress_bar(None, "work", "row", iterable=range(2)):
        clock[0] += 14.5
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_after_two_seconds(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in progress_bar(None, "work", "row", iterable=range(4)):
        clock[0] += 1.0
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert re.findall(r"\d/4", written) == ["2/4", "3/4", "4/4", "4/4"]


def shown(capsys):
    """The lines that were printed since the last call: position, elapsed and remaining seconds."""
    found = re.findall(r"([\d.]+)/\d+ \[(\d+):(\d+)<([\d:?]+),", capsys.readouterr().err)
    return [(float(n), 60 * int(minutes) + int(seconds), left) for n, minutes, seconds, left in found]


def test_the_time_left_follows_the_speed_of_the_second_half_of_the_time(clock, capsys):
    with progress_bar(200, "work", "row") as bar:
        for seconds in [60.0] + [1.0] * 100 + [3.0] * 99:
            clock[0] += seconds
            bar.update()
    left = {n: 60 * int(text[:2]) + int(text[3:]) for n, _, text in shown(capsys) if n > 1}
    # A start of a minute is forgotten, and a change of speed is known after as much time as before it.
    assert {n: seconds for n, seconds in left.items() if n < 100} == {31: 169, 61: 139, 91: 109}
    assert left[188] == 36


def test_bars_inside_an_item_move_the_outer_bar_and_are_not_drawn(clock, capsys):
    with progress_bar(4, "outer", "shard") as outer:
        for shard in range(4):
            positions = []
            with outer.item():
                for _ in progress_bar(10, "first", "row", iterable=range(5), share=0.5):
                    clock[0] += 2.0
                for _ in progress_bar(None, "second", "row", iterable=range(2)):
                    positions.append(outer.n - shard)
                    with progress_bar(4, "third", "token") as bar:
                        bar.update(2)
                    positions.append(outer.n - shard)
                    clock[0] += 5.0
            # The first bar reaches half of its half; the second one has the rest.
            assert positions == [0.25, 0.4375, 0.625, 0.8125]
            assert outer.n == shard + 1
    written = capsys.readouterr().err
    assert set(re.findall(r"(\w+):  ", written)) == {"outer"}
    assert re.findall(r"([\d.]+)/4", written) == ["1.2", "3", "4"]


def test_an_item_that_is_cancelled_or_fails_is_counted_when_it_is_done(clock):
    with progress_bar(2, "work", "row") as bar:
        with pytest.raises(ValueError, match="failed"), bar.item():
            raise ValueError("failed")
        with bar.item() as item:
            item.cancel()
        assert bar.n == 0
        for number in range(2):
            with bar.item():
                pass
            assert bar.n == number + 1


def test_an_inner_bar_without_a_total_is_shown_as_a_count(clock, capsys):
    with progress_bar(2, "outer", "source") as outer, outer.item():
        with progress_bar(None, "inner", "row") as bar:
            bar.update(1200)
            clock[0] += 31.0
            outer.move(0.5)
        assert outer.postfix == ""
    assert "1,200 rows" in capsys.readouterr().err


def test_tracked_items_move_a_bar_by_their_sizes(clock, capsys):
    for block in tracked(["abc", "de", "fghij"], 10, "reading", "letter", len):
        clock[0] += 15.0 * len(block)
    assert [n for n, _, _ in shown(capsys)] == [3, 5, 10]


@pytest.fixture
def prints(capsys):
    """Waits until so many matches of a pattern have been printed."""
    printed = [""]

    def count(pattern):
        printed[0] += capsys.readouterr().err
        return len(re.findall(pattern, printed[0], re.MULTILINE))

    return lambda pattern, number: wait_for(lambda: count(pattern) >= number, f"{number} lines like {pattern}")


def test_work_without_progress_and_without_a_bar_prints_lines(capsys, prints, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.4)
    with reported("cluster"):
        prints(r"^cluster: running for 0:00:0[1-9]$", 1)
        with progress_bar(2, "work", "row", delay=0.01) as bar:
            bar.update()
            prints(r"^work:.* 1/2 ", 2)
    with reported("fit"):
        stop_reporting()
        capsys.readouterr()
        time.sleep(0.6)
    assert capsys.readouterr().err == ""


def test_a_terminal_bar_is_drawn_again_while_nothing_moves_it(prints, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.4)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.1)
    with progress_bar(2, "work", "row", delay=0.01):
        prints("\rwork:", 2)
