"""Clustering without a model: BM25 weights of hashed terms, reduced by a truncated SVD."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError, OptionError
from embeddings.common.randomness import derive_seed
from embeddings.data.cache import CachedSource
from embeddings.inference.search import unit_rows
from embeddings.mining.features import (
    MAX_FITTED_ROWS,
    Int64s,
    PairFeatures,
    RowName,
    Vectors,
    sample_rows,
    unit_features,
)

DEFAULT_DIM = 128
_NUM_HASHES = 1 << 18
_TERM = r"(?u)\w+"
_K1, _B = 1.2, 0.75


class Bm25Features(PairFeatures):
    """Query and document of each row by their words: BM25 weights, a truncated SVD, unit length, side by side.

    A text t has the weight idf(w)·f·(k1 + 1) / (f + k1·(1 - b + b·|t| / mean length)) for a word w that it holds f
    times; words are hashed to 2^18 columns, so no vocabulary grows with the rows. Weights and axes are learned of both
    sides of at most 131,072 rows. A text without a known word is zero; a row of two such texts has no direction.

    Args:
        source: A converted source of pairs.
        svd_dim: Width that each text is reduced to; the features are twice as wide. None: 128, or what the rows allow.
        seed: Decides which rows are learned of, and the SVD's random start.
        row_name: What a message calls a row, such as its file and line; None for its number.

    Precision: weights and SVD in float64, projections in float32.
    Raises:
        InputError: If the source's rows are no pairs.
        OptionError: If there are fewer texts than svd_dim.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, appendix (sparse variant); BM25 of Robertson & Zaragoza 2009
    with k1 1.2, b 0.75. Differs: which sparse features CDE uses is not stated.
    """

    def __init__(
        self, source: CachedSource, svd_dim: int | None = None, seed: int = 0, row_name: RowName | None = None
    ) -> None:
        if source.classes is not None:
            raise InputError(str(source.folder), "the source holds labelled texts, no pairs", "use conversion: pairs")
        self._table, self._seed, self._row_name = source.table, seed, row_name
        self.num_rows = len(source.table)
        most = min(2 * min(self.num_rows, MAX_FITTED_ROWS), _NUM_HASHES)
        if svd_dim is not None and not 1 <= svd_dim <= most:
            raise OptionError("svd_dim", svd_dim, f"must lie in 1 … {most}, the number of texts", "128 is usual")
        self._dim = svd_dim or min(DEFAULT_DIM, most)
        self._learned: dict[str, NDArray[Any]] = {}
        self.fields = {"features": "bm25", "svd_dim": self._dim}

    @property
    def embedding_dim(self) -> int:
        """Width of a feature."""
        return 2 * self._dim

    def fit(self) -> dict[str, NDArray[Any]]:
        """The terms that occur, (t,); their weights, (t,); the texts' mean length, (); the axes, (t, svd_dim)."""
        from sklearn.decomposition import TruncatedSVD

        rows = sample_rows(self.num_rows, MAX_FITTED_ROWS, derive_seed(self._seed, "bm25"))
        queries, documents = self._texts(rows)
        counts = _term_counts([*queries, *documents])
        frequency = np.bincount(counts.indices, minlength=_NUM_HASHES)
        terms = np.flatnonzero(frequency)
        if not len(terms):
            where = "row 0" if self._row_name is None else self._row_name(0)
            raise InputError(where, "neither it nor any other row holds a word", "use --features vectors")
        num_texts = counts.shape[0]
        learned: dict[str, NDArray[Any]] = {
            "terms": terms,
            "idf": np.log1p((num_texts - frequency[terms] + 0.5) / (frequency[terms] + 0.5)),
            "mean_length": np.array(counts.sum() / num_texts),
        }
        # The solver wants as many columns as axes; with few words the rest of the axes stay zero.
        num_axes = min(self._dim, len(terms))
        svd = TruncatedSVD(num_axes, n_iter=7, random_state=derive_seed(self._seed, "svd") % 2**32)
        svd.fit(_bm25_weights(counts, learned))
        axes = np.zeros((len(terms), self._dim), dtype=np.float32)
        axes[:, : len(svd.components_)] = svd.components_.T
        return {**learned, "axes": axes}

    def use(self, learned: dict[str, NDArray[Any]]) -> None:
        """Take the weights and axes."""
        self._learned = learned

    def rows(self, rows: Int64s, swapped: bool = False) -> Vectors:
        """The features of some rows (see `PairFeatures.rows`)."""
        assert self._learned, "use(fit()) comes first"
        sides = [self._reduced(texts) for texts in self._texts(rows)]
        return unit_features(np.concatenate(sides[::-1] if swapped else sides, axis=1), rows, self._row_name)

    def _reduced(self, texts: Sequence[str]) -> Vectors:
        weights = _bm25_weights(_term_counts(texts), self._learned)
        return unit_rows(np.asarray(weights.astype(np.float32) @ self._learned["axes"]))

    def _texts(self, rows: Int64s) -> tuple[list[str], list[str]]:
        stored = self._table.rows(rows)
        return [row.query for row in stored], [row.positives[0] for row in stored]


def _term_counts(texts: Sequence[str]) -> Any:
    """How often each hashed term occurs in each text, a sparse (texts, 2^18) matrix."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=_NUM_HASHES, alternate_sign=False, norm=None, token_pattern=_TERM)
    return vectorizer.transform(texts)


def _bm25_weights(counts: Any, learned: dict[str, NDArray[Any]]) -> Any:
    """The BM25 weight of each known term in each text, a sparse (texts, terms) matrix."""
    length = np.asarray(counts.sum(axis=1)).ravel()
    weights = counts[:, learned["terms"]].tocsr()
    weights.sort_indices()
    per_entry = np.repeat(_K1 * (1 - _B + _B * length / learned["mean_length"]), np.diff(weights.indptr))
    weights.data = weights.data * (_K1 + 1) / (weights.data + per_entry) * learned["idf"][weights.indices]
    return weights
