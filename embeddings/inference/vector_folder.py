"""Vectors on disk: storage formats, shards, and a corpus file encoded by a resumable job on one or more devices."""

import json
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from json.encoder import encode_basestring_ascii as quoted
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError, require_minimum, shown
from embeddings.common.io import (
    MANIFEST,
    atomic_path,
    check_disk_space,
    check_file,
    check_manifest,
    check_regular,
    check_vectors,
    file_sha256,
    load_array,
    read_json_or_empty,
    write_text,
)
from embeddings.common.jobs import ArrayTask, ShardedJob, save_array, shard_rows, spread
from embeddings.common.process import tune_malloc
from embeddings.common.progress import progress_bar
from embeddings.common.text import PromptChoice, TextRole, shorten
from embeddings.common.types import TokenBatch
from embeddings.data.readers import open_reader, rows_of
from embeddings.data.records import kind_of
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.encoder import CONTEXT_FILE, Context, Encoder, model_fields, text_blocks, unit_rows

VectorFormat = Literal["float32", "float16", "int8", "binary"]
VECTOR_FORMATS: tuple[VectorFormat, ...] = get_args(VectorFormat)
# Rows of a shard that are read and compared at a time.
DOCUMENT_TILE = 16384
ENCODE_AGAIN = "delete the folder and encode again"
_MAX_CODE = 127
# Texts per shard; an interruption loses the current shard.
SHARD_SIZE, SLOW_SHARD_SIZE = 8192, 1024
_MANY_PARAMETERS = 10**9
COLUMNS = ("_id", "title", "text")


class Document(NamedTuple):
    """A document: its id, unique in the corpus, and the text to encode, title and text joined by a space."""

    document_id: str
    text: str


def read_corpus(
    path: str | PathLike[str], columns: Mapping[str, str] | None = None, show_progress: bool = False
) -> Iterator[Document]:
    """The documents of a JSONL file, gzipped or not, or of a Parquet file.

    A row has `_id`, `title` and `text` as in BEIR; only `text` is required. `id` is used where there is no `_id`, and
    the row number, from 0, where there is neither. `columns` maps these fields to other names. `show_progress` draws a
    bar. An `InputError` names file and row of an invalid row, and, after the last row, of a repeated id, or a column of
    `columns` that no row has.
    """
    hashes = array("q")
    for _, document in _corpus_rows(path, columns, show_progress):
        hashes.append(hash(document.document_id))
        yield document
    hash_N, seen = np.frombuffer(hashes, np.int64), set[str]()
    hash_N.sort()
    repeated = set(hash_N[1:][hash_N[1:] == hash_N[:-1]].tolist())
    for where, document in _corpus_rows(path, columns) if repeated else ():
        if hash(document.document_id) in repeated and document.document_id in seen:
            what = f"the id {shown(document.document_id)} occurs a second time"
            raise InputError(where, what, "make the ids unique")
        if hash(document.document_id) in repeated:
            seen.add(document.document_id)


def _corpus_rows(
    path: str | PathLike[str], columns: Mapping[str, str] | None = None, show_progress: bool = False
) -> Iterator[tuple[str, Document]]:
    """The documents of a file, each with its place for messages."""
    named = check_columns(columns)
    id_column, title_column, text_column = (named.get(name, name) for name in COLUMNS)
    id_columns = (id_column,) if id_column != "_id" or "id" in (title_column, text_column) else ("_id", "id")
    reader = open_reader(Path(path), (*id_columns, title_column, text_column), (text_column,))
    missing = {*named.values()}
    for number, (where, fields) in enumerate(rows_of(f"reading {path}", [reader]) if show_progress else reader):
        missing -= fields.keys()
        column = id_columns[0] if id_columns[0] in fields else id_columns[-1]
        document_id = identifier_field(where, fields, column) if column in fields else str(number)
        text = text_field(where, fields, text_column)
        if fields.get(title_column) is not None:
            title = text_field(where, fields, title_column)
            text = f"{title} {text}" if title and text else title or text
        yield where, Document(document_id, text)
    for column in sorted(missing):
        raise InputError(str(path), f"no row has the column {column!r}", "correct its name in --columns")


