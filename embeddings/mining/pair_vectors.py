"""The vectors of a source of pairs: of its queries by row, and of its distinct documents, in memory-mapped shards."""

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, OptionError, require_minimum
from embeddings.common.io import check_manifest, check_vectors, file_lock, text_hash
from embeddings.common.jobs import ArrayTask, ShardedJob, load_shard, save_array, write_array
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.text import INSTRUCTION, GivenPrompt, PromptChoice, TextRole, choose_prompt, instruction_prompt
from embeddings.data.store import CachedSource
from embeddings.inference.encoder import model_fields, unit_rows
from embeddings.inference.vector_folder import SHARD_SIZE, VectorFolder, VectorShards, on_devices, parse_devices
from embeddings.mining.pair_index import Int64s, PairIndex, find, index_pairs

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder


_FOLDERS: dict[TextRole, str] = {"query": "queries", "document": "documents"}


@dataclass(frozen=True)
class EncodedTexts:
    """Folders that `encode` wrote, of queries and of documents; their texts are not encoded again."""

    queries: Path | None = None
    documents: Path | None = None


@dataclass(frozen=True)
class EncodingOptions:
    """How commands encode the texts of a source, and which vectors exist already.

    Args:
        vectors: Folder of the input's vectors by the same model, completed if needed; None for one beside the output.
        query_vectors: A folder that `encode --role query` wrote with the same model; queries with the same text are not
            encoded again. With several models one folder each, as `[FOLDER, FOLDER]`.
        document_vectors: The same for documents, such as the vectors of the corpus.
        query_prompt_name: Name of the model's prompt for queries; None for `query` if it has one.
        document_prompt_name: Name of the model's prompt for documents.
        query_prompt: Text of the prompt for queries, such as `"query: "`; may contain the record's `{instruction}`.
        document_prompt: Text of the prompt for documents.
        precision: Dtype of the model's matrix products.
        devices: Devices that share the encoding, one process each: the number of GPUs (without GPUs: of CPU processes),
            or their names, as `cuda:0,cuda:1`. One GPU, or the CPU, if left out.
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
        """The existing vectors of each model."""
        columns: list[Sequence[Path | None]] = []
        for name in ("query_vectors", "document_vectors"):
            value = getattr(self, name)
            folders = [value] if isinstance(value, Path) else value
            if folders is not None and len(folders) != num_models:
                rule = f"must have one folder for each model ({num_models})"
                raise OptionError(name, list(map(str, folders)), rule, "list them in the order of the models")
            columns.append(folders or [None] * num_models)
        return [EncodedTexts(*pair) for pair in zip(*columns, strict=True)]


@dataclass(frozen=True)
class EncodedFolder:
    """A folder that `encode` wrote with the options of a job; `identity` is its entry in manifests."""

    vectors: VectorFolder
    identity: dict[str, Any]

    @classmethod
    def open(cls, path: Path, role: TextRole, prompt_name: PromptChoice, model: Mapping[str, Any]) -> Self:
        """The folder at `path`, encoded in a role with a prompt; None is the role's default prompt."""
        fields = check_manifest(path, {"kind": "vectors", "complete": True, **model, "role": role, "context": None})
        # Without a name, the prompt is the one named like the role.
        if (fields["prompt_name"] or role) != (prompt_name or role):
            check_manifest(path, {"prompt_name": prompt_name})
        vectors = VectorFolder.open(path)
        vectors.require_format("float32", use="a job")
        identity = {name: fields.get(name) for name in ("corpus_sha256", "columns", "mini_batch_tokens")}
        return cls(vectors, identity)

    def find(self, hash_N: Int64s, rows_path: Path) -> Int64s:
        """The row of each text's vector in the folder, or -1; stored in `rows_path` by one process."""
        lock = rows_path.with_name(f".{rows_path.name}.lock")
        if not rows_path.exists():
            with file_lock(lock):
                if not rows_path.exists():
                    self._write_rows(hash_N, rows_path)
                lock.unlink(missing_ok=True)
        row_N: Int64s = load_shard(rows_path, mapped=True)
        return row_N

    def _write_rows(self, hash_N: Int64s, rows_path: Path) -> None:
        """Write the row of each text's vector, for repeated texts the first; an error if there is none."""
        stored = array("q", map(text_hash, self.vectors.texts()))
        row_N = find(hash_N, np.array(stored, np.int64))
        num_found = int(np.count_nonzero(row_N >= 0))
        if not num_found:
            what = f"contains none of the {len(hash_N)} texts"
            raise InputError(str(self.vectors.path), what, "name a folder of these texts, or leave the option out")
        write_array(rows_path, row_N)
        logger.info("%s has the vectors of %d of %d texts", self.vectors.path, num_found, len(hash_N))


