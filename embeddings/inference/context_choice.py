"""Context documents drawn from a corpus, and the vectors that a model's first stage makes of them."""

from collections.abc import Sequence
from itertools import compress
from os import PathLike
from pathlib import Path

import numpy as np

from embeddings.common.errors import OptionError
from embeddings.inference.context import Context, ContextDraw, sample_rows
from embeddings.inference.corpus import Document, read_corpus
from embeddings.inference.encoder import Encoder
from embeddings.inference.vector_folder import VectorFolder


def draw_context(encoder: Encoder, source: str | PathLike[str], size: int | None = None, seed: int = 0) -> ContextDraw:
    """The documents that a corpus gives a contextual model for its context.

    They are drawn from the corpus, never from queries, without replacement; a corpus smaller than `size` is drawn from
    evenly, each document as often as any other or once more.

    Args:
        encoder: The model.
        source: A corpus file (see `read_corpus`), or a folder that `encode_corpus` wrote, by whatever model.
        size: Context documents; None for as many as the model has slots. Fewer leave slots to the null vector.
        seed: Seed of the draw.

    Raises:
        InputError: If the corpus cannot be used or is empty.
        OptionError: If the model takes no context, or none of this size.
    """
    size = require_context_size(encoder, size)
    return ContextDraw(tuple(draw_documents(source, size, seed)), seed)


def draw_documents(source: str | PathLike[str], size: int, seed: int = 0) -> list[Document]:
    """Documents of a corpus, drawn as those of a context are (see `sample_rows`).

    Args:
        source: A corpus file, or a folder that `encode_corpus` wrote.
        size: How many.
        seed: Seed of the draw.

    Raises:
        InputError: If the corpus cannot be used or is empty.
    """
    path = Path(source)
    if not path.is_dir():
        return _documents_of_file(path, size, seed)
    folder = VectorFolder.open(path)
    return folder.documents(sample_rows(folder.num_documents, size, seed).tolist())


def choose_context(encoder: Encoder, source: str | PathLike[str], size: int | None = None, seed: int = 0) -> Context:
    """The context that a corpus gives a contextual model: what `draw_context` draws.

    The documents' first-stage vectors are computed here, once, and the context keeps them.

    Raises:
        InputError: If the corpus cannot be used or is empty.
        OptionError: If the model takes no context, or none of this size.
    """
    return draw_context(encoder, source, size, seed).encoded(encoder)


def sample_context(encoder: Encoder, texts: Sequence[str], size: int | None = None, seed: int = 0) -> Context:
    """The same of texts in memory, whose ids are their rows.

    Raises:
        OptionError: If the model takes no context, or none of this size, or there is no text.
    """
    size = require_context_size(encoder, size)
    if not texts:
        raise OptionError("context", 0, "must hold at least one document", "leave it out for no context")
    rows = sample_rows(len(texts), size, seed).tolist()
    return ContextDraw(tuple(Document(str(row), texts[row]) for row in rows), seed).encoded(encoder)


def require_context_size(encoder: Encoder, size: int | None) -> int:
    """The number of context documents: the one asked for, or as many as the model has slots.

    Raises:
        OptionError: If the model takes no context, or fewer documents.
    """
    slots = encoder.num_context
    if slots == 0:
        raise OptionError("context", "a context", "must be left out: this model takes none", "drop it")
    if size is None:
        return slots
    if not 1 <= size <= slots:
        rule = f"must be from 1 to the model's {slots} context documents"
        raise OptionError("context_size", size, rule, "leave it out for all of them")
    return size


def _documents_of_file(path: Path, size: int, seed: int) -> list[Document]:
    num_documents = sum(1 for _ in read_corpus(path))
    rows = sample_rows(num_documents, size, seed)
    # Two passes over the file: a corpus need not fit in memory.
    wanted = np.zeros(num_documents, dtype=bool)
    wanted[rows] = True
    drawn = dict(zip(np.unique(rows).tolist(), compress(read_corpus(path), wanted), strict=True))
    return [drawn[row] for row in rows.tolist()]
