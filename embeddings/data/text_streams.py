"""Plain texts: where they come from (files, the Hub, packages), and their tokens as one stream on disk."""

import hashlib
import io
import os
import tokenize
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import check_manifest, load_array, write_manifest
from embeddings.common.jobs import progress_bar
from embeddings.data.docstrings import HELD_OUT_PACKAGES, TRAINING_PACKAGES
from embeddings.data.docstrings.extract import SourceFile, find_sources, is_available, require_available
from embeddings.data.records import kind_of
from embeddings.data.sources import Origin, SourceInputs
from embeddings.data.store import cache_folder, converted_folder
from embeddings.data.table import damaged
from embeddings.data.tokenize import copied_backend

# Names that stand for lists of packages.
PACKAGE_LISTS = {"training": TRAINING_PACKAGES, "held_out": HELD_OUT_PACKAGES}


@dataclass(frozen=True)
class TextSource(Origin):
    """One source of plain texts, one document a record or a source file.

    Args:
        name: Name in messages, unique in a run.
        path: File, glob, list of these, or `hub:organisation/name`. Environment variables are filled in. A file is
            Parquet, JSON lines or a table, as of `SourceConfig`.
        packages: In place of `path`: installed packages as one imports them, `stdlib` for the standard library,
            `training` and `held_out` for the packages of the docstring corpus that are installed. None is imported.
        column: Column that holds the text. Records whose text is empty or white space are passed over.
        subset: Configuration of a Hub data set.
        split: Split of a Hub data set, `train` where none is given.
        revision: Branch, tag or commit of a Hub data set.
        weight: Share of this source where the sampler's proportions are given, > 0, relative to the others.
        max_rows: Maximum documents, the first so many; None for all.

    Raises:
        OptionError: If a value is impossible or cannot take effect.
    """

    path: str | list[str] | None = None
    packages: list[str] | None = None
    column: str = "text"
    max_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.path) == bool(self.packages):
            given = "both" if self.path else "neither"
            raise self.fault("path", given, "or packages must be given", "give exactly one of the two")
        if self.packages and self.column != "text":
            raise self.fault("column", self.column, "has no meaning for packages", "leave it out")
        if self.max_rows is not None and self.max_rows < 1:
            raise self.fault("max_rows", self.max_rows, "must be >= 1", "leave it out for all")

    def check(self) -> None:
        """Raise an `OptionError` if a package is not installed; `check_files` checks files."""
        for package in _packages(self.packages or []):
            require_available(package)


class Documents(SourceInputs):
    """The documents of a source, in an order that it alone decides; `identity` may be the packages' hash too."""

    def __init__(self, source: TextSource, root: Path) -> None:
        super().__init__(source, root)
        self.source = source
        self._modules = [file for package in _packages(source.packages or []) for file in find_sources(package)]
        if source.packages:
            self.identity = [{"packages": _digest(self._modules)}]

    def __iter__(self) -> Iterator[str]:
        texts = _module_texts(self._modules) if self.source.packages else self._record_texts()
        return islice((text for text in texts if text.strip()), self.source.max_rows)

    def _record_texts(self) -> Iterator[str]:
        column = self.source.column
        for reader in self.readers([column], [column]):
            for where, fields in reader:
                if column not in fields:
                    names = ", ".join(map(str, fields))[:80]
                    raise InputError(where, f"no column {column!r} among {names}", "set column in the source")
                text = fields[column]
                if not isinstance(text, str):
                    what = f"{column} is {kind_of(text)}, expected text"
                    raise InputError(where, what, "mend the record, or leave it out")
                yield text


def _packages(names: Sequence[str]) -> list[str]:
    """The packages that the names stand for, each once, in the order given."""
    listed = {name: filter(is_available, packages) for name, packages in PACKAGE_LISTS.items()}
    return list(dict.fromkeys(package for name in names for package in listed.get(name, [name])))


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


TOKENS_FILE, STARTS_FILE = "tokens.bin", "documents.npy"
SCHEMA_VERSION = 1
_BATCH = 256


