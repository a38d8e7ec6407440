"""The vectors of a source of pairs: queries row by row, documents each once, in memory-mapped shards."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import CHECKED, atomic_path, check_manifest, check_vectors, file_lock, text_hash
from embeddings.common.jobs import ArrayTask, ShardedJob, load_shard, progress_bar, require_shard_size, save_array
from embeddings.common.process import logger
from embeddings.common.text import INSTRUCTION, GivenPrompt, PromptChoice, TextRole, choose_prompt, instruction_prompt
from embeddings.data.store import CachedSource
from embeddings.inference.encoder import embedder_sha256
from embeddings.inference.vector_folder import SHARD_SIZE, VectorFolder, on_devices, parse_devices
from embeddings.inference.vectors import VectorShards, unit_rows
from embeddings.mining.pair_index import BLOCK, Int64s, PairIndex, equal_hashes, index_pairs

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder


_FOLDERS: dict[TextRole, str] = {"query": "queries", "document": "documents"}


@dataclass(frozen=True)
class EncodedTexts:
    """Folders that `encode` wrote: a text found in one of them is not encoded again.

    Args:
        queries: Vectors of queries (`encode --role query`), or None.
        documents: Vectors of documents, such as those of the extra corpus, or None.
    """

    queries: Path | None = None
    documents: Path | None = None


@dataclass(frozen=True)
class EncodingOptions:
    """How the texts of a source become vectors, and which vectors there are already: the options of commands.

    Args:
        vectors: Folder of the input's vectors by the same model, written where they are not there yet; None for a
            folder beside the output.
        query_vectors: A folder that `encode --role query` wrote with the same model: queries found in it by their text
            are not encoded again. With several models one folder each, as `[FOLDER, FOLDER]`.
        document_vectors: The same of documents, such as `encode` made of the corpus.
        query_prompt_name: Which of the model's prompts goes before each query; None for `query` if it has one.
        document_prompt_name: Which goes before each document.
        query_prompt: What goes before each query instead, such as `"query: "`; a record's own instruction takes the
            place of `{instruction}`.
        document_prompt: What goes before each document.
        precision: Format of matrix products of the model.
        devices: Devices that share the encoding, a process on each: how many GPUs (without GPUs: how many parts of the
            CPU), or their names, as `cuda:0,cuda:1`. One GPU, or the CPU, if left out.

    Raises:
        OptionError: If a prompt is given by name and by text, or there is no such device.
    """

    vectors: Path | None = None
    query_vectors: Path | list[Path] | None = None
    document_vectors: Path | list[Path] | None = None
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    devices: int | str | None = None

    def __post_init__(self) -> None:
        _ = self.prompts, self.device_names

    @property
    def device_names(self) -> tuple[str, ...]:
        return () if self.devices is None else parse_devices(self.devices)

    @property
    def prompts(self) -> dict[str, Any]:
        """The arguments `query_prompt_name` and `document_prompt_name` of `encode_pairs`."""
        return {
            "query_prompt_name": choose_prompt("query_prompt", self.query_prompt_name, self.query_prompt),
            "document_prompt_name": choose_prompt("document_prompt", self.document_prompt_name, self.document_prompt),
        }

    def encoded(self, num_models: int = 1) -> list[EncodedTexts]:
        """What each of several models has encoded already; refuses another number of folders than of models."""
        columns: list[Sequence[Path | None]] = []
        for name in ("query_vectors", "document_vectors"):
            given = getattr(self, name)
            folders = [given] if isinstance(given, Path) else given
            if folders is not None and len(folders) != num_models:
                rule = f"must be as many folders as there are models ({num_models})"
                raise OptionError(name, list(map(str, folders)), rule, "name them in the order of the models")
            columns.append(folders or [None] * num_models)
        return [EncodedTexts(*pair) for pair in zip(*columns, strict=True)]


@dataclass(frozen=True)
class EncodedFolder:
    """A folder that `encode` wrote in the way that a job needs; `identity` is what manifests say of it."""

    vectors: VectorFolder
    identity: dict[str, Any]

    @classmethod
    def open(cls, path: Path, role: TextRole, prompt_name: PromptChoice, model: Mapping[str, Any]) -> Self:
        """The folder at `path`, encoded in a role with the prompt as it was chosen, None for the role's own.

        Raises `InputError` if it is no finished folder of `encode`, was made in another way or by another model, or its
        vectors are not kept in float32.
        """
        fields = check_manifest(path, {"kind": "vectors", "complete": True, **model, "role": role, "context": None})
        # The prompt of the role's name is what comes of none.
        if (fields["prompt_name"] or role) != (prompt_name or role):
            check_manifest(path, {"prompt_name": prompt_name})
        vectors = VectorFolder.open(path)
        vectors.require_format("float32", use="a job")
        identity = {name: fields.get(name) for name in ("corpus_sha256", "columns", "mini_batch_tokens")}
        return cls(vectors, identity)

    def find(self, hash_N: Int64s, rows_path: Path) -> Int64s:
        """The row of each text's vector in the folder, by the text's hash; -1 where it has none, (N,) int64.

        The rows are kept in `rows_path`; of several processes that come here at once, one looks. Memory does not grow
        with the number of texts (see `equal_hashes`). Raises `InputError` if the folder holds none of the texts.
        """
        lock = rows_path.with_name(f".{rows_path.name}.lock")
        if not rows_path.exists():
            with file_lock(lock):
                if not rows_path.exists():
                    _write_rows(self.vectors, hash_N, rows_path)
                lock.unlink(missing_ok=True)
        row_N: Int64s = load_shard(rows_path, mapped=True)
        return row_N


def _write_rows(folder: VectorFolder, hash_N: Int64s, rows_path: Path) -> None:
    """Write the row of each text's vector in the folder; of texts that occur there several times, the first."""
    scratch, num_texts, num_found = rows_path.with_name(f".{rows_path.name}.hashes.tmp"), len(hash_N), 0
    with open(scratch, "wb") as file:
        for start in range(0, num_texts, BLOCK):
            np.asarray(hash_N[start : start + BLOCK], dtype=np.int64).tofile(file)
        for shard in range(folder.num_shards):
            documents = folder.documents(folder.shards.rows(shard))
            np.array([text_hash(document.text) for document in documents], np.int64).tofile(file)
    hash_E: Int64s = np.memmap(scratch, np.int64, "r", shape=(num_texts + folder.num_documents,))
    with atomic_path(rows_path) as temporary:
        row_N = open_memmap(temporary, "w+", np.int64, (num_texts,))
        for entry_n, is_first_n in equal_hashes(hash_E):
            group_n, is_made_n = np.cumsum(is_first_n) - 1, entry_n >= num_texts
            made_G = np.full(int(np.count_nonzero(is_first_n)), -1)
            # Backwards, so that the first of equal texts is the last to be written.
            made_G[group_n[is_made_n][::-1]] = entry_n[is_made_n][::-1] - num_texts
            row_N[entry_n[~is_made_n]] = made_G[group_n[~is_made_n]]
            num_found += int(np.count_nonzero(made_G[group_n[~is_made_n]] >= 0))
        row_N.flush()
        scratch.unlink()
        if not num_found:
            rule = f"holds none of the {num_texts} texts that it is to give the vectors of"
            raise InputError(str(folder.path), rule, "name a folder of these texts, or none")
    logger.info("%s gives the vectors of %d of %d texts", folder.path, num_found, num_texts)


