"""What pairs are clustered by: query and document side by side, in both orders, at unit length."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import check_manifest
from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.data.store import CachedSource
from embeddings.inference.vectors import unit_rows
from embeddings.mining.pair_vectors import PairVectors

Int64s = NDArray[np.int64]
Vectors = NDArray[np.float32]
# What a message calls a row of the source.
RowName = Callable[[int], str]

# More rows than this move the axes of a few hundred dimensions by nothing that matters.
MAX_FITTED_ROWS = 1 << 17
_BLOCK = 8192


class PairFeatures(ABC):
    """A unit vector of each row of a source of pairs, computed when it is asked for.

    What is learned of the rows (axes, term weights) is computed by one process and handed to the others as arrays: two
    machines would not come to the same bits.

    Attributes:
        num_rows: Rows of the source.
        embedding_dim: Width of a feature.
        fields: What decides the features, for manifests.
        row_name: What a message calls a row, such as its file and line.
        learned: What `fit` learned; before that no row can be asked for.
    """

    num_rows: int
    embedding_dim: int
    fields: dict[str, Any]
    row_name: RowName
    learned: dict[str, NDArray[Any]] | None = None

    @abstractmethod
    def fit(self) -> dict[str, NDArray[Any]]:
        """What has to be learned of the rows, by name."""

    @abstractmethod
    def sides(self, rows: Int64s) -> tuple[Vectors, Vectors]:
        """The query's part and the document's of the features of some rows, (n, d) float32 each."""

    def rows(self, rows: Int64s, swapped: bool = False) -> Vectors:
        """The features of ascending rows, (n, embedding_dim) float32, unit rows; `swapped` puts the document first.

        Raises:
            InputError: If a row has no direction; the message names it.
        """
        sides = self.sides(rows)
        return unit_features(np.concatenate(sides[::-1] if swapped else sides, axis=1), rows, self.row_name)


class VectorFeatures(PairFeatures):
    """A surrogate's vectors [q; d] or [d; q], d the row's first positive, reduced to principal axes where wanted.

    The axes are those of the second moments of both orders, without centring, so that they are the same for both.

    Args:
        vectors: The surrogate's unit vectors.
        svd_dim: Width to reduce to, 1 to twice the vectors' width, or None.
        seed: Decides which rows the axes are computed of, where there are more than 131,072.
        row_name: What a message calls a row, such as its file and line.

    Precision: second moments in float64; products with the axes in float32.
    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix; reduction as in the released code.
    """

    def __init__(
        self, vectors: PairVectors, svd_dim: int | None = None, seed: int = 0, row_name: RowName = "row {}".format
    ) -> None:
        width = vectors.query_shards.embedding_dim
        check_svd_dim(svd_dim, width)
        self._vectors, self._svd_dim, self._seed, self.row_name = vectors, svd_dim, seed, row_name
        self.num_rows, self.embedding_dim = vectors.index.num_queries, svd_dim or 2 * width
        self.fields = {"features": "vectors", "svd_dim": svd_dim}
        for role, shards in (("query", vectors.query_shards), ("document", vectors.document_shards)):
            made = check_manifest(shards.folder, {})
            self.fields |= {f"{role}_{name}": made[name] for name in ("model_sha256", "precision", "prompt_name")}

    def fit(self) -> dict[str, NDArray[Any]]:
        """The principal axes, (2D, svd_dim), where the features are reduced."""
        if self._svd_dim is None:
            return {}
        width = 2 * self._vectors.query_shards.embedding_dim
        moments = np.zeros((width, width))
        rows = sample_rows(self.num_rows, MAX_FITTED_ROWS, derive_seed(self._seed, "axes"))
        for start in range(0, len(rows), _BLOCK):
            for swapped in (False, True):
                block = super().rows(rows[start : start + _BLOCK], swapped).astype(np.float64)
                moments += block.T @ block
        _, axes = np.linalg.eigh(moments)
        return {"axes": np.ascontiguousarray(axes[:, ::-1][:, : self._svd_dim], dtype=np.float32)}

    def rows(self, rows: Int64s, swapped: bool = False) -> Vectors:
        vectors = super().rows(rows, swapped)
        if self._svd_dim is None:
            return vectors
        assert self.learned is not None
        return unit_features(vectors @ self.learned["axes"], rows, self.row_name)

    def sides(self, rows: Int64s) -> tuple[Vectors, Vectors]:
        vectors, index = self._vectors, self._vectors.index
        documents = np.asarray(index.positive_rows[index.positive_offsets[rows]], dtype=np.int64)
        return vectors.query_shards.take(rows), vectors.document_shards.take(documents)


def check_svd_dim(svd_dim: int | None, embedding_dim: int) -> None:
    """Refuse a width that [q; d] cannot be reduced to."""
    if svd_dim is not None and not 1 <= svd_dim <= 2 * embedding_dim:
        rule = f"must lie in 1 … {2 * embedding_dim}, twice the vectors' width"
        raise OptionError("svd_dim", svd_dim, rule, "128 is usual")


def unit_features(vectors: Vectors, rows: Int64s, row_name: RowName = "row {}".format) -> Vectors:
    """The vectors of some rows at unit length, (n, d) float32; an `InputError` names a row that has no direction."""
    length_N1 = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(length_N1[:, 0]) & (length_N1[:, 0] > 0)))
    if len(bad):
        what = f"what it is clustered by is {'zero' if length_N1[bad[0], 0] == 0 else 'not finite'}"
        raise InputError(row_name(int(rows[bad[0]])), what, "check its texts and the model")
    return np.asarray(vectors / length_N1, dtype=np.float32)


def sample_rows(num_rows: int, most: int, seed: int) -> Int64s:
    """All rows where there are no more than `most`, else as many random ones, ascending, int64."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(KeyedPermutation(num_rows, seed)(np.arange(most)))


