"""The nearest documents of queries by cosine, exactly, over shards larger than memory."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import check_vectors
from embeddings.common.jobs import ArrayTask, ShardedJob, load_shard, save_array
from embeddings.common.random import derive_seed
from embeddings.inference.precision import has_native_bfloat16
from embeddings.inference.search import TopK, require_top_k
from embeddings.inference.vectors import VectorShards
from embeddings.mining.faiss_library import faiss_version, kmeans_run, load_faiss, new_lists

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
# Scores and rows of a tile's best documents, for a slice of the queries and a number of documents; row -1 if missing.
BestOfTile = Callable[[slice, int], tuple[Floats, Rows]]
# Arguments: the row of the tile's first document, and the tile.
Scan = Callable[[int, Floats], BestOfTile]

# Size of the documents compared at once: large enough that the products take most of the time.
TILE_BYTES = 48 << 20
# faiss on a GPU fails or aborts with more than 65,535 queries in a call, and returns at most 2,048 documents.
QUERY_CHUNK = 16_384
GPU_MAX_DOCUMENTS = 2048
# Documents retained beyond the top k, because approximate scores do not determine the order.
SLACK = 16
# Pairs whose vectors fit a CPU cache.
_PAIR_BLOCK = 512
# Queries compared with every document of a tile at once, if the slack was not enough.
_FULL_SCAN_QUERIES = 64
# Scores of one product of queries and a tile: 32 MiB in float32.
_PRODUCT_SCORES = 1 << 23
# Covers the tolerance on the length of unit vectors.
_UNIT = 1.01


class DocumentSearch(Protocol):
    @property
    def documents(self) -> VectorShards:
        """The documents to search."""

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The nearest documents of each query.

        Args:
            query_QD: Unit vectors, (Q, D) float32.
            top_k: Maximum documents per query; K is the smaller of this and the number of documents.

        Returns:
            Scores and rows, (Q, K), best first, ties by row; row -1 with score -inf if fewer documents are found.

        Raises:
            InputError: If a vector is zero, not finite or not of unit length, or the widths differ.
            OptionError: If `top_k` is not positive, or exceeds the GPU's memory or the limit of faiss on a GPU.
        """


