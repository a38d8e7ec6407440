"""Contexts of contextual models: documents drawn from a corpus and encoded by the model's first stage."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import compress
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, OptionError
from embeddings.common.random import numpy_generator
from embeddings.inference.encoder import Context, Encoder
from embeddings.inference.vector_folder import Document, VectorFolder, read_corpus


def check_same_context(folder: Path, stored: Context | None, requested: Context) -> None:
    """Refuse a folder that was encoded with another context than the queries will be."""
    if stored is not None and stored.summary() == requested.summary():
        return
    shown = "{num_documents} documents of seed {seed} ({documents_sha256:.8})".format_map
    encoded = "without a context" if stored is None else f"with {shown(stored.summary())}"
    what = f"was encoded {encoded}, but the requested context is {shown(requested.summary())}"
    raise InputError(str(folder), what, "leave out --context to use the folder's context, or encode again")


def sample_rows(num_documents: int, size: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """The rows of `size` context documents of a corpus, (size,) int64; they depend on the arguments only.

    Rows are drawn without replacement. A corpus smaller than `size` is repeated first, so that counts differ by at most
    one. Source: the released code of arXiv:2410.02525 requires exactly J documents and oversamples a smaller corpus,
    but does not specify how.
    """
    assert num_documents > 0
    generator = numpy_generator(seed, "context", num_documents, size)
    copies = [generator.permutation(num_documents) for _ in range(size // num_documents)]
    rest = generator.choice(num_documents, size % num_documents, replace=False)
    return np.concatenate([*copies, rest]).astype(np.int64)


def documents_sha256(documents: Iterable[Document]) -> str:
    return hashlib.sha256("".join(json.dumps(list(document)) for document in documents).encode()).hexdigest()


def draw_documents(source: str | PathLike[str], size: int, seed: int = 0) -> list[Document]:
    """Draw documents from a corpus file or an encoded folder (see `sample_rows`)."""
    if Path(source).is_dir():
        folder = VectorFolder.open(source)
        return folder.documents(sample_rows(folder.num_documents, size, seed).tolist())
    # Two passes over the file, because a corpus may not fit in memory.
    num_documents = sum(1 for _ in read_corpus(source, show_progress=True))
    rows = sample_rows(num_documents, size, seed)
    wanted = np.zeros(num_documents, dtype=bool)
    wanted[rows] = True
    drawn = dict(zip(np.unique(rows).tolist(), compress(read_corpus(source), wanted), strict=True))
    return [drawn[row] for row in rows.tolist()]


def choose_context(encoder: Encoder, source: str | PathLike[str], size: int | None = None, seed: int = 0) -> Context:
    """Draw context documents for a contextual model from a corpus, and encode them.

    Args:
        encoder: The model.
        source: A corpus file (see `read_corpus`), or a folder written by `encode_corpus` with any model.
        size: Number of context documents; None for all slots of the model.
        seed: Seed of the draw. A corpus smaller than `size` is oversampled evenly.
    """
    return encode_documents(encoder, draw_documents(source, require_context_size(encoder, size), seed), seed)


def sample_context(encoder: Encoder, texts: Sequence[str], size: int | None = None, seed: int = 0) -> Context:
    """As `choose_context`, from texts in memory, whose ids are their row numbers."""
    size = require_context_size(encoder, size)
    if not texts:
        raise OptionError("context", 0, "must have at least one document", "leave it out for no context")
    rows = sample_rows(len(texts), size, seed).tolist()
    return encode_documents(encoder, [Document(str(row), texts[row]) for row in rows], seed)


def encode_documents(encoder: Encoder, documents: Sequence[Document], seed: int) -> Context:
    vector_MH = encoder.encode_context([document.text for document in documents])
    ids = tuple(document.document_id for document in documents)
    return Context(ids, documents_sha256(documents), seed, vector_MH)


def require_context_size(encoder: Encoder, size: int | None) -> int:
    """The number of context documents, where None means all slots."""
    encoder.require_context()
    slots = encoder.num_context
    if size is None:
        return slots
    if not 1 <= size <= slots:
        rule = f"must be from 1 to the model's {slots} context documents"
        raise OptionError("context_size", size, rule, "leave it out for all of them")
    return size
