"""Exact search in tiles, by inner product or by signs, and searchable corpora."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import OptionError, require_minimum
from embeddings.common.io import check_manifest
from embeddings.common.progress import tracked
from embeddings.inference.context import check_same_context
from embeddings.inference.encoder import Context, Encoder, embedder_sha256
from embeddings.inference.vector_folder import (
    DOCUMENT_TILE,
    Document,
    VectorFolder,
    VectorShards,
    read_corpus,
    sign_bits,
)

QUERY_TILE = 1024


class TopK(NamedTuple):
    """The best documents of each query, best first: scores, (Q, K) float32, and rows, (Q, K) int64."""

    score_QK: npt.NDArray[np.float32]
    index_QK: npt.NDArray[np.int64]


def search_top_k(
    query_QD: npt.NDArray[np.float32],
    documents: npt.NDArray[np.float32] | Iterable[npt.NDArray[np.float32]],
    top_k: int,
    device: str | torch.device = "cpu",
    tie_order_N: npt.NDArray[np.int64] | None = None,
) -> TopK:
    """The K documents with the largest inner products for each query, best first; equal scores by row.

    Only tiles of 1,024 queries x 16,384 documents are in memory, so the documents may be memory-mapped and larger than
    memory; they are read once for all queries. Products and sums are in float32.

    Args:
        query_QD: Query vectors, (Q, D) float32.
        documents: Document vectors, (n, D) float32, or consecutive arrays of them.
        top_k: Maximum number of documents per query; an `OptionError` if it is not positive.
        device: Device that multiplies the tiles.
        tie_order_N: The rows of all documents in the order of equal scores, (N,) int64; None for the order of rows.
    """
    search = TopKSearch(query_QD, top_k, device, tie_order_N)
    for piece in [documents] if isinstance(documents, np.ndarray) else documents:
        search.add(piece)
    return search.result()


class TopKSearch:
    """`search_top_k` over documents that are added one array after the other."""

    def __init__(
        self,
        query_QD: npt.NDArray[np.float32],
        top_k: int,
        device: str | torch.device = "cpu",
        tie_order_N: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._device, self._tie_order_N = device, tie_order_N
        queries = torch.from_numpy(np.ascontiguousarray(query_QD, dtype=np.float32)).to(device)
        rank_N = None if tie_order_N is None else torch.from_numpy(np.argsort(tie_order_N)).to(device)
        self._tiles = TileSearch(queries, top_k, QUERY_TILE, rank_N=rank_N)

    def add(self, document_nD: npt.NDArray[np.float32]) -> None:
        """Compare the next documents with all queries, (n, D) float32."""
        for start in range(0, len(document_nD), DOCUMENT_TILE):
            # A copy: a memory-mapped tile is read-only, which torch does not support.
            tile = np.array(document_nD[start : start + DOCUMENT_TILE], dtype=np.float32)
            self._tiles.add_tile(torch.from_numpy(tile).to(self._device))

    def result(self) -> TopK:
        score_QK, rank_QK = self._tiles.result()
        if self._tie_order_N is None:
            return TopK(score_QK, rank_QK)
        return TopK(score_QK, np.where(rank_QK < 0, -1, self._tie_order_N[rank_QK]))


def require_top_k(top_k: int) -> None:
    require_minimum("top_k", top_k, 1, "10 is usual")


class BestDocuments:
    """The best documents of each query so far, each as one integer: the bits of the score, then of the falling rank."""

    def __init__(self, num_queries: int, top_k: int, chunk_size: int, device: str | torch.device = "cpu") -> None:
        require_top_k(top_k)
        self.top_k = top_k
        starts = range(0, max(1, num_queries), chunk_size)
        self.chunks = [slice(start, min(start + chunk_size, num_queries)) for start in starts]
        self._keys = [
            torch.empty((part.stop - part.start, 0), dtype=torch.int64, device=device) for part in self.chunks
        ]

    def add(self, chunk: int, score_QC: Tensor, rank_QC: Tensor) -> None:
        """Add documents to the queries of a chunk; a document with the score -inf is left out."""
        key_QK = torch.cat([self._keys[chunk], _packed(score_QC, rank_QC)], dim=1)
        if self.top_k < key_QK.shape[1]:
            key_QK = _topk(key_QK, self.top_k)[0]
        self._keys[chunk] = key_QK

    def worst(self, chunk: int) -> Tensor:
        """The score that a further document must exceed to be among the best, (Q, 1)."""
        keys = self._keys[chunk]
        if keys.shape[1] < self.top_k:
            return torch.full((len(keys), 1), -torch.inf, device=keys.device)
        return _scores(keys.amin(dim=1, keepdim=True))

    def result(self) -> TopK:
        """The best documents by score, then by rank; rank -1 and score -inf where there are fewer."""
        key_QK = torch.cat(self._keys).sort(dim=1, descending=True).values
        score_QK = _scores(key_QK)
        rank_QK = torch.where(score_QK > -torch.inf, _MAX_RANK - (key_QK & _MAX_RANK), -1)
        return TopK(score_QK.cpu().numpy(), rank_QK.cpu().numpy())


_MAX_RANK = 2**32 - 1
# Swaps the order of negative numbers, whose bits as integers rise as the numbers fall.
_MAGNITUDE = 2**31 - 1


def _packed(score_QC: Tensor, rank_QC: Tensor) -> Tensor:
    # The sum makes -0.0 equal to 0.0.
    bits = (score_QC + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.long() << 32) | (_MAX_RANK - rank_QC)


def _scores(key_QK: Tensor) -> Tensor:
    ordered = (key_QK >> 32).int()
    return (ordered ^ ((ordered >> 31) & _MAGNITUDE)).view(torch.float32)


# For products in a lower dtype: the usual error of a score of unit vectors, and the share of further documents that
# are scored again.
_MARGINS = {torch.bfloat16: (0.005, 1.0), torch.float16: (0.001, 0.25), torch.float32: (0.0, 0.0)}
SLACK = 16
# Pairs whose vectors fit a CPU cache.
PAIRS = 256


def num_candidates(top_k: int, dtype: torch.dtype = torch.float16) -> int:
    """Number of a tile's documents that may be scored again in float32, after products in a lower dtype."""
    return top_k + int(_MARGINS[dtype][1] * top_k) + SLACK


