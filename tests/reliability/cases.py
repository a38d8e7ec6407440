"""Cases of malformed inputs, and the checks of their errors: one short line, exit code 2, and no written files."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.manifests import rewrite_manifest
from tests.reliability.world import Place

Make = Callable[[Place], object]

MAX_CHARACTERS = 300

# Command lines that most cases use; their input files are made by the case.
CLUSTER = "cluster --model MODEL --num-clusters 2 --svd-dim 2 --input pairs.jsonl --output out"
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
        make: Writes the input into the working folder of the command.
        line: The command line; a word in capitals is a file or model of the world.
        says: A part of the expected message: file and row, field or option, and the rule.
        code: The exit code.
    """

    make: Make
    line: str
    says: str
    code: int = 2


def by_name(lines: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> dict[str, Case]:
    """Convert {command line: {name: (make, message, exit code if not 2)}} to cases by name."""
    return {name: Case(make, line, *rest) for line, named in lines.items() for name, (make, *rest) in named.items()}


def nothing(place: Place) -> None:
    """Makes no file."""


def put(name: str, content: str | bytes) -> Make:
    return lambda place: place.write(name, content)


def rows(name: str, *values: object) -> Make:
    """Makes a JSON Lines file; non-ASCII characters are escaped, so that lone surrogates can be written."""
    return put(name, "".join(json.dumps(value) + "\n" for value in values))


GOOD = {"query": "pad sequences", "positive": "the pad"}


def pairs(**fields: object) -> Make:
    """Makes a valid training record, and one with these fields changed."""
    return rows("pairs.jsonl", GOOD, {**GOOD, **fields})


def both(*makes: Callable[[Any], object]) -> Callable[[Any], None]:
    """Runs several steps in order."""

    def make(place: Any) -> None:
        for step in makes:
            step(place)

    return make


def run(*changes: Callable[[dict[str, Any]], object]) -> Make:
    """Makes the config of a run with some changes, and its records if there are none."""
    return lambda place: place.config(*changes)


def at(place: str, **values: object) -> Make:
    """The config of a run with these values at a path, such as `trainer` or `model.init_args`."""

    def change(config: dict[str, Any]) -> None:
        for name in place.split(".") if place else ():
            config = config.setdefault(name, {})
        config.update(values)

    return run(change)


def chosen(place: str, path: str, **arguments: object) -> Make:
    """The config of a run with this class at a path."""
    *parents, last = place.split(".")
    return at(".".join(parents), **{last: {"class_path": path, "init_args": arguments}})


def callback(path: str, **arguments: object) -> Make:
    return at("trainer", callbacks=[{"class_path": path, "init_args": arguments}])


def source(**options: Any) -> Make:
    return run(lambda config: config["data"]["init_args"]["sources"][0].update(options))


def unchanged(folder: Path) -> None:
    """Does not damage a copy."""


def copied(name: str, damage: Callable[[Path], object] = unchanged, to: str = "") -> Make:
    """Copies a file or folder of the world, and optionally damages it; its manifests lose their hashes first.

    The damage then reaches the checks behind the hashes.
    """

    def make(place: Place) -> object:
        path = place.copy(name, to)
        for manifest in path.rglob("manifest.json"):
            rewrite_manifest(manifest)
        return damage(path)

    return make


def content(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def edited(name: str, /, **changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def tree(folder: Path) -> dict[str, str]:
    """The hash of each file, target of each link and type of each entry below a folder, by path.

    Completely converted sources in `cache` are ignored: the next run uses them.
    """
    entries = {}
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder and "cache" in folders:
            folders.remove("cache")
            entries |= {f"cache/{path.name}": "incomplete" for path in (folder / "cache").glob(".*")}
        for name in [*folders, *files]:
            path = Path(parent, name)
            kind = f"link {os.readlink(path)}" if path.is_symlink() else "folder" if path.is_dir() else _digest(path)
            entries[str(path.relative_to(folder))] = f"{kind} {path.lstat().st_mode:o}"
    return entries


def _digest(path: Path) -> str:
    if not path.is_file():
        return "special"
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError:
        return "unreadable"


def faults(case: Case, code: int, errors: str, place: Place, before: dict[str, str]) -> list[str]:
    """The faults of a rejected command: exit code, message, changed files; empty if there are none."""
    found = []
    if code != case.code:
        found.append(f"exit code {code}, expected {case.code}")
    # The scores of each data set are printed as they are known, the cost of requests before the first is sent.
    lines = [line for line in errors.removesuffix("\n").split("\n") if not re.match(r"eval: |m: \d+ requests, ", line)]
    if len(lines) != 1:
        found.append(f"{len(lines)} lines on standard error")
    line = lines[-1].replace(f"{place.folder}/", "").replace(f"{place.world.root}/", "")
    if not line.startswith("error: ") or not line.isprintable():
        found.append("no printable line that starts with error:")
    if len(line) > MAX_CHARACTERS:
        found.append(f"{len(line)} characters")
    if case.says not in line:
        found.append(f"does not contain {case.says!r}")
    if not re.search(r"(; |\bdid you mean )\S", line):
        found.append("has no hint")
    after = tree(place.folder)
    if changed := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        found.append(f"changed {', '.join(changed[:5])}")
    return [*found, f"standard error: {errors[-1500:]!r}"] if found else []