def check_columns(columns: Mapping[str, str] | None) -> dict[str, str]:
    """The columns by field; an `OptionError` for an unknown field."""
    if unknown := next((name for name in columns or () if name not in COLUMNS), None):
        raise OptionError("columns", unknown, "must map _id, title or text to a column", "write {text: COLUMN}")
    return dict(columns or {})


def text_field(where: str, fields: Mapping[str, Any], name: str) -> str:
    """The text in a field of a row, which may be empty."""
    value = fields.get(name)
    if not isinstance(value, str):
        if name not in fields:
            present = shorten(", ".join(map(str, fields)), 80) or "none"
            raise InputError(where, f"field {name!r} is missing (found: {present})", "add it")
        fix = "give it a text, or leave the row out" if value is None else "write it in quotes"
        raise InputError(where, f"field {name!r} is {kind_of(value)}, expected text", fix)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(where, f"field {name!r} contains a lone surrogate", "write the file again as UTF-8") from None
    return value


def identifier_field(where: str, fields: Mapping[str, Any], name: str) -> str:
    """The id in a field of a row, an integer converted to text."""
    if isinstance(fields.get(name), int) and not isinstance(fields[name], bool):
        return str(fields[name])
    value = text_field(where, fields, name)
    if not value.strip():
        raise InputError(where, f"field {name!r} is empty", "give the row an id")
    return value


def require_format(vector_format: VectorFormat, embedding_dim: int) -> None:
    """Check that a format exists, and that vectors of this width can be stored in it."""
    if vector_format not in VECTOR_FORMATS:
        raise OptionError("vector_format", vector_format, f"must be one of {', '.join(VECTOR_FORMATS)}", "use float32")
    if vector_format == "binary" and embedding_dim % 8:
        rule = f"needs vectors whose width is a multiple of 8, these have {embedding_dim}"
        raise OptionError("vector_format", vector_format, rule, "use int8, or truncate the vectors with dimensions")


