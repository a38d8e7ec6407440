"""Run commands over files that were damaged at random: `python -m tests.reliability.fuzz [--count 10000] [--seed 0]`.

A good file or model is copied, one of its files is mutated, and a command reads it. It must end by itself within 30 s
of processor time: with code 0 where the damage does no harm, else with 2, 70 or 74 and one line, and never with a
traceback. Case i of a seed is the same anywhere: `--only I` runs it again and says what it did. Cases run in two
processes, each of which is begun anew after a case that kills it.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from embeddings.cli.main import main
from tests.reliability.cases import CLUSTER, ENCODE, EVALUATE, FILTER, FIT, MINE, SEARCH
from tests.reliability.world import Place, World

MAX_SECONDS = 30
MAX_BYTES = 12 * 2**30
ENDINGS = (0, 2, 70, 74)
# What a number or word of a text file becomes.
ODD = (
    "NaN", "-Infinity", "1e999", "-1", "0", "1.5", "9" * 25, "null", "true", '""', "[]", "{}", "[" * 3000,
    '{"a":' * 3000, '"\\ud800"', '"\\u0000"',
    '"' + "x" * 5000 + '"', '"../../x"', '"__class__"', "!!python/name:os.system", "&a [*a]",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What is damaged (None: the config and pairs of a run), its copy's name, and which command reads it."""

    source: str | None
    to: str
    line: str
    weight: int = 4


TARGETS = (
    Target("pairs.jsonl", "pairs.jsonl", FILTER),
    Target("pairs.jsonl", "pairs.jsonl", CLUSTER),
    Target("pairs.jsonl", "pairs.jsonl", MINE),
    Target("mined", "mined", "filter --input mined/mined.parquet --output out.parquet", 8),
    Target("eval", "eval", EVALUATE, 8),
    Target("eval", "eval", ENCODE.replace("corpus.jsonl", "eval/corpus.jsonl")),
    Target("vectors", "vectors", SEARCH.replace("corpus.jsonl", "vectors"), 12),
    Target("indexed", "indexed", SEARCH.replace("corpus.jsonl", "indexed --index ivf"), 6),
    Target("logged", "logged", "report logged --output report.html", 4),
    Target("logged", "logged", "show curves --run logged --output curves.png", 4),
    *(
        Target(name, "model", "encode --model model --input CORPUS --output out", 6)
        for name in ("model", "latent", "sparse", "contextual")
    ),
    Target("last.ckpt", "last.ckpt", "export --checkpoint last.ckpt --output out", 12),
    Target(None, "config.yaml", FIT, 3),
    Target("last.ckpt", "last.ckpt", f"{FIT} --ckpt_path last.ckpt", 2),
)


def mutated(content: bytes, chance: random.Random, is_text: bool) -> bytes:
    """The content after one to three changes."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        kinds = ["bits", "cut", "drop", "double", "noise"] + ["odd", "odd", "odd", "lines"] * is_text
        content = _changed(content, chance, chance.choice(kinds))
    return content


def _changed(content: bytes, chance: random.Random, kind: str) -> bytes:
    at = chance.randrange(len(content) + 1)
    end = min(len(content), at + chance.choice((1, 4, 64, 4096)))
    if kind == "bits" and at < len(content):
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "drop":
        return content[:at] + content[end:]
    if kind == "double":
        return content[:end] + content[at:]
    if kind == "odd":
        places = list(re.finditer(rb'"[^"\n]{0,80}"|-?\d+(?:\.\d+)?|\b[a-z_]+\b', content))
        if places:
            chosen = chance.choice(places)
            return content[: chosen.start()] + chance.choice(ODD).encode() + content[chosen.end() :]
    if kind == "lines":
        lines = content.splitlines(keepends=True)
        chance.shuffle(lines)
        return b"".join(lines[: chance.randrange(len(lines) + 1)] or lines)
    return content[:at] + chance.randbytes(end - at) + content[end:]


def damage(path: Path, chance: random.Random) -> str:
    """Mutate one file at a path, a file or a folder; returns which."""
    inside = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix != ".py")  # which no one reads
    files = inside or [path]
    file = chance.choice(files)
    content = file.read_bytes()
    file.write_bytes(mutated(content, chance, is_text=file.suffix not in (".safetensors", ".npy", ".parquet", ".ckpt")))
    return str(file.relative_to(path.parent))


class _Overtime(BaseException):
    """A case takes too long: no error of a file or of a command, so that nothing on the way makes a refusal of it."""


@contextlib.contextmanager
def time_limit(seconds: int, is_over: Event) -> Iterator[None]:
    """End what takes longer, by the CPU's time, and set the event, which stays where the end is not passed on."""

    def stop(*_: object) -> None:
        is_over.set()
        raise _Overtime

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def run_case(world: World, seed: int, index: int) -> dict[str, Any]:
    """Make a case, run its command in this process, and say how it ended."""
    chance = random.Random(f"{seed}/{index}")
    target = chance.choices(TARGETS, [one.weight for one in TARGETS])[0]
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.chdir(folder)
        patch.setenv("EMBED_CACHE", "cache")
        place = Place(folder, world, patch)
        if target.line.startswith(FIT):
            place.config()
        path = folder / target.to if target.source is None else place.copy(target.source, target.to)
        file = damage(path, chance)
        words = target.line.replace("CORPUS", str(world.path("eval") / "corpus.jsonl")).split()
        case = {"index": index, "line": target.line, "file": file}
        try:
            case |= _outcome(world.words(words))
        finally:
            os.chdir(home)
    return case


