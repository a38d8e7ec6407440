"""Vectors that `encode` made before a job began, found again by their texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from embeddings.common.errors import InputError
from embeddings.common.file_lock import file_lock
from embeddings.common.fileio import atomic_path, check_manifest, text_hash
from embeddings.common.log import logger
from embeddings.common.text import PromptChoice, TextRole
from embeddings.inference.vector_folder import VectorFolder
from embeddings.mining.jobs import load_shard
from embeddings.mining.pair_index import BLOCK, Int64s, equal_hashes


@dataclass(frozen=True)
class EncodedTexts:
    """Folders that `encode` wrote: a text that lies in one of them is not encoded again.

    Args:
        queries: Vectors of queries (`encode --role query`), or None.
        documents: Vectors of documents, such as those of the extra corpus, or None.
    """

    queries: Path | None = None
    documents: Path | None = None

    def open(self, role: TextRole, prompt_name: PromptChoice, model: Mapping[str, Any]) -> "EncodedFolder | None":
        """The folder of queries or of documents (see `EncodedFolder.open`)."""
        path = self.queries if role == "query" else self.documents
        return None if path is None else EncodedFolder.open(path, role, prompt_name, model)


@dataclass(frozen=True)
class FoundVectors:
    """Which of some texts have a vector in a folder, and these vectors.

    Attributes:
        folder: The folder that `encode` wrote.
        row_N: Where each text's vector lies in it, -1 where it has none, (N,) int64, memory-mapped.
    """

    folder: VectorFolder
    row_N: Int64s

    def fill(self, vector_ND: npt.NDArray[np.float32], rows: range) -> Int64s:
        """Fill in the vectors that are there.

        Args:
            vector_ND: The vectors of some texts, (n, D) float32, to be filled in.
            rows: These texts, of all N.

        Returns:
            Which of the n have none, ascending, int64.

        Raises:
            InputError: If a shard is missing or damaged, or a vector is zero or not finite.
        """
        row_n = np.asarray(self.row_N[rows.start : rows.stop])
        vector_ND[row_n >= 0] = self.folder.shards.take(row_n[row_n >= 0], unit=False)
        return np.flatnonzero(row_n < 0)


@dataclass(frozen=True)
class EncodedFolder:
    """A folder that `encode` wrote, by the model and in the way that a job needs.

    Attributes:
        vectors: Its vectors and texts.
        identity: What tells it from others by the same model, for manifests.
    """

    vectors: VectorFolder
    identity: dict[str, Any]

    @classmethod
    def open(cls, path: Path, role: TextRole, prompt_name: PromptChoice, model: Mapping[str, Any]) -> Self:
        """The folder at `path`.

        Args:
            path: Where it lies.
            role: Whose length limit and prompt its texts must have been encoded with.
            prompt_name: The prompt as it was chosen, None for the role's own.
            model: What its manifest must say of the model: hash, precision and width.

        Raises:
            InputError: If it is no finished folder of `encode`, or was made in another way (the message names the
                field), or its vectors are not kept in float32, as those are that the job makes itself.
        """
        fields = check_manifest(path, {"kind": "vectors", "complete": True, **model, "role": role, "context": None})
        # The prompt of the role's name is what comes of none.
        if (fields["prompt_name"] or role) != (prompt_name or role):
            check_manifest(path, {"prompt_name": prompt_name})
        vectors = VectorFolder.open(path)
        vectors.require_format("float32", use="a job")
        identity = {name: fields.get(name) for name in ("corpus_sha256", "columns", "mini_batch_tokens")}
        return cls(vectors, identity)

    def find(self, hash_N: Int64s, rows_path: Path) -> FoundVectors:
        """Find texts by their hashes; what was found before lies at `rows_path`.

        Args:
            hash_N: `text_hash` of each text, (N,) int64; texts may repeat.
            rows_path: Where the rows are kept. Of several processes that come here at once, one looks.

        Memory: does not grow with the number of texts (see `equal_hashes`).
        Raises:
            InputError: If the folder holds none of the texts, or is damaged.
        """
        if not rows_path.exists():
            lock = rows_path.with_name(f".{rows_path.name}.lock")
            with file_lock(lock):
                if not rows_path.exists():
                    _write_rows(self.vectors, hash_N, rows_path)
                lock.unlink(missing_ok=True)
        return FoundVectors(self.vectors, load_shard(rows_path, mapped=True))


def _write_rows(folder: VectorFolder, hash_N: Int64s, rows_path: Path) -> None:
    """Write where each text's vector lies in the folder; of texts that lie there several times, the first."""
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