@dataclass(frozen=True)
class PairVectors:
    """Unit vectors of the queries, by row, and of the documents of a source of pairs, by one model."""

    index: PairIndex
    query_shards: VectorShards
    document_shards: VectorShards


def encode_pairs(
    encoder: "Encoder",
    source: CachedSource,
    folder: str | os.PathLike[str],
    *,
    index: PairIndex | None = None,
    negatives: bool = False,
    query_prompt_name: PromptChoice = None,
    document_prompt_name: PromptChoice = None,
    shard_size: int = SHARD_SIZE,
    encoded: EncodedTexts | None = None,
    devices: Sequence[str] = (),
    task: ArrayTask | None = None,
) -> PairVectors:
    """Encode the queries and documents of a source, shard by shard; existing shards are reused.

    A killed job resumes at the first missing shard and writes the same bytes. Each task of an array computes its own
    shards first, and then those that are still missing. With another number of threads vectors may round differently.

    Args:
        encoder: The model.
        source: A converted source of pairs.
        folder: The folder to write: `index/`, `queries/` and `documents/`.
        index: An existing index of the source, such as that of another model or with a corpus; None to write `index/`.
        negatives: Whether the rows' negatives are documents too (see `index_pairs`); belongs to the index.
        query_prompt_name: Name of the prompt for queries, or a prompt as text, in which `{instruction}` stands for each
            row's instruction; None for the model's `query` prompt if it has one.
        document_prompt_name: The same for documents, which have no instruction.
        shard_size: Vectors per shard: the most that is lost when the job is killed.
        encoded: Folders that `encode` wrote with the same model; their vectors are reused.
        devices: Devices that share this process's shards, one process each (see `on_devices`).
        task: Shards that this process computes; None for all.
    """
    require_minimum("shard_size", shard_size, 1)
    assert index is None or not negatives
    encoder.embedder.require_directions("model", encoder.origin, "mining")
    model = {**model_fields(encoder), "embedding_dim": encoder.embedding_dim}
    sides = []
    encoded, prompt_names = encoded or EncodedTexts(), (query_prompt_name, document_prompt_name)
    for role, prompt_name, path in zip(_FOLDERS, prompt_names, (encoded.queries, encoded.documents), strict=True):
        # Raises an error for an unknown prompt before anything is written.
        is_template = role == "query" and _has_instruction(prompt_name)
        prompt = _with_instruction(prompt_name, _longest_instruction(source)) if is_template else prompt_name
        encoder.encode([""], prompt, role=role)
        existing = None if path is None else EncodedFolder.open(path, role, prompt_name, model)
        sides.append(_Side(role, prompt_name, existing))
    index = index or index_pairs(source, Path(folder) / "index", negatives=negatives)
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
    """Encode the missing shards of a side; returns the mini-batch tokens of the process that started the job."""
    kind, sizes = f"{side.role} vectors", {"num_rows": shards.num_rows, "shard_size": shards.shard_size}
    fields = {**index.key, **model, "kind": kind, "prompt_name": side.prompt_name, **sizes}
    identity = None if side.encoded is None else side.encoded.identity
    defaults = {"mini_batch_tokens": budget, "encoded": identity}
    job = ShardedJob(shards.folder, fields, shards.num_shards, stem="vectors", defaults=defaults)
    budget = int(job.fields["mini_batch_tokens"])
    if job.complete:
        return budget
    check_manifest(shards.folder, {"encoded": identity})
    stored_row_N = None
    if side.encoded is not None:
        hash_N = index.query_hashes if side.role == "query" else index.document_hashes
        stored_row_N = side.encoded.find(hash_N, shards.folder / "encoded_rows.npy")

    def texts(shard: int) -> _ShardTexts:
        """The existing vectors of a shard, and the texts that must be encoded."""
        rows = shards.rows(shard)
        vector_ND, missing_n = np.zeros((len(rows), shards.embedding_dim), np.float32), np.arange(len(rows))
        if side.encoded is not None and stored_row_N is not None:
            stored_n = np.asarray(stored_row_N[rows.start : rows.stop])
            missing_n = np.flatnonzero(stored_n < 0)
            vector_ND[stored_n >= 0] = side.encoded.vectors.shards.take(stored_n[stored_n >= 0], unit=False)
        missing = [rows[offset] for offset in missing_n.tolist()]
        parts = [
            (prompt, missing_n[positions], side.texts(index, [missing[position] for position in positions]))
            for prompt, positions in (side.prompts(index, missing) if missing else ())
        ]
        return _ShardTexts(shard, vector_ND, parts)

    writer = _ShardWriter(job, side.role, budget, f"{_FOLDERS[side.role]} of {index.source.folder.name}", shards)
    pending = job.missing(task)
    used = devices[: len(pending)]
    if len(used) > 1:
        results = on_devices(encoder, used, writer, map(texts, pending))
        with closing(results), progress_bar(sum(len(shards.rows(shard)) for shard in pending), kind, "row") as bar:
            for num_rows in results:
                bar.update(num_rows)
    # The shards that are still missing.
    job.run(lambda shard, path: writer.write(encoder, texts(shard), path), task, take_over=True, rows=shards.rows)
    job.finish()
    return budget


