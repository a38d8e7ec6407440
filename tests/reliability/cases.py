"""What a malformed input is, and what its refusal must be like: one short line, exit code 2, and nothing written."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embeddings.cli.main import main
from tests.reliability.world import Place

Make = Callable[[Place], object]

MAX_CHARACTERS = 300
# Ten are the aim; loading torch, Lightning and transformers alone takes nine to ten of a slow CPU's.
MAX_SECONDS = 20.0

# Lines that most cases go to; what they read is what a case makes.
CLUSTER = "cluster --features bm25 --num-clusters 2 --svd-dim 2 --input pairs.jsonl --output out"
ENCODE = "encode --model MODEL --input corpus.jsonl --output out"
EVALUATE = "evaluate --model MODEL --data eval --output scores.json"
FILTER = "filter --input pairs.jsonl --output out.parquet"
FIT = "fit --config config.yaml"
MINE = "mine --model MODEL --input pairs.jsonl --output out.parquet --margin null --num-negatives 2"
SEARCH = "search --model MODEL --corpus corpus.jsonl fox"


@dataclass(frozen=True)
class Case:
    """One malformed input.

    Args:
        name: What is wrong with it.
        make: Makes it, in the folder that the command runs in.
        line: The command line; a word in capitals is a file or model of the world.
        says: What the message must hold: file and row, field or option, and the rule.
        code: The exit code.
    """

    name: str
    make: Make
    line: str | Sequence[str]
    says: str
    code: int = 2

    @property
    def words(self) -> list[str]:
        """The command line's words."""
        return self.line.split() if isinstance(self.line, str) else list(self.line)


def cases(
    lines: Mapping[str | tuple[str, ...], Mapping[str, tuple[Make, str] | tuple[Make, str, int]]],
) -> list[Case]:
    """Cases by command line and name: what makes each, what the message must hold, and an exit code other than 2."""
    return [Case(name, made[0], line, *made[1:]) for line, named in lines.items() for name, made in named.items()]


def nothing(place: Place) -> None:
    """Makes no file."""


def put(name: str, content: str | bytes) -> Make:
    """Makes a file."""
    return lambda place: place.write(name, content)


def rows(name: str, *values: object) -> Make:
    """Makes a file of JSON lines; characters beyond ASCII are escaped, which is how halves of them get through."""
    return put(name, "".join(json.dumps(value) + "\n" for value in values))


GOOD = {"query": "pad sequences", "positive": "the pad"}


def pairs(**fields: object) -> Make:
    """Makes a good training record, and one with these fields."""
    return rows("pairs.jsonl", GOOD, {**GOOD, **fields})


def both(*makes: Make) -> Make:
    """Makes one after another."""

    def make(place: Place) -> None:
        for one in makes:
            one(place)

    return make


def run(*changes: Callable[[dict[str, Any]], object]) -> Make:
    """Makes the config of a run after some changes, and its records where there are none yet."""
    return lambda place: place.config(*changes)


def copied(name: str, damage: Callable[[Path], object], to: str = "") -> Make:
    """Makes a copy of one of the world's files or folders and damages it."""
    return lambda place: damage(place.copy(name, to))


def judged(*lines: str) -> Make:
    """Makes the evaluation folder with these judgments."""
    text = "".join(f"{line}\n" for line in ("query-id\tcorpus-id\tscore", *lines))
    return copied("eval", lambda folder: (folder / "qrels.tsv").write_text(text))


def tree(folder: Path) -> dict[str, str]:
    """Every file's hash, link's target and folder below a folder, by path.

    Sources that were converted whole may stay in the folder `cache`: the next run takes them.
    """
    found = {}
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder and "cache" in folders:
            folders.remove("cache")
            found |= {f"cache/{path.name}": "half made" for path in (folder / "cache").glob(".*")}
        for name in [*folders, *files]:
            path = Path(parent, name)
            kind = f"link {os.readlink(path)}" if path.is_symlink() else "folder" if path.is_dir() else _digest(path)
            found[str(path.relative_to(folder))] = f"{kind} {path.lstat().st_mode:o}"
    return found


def _digest(path: Path) -> str:
    if not path.is_file():
        return "special"
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError:
        return "unreadable"


@dataclass(frozen=True)
class Outcome:
    """How a command ended; seconds are the CPU's, so that a busy machine is not taken for a slow command."""

    code: int
    errors: str
    seconds: float


def run_here(words: list[str], read_errors: Callable[[], str]) -> Outcome:
    """Run a command in this process; the function gives what it wrote to standard error."""
    start = time.process_time()
    code = main(words)
    return Outcome(code, read_errors(), time.process_time() - start)


def faults(case: Case, outcome: Outcome, place: Place, before: dict[str, str]) -> list[str]:
    """What is wrong with a refusal; nothing where it is as it should be."""
    found = []
    if outcome.code != case.code:
        found.append(f"exit code {outcome.code}, expected {case.code}")
    # What a set scored is said before the next one.
    lines = [line for line in outcome.errors.removesuffix("\n").split("\n") if not line.startswith("eval: ")]
    if len(lines) != 1:
        found.append(f"{len(lines)} lines on standard error")
    line = lines[-1].replace(f"{place.folder}/", "").replace(f"{place.world.root}/", "")
    if not line.startswith("error: ") or not line.isprintable():
        found.append("no printable line that begins with error:")
    if len(line) > MAX_CHARACTERS:
        found.append(f"{len(line)} characters")
    if case.says not in line:
        found.append(f"does not say {case.says!r}")
    if not re.search(r"(; |\bdid you mean )\S", line):
        found.append("names no way out")
    after = tree(place.folder)
    if changed := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        found.append(f"changed {', '.join(changed[:5])}")
    if outcome.seconds > MAX_SECONDS:
        found.append(f"{outcome.seconds:.1f} s")
    return [*found, f"standard error: {outcome.errors[-1500:]!r}"] if found else []
