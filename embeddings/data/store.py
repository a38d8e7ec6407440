"""The cache of converted sources: one folder per source, named by the hash of its content, with an index of classes."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_folder, check_manifest, load_array, text_hash, write_manifest
from embeddings.common.jobs import progress_bar
from embeddings.common.process import is_first_process, logger
from embeddings.data.readers import Reader, Row
from embeddings.data.records import (
    PAIR_FIELDS,
    Record,
    look_alikes,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    substitute_columns,
)
from embeddings.data.sources import HASHES, Conversion, SourceConfig, SourceInputs
from embeddings.data.table import ROWS_FILE, SCORES_FILE, StoredRow, Table, damaged, write_table

CACHE_VARIABLE, DEFAULT_CACHE = "EMBED_CACHE", Path(".cache/embeddings")
SCHEMA_VERSION = 2
ORDER_FILE, OFFSETS_FILE, PAIRED_FILE = "class_order.npy", "class_offsets.npy", "class_paired.npy"
DEFAULT_MIN_SCORE = 4.0
_NUM_COLUMN_ROWS, _MAX_NAMED_SUSPECTS = 100, 3
MAX_LANGUAGES = 1 << 16
_PROGRESS_ROWS = 1024


@dataclass
class Suspects:
    """The suspect rows of a source (`Record.suspicion`): their number, and the first ones with the reason."""

    count: int = 0
    first: list[list[str]] = field(default_factory=list)

    def note(self, where: str, suspicion: str) -> None:
        self.count += 1
        if len(self.first) < _MAX_NAMED_SUSPECTS:
            self.first.append([where, suspicion])

    def __str__(self) -> str:
        named = ", ".join(f"{where} ({suspicion})" for where, suspicion in self.first)
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        what = "suspect row" if self.count == 1 else "suspect rows"
        return f"{self.count} {what}: {named}{more}"

    def check(self, config: SourceConfig) -> None:
        """Raise an `InputError` if there are suspect rows and the source refuses them."""
        if self.count and config.suspect_rows == "refuse":
            fix = "correct them, or set suspect_rows: leave_out (or keep)"
            raise InputError(f"source {config.name!r}", str(self), fix)


@dataclass
class Facts:
    """Facts about the rows, collected during a conversion. Memory grows with the number of classes, not of rows.

    Attributes:
        labels: Code of each class, by its text, in order of appearance.
        lone_text: Hash of the text of each class whose texts are all equal so far.
        first_row: File and row of the first row of each class.
        suspects: The suspect rows, kept or left out.
        longest_instruction: The longest instruction in a record, as (file and row, instruction).
        columns: Non-null columns of the first rows, in order of appearance.
        substitutes: Columns that stand in for a field of another name (`substitute_columns`), each with the field.
    """

    labels: dict[str, int] = field(default_factory=dict)
    lone_text: dict[int, int] = field(default_factory=dict)
    first_row: dict[int, str] = field(default_factory=dict)
    suspects: Suspects = field(default_factory=Suspects)
    longest_instruction: tuple[str, str] | None = None
    columns: dict[str, None] = field(default_factory=dict)
    substitutes: dict[str, str] = field(default_factory=dict)

    def code(self, label: str | None, where: str) -> int:
        """The code of a class, assigned at its first row; -1 without a class."""
        if label is None:
            return -1
        code = self.labels.setdefault(label, len(self.labels))
        self.first_row.setdefault(code, where)
        return code

    @property
    def lone_class(self) -> list[str] | None:
        """The first class whose texts are all equal, with the file and row of its first row, or None."""
        if not self.lone_text:
            return None
        code = min(self.lone_text)
        return [list(self.labels)[code], self.first_row[code]]

    def noting_columns(self, config: SourceConfig, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows, and record the columns of the first ones."""
        wanted = PAIR_FIELDS if config.conversion == "pairs" else config.fields
        for number, row in enumerate(rows):
            if number < _NUM_COLUMN_ROWS:
                self.columns |= dict.fromkeys(str(name) for name, value in row.fields.items() if value is not None)
                substitutes = {} if any(config.columns.values()) else substitute_columns(row.fields, wanted)
                self.substitutes |= {name: field for field, names in substitutes.items() for name in names}
            yield row

    def unused_columns(self, config: SourceConfig) -> dict[str, str]:
        """Unused columns whose names resemble a field of a record, each with the field; "" for a score."""
        if config.conversion != "pairs":
            return {}
        mapped = {*config.columns.values(), *self.substitutes}
        unused = look_alikes([name for name in self.columns if name not in mapped], config.fields)
        return unused | ({"score": ""} if config.columns.get("score", "score") in self.columns else {})