@dataclass(frozen=True)
class PairVectors:
    """Unit vectors of the queries and documents of a source of pairs, by one model.

    Attributes:
        index: Which documents there are, and which are whose positives.
        query_shards: Vectors of the queries, row by row.
        document_shards: Vectors of the documents.
    """

    index: PairIndex
    query_shards: VectorShards
    document_shards: VectorShards


def encode_pairs(
    encoder: "Encoder",
    source: CachedSource,
    folder: str | os.PathLike[str],
    *,
    index: PairIndex | None = None,
    corpus: str | os.PathLike[str] | None = None,
    negatives: bool = False,
    query_prompt_name: PromptChoice = None,
    document_prompt_name: PromptChoice = None,
    shard_size: int = SHARD_SIZE,
    encoded: EncodedTexts | None = None,
    devices: Sequence[str] = (),
    task: ArrayTask | None = None,
) -> PairVectors:
    """Encode the queries and documents of a source, shard by shard; what is there already is kept.

    After a kill the same call resumes at the first missing shard and ends with the same bytes. Each task of an array
    begins with its own shards and then makes what others left. All take the first one's mini-batches; with another
    number of threads vectors may be rounded differently.

    Args:
        encoder: The model.
        source: A converted source of pairs.
        folder: The folder to write: `index/`, `queries/` and `documents/`.
        index: The source's index where it is there already, as for a second model; None to make `index/`.
        corpus: A file of more documents (see `index_pairs`), or None; belongs to the index.
        negatives: Whether the rows' negatives are documents too (see `index_pairs`); belongs to the index.
        query_prompt_name: Name of the prompt put before each query, or a given prompt, in which each row's own
            instruction takes the place of `{instruction}`; None for the model's `query` prompt if it has one.
        document_prompt_name: The same for documents, which have no instruction.
        shard_size: Vectors of a shard: what a kill costs at most.
        encoded: Folders that `encode` wrote with the same model: a text found there keeps that vector.
        devices: Devices that share this process's shards, each with a process of its own (see `on_devices`).
        task: Which shards are this process's; None for all.

    Raises:
        InputError: If the source holds no pairs, a vector is zero, the folder holds something else or was made with
            other options, an encoded folder was made in another way or holds none of the texts, or a row lacks the
            instruction that the prompt wants.
        OptionError: If `shard_size` is not positive, or a prompt is not the model's.
        WorkerError: If a device's process died; what is finished is kept.
    """
    require_shard_size(shard_size)
    for name, value in (("corpus", corpus), ("negatives", negatives or None)):
        if index is not None and value is not None:
            raise OptionError(name, str(value), "belongs to the index, which is there already", "give one of them")
    precision = str(encoder.dtype).removeprefix("torch.")
    model = {"model_sha256": embedder_sha256(encoder), "precision": precision, "embedding_dim": encoder.embedding_dim}
    sides = []
    encoded, prompt_names = encoded or EncodedTexts(), (query_prompt_name, document_prompt_name)
    for role, prompt_name, path in zip(_FOLDERS, prompt_names, (encoded.queries, encoded.documents), strict=True):
        # A prompt that the model does not have is found before anything is written.
        wants = role == "query" and _wants_instruction(prompt_name)
        encoder.encode([""], _filled(prompt_name, _longest_instruction(source)) if wants else prompt_name, role=role)
        found = None if path is None else EncodedFolder.open(path, role, prompt_name, model)
        sides.append(_Side(role, prompt_name, found))
    index = index or index_pairs(source, Path(folder) / "index", corpus, negatives)
    sizes = zip(_FOLDERS.values(), (index.num_queries, index.num_documents), strict=True)
    made = [VectorShards(Path(folder) / name, size, encoder.embedding_dim, shard_size) for name, size in sizes]
    budget = encoder.mini_batch_tokens
    for side, shards in zip(sides, made, strict=True):
        budget = _encode_side(encoder, index, side, shards, model, budget, devices, task)
    return PairVectors(index, *made)


