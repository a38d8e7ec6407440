"""Long commands print a line at least every interval; the slow test also compares their time left with the true one.

The commands run in a process whose standard error is a pipe. The interval, half a minute for a user, is shorter here.
Times are CPU time of the process, because other processes may take most of the machine; of a command that waits for a
server they are wall-clock time.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tqdm import tqdm

from benchmarks.growth import write_model, write_records
from embeddings.common import progress
from tests.helpers.chat_server import Reply, chat_server, written
from tests.helpers.processes import Command

# Times left are compared in bars that last longer, five minutes for a user.
MIN_INTERVALS = 10
_NUMBER = r"([\d.]+[kM]?)"
# The title, the position, the total and the time left.
_LINE = re.compile(rf"(.+?):\s+\d+%\|.*\| {_NUMBER}/{_NUMBER} \[[\d.]+<([\d.]+|\?),")
_UNITS = {"k": 1e3, "M": 1e6}


class Line(NamedTuple):
    time: float
    text: str


class Stamped:
    """A stream of lines, each after the time of `clock`."""

    def __init__(self, stream: Any, clock: Callable[[], float]) -> None:
        self._stream, self._clock, self._line = stream, clock, ""

    def write(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._stream.write(f"{self._clock():.3f} {line}\n")

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False


def run_lines(clock_name: str, interval: float, *lines: str) -> int:
    """Run commands one after another in this process, with a short interval and exact times left, all by one clock."""
    clock = getattr(time, clock_name)
    sys.stderr = Stamped(sys.stderr, clock)
    progress.LINE_SECONDS, progress.PROGRESS_DELAY_SECONDS = interval, 0.0
    progress.time = SimpleNamespace(time=clock, sleep=time.sleep)
    sys.modules["tqdm.std"].time = clock
    tqdm.format_interval = staticmethod("{:.3f}".format)
    from embeddings.cli.main import main

    for line in lines:
        print(f"start {line}", file=sys.stderr, flush=True)
        code = convert(line.split()[1:]) if line.startswith("convert ") else main(shlex.split(line))
        print(f"end {line}", file=sys.stderr, flush=True)
        if code:
            return code
    return 0


def convert(paths: list[str]) -> int:
    """Convert sources as `fit` does."""
    from embeddings.data import EmbeddingDataModule, SourceConfig

    EmbeddingDataModule([SourceConfig(f"source{n}", path) for n, path in enumerate(paths)], batch_size=4).setup()
    return 0


def printed(folder: Path, interval: float, lines: list[str], clock: str = "process_time") -> dict[str, list[Line]]:
    """The lines of each command with their times; an error if one fails."""
    environment = {**os.environ, "EMBED_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL}
    with Command(
        [clock, interval, *lines], function=run_lines, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr[-2000:]
    found, current = dict[str, list[Line]](), list[Line]()
    for stamped in stderr.splitlines():
        stamp, _, text = stamped.partition(" ")
        kind, _, command = text.partition(" ")
        if kind == "start":
            current = found[command] = []
        current.append(Line(float(stamp), text))
    return found


def check_gaps(lines: list[Line], longest: float) -> None:
    silence, after = max((after.time - before.time, before.text) for before, after in pairwise(lines))
    assert silence <= longest, f"{silence} s after {after!r}"


def check(lines: list[Line], interval: float, slack: float, times_left: bool) -> dict[str, int]:
    """Check the gaps between lines, and with `times_left` these; returns how many bars' states were read, by title.

    A bar of few intervals is not compared, nor one of few positions: blocks are not shorter here. A line may be two
    intervals off besides, because caches are shared too.
    """
    check_gaps(lines, interval + slack)
    bars: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for line in lines:
        if found := _LINE.match(line.text):
            title, *numbers, left = found.groups()
            n, total = (float(text.rstrip("kM")) * _UNITS.get(text[-1], 1) for text in numbers)
            # The title of a job over several sources ends with the source.
            title, seconds = title.split(" source")[0], float("inf") if left == "?" else float(left)
            bars[title].append((line.time, n / total, seconds))
    compared = {}
    for title, states in bars.items():
        shares = [share for _, share, _ in states]
        assert shares == sorted(shares), f"{title} starts anew: {shares}"
        is_short = states[-1][0] - states[0][0] < MIN_INTERVALS * interval
        if is_short or len(set(shares)) < MIN_INTERVALS:
            compared[title] = 0
            continue
        in_time = [(share, left, states[-1][0] - at) for at, share, left in states if 0.1 <= share < 1]
        for share, left, true in in_time if times_left else ():
            low, high = true / 2 - 2 * interval, 2 * true + 2 * interval
            assert low <= left <= high, f"{title} at {share:.0%}: {left} s, true {true}"
        compared[title] = len(in_time)
    return compared


def commands(num_rows: int) -> list[str]:
    shard = num_rows // 10
    source, vectors = "--input first/pairs.jsonl", "--model model --vectors pairs.vectors"
    return [
        "convert second/pairs.jsonl third/pairs.jsonl",
        f"encode --model model --input first/corpus.jsonl --output vectors --shard-size {shard} --precision float32",
        f"filter {source} --output copies.parquet --near-duplicates 0.8",
        f"filter {source} --output clean.parquet --decontaminate first/held --bm25-threshold 0.8",
        f"filter {source} --output kept.parquet {vectors} --precision float32",
        f"mine {source} --output mined.parquet {vectors} --precision float32 --margin null --num-negatives 4",
        f"cluster {source} --output clusters {vectors} --precision float32 --cluster-size 8 --num-iterations 100 "
        "--num-runs 1",
        "index --vectors vectors",
        "compress --model model --output small --prune sparsegpt --calibration first/pairs.jsonl "
        f"--num-texts {num_rows}",
        "evaluate --model model --data first/evaluation --output scores.json --precision float32",
        "passages documents --output passages.jsonl --model model",
        "queries passages.jsonl --output queries",
    ]


def write_documents(folder: Path, corpus: Path, per_document: int = 10) -> None:
    """Write documents of `per_document` texts of a corpus file, each text a section of four sentences."""
    folder.mkdir()
    # Words with digits are not prose.
    letters = str.maketrans("0123456789", "abcdefghij")
    words = [json.loads(line)["text"].translate(letters).split() for line in corpus.read_text().splitlines()]
    sentences = [[" ".join(text[start::4]).capitalize() + "." for start in range(4)] for text in words]
    for start in range(0, len(sentences), per_document):
        sections = sentences[start : start + per_document]
        text = "\n\n".join(f"# Part {number}\n\n{' '.join(section)}" for number, section in enumerate(sections))
        (folder / f"{start}.md").write_text(text)


# Those that the fast test runs: a conversion, and one for each kind of job.
FAST = (
    "convert",
    "encode",
    "filter --input first/pairs.jsonl --output copies.parquet",
    "cluster --input first/pairs.jsonl --output clusters",
    "passages",
)


def compare(folder: Path, num_rows: int, interval: float, slack: float, fast: bool = False) -> dict[str, int]:
    """Run the commands and check them; returns how many states of long bars were read, by title.

    With `fast` only some commands run, and times left are not compared.
    """
    write_model(folder)
    # Sources of the same bytes would be converted once.
    for name, count in (("first", num_rows), ("second", 5 * num_rows), ("third", 6 * num_rows)):
        (folder / name).mkdir()
        write_records(folder / name, count, templated=False)
    write_documents(folder / "documents", folder / "first" / "corpus.jsonl")
    chosen = [line for line in commands(num_rows) if not fast or line.startswith(FAST)]
    lines = printed(folder, interval, chosen)
    assert list(lines) == chosen
    compared: Counter[str] = Counter()
    for of_command in lines.values():
        compared.update(check(of_command, interval, slack, times_left=not fast))
    return compared


# The slack is for functions of LAPACK that do not let the thread run that prints.
def test_no_long_command_is_silent_and_no_bar_starts_anew(tmp_path):
    compared = compare(tmp_path, 1_500, 0.05, slack=1.0, fast=True)
    # One bar for both sources.
    assert "converting" in compared
    assert sum(map(bool, compared.values())) >= 2, compared


def test_a_command_that_waits_for_a_server_is_not_silent(tmp_path):
    def slow(prompt: str, seed: int, count: int) -> Reply:
        return Reply(written(prompt, seed), seconds=4.0)

    (tmp_path / "pairs.jsonl").write_text(json.dumps({"query": "how high is it", "positive": "It is a mile high."}))
    with chat_server(slow) as server:
        line = f"synthesize --endpoint {server.endpoint} --model m --output made --regenerate-negatives pairs.jsonl"
        (lines,) = printed(tmp_path, 0.2, [line], clock="time").values()
    assert lines[-1].time - lines[0].time > 4, lines
    check_gaps(lines, 2.0)


@pytest.mark.slow
def test_preparing_the_docstrings_of_installed_packages_is_not_silent(tmp_path):
    (lines,) = printed(tmp_path, 0.5, ["prepare docstrings --output docstrings"]).values()
    assert lines[-1].time - lines[0].time > 5, lines
    check_gaps(lines, 2.5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_longer_command_is_silent_and_its_time_left_is_right(tmp_path):
    compared = compare(tmp_path, 10_000, 0.25, slack=2.0)
    for title in ("encode", "encode document", "document vectors", "k-means"):
        assert compared[title] >= 3, compared