class TileSearch(BestDocuments):
    """The best documents of tiles, which are added in order.

    Candidates of products in a lower `dtype` are scored again in float32, `num_pairs` at once. Equal scores are in the
    order of `rank_N`, by default that of the rows.
    """

    def __init__(
        self,
        query_QD: Tensor,
        top_k: int,
        chunk_size: int,
        dtype: torch.dtype = torch.float32,
        num_pairs: int = PAIRS,
        rank_N: Tensor | None = None,
    ) -> None:
        super().__init__(len(query_QD), top_k, chunk_size, query_QD.device)
        self._query_QD, self._rounded_QD = query_QD, query_QD.to(dtype)
        self._dtype, self._num_pairs, self._rank_N, self._num_documents = dtype, num_pairs, rank_N, 0

    def add_tile(self, tile_TD: Tensor) -> None:
        """Compare the next documents with all queries, (T, D)."""
        row_T = torch.arange(self._num_documents, self._num_documents + len(tile_TD), device=tile_TD.device)
        self._num_documents += len(tile_TD)
        rank_T = row_T if self._rank_N is None else self._rank_N[row_T]
        tile_DT = tile_TD.to(self._dtype).T
        for number, chunk in enumerate(self.chunks):
            score_QT = self._rounded_QD[chunk] @ tile_DT
            if self._dtype == torch.float32:
                self.add(number, *_top_of_tile(score_QT, rank_T, self.top_k))
                continue
            score_QC, column_QC = largest(score_QT, min(num_candidates(self.top_k, self._dtype), len(tile_TD)))
            least_Q1 = self.worst(number)
            if self.top_k < score_QC.shape[1]:
                least_Q1 = least_Q1.maximum(_topk(score_QC, self.top_k)[0].amin(dim=1, keepdim=True))
            query_P, place_P = (score_QC > least_Q1 - _MARGINS[self._dtype][0]).nonzero(as_tuple=True)
            exact_QC = torch.full_like(score_QC, -torch.inf)
            row_P = column_QC[query_P, place_P]
            pairs = torch.split(query_P, self._num_pairs), torch.split(row_P, self._num_pairs)
            # `index_select` is several times as fast on a CPU as an index in brackets.
            query_QD = self._query_QD[chunk]
            exact_QC[query_P, place_P] = torch.cat([
                torch.linalg.vecdot(query_QD.index_select(0, query_p), tile_TD.index_select(0, row_p).float())
                for query_p, row_p in zip(*pairs, strict=True)
            ])  # fmt: skip
            self.add(number, exact_QC, rank_T[column_QC])