def _encode_side(
    encoder: "Encoder",
    index: PairIndex,
    side: "_Side",
    shards: VectorShards,
    model: Mapping[str, Any],
    budget: int,
    devices: Sequence[str],
    task: ArrayTask | None,
) -> int:
    """Make what is missing of a side's vectors; returns the mini-batches' tokens, those of whoever began it."""
    kind, sizes = f"{side.role} vectors", {"num_rows": shards.num_rows, "shard_size": shards.shard_size}
    fields = {**index.key, **model, "kind": kind, "prompt_name": side.prompt_name, **sizes}
    identity = None if side.encoded is None else side.encoded.identity
    defaults = {"mini_batch_tokens": budget, "encoded": identity}
    job = ShardedJob(shards.folder, fields, shards.num_shards, stem="vectors", defaults=defaults)
    budget = int(job.fields["mini_batch_tokens"])
    if job.complete:
        return budget
    check_manifest(shards.folder, {"encoded": identity})
    found_N = None
    if side.encoded is not None:
        hash_N = index.query_hashes if side.role == "query" else index.document_hashes
        found_N = side.encoded.find(hash_N, shards.folder / "encoded_rows.npy")

    def texts(shard: int) -> _ShardTexts:
        """What is there of a shard, and the texts that are left to encode."""
        rows = shards.rows(shard)
        vector_ND, left_n = np.zeros((len(rows), shards.embedding_dim), np.float32), np.arange(len(rows))
        if side.encoded is not None and found_N is not None:
            found_n = np.asarray(found_N[rows.start : rows.stop])
            left_n = np.flatnonzero(found_n < 0)
            vector_ND[found_n >= 0] = side.encoded.vectors.shards.take(found_n[found_n >= 0], unit=False)
        left = [rows[place] for place in left_n.tolist()]
        parts = [
            (prompt, left_n[places], side.texts(index, [left[place] for place in places]))
            for prompt, places in (side.prompts(index, left) if left else ())
        ]
        return _ShardTexts(shard, vector_ND, parts)

    maker = _ShardMaker(job, side.role, budget, f"{_FOLDERS[side.role]} of {index.source.folder.name}", shards)
    own = [shard for shard in (task or ArrayTask()).shards(job.num_shards) if not job.path(shard).exists()]
    used = devices[: len(own)]
    if len(used) > 1:
        made = on_devices(encoder, used, maker, map(texts, own))
        with closing(made), progress_bar(len(own), kind, "shard") as bar:
            for _ in made:
                bar.update()
    # All shards, or those that other tasks have left.
    job.run(lambda shard, path: maker.write(encoder, texts(shard), path), task, take_over=True)
    # Each shard's vectors were checked as it was made, so training need not read them through.
    job.finish(lambda: {CHECKED: True})
    return budget