def layout(conversion: Conversion) -> str:
    """Layout of the stored rows; conversions with the same layout share a converted source."""
    return {"pairs": "records", "sts": "scored"}.get(conversion, "labelled")


def min_score(config: SourceConfig) -> float:
    return DEFAULT_MIN_SCORE if config.min_score is None else config.min_score


def convert_rows(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[StoredRow]:
    """The rows to store, in the order of the source; adds to `facts`."""
    convert = _convert_labelled if layout(config.conversion) == "labelled" else _convert_records
    return convert(config, rows, facts)


def usable_records(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[tuple[str, Record]]:
    """The records that training uses, each with its file and row, in the order of the source.

    A pair of `sts` with a high enough score becomes two records, one in each direction. `facts` counts suspect records,
    which are used only under `suspect_rows: keep`.
    """
    if config.conversion == "sts":
        yield from _scored_records(config, rows)
        return
    any_usable = False
    for where, fields in rows:
        record = parse_record(fields, config.columns, where)
        if suspicion := record.suspicion:
            facts.suspects.note(where, suspicion)
            if config.suspect_rows != "keep":
                continue
        any_usable = True
        yield where, record
    if not any_usable:
        what = f"no row can be used: {facts.suspects}"
        raise InputError(f"source {config.name!r}", what, "correct them, or set suspect_rows: keep")


def _convert_records(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[StoredRow]:
    for where, record in usable_records(config, rows, facts):
        texts = tuple(negative.text for negative in record.negatives)
        levels = tuple(negative.level for negative in record.negatives)
        code = facts.code(record.label, where)
        if record.instruction and len(record.instruction) > len((facts.longest_instruction or ("", ""))[1]):
            facts.longest_instruction = (where, record.instruction)
        instruction = record.instruction or ""
        yield StoredRow(record.query, record.positives, texts, levels, code, instruction, record.scores)


def _convert_labelled(config: SourceConfig, rows: Iterable[Row], facts: Facts) -> Iterator[StoredRow]:
    for where, fields in rows:
        text, label = parse_labelled_text(fields, config.columns, where)
        is_new = label not in facts.labels
        code = facts.code(label, where)
        if is_new:
            facts.lone_text[code] = text_hash(text)
        elif code in facts.lone_text and facts.lone_text[code] != text_hash(text):
            del facts.lone_text[code]
        yield StoredRow(text, label=code)


def _scored_records(config: SourceConfig, rows: Iterable[Row]) -> Iterator[tuple[str, Record]]:
    threshold, highest = min_score(config), float("-inf")
    for where, fields in rows:
        first, second, score = parse_scored_pair(fields, config.columns, where)
        highest = max(highest, score)
        if score >= threshold:
            yield where, Record(first, (second,))
            yield where, Record(second, (first,))
    if highest < threshold:
        what = f"no pair reaches the score {threshold:g} (the highest is {highest:g})"
        raise InputError(f"source {config.name!r}", what, "set min_score to the scale of the source")


def write_class_index(folder: Path, labels: NDArray[np.int32], num_classes: int, lone: Collection[int] = ()) -> None:
    """Write the row order by class, the offset of each class in it, and the rows that can have a positive.

    `lone` are classes whose texts are all equal: their rows have no positive.
    """
    np.save(folder / ORDER_FILE, np.argsort(labels, kind="stable").astype(np.int64))
    counts = np.bincount(labels, minlength=num_classes)
    np.save(folder / OFFSETS_FILE, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    np.save(folder / PAIRED_FILE, np.flatnonzero(~np.isin(labels, list(lone))).astype(np.int64))


class ClassIndex:
    """Memory-mapped index of the rows inside and outside each class; pickling stores only the folder.

    `paired` are the rows with a possible positive (another text of their class), (rows,) int64.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fix = "delete its folder and run again"
        self._order = load_array(folder / ORDER_FILE, fix, mapped=True)
        self.paired: NDArray[np.int64] = load_array(folder / PAIRED_FILE, fix, mapped=True)
        self._offsets: list[int] = load_array(folder / OFFSETS_FILE, fix).tolist()

    def __reduce__(self) -> tuple[type["ClassIndex"], tuple[Path]]:
        return ClassIndex, (self.folder,)

    def size(self, label: int) -> int:
        return self._offsets[label + 1] - self._offsets[label]

    def num_outside(self, label: int) -> int:
        return len(self._order) - self.size(label)

    def member(self, label: int, position: int) -> int:
        """The row at `position` (0 to `size` - 1) of a class."""
        return int(self._order[self._offsets[label] + position])

    def outsider(self, label: int, position: int) -> tuple[int, int]:
        """The row at `position` (0 to `num_outside` - 1) of all other classes, and its class."""
        skipped = position if position < self._offsets[label] else position + self.size(label)
        return int(self._order[skipped]), bisect_right(self._offsets, skipped) - 1


class CachedSource:
    """A converted source, read from its folder. The manifest stores the fields of `Facts`.

    Attributes:
        key: Hash of the inputs and the settings.
        table: The rows.
        inputs: Identity of the files, or of the Hub data set (see `SourceInputs`).
        settings: Settings of the conversion, in JSON types.
        labels: The text of each class, by code.
        lone_class: A class whose texts are all equal, with the file and row of its first row, or None.
        longest_instruction: The longest instruction in a record, as [file and row, instruction], or None.
        unused_columns: Unused columns whose names resemble a field, each with the field.
        classes: The index of classes, or None in a layout without classes.
    """

    def __init__(self, folder: Path, key: str) -> None:
        manifest = check_manifest(folder, {"schema_version": SCHEMA_VERSION, "key": key})
        self.folder, self.key = folder, key
        self.table = Table(folder)
        if len(self.table) != manifest["num_rows"] or _num_bytes(folder) != {
            name: manifest[name] for name in ("num_bytes", "num_score_bytes") if name in manifest
        }:
            raise damaged(folder)
        self.inputs: list[dict[str, Any]] = manifest["inputs"]
        settings = ("layout", "columns", "min_score", "suspect_rows")
        self.settings: dict[str, Any] = {name: manifest[name] for name in settings if name in manifest}
        self.labels: list[str] = manifest["labels"]
        self.lone_class: list[str] | None = manifest["lone_class"]
        # Manifests of older versions lack these fields.
        self.longest_instruction: list[str] | None = manifest.get("longest_instruction")
        self.unused_columns: dict[str, str] = manifest.get("unused_columns") or {}
        self.suspects = Suspects(**manifest.get("suspects", {}))
        self.classes = ClassIndex(folder) if manifest["layout"] == "labelled" else None


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Folder of converted sources: the argument, else `$EMBED_CACHE`, else `.cache/embeddings`."""
    return Path(cache_dir or os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)


@contextlib.contextmanager
def borrowed_cache(cache_dir: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """A temporary cache that links to the sources of `cache_dir`; new conversions are deleted with it."""
    root = cache_folder(cache_dir).absolute()
    with tempfile.TemporaryDirectory() as folder:
        for path in root.iterdir() if root.is_dir() else ():
            if path.name == HASHES:
                shutil.copytree(path, Path(folder) / HASHES)
            elif path.is_dir() and not path.name.startswith("."):
                (Path(folder) / path.name).symlink_to(path)
        yield folder


def converted_folder(root: Path, identity: Mapping[str, Any], write: Callable[[Path, dict[str, Any]], None]) -> str:
    """Write the folder of an identity in `root` if it does not exist; returns its key.

    `write` is called with the folder and the identity with its key. The folder appears only when it is complete, and
    several processes may call this at the same time.
    """
    key = content_key(identity)
    if not (root / key).is_dir():
        with writing_cache(root), atomic_folder(root / key) as folder:
            write(folder, {**identity, "key": key})
    return key


@contextlib.contextmanager
def writing_cache(root: Path) -> Iterator[None]:
    """Turn errors of writing the cache into an `InputError` whose hint is to choose another folder."""
    try:
        yield
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        what = f"the cache cannot be written ({error.strerror})"
        raise InputError(str(root), what, f"set {CACHE_VARIABLE} to another folder") from None


def content_key(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def open_cached(config: SourceConfig, cache_dir: str | os.PathLike[str] | None = None) -> CachedSource:
    """Open a converted source; the first call for a content converts it.

    The key is a hash of the file contents (or the commit of the Hub data set), the settings of the conversion, and the
    schema version.
    """
    # Absolute, because a worker opens the folder again, possibly in another working directory.
    root = cache_folder(cache_dir).absolute()
    inputs = SourceInputs(config, root)
    identity = {
        "schema_version": SCHEMA_VERSION,
        "layout": layout(config.conversion),
        "columns": dict(sorted(config.columns.items())),
        "min_score": min_score(config) if config.conversion == "sts" else None,
        "suspect_rows": None,
        "inputs": inputs.identity,
    }
    if config.conversion == "pairs":
        # A refused source is not stored, so `leave_out` shares the key of `refuse`. Older versions used two keys.
        separate = {**identity, "suspect_rows": config.suspect_rows}
        is_separate = config.suspect_rows == "keep" or (root / content_key(separate)).is_dir()
        identity = separate if is_separate else {**identity, "suspect_rows": "refuse"}
    key = converted_folder(root, identity, partial(_convert, config, inputs))
    cached = CachedSource(root / key, key)
    inputs.remember()
    cached.suspects.check(config)
    if cached.suspects.count and is_first_process():
        done, other = ("kept", "leave_out") if config.suspect_rows == "keep" else ("left out", "keep or refuse")
        logger.warning("source %s: %s; %s (else suspect_rows: %s)", config.name, cached.suspects, done, other)
    return cached


def read_records(config: SourceConfig, cached: CachedSource) -> Iterator[tuple[str, Record]]:
    """The complete records of a source of `pairs` or `sts`, with file and row, in the order of the table.

    They are read from the source again, because converted rows lack `score`, `id`, `language` and the label text.
    """
    assert layout(config.conversion) in ("records", "scored")
    inputs = SourceInputs(config, cached.folder.parent, cached.inputs[0].get("commit"))
    if not config.is_hub and inputs.identity != cached.inputs:
        raise InputError(f"source {config.name!r}", "its files have changed since the job started", "start again")
    rows = _with_progress(f"reading {config.name}", _readers(config, inputs))
    yield from usable_records(config, rows, Facts())
    inputs.require_unchanged()


def record_place(config: SourceConfig, cached: CachedSource, row: int) -> str:
    """File and row of a record, for messages; reads the source up to that record."""
    return next(islice(read_records(config, cached), row, None))[0]


def _convert(config: SourceConfig, inputs: SourceInputs, folder: Path, identity: dict[str, Any]) -> None:
    facts = Facts()
    readers = _readers(config, inputs)
    rows = facts.noting_columns(config, _with_progress(f"converting {config.name}", readers))
    num_rows = write_table(folder, convert_rows(config, rows, facts))
    facts.suspects.check(config)
    facts.columns |= dict.fromkeys(name for reader in readers for name in reader.unread_columns)
    if identity["layout"] == "labelled":
        write_class_index(folder, Table(folder).labels(), len(facts.labels), facts.lone_text)
    inputs.require_unchanged()
    if facts.substitutes:
        used = ", ".join(f"{name} as {field}" for name, field in facts.substitutes.items())
        logger.info("source %s: columns used: %s", config.name, used)
    fields = {
        "num_rows": num_rows,
        **_num_bytes(folder),
        "labels": list(facts.labels),
        "lone_class": facts.lone_class,
        "longest_instruction": facts.longest_instruction,
        "unused_columns": facts.unused_columns(config),
        "suspects": asdict(facts.suspects),
        "paths": inputs.paths,
    }
    write_manifest(folder, {**identity, **fields})


def _num_bytes(folder: Path) -> dict[str, int]:
    """The sizes of the files of rows and scores (if there are any), by manifest field."""
    files = {"num_bytes": folder / ROWS_FILE, "num_score_bytes": folder / SCORES_FILE}
    return {name: path.stat().st_size for name, path in files.items() if path.exists()}


def _readers(config: SourceConfig, inputs: SourceInputs) -> list[Reader]:
    required = ("query", "positive") if config.conversion == "pairs" else config.fields
    columns = [[config.columns.get(name) or name for name in names] for names in (config.fields, required)]
    return inputs.readers(*columns)


def _with_progress(title: str, readers: Sequence[Reader]) -> Iterator[Row]:
    """The rows of all readers, with a progress bar."""
    sizes = [reader.total_bytes for reader in readers]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with progress_bar(total, title, "row" if total is None else "B", unit_scale=True) as bar:
        done = 0
        for reader in readers:
            for number, row in enumerate(reader, start=1):
                yield row
                if number % _PROGRESS_ROWS == 0:
                    bar.update(_PROGRESS_ROWS if total is None else done + reader.bytes_read - bar.n)
            done += reader.bytes_read
        if total is not None:
            bar.update(total - bar.n)


def read_languages(config: SourceConfig, cached: CachedSource) -> NDArray[np.uint16]:
    """The language code of each row, numbered by first appearance, (rows,)."""
    code_N = np.empty(len(cached.table), np.uint16)
    codes: dict[str, int] = {}
    for row, (where, record) in enumerate(read_records(config, cached)):
        if record.language is None:
            fix = "give every record one, or map it with columns: {language: YOUR_COLUMN}"
            raise InputError(where, "the record has no language", fix)
        code = codes.setdefault(record.language, len(codes))
        if code == MAX_LANGUAGES:
            what = f"language {record.language[:40]!r} exceeds the maximum of {MAX_LANGUAGES} languages"
            raise InputError(where, what, "map the field language to the column of the language")
        code_N[row] = code
    return code_N
