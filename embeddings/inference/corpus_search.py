"""A corpus that is searched, once or many times."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.fileio import check_manifest
from embeddings.inference.context import Context, ContextDraw, check_same_context
from embeddings.inference.corpus import Document, read_corpus
from embeddings.inference.encoder import Encoder
from embeddings.inference.model_digest import embedder_sha256
from embeddings.inference.search import TopK, search_top_k, unit_rows
from embeddings.inference.sign_search import RESCORE_MULTIPLIER, require_multiplier, search_signs
from embeddings.inference.vector_folder import VectorFolder

# The best documents of some queries, from their unit vectors and the number of documents wanted.
NearestRows = Callable[[npt.NDArray[np.float32], int], TopK]


class Hit(NamedTuple):
    """A document found by a search.

    Attributes:
        document_id: Its id in the corpus.
        score: Cosine of the query with the document's vector, as it is kept.
        text: The text that was encoded.
    """

    document_id: str
    score: float
    text: str


class CorpusSearch:
    """A corpus at hand for searches: what does not depend on the query is done when this is made.

    Args:
        encoder: The model; its `query` prompt goes before each query.
        corpus: A folder that `encode_corpus` wrote with the same model, or a corpus file, which is encoded now.
        context: What a contextual model reads queries and documents behind, None for a folder's own, and for no context
            where the corpus is a file. A draw is encoded for a file alone: with a folder's own it is only compared.
        nearest: An index of the folder's vectors; None to compare each query with every document. A corpus file has
            none.
        rescore_multiplier: For a folder of binary vectors, how many are scored again for each document wanted (see
            `search_signs`); None for 4.

    Raises:
        InputError: If the corpus cannot be used, or another model encoded it, or it was encoded with another context or
            another number of dimensions.
        OptionError: If the model takes no such context, `rescore_multiplier` is not positive, or it is given and the
            corpus is no folder of binary vectors, or an index is given and the corpus is a file.
    """

    def __init__(
        self,
        encoder: Encoder,
        corpus: str | Path,
        *,
        context: Context | ContextDraw | None = None,
        nearest: NearestRows | None = None,
        rescore_multiplier: int | None = None,
    ) -> None:
        self.encoder = encoder
        self._folder, self._context = None, None
        self._rescore_multiplier = RESCORE_MULTIPLIER if rescore_multiplier is None else rescore_multiplier
        require_multiplier(self._rescore_multiplier)
        if Path(corpus).is_dir():
            fields = {"model_sha256": embedder_sha256(encoder), "embedding_dim": encoder.embedding_dim}
            check_manifest(corpus, {"kind": "vectors", "complete": True, **fields})
            self._folder = VectorFolder.open(corpus)
            _check_effect(rescore_multiplier, self._folder.vector_format == "binary")
            self._context = self._folder.context()
            if context is not None:
                check_same_context(self._folder.path, self._context, context)
            self._nearest = nearest or self._compare_all
        else:
            if nearest is not None:
                raise OptionError(
                    "nearest", "an index", "needs an encoded folder", "encode the corpus, or leave it out"
                )
            _check_effect(rescore_multiplier, False)
            self._all = list(read_corpus(corpus))
            self._context = context.encoded(encoder) if isinstance(context, ContextDraw) else context
            texts = [document.text for document in self._all]
            self._vector_ND = unit_rows(encoder.encode(texts, None, self._context, role="document"))
            self._nearest = self._compare_all

    @property
    def has_context(self) -> bool:
        """Whether queries and documents are read in a context."""
        return self._context is not None

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[Hit]]:
        """The documents with the largest cosines of each query, best first.

        Args:
            queries: Texts to search for.
            top_k: Most documents of a query.

        Raises:
            InputError: If one of the folder's vectors is zero or not finite, or its documents are damaged.
            OptionError: If `top_k` is not positive.
        """
        query_QD = unit_rows(self.encoder.encode(queries, None, self._context, role="query"))
        found = self._nearest(query_QD, top_k)
        return [
            [
                Hit(document.document_id, score, document.text)
                for document, score in zip(self._documents(rows), scores, strict=False)
            ]
            for rows, scores in zip(found.index_QK.tolist(), found.score_QK.tolist(), strict=True)
        ]

    def _compare_all(self, query_QD: npt.NDArray[np.float32], top_k: int) -> TopK:
        if self._folder is not None and self._folder.vector_format == "binary":
            return search_signs(query_QD, self._folder.shards, top_k, self._rescore_multiplier)
        documents = self._vector_ND if self._folder is None else self._folder.directions()
        return search_top_k(query_QD, documents, top_k, self.encoder.device)

    def _documents(self, rows: list[int]) -> list[Document]:
        """The documents in some rows; an index that found fewer has -1 in the last ones."""
        rows = [row for row in rows if row >= 0]
        return [self._all[row] for row in rows] if self._folder is None else self._folder.documents(rows)


def _check_effect(rescore_multiplier: int | None, is_binary: bool) -> None:
    if rescore_multiplier is not None and not is_binary:
        rule = "has no effect but on a folder of binary vectors"
        raise OptionError("rescore_multiplier", rescore_multiplier, rule, "leave it out")


def search_corpus(
    encoder: Encoder,
    corpus: str | Path,
    queries: Sequence[str],
    top_k: int = 10,
    *,
    context: Context | ContextDraw | None = None,
) -> list[list[Hit]]:
    """The documents with the largest cosines of each query, best first; see `CorpusSearch`."""
    return CorpusSearch(encoder, corpus, context=context).search(queries, top_k)