def _top_of_tile(score_QT: Tensor, rank_T: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top k of a tile, equal scores by rank: scores and ranks, unordered."""
    if top_k >= len(rank_T):
        return score_QT, rank_T.expand_as(score_QT)
    score_QC, column_QC = largest(score_QT, top_k + 1)
    score_QC, order_QC = score_QC.sort(dim=1, descending=True)
    score_QK, rank_QK = score_QC[:, :top_k], rank_T[column_QC.gather(1, order_QC[:, :top_k])]
    # If the last score occurs once more, the choice among equals was arbitrary.
    tied_Q = score_QC[:, top_k] == score_QC[:, top_k - 1]
    if bool(tied_Q.any()):
        key_QK = _topk(_packed(score_QT[tied_Q], rank_T), top_k)[0]
        score_QK[tied_Q], rank_QK[tied_Q] = _scores(key_QK), _MAX_RANK - (key_QK & _MAX_RANK)
    return score_QK, rank_QK


# Values per column of the layout in `largest`.
_STRIPES = 16


def largest(score_QT: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` largest values of each row in float32 and their positions, (Q, `top_k`), unordered.

    A row is laid out in stripes, one below the other: the `top_k` columns with the largest maxima contain them.
    """
    num_columns = score_QT.shape[1] // _STRIPES
    if num_columns <= top_k:
        return _topk(score_QT.float(), top_k)
    striped = score_QT[:, : _STRIPES * num_columns].view(-1, _STRIPES, num_columns)
    _, column_QK = _topk(striped.amax(dim=1).float(), top_k)
    chosen_QSK = column_QK[:, None, :].expand(-1, _STRIPES, -1)
    score_QC = torch.cat([striped.gather(2, chosen_QSK).flatten(1), score_QT[:, _STRIPES * num_columns :]], dim=1)
    value_QK, candidate_QK = _topk(score_QC.float(), top_k)
    column_QK = column_QK.gather(1, candidate_QK % top_k)
    # The candidates of the stripes are followed by the values of an incomplete last stripe.
    rest_QK = candidate_QK - _STRIPES * top_k
    stripe_QK = candidate_QK // top_k
    return value_QK, torch.where(rest_QK < 0, stripe_QK * num_columns + column_QK, _STRIPES * num_columns + rest_QK)


def _topk(value_QN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if value_QN.is_cuda:
        value_QK, index_QK = value_QN.topk(top_k, dim=1, sorted=False)
        return value_QK, index_QK
    # Several times as fast on a CPU.
    index_QK = torch.from_numpy(np.argpartition(value_QN.numpy(), -top_k, axis=1)[:, -top_k:])
    return value_QN.gather(1, index_QK), index_QK


RESCORE_MULTIPLIER = 4
# Queries per block: their distances to a tile of documents take a few MiB.
_QUERIES = 32


def search_signs(
    query_QD: npt.NDArray[np.float32], documents: VectorShards, top_k: int, rescore_multiplier: int = RESCORE_MULTIPLIER
) -> TopK:
    """The documents whose signs have the largest cosine with each query, among those with the nearest signs.

    The K x `rescore_multiplier` documents with the smallest Hamming distances are scored against the unit queries,
    (Q, D) float32: score = q . s / sqrt(D) with s in {-1, 1}. Equal scores are in row order.

    Precision: scores are summed in float64.
    Source: Yamada et al. 2021 (BPR), arXiv:2106.00882: candidates by Hamming distance, rescored with the float query.
        Differs: the model need not be trained for it.
    """
    require_top_k(top_k)
    require_multiplier(rescore_multiplier)
    shards = (documents.stored(shard) for shard in range(documents.num_shards))
    nearest = nearest_signs(sign_bits(query_QD), shards, top_k * rescore_multiplier)
    width = min(top_k, documents.num_rows)
    best = TopK(np.empty((len(query_QD), width), np.float32), np.empty((len(query_QD), width), np.int64))
    for query, row_M in enumerate(np.sort(nearest.index_QK, axis=1)):
        dot_M = np.vecdot(documents.take(row_M, unit=False).astype(np.float64), query_QD[query].astype(np.float64))
        score_M = (dot_M / documents.embedding_dim**0.5).astype(np.float32)
        order_K = np.argsort(-score_M, kind="stable")[:width]
        best.score_QK[query], best.index_QK[query] = score_M[order_K], row_M[order_K]
    return best


def nearest_signs(query_QB: npt.NDArray[np.uint8], documents: Iterable[npt.NDArray[np.uint8]], top_k: int) -> TopK:
    """The documents with the smallest Hamming distances, equal distances by row; packed signs, (Q, B) uint8.

    Scores are negative distances.
    """
    query_QW, best, first_row = _words(query_QB), BestDocuments(len(query_QB), top_k, _QUERIES), 0
    for piece in documents:
        for start in range(0, len(piece), DOCUMENT_TILE):
            tile_WT = np.ascontiguousarray(_words(piece[start : start + DOCUMENT_TILE]).T)
            rank_T = torch.arange(first_row, first_row + tile_WT.shape[1])
            for number, chunk in enumerate(best.chunks):
                distance_QT = np.zeros((chunk.stop - chunk.start, len(rank_T)), np.float32)
                for query_Q, word_T in zip(query_QW[chunk].T, tile_WT, strict=True):
                    distance_QT += np.bitwise_count(query_Q[:, None] ^ word_T)
                best.add(number, *_top_of_tile(-torch.from_numpy(distance_QT), rank_T, top_k))
            first_row += len(rank_T)
    return best.result()


def _words(bits_NB: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The same bits as 64-bit words, padded with 0, (N, W)."""
    return np.pad(bits_NB, ((0, 0), (0, -bits_NB.shape[1] % 8))).view(np.uint64)


def require_multiplier(rescore_multiplier: int) -> None:
    require_minimum("rescore_multiplier", rescore_multiplier, 1, f"leave it out for {RESCORE_MULTIPLIER}")


# Searches an index: unit query vectors and the number of documents per query -> the best documents.
NearestRows = Callable[[npt.NDArray[np.float32], int], TopK]


class Hit(NamedTuple):
    """A search result: document id, score of the query with the stored vector, and encoded text."""

    document_id: str
    score: float
    text: str


class CorpusSearch:
    """A searchable corpus; the constructor does all work that does not depend on the query.

    Args:
        encoder: The model; its `query` prompt goes before each query.
        corpus: A folder written by `encode_corpus` with the same model, or a corpus file, which is encoded now.
        context: Context for the queries and documents of a contextual model; None for the folder's context, or for a
            file without a context.
        nearest: An index of the folder's vectors; None to compare each query with every document.
        rescore_multiplier: For a folder of binary vectors, the number of candidates to rescore per returned document
            (see `search_signs`); None for 4.

    Attributes:
        folder: The folder of vectors; None for a corpus file.
        compares_all: Whether every document is scored; not with an index or binary vectors.
        nearest: Searches the vectors for the best documents.
    """

    def __init__(
        self,
        encoder: Encoder,
        corpus: str | Path,
        *,
        context: Context | None = None,
        nearest: NearestRows | None = None,
        rescore_multiplier: int | None = None,
    ) -> None:
        self.encoder, self.context = encoder, context
        self.folder: VectorFolder | None = None
        self._rescore_multiplier = RESCORE_MULTIPLIER if rescore_multiplier is None else rescore_multiplier
        require_multiplier(self._rescore_multiplier)
        if nearest is not None:
            encoder.embedder.require_directions("index", encoder.origin, "an index")
        if Path(corpus).is_dir():
            fields = {"model_sha256": embedder_sha256(encoder), "embedding_dim": encoder.embedding_dim}
            check_manifest(corpus, {"kind": "vectors", "complete": True, **fields})
            self.folder = VectorFolder.open(corpus)
        self._is_binary = self.folder is not None and self.folder.vector_format == "binary"
        self.compares_all = nearest is None and not self._is_binary
        if self._is_binary:
            encoder.embedder.require_directions("corpus", str(corpus), "a search of binary vectors")
        elif rescore_multiplier is not None:
            rule = "has an effect only on a folder of binary vectors"
            raise OptionError("rescore_multiplier", rescore_multiplier, rule, "leave it out")
        if self.folder is not None:
            self.context = self.folder.context()
            if context is not None:
                check_same_context(self.folder.path, self.context, context)
        else:
            if nearest is not None:
                raise OptionError("nearest", "an index", "needs an encoded folder", "encode the corpus first")
            self._corpus = list(read_corpus(corpus, show_progress=encoder.show_progress))
            texts = [document.text for document in self._corpus]
            self._vector_ND = encoder.comparable(encoder.encode(texts, None, context, role="document"))
        self.nearest: NearestRows = nearest or self._compare_all

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[Hit]]:
        """At most `top_k` documents with the largest scores (see `Encoder.similarity`) for each query, best first."""
        return self.hits(self.nearest(self.query_vectors(queries), top_k))

    def query_vectors(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors of queries whose inner products with those of the documents are the scores, (Q, D) float32."""
        return self.encoder.comparable(self.encoder.encode(queries, None, self.context, role="query"))

    def tiles(self) -> Iterable[npt.NDArray[np.float32]]:
        """The vectors of all documents in consecutive arrays, (n, D) float32 (see `query_vectors`)."""
        if self.folder is None:
            return [self._vector_ND]
        return self.folder.tiles() if self.encoder.embedder.compares_lengths else self.folder.directions()

    def texts(self) -> Iterator[str]:
        if self.folder is None:
            return (document.text for document in self._corpus)
        return self.folder.texts()

    def hits(self, best: TopK) -> list[list[Hit]]:
        """The documents at some rows, with their scores."""
        return [
            [Hit(id_, score, text) for (id_, text), score in zip(self._documents(rows), scores, strict=False)]
            for rows, scores in zip(best.index_QK.tolist(), best.score_QK.tolist(), strict=True)
        ]

    def _compare_all(self, query_QD: npt.NDArray[np.float32], top_k: int) -> TopK:
        if self.folder is not None and self._is_binary:
            return search_signs(query_QD, self.folder.shards, top_k, self._rescore_multiplier)
        tiles = self.tiles()
        if self.folder is not None:
            options = {"disable": not self.encoder.show_progress, "unit_scale": True}
            tiles = tracked(tiles, self.folder.num_documents, "search", "vector", len, **options)
        return search_top_k(query_QD, tiles, top_k, self.encoder.device)

    def _documents(self, rows: list[int]) -> list[Document]:
        # An index that found fewer than requested ends its rows with -1.
        rows = [row for row in rows if row >= 0]
        return [self._corpus[row] for row in rows] if self.folder is None else self.folder.documents(rows)