class CoarseSearch:
    """The best documents of some queries, tile by tile, by approximate scores: products in a faster dtype.

    Some CPUs multiply bfloat16 twice as fast as float32. With q' and d' the rounded vectors,
    q d - q' d' = (q - q') d + q' (d - d') is at most |q - q'| + |q'| |d - d'|. Both distances are measured; in bfloat16
    they are about 0.001 each, and its product is rounded again when it is stored. In float32 only the sums are rounded.
    """

    def __init__(self, query_QD: Floats, dtype: torch.dtype) -> None:
        query = torch.from_numpy(query_QD)
        self._query_QD, self._dtype = query.to(dtype), dtype
        self._query_error_Q = (query - query.to(dtype).float()).norm(dim=1).numpy()
        self._document_error = 0.0

    def width(self, top_k: int) -> int:
        """Number of documents to retain so that they nearly always include the true top k."""
        return (2 * top_k if self._dtype == torch.bfloat16 else top_k) + SLACK

    def __call__(self, first_row: int, tile_TD: Floats) -> BestOfTile:
        """A function that finds a tile's best documents for some of the queries."""
        tile = torch.from_numpy(tile_TD)
        rounded = tile.to(self._dtype)
        if self._dtype != torch.float32:
            self._document_error = max(self._document_error, float((tile - rounded.float()).norm(dim=1).max()))

        def best(chunk: slice, top_k: int) -> tuple[Floats, Rows]:
            queries = torch.split(self._query_QD[chunk], max(1, _PRODUCT_SCORES // len(tile_TD)))
            found = [topk_per_row(query_QD @ rounded.T, top_k) for query_QD in queries]
            score_QK, row_QK = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
            return score_QK, row_QK + first_row

        return best

    def bound(self, last_Q: Floats) -> Floats:
        return score_bound(last_Q, self._query_error_Q, self._document_error, self._query_QD.shape[1], self._dtype)


def score_bound(
    last_Q: Floats, query_error_Q: Floats | float, document_error: float, embedding_dim: int, dtype: torch.dtype
) -> Floats:
    """Upper bound on the true score of documents whose product of rounded vectors is at most `last_Q`, in `dtype`.

    `query_error_Q` is the distance of each query from its rounded vector, `document_error` the maximum of the
    documents' distances. Products are summed in float32.
    """
    # Half a unit in the last place; float32 sums are stored exactly.
    storage = np.float32(0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
    error = np.float32(_UNIT) * (query_error_Q + (1 + query_error_Q) * document_error)
    bound_Q: Floats = last_Q + np.abs(last_Q) * storage + error + np.float32(rounding_error(embedding_dim))
    return bound_Q.astype(np.float32, copy=False)


def rounding_error(width: int) -> float:
    """Twice a bound on the error of a float32 inner product of unit vectors."""
    return width * 2.0**-23


class ExactSearch:
    """The documents with the largest inner product with each query, as if all pairs had been scored.

    A coarse search finds more than `top_k` documents by approximate scores, tile by tile: in bfloat16 if the CPU
    supports it, else in float32. They are scored again in float64. If the error bound does not exclude a missed
    document, the query is searched again: first in float32, then among all documents in float64.

    Precision: a score is the inner product summed in float64, rounded to float32.
    Determinism: scores and rows do not depend on the size of shards or the number of queries in a call.
    Memory: four tiles of 48 MiB, 32 MiB of scores, and 12 bytes for each of (2 `top_k` + 16) documents per query.
    Related: `GpuSearch` for the same on a GPU.
    """

    def __init__(self, documents: VectorShards) -> None:
        self.documents = documents
        quick = [torch.bfloat16] if has_native_bfloat16(torch.device("cpu")) else []
        self._dtypes = [*quick, torch.float32]

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The nearest documents of each query (see `DocumentSearch`)."""
        check_search(self.documents, query_QD, top_k)
        shape = (len(query_QD), min(top_k, self.documents.num_rows))
        best = TopK(np.empty(shape, np.float32), np.empty(shape, np.int64))
        open_Q = np.arange(len(query_QD))
        for dtype in self._dtypes:
            if open_Q.size:
                found, doubtful_Q = self._scanned(dtype, query_QD[open_Q], top_k)
                best.score_QK[open_Q], best.index_QK[open_Q] = found
                open_Q = open_Q[doubtful_Q]
        for start in range(0, open_Q.size, _FULL_SCAN_QUERIES):
            query_n = open_Q[start : start + _FULL_SCAN_QUERIES]
            lowest_n = best.score_QK[query_n, -1]
            best.score_QK[query_n], best.index_QK[query_n] = self._among_all(query_QD[query_n], lowest_n, top_k)
        return best

    def _scanned(self, dtype: torch.dtype, query_QD: Floats, top_k: int) -> tuple[TopK, npt.NDArray[np.bool_]]:
        """The best documents of a coarse search, and for which queries it may have missed a better one."""
        scan = CoarseSearch(query_QD, dtype)
        width = min(scan.width(top_k), self.documents.num_rows)
        found = best_of_tiles(self.documents, len(query_QD), width, scan)
        best = in_order(query_QD, found.index_QK, self.documents, top_k)
        if width == self.documents.num_rows:
            return best, np.zeros(len(query_QD), np.bool_)
        # In the coarse scores, the other documents score at most as high as the last retained one.
        return best, best.score_QK[:, -1] <= scan.bound(found.score_QK.min(axis=1))

    def _among_all(self, query_QD: Floats, lowest_Q: Floats, top_k: int) -> TopK:
        """The top k of a few queries among all documents; `lowest_Q` is a lower bound on the score of the k-th."""
        threshold_Q1 = (lowest_Q - rounding_error(query_QD.shape[1]))[:, None]
        score_QK = np.full((len(query_QD), top_k), -np.inf, np.float32)
        row_QK = np.full((len(query_QD), top_k), -1, np.int64)
        for first_row, tile_TD in tiles(self.documents):
            query_P, row_P = np.nonzero(query_QD @ tile_TD.T >= threshold_Q1)
            score_P = dot_pairs(query_QD, query_P, tile_TD, row_P)
            for query in np.unique(query_P).tolist():
                is_of_query = query_P == query
                scores = np.append(score_QK[query], score_P[is_of_query])
                rows = np.append(row_QK[query], row_P[is_of_query] + first_row)
                order = np.lexsort((rows, -scores))[:top_k]
                score_QK[query], row_QK[query] = scores[order], rows[order]
        return TopK(score_QK, row_QK)


def check_search(documents: VectorShards, query_QD: Floats, top_k: int) -> None:
    """Check the arguments of a search (see `DocumentSearch`)."""
    require_top_k(top_k)
    if query_QD.shape[1] != documents.embedding_dim:
        what = f"contains vectors of width {documents.embedding_dim}, the queries' is {query_QD.shape[1]}"
        raise InputError(str(documents.folder), what, "encode both with one model")
    check_vectors(query_QD, "query vectors", unit=True)


def tiles(documents: VectorShards) -> Iterator[tuple[int, Floats]]:
    """All unit vectors in tiles of at most `TILE_BYTES`, each with its first row and valid until the next tile."""
    size = max(1, TILE_BYTES // (4 * documents.embedding_dim))
    tile_TD = np.empty((min(size, documents.num_rows), documents.embedding_dim), np.float32)

    def check(block_nD: Floats, shard: int, start: int) -> None:
        check_vectors(block_nD, str(documents.path(shard)), start, unit=True)

    return fill(tile_TD, documents, check)


def fill(
    tile_TD: npt.NDArray[Any], documents: VectorShards, check: Callable[[Floats, int, int], None] | None = None
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """All vectors, copied into a float32 or float16 array tile by tile, with each tile's first row.

    `check` is called with blocks of each shard, the shard, and the block's first row in it.
    """
    size, first_row, filled = len(tile_TD), 0, 0
    for shard in range(documents.num_shards):
        stored = documents.stored(shard)
        vector_ND = stored if stored.dtype == tile_TD.dtype else documents.load(shard)
        for start in range(0, len(vector_ND), size):
            block_nD = vector_ND[start : start + size]
            if check is not None:
                check(block_nD, shard, start)
            while len(block_nD):
                count = min(len(block_nD), size - filled)
                tile_TD[filled : filled + count] = block_nD[:count]
                filled, block_nD = filled + count, block_nD[count:]
                if filled == size:
                    yield first_row, tile_TD
                    first_row, filled = first_row + size, 0
    if filled:
        yield first_row, tile_TD[:filled]


def best_of_tiles(documents: VectorShards, num_queries: int, width: int, scan: Scan) -> TopK:
    """The `width` best documents of each query over all tiles, unordered."""
    score_QK = np.full((num_queries, width), -np.inf, np.float32)
    row_QK = np.full((num_queries, width), -1, np.int64)
    for first_row, tile_TD in tiles(documents):
        best_of_tile = scan(first_row, tile_TD)
        for start in range(0, num_queries, QUERY_CHUNK):
            chunk = slice(start, start + QUERY_CHUNK)
            scores, rows = best_of_tile(chunk, min(width, len(tile_TD)))
            scores = np.concatenate([score_QK[chunk], scores], axis=1)
            rows = np.concatenate([row_QK[chunk], rows], axis=1)
            best = np.argpartition(-scores, width - 1, axis=1)[:, :width]
            score_QK[chunk] = np.take_along_axis(scores, best, axis=1)
            row_QK[chunk] = np.take_along_axis(rows, best, axis=1)
    return TopK(score_QK, row_QK)


def in_order(query_QD: Floats, row_QK: Rows, documents: VectorShards, top_k: int) -> TopK:
    """The best of the given documents of each query, by score and then by row; row -1 comes last."""
    score_QK = np.full(row_QK.shape, -np.inf, np.float32)
    query_P, rank_P = np.nonzero(row_QK >= 0)
    score_QK[query_P, rank_P] = pair_scores(query_QD, query_P, row_QK[query_P, rank_P], documents)
    order_QK = np.lexsort((row_QK, -score_QK), axis=1)[:, :top_k]
    return TopK(np.take_along_axis(score_QK, order_QK, axis=1), np.take_along_axis(row_QK, order_QK, axis=1))


def pair_scores(query_QD: Floats, query_P: Rows, row_P: Rows, documents: VectorShards) -> Floats:
    """The inner products of pairs of a query and a document, (P,) float32; shards are read in order, each once.

    They are summed in float64, so that a pair's score does not depend on the other pairs.
    """
    order_P = np.argsort(row_P, kind="stable")
    shard_P = row_P[order_P] // documents.shard_size
    score_P = np.empty(len(row_P), np.float32)
    for shard in np.unique(shard_P).tolist():
        pairs = order_P[np.searchsorted(shard_P, shard) : np.searchsorted(shard_P, shard, side="right")]
        row_n = row_P[pairs] - documents.rows(shard).start
        score_P[pairs] = dot_pairs(query_QD, query_P[pairs], documents.load(shard), row_n)
    return score_P


def dot_pairs(query_QD: Floats, query_P: Rows, vector_ND: Floats, row_P: Rows) -> Floats:
    """The inner products of pairs of rows, (P,) float32, summed in float64."""
    score_P = np.empty(len(row_P), np.float32)
    for start in range(0, len(row_P), _PAIR_BLOCK):
        block = slice(start, start + _PAIR_BLOCK)
        left_nD = query_QD[query_P[block]].astype(np.float64)
        score_P[block] = np.vecdot(left_nD, np.asarray(vector_ND[row_P[block]]).astype(np.float64))
    return score_P


# Values per column of the layout in `topk_per_row`.
_STRIPES = 16


def topk_per_row(score_QT: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` largest values of each row in float32 and their positions, (Q, `top_k`), unordered, on any device.

    A row is reshaped to stripes, one below the other. The `top_k` columns with the largest maxima contain the `top_k`
    largest values of the row: a value in another column is exceeded by the maxima of `top_k` columns.
    """
    num_columns = score_QT.shape[1] // _STRIPES
    if num_columns <= top_k:
        return _plain_topk(score_QT, top_k)
    striped = score_QT[:, : _STRIPES * num_columns].view(-1, _STRIPES, num_columns)
    _, column_QK = _plain_topk(striped.amax(dim=1), top_k)
    chosen_QSK = column_QK[:, None, :].expand(-1, _STRIPES, -1)
    score_QC = torch.cat([striped.gather(2, chosen_QSK).flatten(1), score_QT[:, _STRIPES * num_columns :]], dim=1)
    value_QK, candidate_QK = _plain_topk(score_QC, top_k)
    column_QK = column_QK.gather(1, candidate_QK % top_k)
    # The candidates of the stripes are followed by the values of an incomplete last stripe.
    rest_QK = candidate_QK - _STRIPES * top_k
    stripe_QK = candidate_QK // top_k
    return value_QK, torch.where(rest_QK < 0, stripe_QK * num_columns + column_QK, _STRIPES * num_columns + rest_QK)


def _plain_topk(value_QN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if value_QN.is_cuda:
        value_QK, index_QK = value_QN.float().topk(top_k, dim=1, sorted=False)
        return value_QK, index_QK
    # Several times as fast on a CPU.
    value_QN = value_QN.float()
    index_QK = torch.from_numpy(np.argpartition(value_QN.numpy(), -top_k, axis=1)[:, -top_k:])
    return value_QN.gather(1, index_QK), index_QK


MAX_LISTS = 4096
SAMPLE_PER_LIST = 64
ITERATIONS = 10
PROBES = 32


class IvfSearch:
    """Documents with a large inner product with each query, from the lists with the nearest centroids (IVF).

    Centroids come from spherical k-means on a sample. Only the list number of each document is stored; faiss inverted
    lists are built tile by tile during the search. The results are scored and ordered as by `ExactSearch`.

    Args:
        documents: Unit vectors.
        centroid_CD: Centroids of the lists, (C, D) float32, unit norm.
        lists: Folder of `list-<i>.npy` for each shard of the documents, (n,) int32.
        num_probes: Lists searched per query.
        gpu: Whether faiss runs on the first GPU.

    Determinism: a function of documents, lists, probes and seed, on one type of device.
    Memory: the sample (while training), the centroids, and two tiles of 48 MiB.
    """

    def __init__(
        self, documents: VectorShards, centroid_CD: Floats, lists: Path, num_probes: int, gpu: bool = False
    ) -> None:
        self.documents, self.centroid_CD, self.lists, self.num_probes = documents, centroid_CD, lists, num_probes
        self.gpu, self._faiss = gpu, load_faiss(gpu)
        self._resources: Any = self._faiss.StandardGpuResources() if gpu else None
        self._quantizer = self._faiss.IndexFlatIP(documents.embedding_dim)
        self._quantizer.add(np.ascontiguousarray(centroid_CD))

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The nearest documents of each query in its lists (see `DocumentSearch`)."""
        check_search(self.documents, query_QD, top_k)
        if self.gpu and top_k > (limit := GPU_MAX_DOCUMENTS - SLACK):
            raise OptionError("top_k", top_k, f"must be <= {limit} on a GPU", "lower it, or search on the CPU")
        faiss, width = self._faiss, min(top_k + SLACK, self.documents.num_rows)
        score_QP, list_QP = faiss.knn(query_QD, self.centroid_CD, self.num_probes, metric=faiss.METRIC_INNER_PRODUCT)

        def scan(first_row: int, tile_TD: Floats) -> BestOfTile:
            list_T = self._lists_of(first_row, len(tile_TD))
            index = new_lists(self._quantizer, len(self.centroid_CD))
            index.add_core(len(tile_TD), faiss.swig_ptr(tile_TD), None, faiss.swig_ptr(list_T))
            if self.gpu:
                index = faiss.index_cpu_to_gpu(self._resources, 0, index)
            index.nprobe = self.num_probes

            def best(chunk: slice, top_k: int) -> tuple[Floats, Rows]:
                score_QK, row_QK = index.search_preassigned(query_QD[chunk], top_k, list_QP[chunk], score_QP[chunk])
                # For missing documents faiss returns row -1 and the lowest float.
                return np.where(row_QK < 0, np.float32(-np.inf), score_QK), np.where(row_QK < 0, -1, row_QK + first_row)

            return best

        found = best_of_tiles(self.documents, len(query_QD), width, scan)
        return in_order(query_QD, found.index_QK, self.documents, top_k)

    def _lists_of(self, first_row: int, count: int) -> Rows:
        """The list numbers of consecutive documents, (count,) int64."""
        size, parts = self.documents.shard_size, []
        for shard in range(first_row // size, (first_row + count - 1) // size + 1):
            start = self.documents.rows(shard).start
            lists = load_shard(self.lists / f"list-{shard:05d}.npy", mapped=True)
            parts.append(lists[max(0, first_row - start) : first_row + count - start])
        return np.concatenate(parts).astype(np.int64)


def build_ivf(
    documents: VectorShards,
    folder: str | os.PathLike[str],
    *,
    num_probes: int | None = None,
    num_lists: int | None = None,
    seed: int = 0,
    gpu: bool = False,
    task: ArrayTask | None = None,
) -> IvfSearch:
    """Train the lists and assign the documents to them; existing shards are reused.

    Args:
        documents: Unit vectors.
        folder: The folder to write: `centroids/`, `lists/`.
        num_probes: Lists searched per query, or None for 32, or all if there are fewer.
        num_lists: Number of lists, or None for 4 times the square root of the number of documents, at most 4,096 and
            one per 39 documents (the minimum that faiss recommends).
        seed: Seed of the sample and of the k-means.
        gpu: Whether faiss runs on the first GPU.
        task: Shards that this process computes; afterwards it computes the shards that are still missing.

    Raises:
        InputError: If a vector is not of unit length, or the folder was written from other inputs.
        MissingExtraError: If faiss is not installed.
        OptionError: If there are more lists than documents or fewer than probes, or there is no GPU.
    """
    faiss = load_faiss(gpu)
    num_lists, num_probes = ivf_sizes(documents.num_rows, num_lists, num_probes)
    fields = {
        "num_rows": documents.num_rows,
        "embedding_dim": documents.embedding_dim,
        "num_lists": num_lists,
        "seed": seed,
        "gpu": gpu,
        "faiss": faiss_version(),
    }

    def train(_: int, path: Path) -> None:
        """Write the centroids of a stratified sample of the documents."""
        for shard, vector_ND in enumerate(documents):
            check_vectors(vector_ND, str(documents.path(shard)), unit=True)
        sample_nD = documents.take(sample_rows(documents.num_rows, num_lists, seed))
        save_array(path, train_centroids(sample_nD, num_lists, seed, gpu))

    training = ShardedJob(Path(folder) / "centroids", {"kind": "ivf centroids", **fields}, 1, stem="vectors")
    training.run(train, task, take_over=True)
    training.finish()
    centroid_CD = np.array(VectorShards(training.folder, num_lists, documents.embedding_dim, num_lists).load(0))

    def sort(shard: int, path: Path) -> None:
        """Write the nearest centroid of each document of a shard."""
        vector_ND = np.ascontiguousarray(documents.load(shard))
        _, list_N1 = faiss.knn(vector_ND, centroid_CD, 1, metric=faiss.METRIC_INNER_PRODUCT)
        assert list_N1.min() >= 0
        save_array(path, list_N1[:, 0].astype(np.int32))

    shards = {"kind": "ivf lists", **fields, "shard_size": documents.shard_size}
    sorting = ShardedJob(Path(folder) / "lists", shards, documents.num_shards, stem="list")
    sorting.run(sort, task, take_over=True)
    sorting.finish()
    return IvfSearch(documents, centroid_CD, sorting.folder, num_probes, gpu)


def ivf_sizes(num_documents: int, num_lists: int | None = None, num_probes: int | None = None) -> tuple[int, int]:
    """The number of lists, and of lists searched per query: the arguments, or `build_ivf`'s defaults."""
    if num_lists is None:
        num_lists = max(1, min(int(4 * num_documents**0.5), MAX_LISTS, num_documents // 39))
    if not 1 <= num_lists <= num_documents:
        rule = f"must be between 1 and the {num_documents} documents"
        raise OptionError("num_lists", num_lists, rule, "leave it out for the default")
    if num_probes is None:
        num_probes = min(PROBES, num_lists)
    if not 1 <= num_probes <= num_lists:
        raise OptionError("num_probes", num_probes, f"must be between 1 and the {num_lists} lists", "lower it")
    return num_lists, num_probes


def sample_rows(num_documents: int, num_lists: int, seed: int) -> Rows:
    """The documents that lists are trained on, 64 per list: a random one from each of n equal ranges, (n,) int64."""
    count = min(num_documents, num_lists * SAMPLE_PER_LIST)
    edges = np.arange(count + 1) * num_documents // count
    return np.random.default_rng(derive_seed(seed, "ivf sample")).integers(edges[:-1], edges[1:])


def train_centroids(sample_nD: Floats, num_lists: int, seed: int, gpu: bool = False) -> Floats:
    """The centroids of lists, (C, D) float32, by spherical k-means on unit vectors."""
    lists_seed = derive_seed(seed, "ivf") % 2**31
    return kmeans_run(sample_nD, num_lists, num_iterations=ITERATIONS, seed=lists_seed, gpu=gpu).centroids