def _outcome(words: list[str]) -> dict[str, Any]:
    errors, is_over = io.StringIO(), Event()
    limit = time_limit(MAX_SECONDS, is_over)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()), limit:
            code = main(words)
    except BaseException:
        return {"code": 1, "fault": traceback.format_exc()[-3000:]}
    if is_over.is_set():
        return {"code": code, "fault": f"took more than {MAX_SECONDS} s, and then said {errors.getvalue()[-1500:]}"}
    said = errors.getvalue()
    refusals = [line for line in said.splitlines() if line.startswith("error: ")]
    # What nobody foresaw is one line too, which names the file of its traceback.
    if code not in ENDINGS or "Traceback" in said or "the traceback is in" in said:
        return {"code": code, "fault": said[-3000:]}
    if code and (len(refusals) != 1 or len(refusals[0]) > 400):
        return {"code": code, "fault": f"{len(refusals)} lines of refusal: {said[-1500:]}"}
    return {"code": code}


def run_share(seed: int, indices: range, journal: Path, root: Path) -> None:
    """Run some cases in this process, each noted before and after."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    world = World(root)
    with journal.open("a") as file:
        # Behind whatever one that was killed has left of a line.
        file.write("\n")
        for index in indices:
            file.write(json.dumps({"began": index}) + "\n")
            file.flush()
            file.write(json.dumps(run_case(world, seed, index)) + "\n")
            file.flush()


def fuzz(count: int, seed: int, root: Path, processes: int = 2) -> list[dict[str, Any]]:
    """Run the cases in several processes; returns those that ended as none may.

    A process that ends before its first case is a `RuntimeError`: it would happen again.
    """
    words = [sys.executable, "-m", "tests.reliability.fuzz", "--seed", str(seed), "--root", str(root)]
    journals = [root / f"journal-{part}.jsonl" for part in range(processes)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    firsts: dict[int, int] = {}
    codes: Counter[int] = Counter()
    faults: list[dict[str, Any]] = []
    shown = 0.0

    def start(part: int, first: int) -> None:
        firsts[part] = first
        share = ["--share", str(first), str(count), str(processes), str(journals[part])]
        with journals[part].with_suffix(".txt").open("wb") as said:
            running[part] = subprocess.Popen([*words, *share], stdout=said, stderr=said)

    for part in range(processes):
        journals[part].unlink(missing_ok=True)
        start(part, part)
    while running:
        time.sleep(0.5)
        for part, child in list(running.items()):
            if child.poll() is None:
                continue
            del running[part]
            began = _read(journals[part])[0]
            if child.returncode:
                said = journals[part].with_suffix(".txt").read_text(errors="replace")[-1500:]
                if began < firsts[part]:
                    raise RuntimeError(f"a process ended with {child.returncode} before case {firsts[part]}: {said}")
                faults.append({"index": began, "fault": f"the process ended with {child.returncode}: {said}"})
                start(part, began + processes)
        if time.monotonic() > shown + 30 or not running:
            shown = time.monotonic()
            cases = [case for journal in journals for case in _read(journal)[1]]
            codes = Counter(case["code"] for case in cases)
            print(f"{len(cases)} of {count}: codes {dict(sorted(codes.items()))}", flush=True)
    return faults + [case for journal in journals for case in _read(journal)[1] if "fault" in case]


def _read(journal: Path) -> tuple[int, list[dict[str, Any]]]:
    """The case that began last, and all that ended; the half line of a process that was killed says nothing."""
    lines = []
    for line in journal.read_text().splitlines() if journal.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    began = [line["began"] for line in lines if "began" in line]
    return (began[-1] if began else -1), [line for line in lines if "code" in line]


def run() -> int:
    """Run what the command line asks for; returns how many cases ended as none may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one case, and print how it ended")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.share:
        first, count, step, journal = given.share
        run_share(given.seed, range(int(first), int(count), int(step)), Path(journal), given.root)
        return 0
    with tempfile.TemporaryDirectory() as name:
        root = given.root or Path(name)
        root.mkdir(exist_ok=True)
        world = World(root)
        for target in TARGETS:
            world.path(target.source or "pairs.jsonl")
        if given.only is not None:
            print(json.dumps(run_case(world, given.seed, given.only), indent=1).replace("\\n", "\n"))
            return 0
        faults = fuzz(given.count, given.seed, root)
    for case in faults:
        print(json.dumps(case).replace("\\n", "\n"))
    print(f"{given.count} damaged files: {len(faults)} ended with a traceback, a crash, or after {MAX_SECONDS} s")
    return len(faults)


if __name__ == "__main__":
    raise SystemExit(bool(run()))
