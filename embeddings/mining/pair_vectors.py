"""The vectors of a source of pairs: queries row by row, documents each once, in memory-mapped shards."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embeddings.common.directions import CHECKED, require_directions
from embeddings.common.errors import InputError, OptionError
from embeddings.common.fileio import check_manifest
from embeddings.common.text import INSTRUCTION, GivenPrompt, PromptChoice, TextRole, instruction_prompt
from embeddings.data.cache import CachedSource
from embeddings.inference.model_digest import embedder_sha256
from embeddings.inference.search import unit_rows
from embeddings.inference.vector_folder import SHARD_SIZE
from embeddings.inference.vector_shards import VectorShards, save_vectors
from embeddings.mining.encoded_texts import EncodedFolder, EncodedTexts, FoundVectors
from embeddings.mining.jobs import ArrayTask, ShardedJob
from embeddings.mining.pair_index import PairIndex, index_pairs

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder

_FOLDERS: dict[TextRole, str] = {"query": "queries", "document": "documents"}


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

    @property
    def num_queries(self) -> int:
        """Rows of the source."""
        return self.index.num_queries

    @property
    def num_documents(self) -> int:
        """Different documents."""
        return self.index.num_documents

    @property
    def embedding_dim(self) -> int:
        """Width of the vectors, D."""
        return self.query_shards.embedding_dim

    @property
    def positive_offsets(self) -> npt.NDArray[np.int64]:
        """Where each query's positives begin in `positive_rows`, (rows + 1,), memory-mapped."""
        return self.index.positive_offsets

    @property
    def positive_rows(self) -> npt.NDArray[Any]:
        """The documents that are positives, query after query, memory-mapped."""
        return self.index.positive_rows

    def queries(self) -> Iterator[npt.NDArray[np.float32]]:
        """The unit vectors of the queries, shard by shard, memory-mapped, (n, D) float32."""
        return iter(self.query_shards)

    def documents(self) -> Iterator[npt.NDArray[np.float32]]:
        """The unit vectors of the documents, shard by shard, memory-mapped, (n, D) float32."""
        return iter(self.document_shards)


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
    task: ArrayTask | None = None,
) -> PairVectors:
    """Encode the queries and documents of a source, shard by shard; what is there already is kept.

    After a kill the same call goes on at the first shard that is not whole, and ends with the same bytes. Each task of
    an array begins with its own shards and goes on with what others left: every task returns with all vectors there.
    All take the first one's mini-batches, on however many threads: with another number, vectors may be rounded
    differently.

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
        encoded: Folders that `encode` wrote with the same model: a text that lies there keeps that vector.
        task: Which shards are this process's; None for all.

    Raises:
        InputError: If the source holds no pairs, a vector is zero, or the folder holds something else, or was made
            with other options; or if an encoded folder was made in another way, or holds none of the texts; or if the
            prompt holds `{instruction}` and a row has none.
        OptionError: If `shard_size` is not positive, or a prompt is not the model's.
    """
    if shard_size < 1:
        raise OptionError("shard_size", shard_size, "must be >= 1", "leave it out for the default")
    for name, value in (("corpus", corpus), ("negatives", negatives or None)):
        if index is not None and value is not None:
            raise OptionError(name, str(value), "belongs to the index, which is there already", "give one of them")
    precision = str(encoder.dtype).removeprefix("torch.")
    model = {"model_sha256": embedder_sha256(encoder), "precision": precision, "embedding_dim": encoder.embedding_dim}
    sides = []
    for role, prompt_name in zip(_FOLDERS, (query_prompt_name, document_prompt_name), strict=True):
        # A prompt that the model does not have is found before anything is written.
        wants = role == "query" and _wants_instruction(prompt_name)
        encoder.encode([""], _filled(prompt_name, _longest_instruction(source)) if wants else prompt_name, role=role)
        sides.append(_Side(role, prompt_name, (encoded or EncodedTexts()).open(role, prompt_name, model)))
    index = index or index_pairs(source, Path(folder) / "index", corpus, negatives)
    places = ((Path(folder) / side.name, side.num_rows(index)) for side in sides)
    made = [VectorShards(place, num_rows, encoder.embedding_dim, shard_size) for place, num_rows in places]
    budget = encoder.mini_batch_tokens
    for side, shards in zip(sides, made, strict=True):
        budget = _encode_side(encoder, index, side, shards, model, budget, task)
    return PairVectors(index, *made)