DEFAULT_DIM = 128
_NUM_HASHES = 1 << 18
_TERM = r"(?u)\w+"
_K1, _B = 1.2, 0.75


class Bm25Features(PairFeatures):
    """Query and document of each row by their words: BM25 weights, a truncated SVD, unit length, side by side.

    A text t has the weight idf(w)·f·(k1 + 1) / (f + k1·(1 - b + b·|t| / mean length)) for a word w that it holds f
    times; words are hashed to 2^18 columns. Weights and axes are learned of both sides of at most 131,072 rows. A text
    without a known word is zero; a row of two such texts has no direction.

    Args:
        source: A converted source of pairs.
        svd_dim: Width that each text is reduced to; the features are twice as wide. None: 128, or what the rows allow.
        seed: Decides which rows are learned of, and the SVD's random start.
        row_name: What a message calls a row, such as its file and line.

    Precision: weights and SVD in float64, projections in float32.
    Raises:
        InputError: If the source's rows are no pairs.
        OptionError: If there are fewer texts than svd_dim.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, appendix (sparse variant); BM25 of Robertson & Zaragoza 2009
    with k1 1.2, b 0.75. Differs: which sparse features CDE uses is not stated.
    """

    def __init__(
        self, source: CachedSource, svd_dim: int | None = None, seed: int = 0, row_name: RowName = "row {}".format
    ) -> None:
        if source.classes is not None:
            raise InputError(str(source.folder), "the source holds labelled texts, no pairs", "use conversion: pairs")
        self._table, self._seed, self.row_name = source.table, seed, row_name
        self.num_rows = len(source.table)
        most = min(2 * min(self.num_rows, MAX_FITTED_ROWS), _NUM_HASHES)
        if svd_dim is not None and not 1 <= svd_dim <= most:
            raise OptionError("svd_dim", svd_dim, f"must lie in 1 … {most}, the number of texts", "128 is usual")
        self._dim = svd_dim or min(DEFAULT_DIM, most)
        self.embedding_dim = 2 * self._dim
        self.fields = {"features": "bm25", "svd_dim": self._dim}

    def fit(self) -> dict[str, NDArray[Any]]:
        """The terms that occur, (t,), their weights, (t,), the texts' mean length and the axes, (t, svd_dim)."""
        from sklearn.decomposition import TruncatedSVD

        rows = sample_rows(self.num_rows, MAX_FITTED_ROWS, derive_seed(self._seed, "bm25"))
        queries, documents = self._texts(rows)
        counts = _term_counts([*queries, *documents])
        frequency = np.bincount(counts.indices, minlength=_NUM_HASHES)
        terms = np.flatnonzero(frequency)
        if not len(terms):
            raise InputError(self.row_name(0), "neither it nor any other row holds a word", "use --features vectors")
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

    def sides(self, rows: Int64s) -> tuple[Vectors, Vectors]:
        assert self.learned is not None
        axes = self.learned["axes"]
        weights = (_bm25_weights(_term_counts(texts), self.learned) for texts in self._texts(rows))
        query_ND, document_ND = (unit_rows(np.asarray(w.astype(np.float32) @ axes)) for w in weights)
        return query_ND, document_ND

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