class _ShardTexts(NamedTuple):
    """A shard's existing vectors, (n, D), and the missing texts with their prompts and positions in the shard."""

    shard: int
    vector_ND: npt.NDArray[np.float32]
    parts: list[tuple[PromptChoice, Int64s, list[str]]]


@dataclass(frozen=True)
class _ShardWriter:
    job: ShardedJob
    role: TextRole
    mini_batch_tokens: int
    where: str
    shards: VectorShards

    def __call__(self, encoder: "Encoder", item: _ShardTexts) -> int:
        """Write a shard, unless another process does; returns its number of rows."""
        self.job.make(item.shard, lambda _, path: self.write(encoder, item, path))
        return len(item.vector_ND)

    def write(self, encoder: "Encoder", item: _ShardTexts, path: Path) -> None:
        encoder, vector_ND = encoder.with_mini_batch_tokens(self.mini_batch_tokens), item.vector_ND
        encoder.compile_for(self.shards.num_rows)
        with progress_bar(sum(len(texts) for *_, texts in item.parts), f"encode {self.role}", "text") as bar:
            for prompt, position_n, texts in item.parts:
                with bar.item(len(texts)):
                    vector_ND[position_n] = encoder.encode(texts, prompt, role=self.role)
        check_vectors(vector_ND, self.where, self.shards.rows(item.shard).start)
        save_array(path, unit_rows(vector_ND))


@dataclass(frozen=True)
class _Side:
    role: TextRole
    prompt_name: PromptChoice
    encoded: EncodedFolder | None

    def texts(self, index: PairIndex, rows: list[int]) -> list[str]:
        return index.source.table.queries(rows) if self.role == "query" else index.document_texts(rows)

    def prompts(self, index: PairIndex, rows: list[int]) -> Iterator[tuple[PromptChoice, list[int]]]:
        """The prompts of some rows, each with the positions of its rows among these."""
        if not _has_instruction(self.prompt_name):
            yield self.prompt_name, list(range(len(rows)))
            return
        positions_of: dict[str, list[int]] = {}
        for position, row in enumerate(index.source.table.rows(rows)):
            positions_of.setdefault(row.instruction, []).append(position)
        for instruction, positions in positions_of.items():
            yield _with_instruction(self.prompt_name, instruction), positions


def _has_instruction(prompt: PromptChoice) -> bool:
    return isinstance(prompt, dict) and INSTRUCTION in prompt["text"]


def _with_instruction(prompt: PromptChoice, instruction: str) -> GivenPrompt:
    assert isinstance(prompt, dict)
    return GivenPrompt(text=instruction_prompt(instruction, prompt["text"]))


def _longest_instruction(source: CachedSource) -> str:
    """The longest instruction of the rows; an `InputError` if a row has none."""
    longest = ""
    for start in progress_bar(None, "reading instructions", "block", iterable=range(0, len(source.table), SHARD_SIZE)):
        block = source.table.rows(range(start, min(start + SHARD_SIZE, len(source.table))))
        for row, stored in enumerate(block, start):
            if not stored.instruction:
                what = f"has no instruction for {INSTRUCTION} in the query prompt"
                raise InputError(f"row {row}", what, "add one to each record, or write it in the prompt")
            longest = max(longest, stored.instruction, key=len)
    return longest
