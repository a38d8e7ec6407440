"""The documents of a source as one stream of tokens on disk, made once, and the rows that it is cut into."""

import copy
import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from embeddings.common.arrays import load_array
from embeddings.common.errors import InputError, OptionError
from embeddings.common.fileio import check_manifest, write_manifest
from embeddings.data.cache import CACHE_VARIABLE, cache_folder
from embeddings.data.staging import staged_folder
from embeddings.data.text_sources import Documents, TextSource

TOKENS_FILE, STARTS_FILE = "tokens.bin", "documents.npy"
SCHEMA_VERSION = 1
_BATCH = 256
_PROGRESS_DELAY_SECONDS = 2.0


class DocumentTokenizer:
    """Documents to token ids with the tokenizer's own special tokens around them and a separator at the end.

    A special token that a document spells out (`</s>` in a source file) is read as plain characters, so separators
    are where documents end and nowhere else. Nothing is truncated.

    Args:
        tokenizer: A fast tokenizer; it is copied, so its own settings neither matter nor change.
        append_eos: Whether a document whose tokens do not end in the end-of-sequence token (or `[SEP]`) gets it.

    Raises:
        OptionError: If the tokenizer is slow, or has no token to append.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            rule = "must be a fast tokenizer"
            raise OptionError("tokenizer", type(tokenizer).__name__, rule, "save it with a tokenizer.json and use that")
        self._backend: Tokenizer = copy.deepcopy(backend)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True
        self._separator: int | None = None
        if append_eos:
            known = (tokenizer.eos_token_id, tokenizer.sep_token_id)
            self._separator = next((token for token in known if isinstance(token, int)), None)
            if self._separator is None:
                raise OptionError("data.append_eos", True, "needs a tokenizer with an eos_token", "set it to false")

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the tokens of a document."""
        content = f"{self._backend.to_str()}\0{self._separator}"
        return hashlib.sha256(content.encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each document."""
        found: list[list[int]] = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        if self._separator is not None:
            for ids in found:
                if ids[-1:] != [self._separator]:
                    ids.append(self._separator)
        return found


class TokenStream:
    """Reads what `open_stream` wrote: the tokens stay on disk, mapped into memory, and rows are computed.

    Row r holds tokens r·L … (r+1)·L - 1 of the stream, so every token is in exactly one row, and nothing is stored per
    row; per document its start is. The last row may be shorter.

    Attributes:
        key: Hash of all that decides its content.

    Raises:
        InputError: If the folder's files are not what was written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        manifest = check_manifest(folder, {"schema_version": SCHEMA_VERSION, "key": key})
        self.folder, self.key = folder, key
        self.num_tokens: int = manifest["num_tokens"]
        dtype = np.dtype(manifest["dtype"])
        try:
            self._tokens = np.memmap(folder / TOKENS_FILE, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise _damaged(folder) from error
        self._starts = load_array(folder / STARTS_FILE, "delete the folder and run again", mapped=True)
        if len(self._tokens) != self.num_tokens or len(self._starts) != manifest["num_documents"]:
            raise _damaged(folder)

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[Path, str]]:
        """The folder alone: a worker opens the files again."""
        return TokenStream, (self.folder, self.key)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._starts)

    def num_rows(self, row_length: int) -> int:
        """Rows of `row_length` tokens that hold the whole stream."""
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
    """A source as a stream of tokens; the first call for a content and a tokenizer makes it, later ones find it.

    A kill at any moment leaves no half-made folder behind; processes may call this at once.

    Raises:
        InputError: If the source cannot be read or holds no text, or the folder cannot be written.
        OptionError: If a package is not installed.
    """
    root = cache_folder(cache_dir).absolute()
    documents = Documents(source, root / "hashes")
    identity = {
        "schema_version": SCHEMA_VERSION,
        "kind": "token stream",
        "tokenizer": tokenizer.fingerprint,
        "column": source.column,
        "inputs": documents.inputs,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    if not (root / key).is_dir():
        try:
            with staged_folder(root / key) as folder:
                _write(folder, documents, tokenizer, {**identity, "key": key})
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise InputError(
                str(root), f"the cache cannot be written ({error.strerror})", f"set {CACHE_VARIABLE} to another folder"
            ) from None
    stream = TokenStream(root / key, key)
    documents.remember(root / "hashes")
    return stream


def _write(folder: Path, documents: Documents, tokenizer: DocumentTokenizer, identity: dict[str, object]) -> None:
    starts = array("q")
    total, dtype = 0, np.dtype(np.uint32)
    title = f"tokenising {documents.source.name}"
    with (
        open(folder / TOKENS_FILE, "wb") as file,
        tqdm(desc=title, unit=" documents", delay=_PROGRESS_DELAY_SECONDS) as bar,
    ):
        for texts in _batches(documents):
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


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(documents)
    while texts := list(islice(remaining, _BATCH)):
        yield texts


def _damaged(folder: Path) -> InputError:
    return InputError(str(folder), "the converted data is damaged", "delete the folder and run again")
