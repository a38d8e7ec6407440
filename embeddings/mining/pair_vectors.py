"""The vectors of a source of pairs: queries row by row, documents each once, in memory-mapped shards."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embeddings.common.directions import CHECKED, require_directions
from embeddings.common.errors import OptionError
from embeddings.common.fileio import check_manifest
from embeddings.common.text import TextRole
from embeddings.data.cache import CachedSource
from embeddings.inference.search import unit_rows
from embeddings.inference.vector_folder import SHARD_SIZE, embedder_sha256
from embeddings.inference.vector_shards import VectorShards, save_vectors
from embeddings.mining.jobs import ArrayTask, ShardedJob
from embeddings.mining.pair_index import PairIndex, index_pairs

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder


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
    query_prompt_name: str | None = None,
    document_prompt_name: str | None = None,
    shard_size: int = SHARD_SIZE,
    task: ArrayTask | None = None,
) -> PairVectors:
    """Encode the queries and documents of a source, shard by shard; what is there already is kept.

    After a kill the same call goes on at the first shard that is not whole, and ends with the same bytes. Of the tasks
    of an array each begins with its own shards and goes on with what the others left, so that every task returns with
    all vectors there.

    Args:
        encoder: The model.
        source: A converted source of pairs.
        folder: The folder to write: `index/`, `queries/` and `documents/`.
        index: The source's index where it is there already, as for a second model; None to make `index/`.
        corpus: A file of more documents (see `index_pairs`), or None; belongs to the index.
        negatives: Whether the rows' negatives are documents too (see `index_pairs`); belongs to the index.
        query_prompt_name: Prompt put before each query, None for the model's `query` prompt if it has one.
        document_prompt_name: The same for documents.
        shard_size: Vectors of a shard: what a kill costs at most.
        task: Which shards are this process's; None for all.

    Raises:
        InputError: If the source holds no pairs, a vector is zero, or the folder holds something else, or was made
            with other options.
        OptionError: If `shard_size` is not positive, or a prompt is not the model's.
    """
    if shard_size < 1:
        raise OptionError("shard_size", shard_size, "must be >= 1", "leave it out for the default")
    for name, value in (("corpus", corpus), ("negatives", negatives or None)):
        if index is not None and value is not None:
            raise OptionError(name, str(value), "belongs to the index, which is there already", "give one of them")
    # A prompt that the model does not have is found before anything is written.
    encoder.encode([""], query_prompt_name, role="query")
    encoder.encode([""], document_prompt_name, role="document")
    index = index or index_pairs(source, Path(folder) / "index", corpus, negatives)
    model = {
        **index.key,
        "model_sha256": embedder_sha256(encoder),
        "precision": str(encoder.dtype).removeprefix("torch."),
        "mini_batch_tokens": encoder.mini_batch_tokens,
        "embedding_dim": encoder.embedding_dim,
        "shard_size": shard_size,
    }
    roles: tuple[tuple[TextRole, str, int, str | None], ...] = (
        ("query", "queries", index.num_queries, query_prompt_name),
        ("document", "documents", index.num_documents, document_prompt_name),
    )
    made = []
    for role, name, num_rows, prompt_name in roles:
        shards = VectorShards(Path(folder) / name, num_rows, encoder.embedding_dim, shard_size)
        fields = {"kind": f"{role} vectors", "num_rows": num_rows, "prompt_name": prompt_name, **model}
        job = ShardedJob(shards.folder, fields, shards.num_shards, stem="vectors")
        make = partial(_encode_shard, encoder, index, shards, role, prompt_name)
        job.run(make, task, take_over=True)
        # Each shard's vectors were checked as it was made, so training need not read them through.
        job.finish(lambda: {CHECKED: True})
        made.append(shards)
    return PairVectors(index, *made)


def open_pair_vectors(folder: str | os.PathLike[str], index: PairIndex) -> PairVectors:
    """The finished vectors that `encode_pairs` wrote to a folder.

    Raises:
        InputError: If there are none, or they are of another source, or queries and documents are not of one width.
    """
    made = []
    for role, name in (("query", "queries"), ("document", "documents")):
        fields = check_manifest(Path(folder) / name, {"kind": f"{role} vectors", **index.key, "complete": True})
        made.append(
            VectorShards(Path(folder) / name, fields["num_rows"], fields["embedding_dim"], fields["shard_size"])
        )
    return PairVectors(index, *made)


def _encode_shard(
    encoder: "Encoder",
    index: PairIndex,
    shards: VectorShards,
    role: TextRole,
    prompt_name: str | None,
    shard: int,
    path: Path,
) -> None:
    """Encode the texts of one shard to `path`, as unit vectors."""
    text_of = index.query_text if role == "query" else index.document_text
    rows = shards.rows(shard)
    vector_ND = encoder.encode([text_of(row) for row in rows], prompt_name, role=role)
    require_directions(vector_ND, f"{shards.folder.name} of {index.source.folder.name}", rows.start)
    save_vectors(path, unit_rows(vector_ND))
