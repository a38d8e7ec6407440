"""The context of a call: documents of a corpus, chosen once, encoded once, kept beside the vectors made with them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from embeddings.common.arrays import load_array
from embeddings.common.errors import InputError, OptionError
from embeddings.common.fileio import atomic_path, check_manifest, file_sha256
from embeddings.common.randomness import numpy_generator
from embeddings.inference.corpus import Document
from embeddings.inference.vector_shards import save_vectors

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder

CONTEXT_FILE = "context.npy"


@dataclass(frozen=True, eq=False)
class Context:
    """Context documents and the vectors that a model's first stage made of them.

    Attributes:
        document_ids: Ids of the documents in their corpus, M of them; one that was drawn twice is there twice.
        documents_sha256: Hash of the ids and texts, in this order.
        seed: Seed that they were drawn with.
        vector_MH: First-stage vectors, (M, H) float32.
    """

    document_ids: tuple[str, ...]
    documents_sha256: str
    seed: int
    vector_MH: npt.NDArray[np.float32]

    def __len__(self) -> int:
        """Number of documents, M."""
        return len(self.document_ids)

    def summary(self) -> dict[str, Any]:
        """What tells one context of a model from another, as plain types."""
        return {"num_documents": len(self), "seed": self.seed, "documents_sha256": self.documents_sha256}

    def manifest_fields(self) -> dict[str, Any]:
        """What a manifest says of the context that its vectors were made with."""
        return {"context": self.summary(), "context_document_ids": list(self.document_ids)}

    def write(self, folder: Path) -> Self:
        """Keep the vectors in `folder`; those of a run that was killed stay, and are the ones returned."""
        if not (folder / CONTEXT_FILE).exists():
            with atomic_path(folder / CONTEXT_FILE) as temporary:
                save_vectors(temporary, self.vector_MH)
        vectors = np.load(folder / CONTEXT_FILE)
        return type(self)(self.document_ids, self.documents_sha256, self.seed, vectors)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The context that a finished folder of vectors was made with, or None where it was made with none.

        Raises:
            InputError: If the context's vectors are missing or not the ones that were used.
        """
        fields = check_manifest(folder, {})
        if fields.get("context") is None:
            return None
        path = folder / CONTEXT_FILE
        if not path.is_file() or file_sha256(path) != fields["context_vectors_sha256"]:
            raise InputError(str(path), "is not the context that these vectors were made with", "encode again")
        summary = fields["context"]
        ids = tuple(fields["context_document_ids"])
        return cls(ids, summary["documents_sha256"], summary["seed"], load_array(path, "encode again"))


@dataclass(frozen=True)
class ContextDraw:
    """Context documents that were drawn and not encoded yet: what they are is all it takes to compare two contexts.

    Attributes:
        documents: The documents in the order they were drawn in, M of them.
        seed: Seed that they were drawn with.
    """

    documents: tuple[Document, ...]
    seed: int

    def summary(self) -> dict[str, Any]:
        """What `Context.summary` says of these documents."""
        sha256 = documents_sha256(self.documents)
        return {"num_documents": len(self.documents), "seed": self.seed, "documents_sha256": sha256}

    def encoded(self, encoder: "Encoder") -> Context:
        """The context, with the vectors that a model's first stage makes of the documents.

        Raises:
            OptionError: If the model takes no context.
            NumericError: If a vector is not finite.
        """
        vector_MH = encoder.encode_context([document.text for document in self.documents])
        return context_of(self.documents, vector_MH, self.seed)


def check_same_context(folder: Path, found: Context | None, asked: Context | ContextDraw) -> None:
    """Refuse to search vectors that were made with one context by queries that would be made with another.

    Raises:
        InputError: If the contexts differ; the message says in what.
    """
    if found is not None and found.summary() == asked.summary():
        return
    was = "without a context" if found is None else f"with {_describe(found.summary())}"
    what = f"was encoded {was}, asked for is {_describe(asked.summary())}"
    raise InputError(str(folder), what, "leave --context out to search with the folder's own, or encode it again")


def sample_rows(num_documents: int, size: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """The rows of `size` context documents of a corpus.

    Without replacement where the corpus has as many; a smaller one is drawn whole as often as it fits and the rest
    without replacement, so that every document is there as often as any other, or once more.

    Determinism: the rows depend on the arguments alone.

    Args:
        num_documents: Documents of the corpus.
        size: Rows to draw.
        seed: Seed of the draw.

    Returns:
        Rows, (size,) int64.

    Raises:
        OptionError: If `size` is not positive.

    Source: the released code of arXiv:2410.02525 wants exactly J documents and a smaller corpus oversampled; how is
        not said there.
    """
    if size < 1:
        raise OptionError("context_size", size, "must be >= 1", "leave it out for the model's own size")
    assert num_documents > 0
    generator = numpy_generator(seed, "context", num_documents, size)
    whole = [generator.permutation(num_documents) for _ in range(size // num_documents)]
    rest = generator.choice(num_documents, size % num_documents, replace=False)
    return np.concatenate([*whole, rest]).astype(np.int64)


def documents_sha256(documents: Iterable[Document]) -> str:
    """A hash of the ids and texts of documents, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(list(document)).encode())
    return digest.hexdigest()


def context_of(documents: Sequence[Document], vector_MH: npt.NDArray[np.float32], seed: int) -> Context:
    """The context of documents in the order they were drawn in, with their first-stage vectors."""
    ids = tuple(document.document_id for document in documents)
    return Context(ids, documents_sha256(documents), seed, vector_MH)


def _describe(summary: dict[str, Any]) -> str:
    return f"{summary['num_documents']} documents of seed {summary['seed']} ({summary['documents_sha256'][:8]})"