def stored_type(vector_format: VectorFormat, embedding_dim: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype of stored vectors, and the shape of a row; int8 is a record of `scale` and `codes`."""
    match vector_format:
        case "float32" | "float16":
            return np.dtype(vector_format), (embedding_dim,)
        case "int8":
            return np.dtype([("scale", "<f4"), ("codes", "i1", (embedding_dim,))]), ()
        case "binary":
            return np.dtype(np.uint8), (embedding_dim // 8,)


def bytes_per_vector(vector_format: VectorFormat, embedding_dim: int) -> int:
    dtype, shape = stored_type(vector_format, embedding_dim)
    return int(dtype.itemsize * np.prod(shape, dtype=np.int64))


def stored_rows(
    vector_ND: npt.NDArray[np.float32], vector_format: VectorFormat, where: str, first_row: int = 0
) -> npt.NDArray[Any]:
    """Convert vectors, (N, D) float32, to their stored form, (N, ...) of `stored_type`; float32 is not copied.

    int8 is symmetric with one scale per row: scale = max |x| / 127, code = x / scale, rounded to nearest. One scale per
    dimension, calibrated on the first 1,000 rows, preserves the order less well (E13). An `InputError` names `where`
    and the row of a vector that is zero, not finite, or outside the range of float16.
    """
    check_vectors(vector_ND, where, first_row)
    match vector_format:
        case "float32":
            return vector_ND
        case "float16":
            with np.errstate(over="ignore", under="ignore"):
                half_ND = vector_ND.astype(np.float16)
            bad_n = np.flatnonzero(~np.isfinite(half_ND).all(axis=1) | ~half_ND.any(axis=1))
            if bad_n.size:
                what = "the vector has numbers too large or too small for float16"
                hint = "encode with vector_format float32 or int8"
                raise InputError(f"{where}:{first_row + int(bad_n[0])}", what, hint)
            return half_ND
        case "int8":
            rows_N = np.empty(len(vector_ND), stored_type(vector_format, vector_ND.shape[1])[0])
            rows_N["scale"] = np.abs(vector_ND).max(axis=1) / _MAX_CODE
            rows_N["codes"] = np.rint(vector_ND / rows_N["scale"][:, None])
            return rows_N
        case "binary":
            return sign_bits(vector_ND)


def float_rows(stored: npt.NDArray[Any], vector_format: VectorFormat) -> npt.NDArray[np.float32]:
    """Convert stored vectors to float32, (N, D): scale x code for int8, -1 or 1 for binary; float32 is not copied."""
    match vector_format:
        case "float32":
            rows: npt.NDArray[np.float32] = stored
        case "float16":
            rows = stored.astype(np.float32)
        case "int8":
            rows = stored["codes"] * stored["scale"][:, None]
        case "binary":
            rows = 2 * np.unpackbits(stored, axis=1).astype(np.float32) - 1
    return rows


def sign_bits(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The signs of vectors, packed: bit 1 where a number is above 0, (N, D / 8) uint8."""
    return np.packbits(vector_ND > 0, axis=1)


@dataclass(frozen=True)
class VectorShards:
    """The shards `vectors-<i>.npy` of a folder; row numbers run through all shards.

    Every shard except the last has `shard_size` of the `num_rows` vectors of width D.
    """

    folder: Path
    num_rows: int
    embedding_dim: int
    shard_size: int
    vector_format: VectorFormat = "float32"

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.shard_size)

    def path(self, shard: int) -> Path:
        return self.folder / f"vectors-{shard:05d}.npy"

    def rows(self, shard: int) -> range:
        return shard_rows(shard, self.shard_size, self.num_rows)

    def stored(self, shard: int) -> npt.NDArray[Any]:
        """A shard as stored, memory-mapped, (n, ...) of `stored_type`."""
        dtype, row_shape = stored_type(self.vector_format, self.embedding_dim)
        path, shape = self.path(shard), (len(self.rows(shard)), *row_shape)
        array: npt.NDArray[Any] = load_array(path, ENCODE_AGAIN, mapped=True)
        if array.shape != shape or array.dtype != dtype:
            what = f"is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}"
            raise InputError(str(path), what, ENCODE_AGAIN)
        return array

    def load(self, shard: int) -> npt.NDArray[np.float32]:
        """The vectors of a shard, (n, D) float32: memory-mapped if stored as float32, else a copy."""
        return float_rows(self.stored(shard), self.vector_format)

    def take(self, row_N: npt.NDArray[np.int64], unit: bool = True) -> npt.NDArray[np.float32]:
        """The vectors at `row_N`, in that order, (N, D) float32; each shard with such a row is read once.

        An `InputError` names shard and row of a vector that is zero, not finite or, with `unit`, not of unit length.
        """
        vector_ND = np.empty((len(row_N), self.embedding_dim), dtype=np.float32)
        order_N = np.argsort(row_N, kind="stable")
        shard_N = row_N[order_N] // self.shard_size
        for start, stop in pairwise(np.flatnonzero(np.diff(shard_N, prepend=-1, append=-1))):
            shard, index_n = int(shard_N[start]), order_N[start:stop]
            row_n = row_N[index_n] % self.shard_size
            vector_nD = float_rows(self.stored(shard)[row_n], self.vector_format)
            check_vectors(vector_nD, str(self.path(shard)), unit=unit, row_N=row_n)
            vector_ND[index_n] = vector_nD
        return vector_ND

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors of each shard, in order, (n, D) float32."""
        return map(self.load, range(self.num_shards))


@dataclass(frozen=True)
class VectorFolder:
    """A folder written by `encode_corpus`.

    Shard `i` is `vectors-<i>.npy`, n rows of `stored_type`, and `documents-<i>.jsonl`, `{"_id", "text"}`.
    """

    path: Path
    num_documents: int
    embedding_dim: int
    shard_size: int
    vector_format: VectorFormat = "float32"

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        fields = check_manifest(path, {"kind": "vectors", "complete": True})
        sizes = {name: fields.integer(name, minimum=1) for name in ("num_documents", "embedding_dim", "shard_size")}
        return cls(Path(path), **sizes, vector_format=fields["vector_format"])

    def require_format(self, *formats: VectorFormat, use: str) -> None:
        """Refuse a folder whose vectors are not stored in one of `formats`; `use` names what needs them."""
        if self.vector_format not in formats:
            what = f"has {self.vector_format} vectors, but {use} needs {' or '.join(formats)}"
            raise InputError(str(self.path), what, f"encode into another folder with --vector-format {formats[0]}")

    @property
    def shards(self) -> VectorShards:
        return VectorShards(self.path, self.num_documents, self.embedding_dim, self.shard_size, self.vector_format)

    def directions(self) -> Iterator[npt.NDArray[np.float32]]:
        return map(unit_rows, self.tiles())

    def tiles(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors in blocks of at most 16,384; an `InputError` names a zero or non-finite one."""
        for shard in range(self.shards.num_shards):
            stored = self.shards.stored(shard)
            for start in range(0, len(stored), DOCUMENT_TILE):
                vector_nD = float_rows(stored[start : start + DOCUMENT_TILE], self.vector_format)
                check_vectors(vector_nD, str(self.shards.path(shard)), start)
                yield vector_nD

    def context(self) -> Context | None:
        """The context that the vectors were encoded with, if any; queries must be encoded with it too."""
        return Context.read(self.path)

    def texts(self) -> Iterator[str]:
        """The texts of all documents, in order; one shard of them is in memory."""
        for shard in range(self.shards.num_shards):
            yield from (document.text for document in self.documents(self.shards.rows(shard)))

    def documents(self, rows: Sequence[int]) -> list[Document]:
        """The documents at some rows; only their shards are read."""
        documents: dict[int, Document] = {}
        for shard in sorted({row // self.shard_size for row in rows}):
            path = _documents_path(self.path, shard)
            check_regular(path)
            check_file(path, ENCODE_AGAIN)
            try:
                lines = path.read_text(encoding="utf-8").split("\n")
            except (FileNotFoundError, UnicodeDecodeError):
                raise InputError(str(path), "is missing or damaged", ENCODE_AGAIN) from None
            for row in {row for row in rows if row // self.shard_size == shard}:
                index = row % self.shard_size
                try:
                    fields = json.loads(lines[index])
                    documents[row] = Document(*(text_field("", fields, name) for name in ("_id", "text")))
                except (ValueError, IndexError, AttributeError, RecursionError, InputError):
                    raise InputError(f"{path}:{index + 1}", "is not a document", ENCODE_AGAIN) from None
        return [documents[row] for row in rows]


def encode_corpus(
    encoder: Encoder,
    corpus: str | PathLike[str],
    output: str | PathLike[str],
    *,
    prompt_name: PromptChoice = None,
    role: TextRole = "document",
    columns: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    vector_format: VectorFormat = "float32",
    context: Context | None = None,
    devices: Sequence[str] = (),
    tokenizer_workers: int = 0,
    task: ArrayTask | None = None,
    known: tuple[dict[str, Any], int] | None = None,
) -> VectorFolder | None:
    """Encode a corpus file into a folder, shard by shard; None while shards of other tasks are missing.

    After a kill, the same call resumes at the first missing shard, and writes the same bytes; only another number of
    threads may change the rounding. A finished folder is not changed.

    Args:
        encoder: The model.
        corpus: A corpus file (see `read_corpus`).
        output: The folder to write.
        prompt_name: The model's prompt before each document, or a literal one; None for the prompt named like the role.
        role: The role whose length limit and prompt are used: `query` for a file of queries.
        columns: Column names that differ from the field names.
        shard_size: Documents per shard, of which a kill loses one per device. None for that of the folder; in a new one
            1,024 on a CPU or with at least a billion parameters, else 8,192.
        vector_format: Storage format of the vectors (see `stored_rows`).
        context: Context for a contextual model (see `choose_context`), stored in the folder, where a search reads it.
        devices: Devices that share the shards, one process each (see `on_devices`).
        tokenizer_workers: Processes that tokenise ahead of the devices, at most two shards each; 0 for none.
        task: The shards that this process encodes; None for all.
        known: The result of `encoding_fields` for these arguments, if it was computed.
    """
    folder = Path(output)
    require_minimum("tokenizer_workers", tokenizer_workers, 0, "0 tokenises between the shards")
    # Errors in the corpus or the prompt are found before anything is written.
    fields, text_bytes = known or encoding_fields(
        encoder, corpus, folder, prompt_name, role, columns, shard_size, vector_format, context
    )
    num_documents, shard_size = fields["num_documents"], fields["shard_size"]
    shards = VectorShards(folder, num_documents, encoder.embedding_dim, shard_size, vector_format)
    defaults = {"mini_batch_tokens": encoder.mini_batch_tokens}
    job = ShardedJob(folder, fields, shards.num_shards, stem="vectors", defaults=defaults)
    of_task = (task or ArrayTask()).shards(shards.num_shards)
    missing = job.missing(task)
    total_bytes = text_bytes + num_documents * bytes_per_vector(vector_format, encoder.embedding_dim)
    check_disk_space(folder, total_bytes * len(missing) // shards.num_shards)
    if context is not None:
        context = context.write(folder)
    options = (os.fspath(corpus), prompt_name, role, context, job.fields["mini_batch_tokens"])
    items = _missing_shards(shards, missing, read_corpus(corpus, columns))
    # The first shard cannot be tokenised while another is encoded.
    num_tokenisers = min(tokenizer_workers, len(missing) - 1)
    if num_tokenisers > 0:
        embedder = encoder.embedder
        tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
        tokenise = partial(_tokeniser, tokenizer, role, embedder.text.prompt(prompt_name, role))
        items = spread([tokenise] * num_tokenisers, items)
    total = sum(len(shards.rows(shard)) for shard in of_task)
    done = total - sum(len(shards.rows(shard)) for shard in missing)
    used, work = devices[: len(missing)], partial(_encode_shard, shards, options)
    with (
        closing(items),
        progress_bar(total, "encode", "document", initial=done, disable=not encoder.show_progress) as bar,
    ):
        if len(used) < 2:
            for item in items:
                with bar.item(len(item.documents)):
                    work(encoder, item)
        else:
            with closing(on_devices(encoder, used, work, items)) as counts:
                for count in counts:
                    bar.update(count)
    is_finished = job.finish(
        lambda: {} if context is None else {"context_vectors_sha256": file_sha256(folder / CONTEXT_FILE)}
    )
    return VectorFolder.open(folder) if is_finished else None


def encoding_fields(
    encoder: Encoder,
    corpus: str | PathLike[str],
    folder: Path,
    prompt_name: PromptChoice = None,
    role: TextRole = "document",
    columns: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    vector_format: VectorFormat = "float32",
    context: Context | None = None,
) -> tuple[dict[str, Any], int]:
    """What determines the output of `encode_corpus`, and the bytes of all texts in UTF-8; reads the corpus."""
    shard_size = _default_shard_size(encoder, folder) if shard_size is None else shard_size
    require_minimum("shard_size", shard_size, 1)
    require_format(vector_format, encoder.embedding_dim)
    num_documents, text_bytes = 0, 0
    for document in read_corpus(corpus, columns, encoder.show_progress):
        num_documents += 1
        text_bytes += len(document.text.encode())
    encoder.encode([""], prompt_name, context, role=role)
    fields = {
        "kind": "vectors",
        "corpus_sha256": file_sha256(corpus),
        "columns": dict(sorted((columns or {}).items())),
        "num_documents": num_documents,
        **model_fields(encoder),
        "embedding_dim": encoder.embedding_dim,
        "prompt_name": prompt_name,
        "role": role,
        **({"similarity": "dot"} if encoder.embedder.compares_lengths else {}),
        **({"context": None} if context is None else context.manifest_fields()),
        "shard_size": shard_size,
        "vector_format": vector_format,
    }
    return fields, text_bytes


def _default_shard_size(encoder: Encoder, folder: Path) -> int:
    recorded = read_json_or_empty(folder / MANIFEST).get("shard_size")
    if type(recorded) is int and recorded > 0:
        return recorded
    num_parameters = sum(weight.numel() for weight in encoder.embedder.parameters())
    is_slow = encoder.device.type == "cpu" or num_parameters >= _MANY_PARAMETERS
    return SLOW_SHARD_SIZE if is_slow else SHARD_SIZE


class _ShardTexts(NamedTuple):
    """The documents of a shard, and their tokens if another process tokenised them."""

    shard: int
    documents: list[Document]
    tokens: list[TokenBatch] | None = None


def _missing_shards(
    shards: VectorShards, missing: Sequence[int], documents: Iterator[Document]
) -> Generator[_ShardTexts, None, None]:
    """Each missing shard and its documents, from one pass over the corpus."""
    wanted = set(missing)
    for shard in range(shards.num_shards if missing else 0):
        of_shard = list(islice(documents, shards.shard_size))
        if shard in wanted:
            yield _ShardTexts(shard, of_shard)


def _tokeniser(tokenizer: TextTokenizer, role: TextRole, prompt: str) -> Callable[[_ShardTexts], _ShardTexts]:
    def tokenise(item: _ShardTexts) -> _ShardTexts:
        blocks = text_blocks([text for _, text in item.documents])
        return item._replace(tokens=[tokenizer(block, role, prompt) for block in blocks])

    return tokenise


def _encode_shard(
    shards: VectorShards,
    options: tuple[str, PromptChoice, TextRole, Context | None, int],
    encoder: Encoder,
    item: _ShardTexts,
) -> int:
    """Encode and write a shard, in this process or a worker; returns its number of documents."""
    (corpus, prompt_name, role, context, mini_batch_tokens), (shard, documents, tokens) = options, item
    encoder = encoder.with_mini_batch_tokens(mini_batch_tokens)
    encoder.compile_for(shards.num_rows)
    vectors = encoder.encode([text for _, text in documents], prompt_name, context, role=role, tokenised=tokens)
    stored = stored_rows(vectors, shards.vector_format, corpus, shards.rows(shard).start + 1)
    _write_shard(shards, shard, documents, stored)
    return len(documents)


def _write_shard(shards: VectorShards, shard: int, documents: list[Document], stored: npt.NDArray[Any]) -> None:
    # `json.dumps` would take four times as long.
    lines = [f'{{"_id": {quoted(document_id)}, "text": {quoted(text)}}}\n' for document_id, text in documents]
    write_text(_documents_path(shards.folder, shard), "".join(lines))
    check_disk_space(shards.path(shard), stored.nbytes)
    # The vectors are written last: if they exist, the shard is complete.
    with atomic_path(shards.path(shard)) as temporary:
        save_array(temporary, stored)


def _documents_path(folder: Path, shard: int) -> Path:
    return folder / f"documents-{shard:05d}.jsonl"


Item = TypeVar("Item")
Result = TypeVar("Result")


def parse_devices(devices: int | str) -> tuple[str, ...]:
    """The devices for a number of them (GPUs, or CPU processes if there is no GPU), or for names separated by commas.

    A name that occurs twice means two processes.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(devices, int):
        names = [f"cuda:{number}" if num_gpus else "cpu" for number in range(devices)]
    else:
        names = [name.strip() for name in devices.split(",")]
    known = {"cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{number}" for number in range(num_gpus))}
    if not names or not known.issuperset(names):
        hint = "give a number of devices, or names such as cuda:0,cuda:1"
        raise OptionError("devices", devices, f"must be devices of this machine ({', '.join(sorted(known))})", hint)
    if len({torch.device(name).type for name in names}) > 1:
        raise OptionError("devices", devices, "must all be of one type", "CPU and GPU round vectors differently")
    return tuple(names)


def on_devices(
    encoder: Encoder, devices: Sequence[str], work: Callable[[Encoder, Item], Result], items: Iterable[Item]
) -> Generator[Result, None, None]:
    """Process items on several devices, and yield results as they finish.

    Each worker loads the model, which must be of a model directory, and has a share of this process's threads. Until
    the generator is closed, the encoder's model is on the CPU and must not be used. `work`, items and results are
    pickled.
    """
    if encoder.origin is None:
        raise OptionError("devices", ",".join(devices), "needs a model that was read from a directory", "save it first")
    precision = str(encoder.dtype).removeprefix("torch.")
    options = {
        # Weights that are all of another dtype decide the precision.
        "precision": precision if precision in ("float32", "bfloat16", "int8") else "auto",
        "dimensions": encoder.dimensions,
    }
    num_threads = max(1, torch.get_num_threads() // len(devices))
    workers = [partial(_start, work, num_threads, encoder.origin, {**options, "device": name}) for name in devices]
    return _with_model_on_cpu(encoder, spread(workers, items))


def _with_model_on_cpu(encoder: Encoder, results: Generator[Result, None, None]) -> Generator[Result, None, None]:
    device = encoder.embedder.device
    encoder.embedder.to("cpu")
    try:
        yield from results
    finally:
        encoder.embedder.to(device)


def _start(
    work: Callable[[Encoder, Item], Result], num_threads: int, model: str, options: dict[str, Any]
) -> Callable[[Item], Result]:
    """In a worker process: load the model on its device, and return the work to do with it."""
    torch.set_num_threads(num_threads)
    # tqdm's default lock is a system semaphore, which a killed process does not release.
    tqdm.set_lock(RLock())
    tune_malloc()
    return partial(work, Encoder.from_pretrained(model, **options))