def open_pair_vectors(folder: str | os.PathLike[str], index: PairIndex) -> PairVectors:
    """The finished vectors that `encode_pairs` wrote to a folder.

    Raises:
        InputError: If there are none, or they are of another source.
    """
    made = []
    for role, name in _FOLDERS.items():
        fields = check_manifest(Path(folder) / name, {"kind": f"{role} vectors", **index.key, "complete": True})
        num_rows, width = fields.integer("num_rows", least=1), fields.integer("embedding_dim", least=1)
        made.append(VectorShards(Path(folder) / name, num_rows, width, fields.integer("shard_size", least=1)))
    return PairVectors(index, *made)


class _ShardTexts(NamedTuple):
    """A shard's vectors, (n, D), as far as they were found, and its other texts with their prompts and places."""

    shard: int
    vector_ND: npt.NDArray[np.float32]
    parts: list[tuple[PromptChoice, Int64s, list[str]]]


@dataclass(frozen=True)
class _ShardMaker:
    """Encodes and writes a shard's unit vectors, in this process or another one."""

    job: ShardedJob
    role: TextRole
    mini_batch_tokens: int
    where: str
    shards: VectorShards

    def __call__(self, encoder: "Encoder", item: _ShardTexts) -> bool:
        """Make the shard, unless it is there or another process is making it."""
        return self.job.make(item.shard, lambda _, path: self.write(encoder, item, path))

    def write(self, encoder: "Encoder", item: _ShardTexts, path: Path) -> None:
        encoder, vector_ND = encoder.with_mini_batch_tokens(self.mini_batch_tokens), item.vector_ND
        for prompt, place_n, texts in item.parts:
            vector_ND[place_n] = encoder.encode(texts, prompt, role=self.role)
        check_vectors(vector_ND, self.where, self.shards.rows(item.shard).start)
        save_array(path, unit_rows(vector_ND))


@dataclass(frozen=True)
class _Side:
    """The queries of a source or its documents, and how they are encoded."""

    role: TextRole
    prompt_name: PromptChoice
    encoded: EncodedFolder | None

    def texts(self, index: PairIndex, rows: list[int]) -> list[str]:
        return index.source.table.queries(rows) if self.role == "query" else index.document_texts(rows)

    def prompts(self, index: PairIndex, rows: list[int]) -> Iterator[tuple[PromptChoice, list[int]]]:
        """The prompts of some rows, each with the places among these rows that it is for."""
        if not _wants_instruction(self.prompt_name):
            yield self.prompt_name, list(range(len(rows)))
            return
        places: dict[str, list[int]] = {}
        for place, row in enumerate(index.source.table.rows(rows)):
            places.setdefault(row.instruction, []).append(place)
        for instruction, found in places.items():
            yield _filled(self.prompt_name, instruction), found


def _wants_instruction(prompt: PromptChoice) -> bool:
    return isinstance(prompt, dict) and INSTRUCTION in prompt["text"]


def _filled(prompt: PromptChoice, instruction: str) -> GivenPrompt:
    assert isinstance(prompt, dict)
    return GivenPrompt(text=instruction_prompt(instruction, prompt["text"]))


def _longest_instruction(source: CachedSource) -> str:
    """The longest instruction of the rows; an `InputError` where a row has none."""
    longest = ""
    for start in range(0, len(source.table), SHARD_SIZE):
        block = source.table.rows(range(start, min(start + SHARD_SIZE, len(source.table))))
        for row, stored in enumerate(block, start):
            if not stored.instruction:
                what = f"has no instruction to put in the place of {INSTRUCTION} in the query prompt"
                raise InputError(f"row {row}", what, "give each record one, or write it in the prompt")
            longest = max(longest, stored.instruction, key=len)
    return longest