def _encode_side(
    encoder: "Encoder",
    index: PairIndex,
    side: "_Side",
    shards: VectorShards,
    model: Mapping[str, Any],
    budget: int,
    task: ArrayTask | None,
) -> int:
    """Make what is missing of a side's vectors; returns the mini-batches' tokens, those of whoever began it."""
    fields = {**index.key, **model, **side.fields, "num_rows": shards.num_rows, "shard_size": shards.shard_size}
    defaults = {"mini_batch_tokens": budget, "encoded": side.identity}
    job = ShardedJob(shards.folder, fields, shards.num_shards, stem="vectors", defaults=defaults)
    budget = int(job.fields["mini_batch_tokens"])
    if not job.complete:
        check_manifest(shards.folder, {"encoded": side.identity})
        found = side.found(index, shards.folder)
        make = partial(_encode_shard, encoder.with_mini_batch_tokens(budget), index, shards, side, found)
        job.run(make, task, take_over=True)
        # Each shard's vectors were checked as it was made, so training need not read them through.
        job.finish(lambda: {CHECKED: True})
    return budget


def open_pair_vectors(folder: str | os.PathLike[str], index: PairIndex) -> PairVectors:
    """The finished vectors that `encode_pairs` wrote to a folder.

    Raises:
        InputError: If there are none, or they are of another source, or queries and documents are not of one width.
    """
    made = []
    for role, name in _FOLDERS.items():
        fields = check_manifest(Path(folder) / name, {"kind": f"{role} vectors", **index.key, "complete": True})
        num_rows, width, shard_size = (
            fields.whole(field, least=1) for field in ("num_rows", "embedding_dim", "shard_size")
        )
        made.append(VectorShards(Path(folder) / name, num_rows, width, shard_size))
    return PairVectors(index, *made)


@dataclass(frozen=True)
class _Side:
    """The queries of a source or its documents, and how they are encoded."""

    role: TextRole
    prompt_name: PromptChoice
    encoded: EncodedFolder | None

    @property
    def name(self) -> str:
        return _FOLDERS[self.role]

    @property
    def fields(self) -> dict[str, Any]:
        return {"kind": f"{self.role} vectors", "prompt_name": self.prompt_name}

    @property
    def identity(self) -> dict[str, Any] | None:
        return None if self.encoded is None else self.encoded.identity

    def num_rows(self, index: PairIndex) -> int:
        return index.num_queries if self.role == "query" else index.num_documents

    def text(self, index: PairIndex, row: int) -> str:
        return index.query_text(row) if self.role == "query" else index.document_text(row)

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

    def found(self, index: PairIndex, folder: Path) -> FoundVectors | None:
        if self.encoded is None:
            return None
        hash_N = index.query_hashes if self.role == "query" else index.document_hashes
        return self.encoded.find(hash_N, folder / "encoded_rows.npy")


def _encode_shard(
    encoder: "Encoder",
    index: PairIndex,
    shards: VectorShards,
    side: _Side,
    found: FoundVectors | None,
    shard: int,
    path: Path,
) -> None:
    """Write the unit vectors of one shard to `path`: those that were found, and the other texts encoded."""
    rows = shards.rows(shard)
    vector_ND = np.empty((len(rows), shards.embedding_dim), np.float32)
    left_n = np.arange(len(rows)) if found is None else found.fill(vector_ND, rows)
    if len(left_n):
        left = [rows[place] for place in left_n.tolist()]
        for prompt, places in side.prompts(index, left):
            texts = [side.text(index, left[place]) for place in places]
            vector_ND[left_n[places]] = encoder.encode(texts, prompt, role=side.role)
    require_directions(vector_ND, f"{side.name} of {index.source.folder.name}", rows.start)
    save_vectors(path, unit_rows(vector_ND))


def _wants_instruction(prompt: PromptChoice) -> bool:
    """Whether a record's own instruction belongs in a prompt."""
    return isinstance(prompt, dict) and INSTRUCTION in prompt["text"]


def _filled(prompt: PromptChoice, instruction: str) -> GivenPrompt:
    """A given prompt with an instruction in it."""
    assert isinstance(prompt, dict)
    return GivenPrompt(text=instruction_prompt(instruction, prompt["text"]))


def _longest_instruction(source: CachedSource) -> str:
    """The longest instruction of the rows, which all have one.

    Raises:
        InputError: If a row has none.
    """
    longest = ""
    for start in range(0, len(source.table), SHARD_SIZE):
        block = source.table.rows(range(start, min(start + SHARD_SIZE, len(source.table))))
        for row, stored in enumerate(block, start):
            if not stored.instruction:
                what = f"has no instruction to put in the place of {INSTRUCTION} in the query prompt"
                raise InputError(f"row {row}", what, "give each record one, or write it in the prompt")
            longest = max(longest, stored.instruction, key=len)
    return longest
