"""What a malformed input is, and what its refusal must be like: one short line, exit code 2, and nothing written."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.world import Place

Make = Callable[[Place], object]

MAX_CHARACTERS = 300

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
        make: Makes it, in the folder that the command runs in.
        line: The command line; a word in capitals is a file or model of the world.
        says: What the message must hold: file and row, field or option, and the rule.
        code: The exit code.
    """

    make: Make
    line: str
    says: str
    code: int = 2


def by_name(lines: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> dict[str, Case]:
    """Cases by name, of what makes each, what the message must hold, and an exit code other than 2, by command line."""
    return {name: Case(made[0], line, *made[1:]) for line, named in lines.items() for name, made in named.items()}


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


def both(*makes: Callable[[Any], object]) -> Callable[[Any], None]:
    """Makes, or damages, one after another."""

    def make(place: Any) -> None:
        for one in makes:
            one(place)

    return make


def run(*changes: Callable[[dict[str, Any]], object]) -> Make:
    """Makes the config of a run after some changes, and its records where there are none yet."""
    return lambda place: place.config(*changes)


def at(place: str, **values: object) -> Make:
    """The config of a run with these values at a place, as `trainer` or `model.init_args`."""

    def change(config: dict[str, Any]) -> None:
        for name in place.split(".") if place else ():
            config = config.setdefault(name, {})
        config.update(values)

    return run(change)


def chosen(place: str, path: str, **arguments: object) -> Make:
    """The config of a run with this class at a place."""
    *parents, last = place.split(".")
    return at(".".join(parents), **{last: {"class_path": path, "init_args": arguments}})


def callback(path: str, **arguments: object) -> Make:
    """The config of a run with this callback."""
    return at("trainer", callbacks=[{"class_path": path, "init_args": arguments}])


def source(**options: Any) -> Make:
    """The config of a run whose source has these options."""
    return run(lambda config: config["data"]["init_args"]["sources"][0].update(options))


def unchanged(folder: Path) -> None:
    """Leaves a copy as it is."""


def copied(name: str, damage: Callable[[Path], object] = unchanged, to: str = "") -> Make:
    """Makes a copy of one of the world's files or folders, and may damage it."""
    return lambda place: damage(place.copy(name, to))


def content(name: str, text: str | bytes) -> Callable[[Path], object]:
    """Gives a file of a folder another content."""
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def without(name: str) -> Callable[[Path], object]:
    """Takes a file out of a folder."""
    return lambda folder: (folder / name).unlink()


def edited(name: str, /, **changes: object) -> Callable[[Path], object]:
    """Changes fields of a JSON file in a folder."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Changes the bytes of a file in a folder."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def judged(*lines: str) -> Make:
    """Makes the evaluation folder with these judgments."""
    text = "".join(f"{line}\n" for line in ("query-id\tcorpus-id\tscore", *lines))
    return copied("eval", content("qrels.tsv", text))


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


def faults(case: Case, code: int, errors: str, place: Place, before: dict[str, str]) -> list[str]:
    """What is wrong with a refusal; nothing where it is as it should be."""
    found = []
    if code != case.code:
        found.append(f"exit code {code}, expected {case.code}")
    # What a set scored is said before the next one.
    lines = [line for line in errors.removesuffix("\n").split("\n") if not line.startswith("eval: ")]
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
    return [*found, f"standard error: {errors[-1500:]!r}"] if found else []
