"""Sources converted once: a folder for each content, found again by its hash."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from embeddings.common.errors import InputError
from embeddings.common.fileio import check_manifest, write_manifest
from embeddings.common.log import logger
from embeddings.data.class_index import ClassIndex, write_class_index
from embeddings.data.conversions import Facts, convert_rows, layout, min_score, required_fields, usable_records
from embeddings.data.file_hashes import FileHash, hash_file, remember_hash
from embeddings.data.files import resolve_files
from embeddings.data.hub import HubReader, resolve_revision
from embeddings.data.readers import Reader, Row, open_reader
from embeddings.data.records import Record
from embeddings.data.sources import HUB_PREFIX, SourceConfig
from embeddings.data.staging import staged_folder
from embeddings.data.table import ROWS_FILE, Table, write_table

CACHE_VARIABLE, DEFAULT_CACHE = "EMBED_CACHE", Path(".cache/embeddings")
SCHEMA_VERSION = 2
_HASHES = "hashes"
_PROGRESS_ROWS = 1024
_PROGRESS_DELAY_SECONDS = 2.0


class CachedSource:
    """A converted source, read from its folder.

    Attributes:
        folder: Where it lies.
        key: Hash of all that decides its content.
        table: Its rows.
        inputs: What tells its files, or its Hub data set, from others.
        labels: The text of each class, by its code.
        lone_class: A class whose texts are all the same, with the file and row of its first, or None.
        longest_instruction: File and row of the longest instruction of a record's own, and that, or None.
        unused_columns: Columns that look like a field and are not used, each with the field (`Facts`).
        classes: The rows of each class, or None where the layout has none.

    Raises:
        InputError: If the folder's manifest or data is not what was written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        manifest = check_manifest(folder, {"schema_version": SCHEMA_VERSION, "key": key})
        self.folder, self.key = folder, key
        self.table = Table(folder)
        if len(self.table) != manifest["num_rows"] or (folder / ROWS_FILE).stat().st_size != manifest["num_bytes"]:
            raise InputError(str(folder), "the converted data is damaged", "delete the folder and run again")
        self.inputs: list[dict[str, Any]] = manifest["inputs"]
        self.labels: list[str] = manifest["labels"]
        self.lone_class: list[str] | None = manifest["lone_class"]
        # Sources that were converted before these were noted do not say them.
        self.longest_instruction: list[str] | None = manifest.get("longest_instruction")
        self.unused_columns: dict[str, str] = manifest.get("unused_columns") or {}
        self.classes = ClassIndex(folder) if manifest["layout"] == "labelled" else None


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where converted sources lie: the argument, else `$EMBED_CACHE`, else `.cache/embeddings` here."""
    return Path(cache_dir or os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)


def open_cached(config: SourceConfig, cache_dir: str | os.PathLike[str] | None = None) -> CachedSource:
    """A source in converted form; the first call for a content converts it, later ones find it.

    The key is a hash of the files' bytes (or the Hub data set's commit), of what the conversion stores, and of the
    schema's version. A kill at any moment leaves no half-made folder behind; processes may call this at once.

    Args:
        config: The source.
        cache_dir: Folder of converted sources (see `cache_folder`).

    Raises:
        InputError: If the source cannot be read, a row cannot be used, or the folder cannot be written.
    """
    # A worker opens the folder again, perhaps after the working directory has changed.
    root = cache_folder(cache_dir).absolute()
    files = [] if config.is_hub else [hash_file(path, root / _HASHES) for path in resolve_files(config.path)]
    identity = {
        "schema_version": SCHEMA_VERSION,
        "layout": layout(config.conversion),
        "columns": dict(sorted(config.columns.items())),
        "min_score": min_score(config) if config.conversion == "sts" else None,
        "suspect_rows": config.suspect_rows if config.conversion == "pairs" else None,
        "inputs": [{"sha256": file.sha256} for file in files] or [_hub_input(config)],
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    if not (root / key).is_dir():
        try:
            _convert(config, files, root / key, {**identity, "key": key})
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise InputError(
                str(root), f"the cache cannot be written ({error.strerror})", f"set {CACHE_VARIABLE} to another folder"
            ) from None
    cached = CachedSource(root / key, key)
    for file in files:
        remember_hash(file, root / _HASHES)
    return cached


def read_records(config: SourceConfig, cached: CachedSource) -> Iterator[Record]:
    """The records of a source of `pairs` or `sts` as their author wrote them, row by row as its converted form's.

    What converted rows leave out (`score`, `id`, `language`, the label's text) is read from the source itself.

    Raises:
        InputError: If the source can no longer be read, or is not what was converted.
    """
    for _, record in read_located_records(config, cached):
        yield record


def record_place(config: SourceConfig, cached: CachedSource, row: int) -> str:
    """File and row of a record of a source of pairs, as messages name them; the source is read up to it.

    Raises:
        InputError: If the source can no longer be read, or is not what was converted.
    """
    return next(islice(read_located_records(config, cached), row, None))[0]


def read_located_records(config: SourceConfig, cached: CachedSource) -> Iterator[tuple[str, Record]]:
    """The records as `read_records` gives them, each with its file and row for messages."""
    assert layout(config.conversion) in ("records", "scored")
    files = (
        []
        if config.is_hub
        else [hash_file(path, cached.folder.parent / _HASHES) for path in resolve_files(config.path)]
    )
    if not config.is_hub and [{"sha256": file.sha256} for file in files] != cached.inputs:
        raise InputError(f"source {config.name!r}", "its files have changed since the work began", "begin again")
    readers = _readers(config, [file.path for file in files], cached.inputs[0])
    yield from usable_records(config, _with_progress(f"reading {config.name}", readers), Facts())
    _require_current(files)


def _require_current(files: Sequence[FileHash]) -> None:
    for file in files:
        if not file.is_current():
            raise InputError(str(file.path), "the file changed while it was read", "run again when it is at rest")


def _convert(config: SourceConfig, files: Sequence[FileHash], target: Path, identity: dict[str, Any]) -> None:
    facts = Facts()
    readers = _readers(config, [file.path for file in files], identity["inputs"][0])
    with staged_folder(target) as folder:
        rows = facts.noting_columns(_with_progress(f"converting {config.name}", readers))
        num_rows = write_table(folder, convert_rows(config, rows, facts))
        facts.columns |= dict.fromkeys(name for reader in readers for name in reader.unread_columns)
        if identity["layout"] == "labelled":
            write_class_index(folder, Table(folder).labels(), len(facts.labels), facts.lone_text)
        _require_current(files)
        fields = {
            "num_rows": num_rows,
            "num_bytes": (folder / ROWS_FILE).stat().st_size,
            "labels": list(facts.labels),
            "lone_class": facts.lone_class,
            "longest_instruction": facts.longest_instruction,
            "unused_columns": facts.unused_columns(config),
            "paths": [str(file.path) for file in files],
        }
        write_manifest(folder, {**identity, **fields})
    for suspicion, count in facts.suspects.items():
        done = "left out" if config.suspect_rows == "leave_out" else "kept"
        logger.warning("source %s: in %d rows, which are %s, %s", config.name, count, done, suspicion)


def _hub_input(config: SourceConfig) -> dict[str, Any]:
    name = str(config.path).removeprefix(HUB_PREFIX)
    commit = resolve_revision(name, config.revision)
    return {"hub": name, "subset": config.subset, "split": config.split or "train", "commit": commit}


def _readers(config: SourceConfig, files: Sequence[Path], hub: dict[str, Any]) -> list[Reader]:
    if config.is_hub:
        return [HubReader(hub["hub"], hub["subset"], hub["split"], hub["commit"])]
    columns = [config.columns.get(name, name) for name in config.fields]
    required = [config.columns.get(name, name) for name in required_fields(config)]
    return [open_reader(path, columns, required) for path in files]


def _with_progress(title: str, readers: Sequence[Reader]) -> Iterator[Row]:
    """The rows of all readers, with a bar once the work takes more than a moment."""
    sizes = [reader.total_bytes for reader in readers]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with tqdm(
        total=total,
        desc=title,
        delay=_PROGRESS_DELAY_SECONDS,
        unit="row" if total is None else "B",
        unit_scale=True,
    ) as bar:
        done = 0
        for reader in readers:
            for number, row in enumerate(reader, start=1):
                yield row
                if number % _PROGRESS_ROWS == 0:
                    bar.update(_PROGRESS_ROWS if total is None else done + reader.bytes_read - bar.n)
            done += reader.bytes_read
        if total is not None:
            bar.update(total - bar.n)