class DocumentTokenizer:
    """Documents to token ids with the tokenizer's own special tokens around them and, on request, a separator behind.

    A special token that a document spells out (`</s>` in a source file) is read as plain characters, so separators
    are where documents end and nowhere else. Nothing is truncated.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> None:
        self._backend = copied_backend(tokenizer)
        self._backend.encode_special_tokens = True
        self._separator: int | None = None
        if append_eos:
            known = (tokenizer.eos_token_id, tokenizer.sep_token_id)
            self._separator = next((token for token in known if isinstance(token, int)), None)
            if self._separator is None:
                raise OptionError("data.append_eos", True, "needs a tokenizer with an eos_token", "set it to false")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._backend.to_str()}\0{self._separator}".encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        if self._separator is not None:
            for ids in found:
                if ids[-1:] != [self._separator]:
                    ids.append(self._separator)
        return found


class TokenStream:
    """Reads what `open_stream` wrote: the tokens stay on disk, mapped into memory, and rows are computed.

    Row r holds tokens r·L … (r+1)·L - 1 of the stream, so every token is in exactly one row; the last may be shorter.
    Nothing is stored per row; per document its start is.
    """

    def __init__(self, folder: Path, key: str) -> None:
        manifest = check_manifest(folder, {"schema_version": SCHEMA_VERSION, "key": key})
        self.folder, self.key = folder, key
        self.num_tokens: int = manifest["num_tokens"]
        dtype = np.dtype(manifest["dtype"])
        try:
            self._tokens = np.memmap(folder / TOKENS_FILE, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise damaged(folder) from error
        self._starts = load_array(folder / STARTS_FILE, "delete the folder and run again", mapped=True)
        if len(self._tokens) != self.num_tokens or len(self._starts) != manifest["num_documents"]:
            raise damaged(folder)

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[Path, str]]:
        return TokenStream, (self.folder, self.key)

    def num_rows(self, row_length: int) -> int:
        return -(-self.num_tokens // row_length)

    def row(self, index: int, row_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens of a row and which document of the row each is of, from 0; each (n,) int64, n <= row_length."""
        start = index * row_length
        stop = min(start + row_length, self.num_tokens)
        assert 0 <= start < stop
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        inner = np.asarray(self._starts[first + 1 : last + 1], dtype=np.int64)
        document = np.searchsorted(inner, np.arange(start, stop), side="right")
        return self._tokens[start:stop].astype(np.int64), document.astype(np.int64)


def open_stream(
    source: TextSource, tokenizer: DocumentTokenizer, cache_dir: str | os.PathLike[str] | None = None
) -> TokenStream:
    """A source as a stream of tokens; the first call for a content and a tokenizer makes it, later ones find it."""
    root = cache_folder(cache_dir).absolute()
    documents = Documents(source, root)
    identity = {
        "schema_version": SCHEMA_VERSION,
        "kind": "token stream",
        "tokenizer": tokenizer.fingerprint,
        "column": source.column,
        "inputs": documents.identity,
    }
    if source.max_rows is not None:
        identity["max_rows"] = source.max_rows
    key = converted_folder(root, identity, partial(_write, documents, tokenizer))
    stream = TokenStream(root / key, key)
    documents.remember()
    return stream


def _write(documents: Documents, tokenizer: DocumentTokenizer, folder: Path, identity: dict[str, object]) -> None:
    starts = array("q")
    total, dtype = 0, np.dtype(np.uint32)
    title = f"tokenising {documents.source.name}"
    with open(folder / TOKENS_FILE, "wb") as file, progress_bar(None, title, " documents") as bar:
        remaining = iter(documents)
        while texts := list(islice(remaining, _BATCH)):
            for ids in tokenizer(texts):
                if ids:
                    starts.append(total)
                    total += len(ids)
                    file.write(np.asarray(ids, dtype=dtype).tobytes())
            bar.update(len(texts))
    documents.require_unchanged()
    if total == 0:
        raise InputError(f"source {documents.source.name!r}", "holds no text", "give another, or leave it out")
    np.save(folder / STARTS_FILE, np.frombuffer(starts, dtype=np.int64))
    fields = {"num_tokens": total, "num_documents": len(starts), "dtype": dtype.str}
    write_manifest(folder, {**identity, **fields})
