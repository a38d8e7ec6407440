"""Run commands over files that were damaged at random: `python -m tests.reliability.fuzz [--count 10000] [--seed 0]`.

A valid file or model is copied, one of its files is mutated, and a command reads it. The command must exit within 30 s
of CPU time: with code 0 if the damage is harmless, otherwise with 2, 70 or 74 and one line, and never with a traceback.
Case i of a seed is reproducible: `--only I` runs it again and prints its result. Each case runs in a separate process;
two run at the same time.
"""

import argparse
import contextlib
import io
import json
import random
import re
import resource
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from embeddings.cli.main import main
from tests.helpers.processes import Command, start_server
from tests.reliability.cases import CLUSTER, ENCODE, EVALUATE, FILTER, FIT, MINE, SEARCH
from tests.reliability.world import Place, World

MAX_SECONDS = 30
MAX_BYTES = 12 * 2**30
ENDINGS = (0, 2, 70, 74)
# Replacements for a number or word of a text file.
ODD = (
    "NaN", "-Infinity", "1e999", "-1", "0", "1.5", "9" * 25, "null", "true", '""', "[]", "{}", "[" * 3000,
    '{"a":' * 3000, '"\\ud800"', '"\\u0000"',
    '"' + "x" * 5000 + '"', '"../../x"', '"__class__"', "!!python/name:os.system", "&a [*a]",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A file or model to damage (None: the config of a run), the name of its copy, and the command that reads it."""

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
        matches = list(re.finditer(rb'"[^"\n]{0,80}"|-?\d+(?:\.\d+)?|\b[a-z_]+\b', content))
        if matches:
            match = chance.choice(matches)
            return content[: match.start()] + chance.choice(ODD).encode() + content[match.end() :]
    if kind == "lines":
        lines = content.splitlines(keepends=True)
        chance.shuffle(lines)
        return b"".join(lines[: chance.randrange(len(lines) + 1)] or lines)
    return content[:at] + chance.randbytes(end - at) + content[end:]


def damage(path: Path, chance: random.Random) -> str:
    """Mutate a file, or one file in a folder; returns its path."""
    # No command reads a model directory's code.
    inside = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix != ".py")
    file = chance.choice(inside or [path])
    content = file.read_bytes()
    file.write_bytes(mutated(content, chance, is_text=file.suffix not in (".safetensors", ".npy", ".parquet", ".ckpt")))
    return str(file.relative_to(path.parent))


class _Overtime(BaseException):
    """A case took too long. As a `BaseException` it is not reported as an error of a file."""


@contextlib.contextmanager
def time_limit(seconds: float, is_over: Event) -> Iterator[None]:
    """Raise `_Overtime` after a limit of CPU time, and set the event, in case the exception is swallowed."""

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
    """Make a case, run its command in this process, and return its result."""
    chance = random.Random(f"{seed}/{index}")
    target = chance.choices(TARGETS, [one.weight for one in TARGETS])[0]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.chdir(folder)
        patch.setenv("EMBED_CACHE", "cache")
        place = Place(folder, world, patch)
        if target.line.startswith(FIT):
            place.config()
        path = folder / target.to if target.source is None else place.copy(target.source, target.to)
        file = damage(path, chance)
        words = target.line.replace("CORPUS", str(world.path("eval") / "corpus.jsonl"))
        return {"index": index, "line": target.line, "file": file} | _outcome(world.words(words))


def _outcome(words: list[str]) -> dict[str, Any]:
    errors, is_over = io.StringIO(), Event()
    limit = time_limit(MAX_SECONDS, is_over)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()), limit:
            code = main(words)
    except BaseException:
        return {"code": 1, "fault": traceback.format_exc()[-3000:]}
    if is_over.is_set():
        return {"code": code, "fault": f"took more than {MAX_SECONDS} s; stderr: {errors.getvalue()[-1500:]}"}
    text = errors.getvalue()
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if code not in ENDINGS:
        return {"code": code, "fault": text[-3000:]}
    if code and (len(lines) != 1 or len(lines[0]) > 400):
        return {"code": code, "fault": f"{len(lines)} error lines: {text[-1500:]}"}
    return {"code": code}


def run_apart(root: Path, seed: int, index: int) -> dict[str, Any]:
    """Run a case in a separate process; a crash of the process is a fault too."""
    with tempfile.TemporaryFile() as output:
        code = Command([root, seed, index], function=_print_case, stdout=output, stderr=output).wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code:
        return {"index": index, "code": code, "fault": f"the process ended with {code}: {text[-1500:]}"}
    case: dict[str, Any] = json.loads(text.splitlines()[-1])
    return case


def _print_case(root: Path, seed: int, index: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    print(json.dumps(run_case(World(root), seed, index)))


def fuzz(count: int, seed: int, root: Path) -> list[dict[str, Any]]:
    """Run the cases, two at a time; returns those with a fault."""
    codes: Counter[int] = Counter()
    faults = []
    start_server()
    with ThreadPool(2) as pool:
        for case in pool.imap_unordered(partial(run_apart, root, seed), range(count)):
            codes[case["code"]] += 1
            if "fault" in case:
                faults.append(case)
            if codes.total() % 100 == 0:
                print(f"{codes.total()} of {count}: codes {dict(sorted(codes.items()))}", flush=True)
    return faults


def run() -> int:
    """Run the command line; returns the number of cases with a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one case and print its result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name))
        for target in TARGETS:
            world.path(target.source or "pairs.jsonl")
        if options.only is not None:
            print(json.dumps(run_case(world, options.seed, options.only), indent=1).replace("\\n", "\n"))
            return 0
        faults = fuzz(options.count, options.seed, world.root)
    for case in faults:
        print(json.dumps(case).replace("\\n", "\n"))
    print(f"{options.count} damaged files: {len(faults)} ended with a traceback, a crash, or after {MAX_SECONDS} s")
    return len(faults)


if __name__ == "__main__":
    raise SystemExit(bool(run()))
