"""Where plain texts come from: files of records, data sets of the Hub, or the source code of installed packages."""

import hashlib
import io
import math
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError, OptionError
from embeddings.data.docstrings import HELD_OUT_PACKAGES, TRAINING_PACKAGES
from embeddings.data.docstrings.sources import SourceFile, find_sources, is_available, require_available
from embeddings.data.file_hashes import FileHash, hash_file, remember_hash
from embeddings.data.files import resolve_files
from embeddings.data.hub import HubReader, resolve_revision
from embeddings.data.readers import Reader, open_reader
from embeddings.data.records import kind_of
from embeddings.data.sources import HUB_PREFIX

# Names that stand for lists of packages.
PACKAGE_LISTS = {"training": TRAINING_PACKAGES, "held_out": HELD_OUT_PACKAGES}


@dataclass(frozen=True)
class TextSource:
    """One source of plain texts, one document a record or a source file.

    Args:
        name: Name in messages, unique in a run.
        path: File, glob, list of these, or `hub:organisation/name`. Environment variables are filled in. A file is
            JSON lines, plain or gzipped, or Parquet; its content decides, not its name.
        packages: In place of `path`: installed packages as one imports them, `stdlib` for the standard library,
            `training` and `held_out` for the packages of the docstring corpus that are installed. None is imported.
        column: Column that holds the text. Records whose text is empty or white space are passed over.
        subset: Configuration of a Hub data set.
        split: Split of a Hub data set, `train` where none is given.
        revision: Branch, tag or commit of a Hub data set.
        weight: Share of this source where the sampler's proportions are given, > 0, relative to the others.

    Raises:
        OptionError: If a value is impossible or cannot take effect.
    """

    name: str
    path: str | list[str] | None = None
    packages: list[str] | None = None
    column: str = "text"
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise OptionError("data.sources.name", self.name, "must not be empty", "name the source")
        if bool(self.path) == bool(self.packages):
            given = "both" if self.path else "neither"
            raise self._fault("path", given, "or packages must be given", "give exactly one of the two")
        if self.is_hub and not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?", str(self.path)):
            raise self._fault("path", self.path, "is no name of a Hub data set", "write hub:organisation/name")
        if isinstance(self.path, list) and any(part.startswith(HUB_PREFIX) for part in self.path):
            raise self._fault("path", self.path, "lists a Hub data set", "give each Hub data set its own source")
        for option in ("subset", "split", "revision"):
            if (value := getattr(self, option)) is not None and not self.is_hub:
                raise self._fault(option, value, "has a meaning for Hub data sets only", "leave it out")
        if self.packages and self.column != "text":
            raise self._fault("column", self.column, "has no meaning for packages", "leave it out")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise self._fault("weight", self.weight, "must be a finite number > 0", "leave the source out to skip it")

    @property
    def is_hub(self) -> bool:
        """Whether the source is a Hub data set."""
        return isinstance(self.path, str) and self.path.startswith(HUB_PREFIX)

    def check(self) -> None:
        """Check that what the source names is there, without reading it; the Hub is not asked.

        Raises:
            InputError: If a file is missing.
            OptionError: If a package is not installed.
        """
        if self.packages:
            for package in _packages(self.packages):
                require_available(package)
        elif not self.is_hub:
            assert self.path is not None
            resolve_files(self.path)

    def _fault(self, option: str, value: object, rule: str, fix: str) -> OptionError:
        return OptionError(f"data.sources[{self.name}].{option}", value, rule, fix)


class Documents:
    """The documents of a source, in an order that the source alone decides, and what tells its content from others.

    Attributes:
        inputs: Hashes of the files, the commit of the Hub data set, or the hash of the packages' files.

    Args:
        source: The source.
        memory: Folder of remembered file hashes.

    Raises:
        InputError: If a file or the Hub cannot be read.
        OptionError: If a package is not installed.
    """

    def __init__(self, source: TextSource, memory: Path) -> None:
        self.source = source
        self.inputs: list[dict[str, Any]]
        self._files: list[FileHash] = []
        self._modules: list[SourceFile] = []
        if source.packages:
            self._modules = [file for package in _packages(source.packages) for file in find_sources(package)]
            self.inputs = [{"packages": _digest(self._modules)}]
        elif source.is_hub:
            name = str(source.path).removeprefix(HUB_PREFIX)
            commit = resolve_revision(name, source.revision)
            self.inputs = [{"hub": name, "subset": source.subset, "split": source.split or "train", "commit": commit}]
        else:
            assert source.path is not None
            self._files = [hash_file(path, memory) for path in resolve_files(source.path)]
            self.inputs = [{"sha256": file.sha256} for file in self._files]

    def __iter__(self) -> Iterator[str]:
        """The texts, without those that are empty or white space.

        Raises:
            InputError: At the first record without a text in its column; the message names file and row.
        """
        texts = _module_texts(self._modules) if self.source.packages else self._record_texts()
        return (text for text in texts if text.strip())

    def require_unchanged(self) -> None:
        """Check that the files are what they were when they were hashed.

        Raises:
            InputError: If one is not.
        """
        for file in self._files:
            if not file.is_current():
                raise InputError(str(file.path), "the file changed while it was read", "run again when it is at rest")

    def remember(self, memory: Path) -> None:
        """Note the files' hashes, so that the next run need not read them whole."""
        for file in self._files:
            remember_hash(file, memory)

    def _record_texts(self) -> Iterator[str]:
        column, readers = self.source.column, self._readers()
        for reader in readers:
            for where, fields in reader:
                if column not in fields:
                    names = ", ".join(map(str, fields))[:80]
                    raise InputError(where, f"no column {column!r} among {names}", "set column in the source")
                text = fields[column]
                if not isinstance(text, str):
                    what = f"{column} is {kind_of(text)}, expected text"
                    raise InputError(where, what, "mend the record, or leave it out")
                yield text

    def _readers(self) -> list[Reader]:
        if self.source.is_hub:
            (hub,) = self.inputs
            return [HubReader(hub["hub"], hub["subset"], hub["split"], hub["commit"])]
        column = self.source.column
        return [open_reader(file.path, [column], [column]) for file in self._files]


def _packages(names: Sequence[str]) -> list[str]:
    """The packages that the names stand for, each once, in the order given."""
    found: dict[str, None] = {}
    for name in names:
        listed = [package for package in PACKAGE_LISTS.get(name, ()) if is_available(package)]
        found |= dict.fromkeys(listed if name in PACKAGE_LISTS else [name])
    return list(found)


def _module_texts(modules: Sequence[SourceFile]) -> Iterator[str]:
    """The source files as text, in the encoding that their first lines declare; one that breaks it is left out."""
    for module in modules:
        content = module.path.read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            yield content.decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError):
            continue


def _digest(modules: Sequence[SourceFile]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        content = module.path.read_bytes()
        digest.update(f"{module.module}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
