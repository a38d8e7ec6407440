"""Exact search on a GPU within a memory limit: documents stay on the device, or are streamed in tiles."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import OptionError
from embeddings.common.io import UNIT_TOLERANCE
from embeddings.inference.search import TopK
from embeddings.inference.vectors import VectorShards
from embeddings.mining.search import QUERY_CHUNK, SLACK, ExactSearch, Floats, fill, score_bound, topk_per_row

MEMORY_GIB = 16.0
# Larger tiles and work buffers are not faster.
_TILE_ROWS = 131_072
_WORK_BYTES = 2 << 30
# Sixteenths of the memory for resident documents, for a tile, for the queries of a pass, and for results of products.
_RESIDENT, _TILE, _QUERIES, _WORK = 12, 1, 1, 2


class SearchSizes(NamedTuple):
    """The block sizes of a search, and whether all documents stay on the device.

    `pass_queries` queries share a pass over the documents, `product_queries` share one product with a tile, and
    `num_pairs` pairs are scored again at once. `num_bytes` is the maximum memory in use.
    """

    is_resident: bool
    tile_rows: int
    pass_queries: int
    product_queries: int
    num_pairs: int
    num_bytes: int


def search_sizes(
    num_documents: int, embedding_dim: int, stored_bytes: int, width: int, num_queries: int, memory_gib: float
) -> SearchSizes:
    """The block sizes with which a search fits its memory; `width` documents are retained per query.

    Bytes for vectors of width D: `stored_bytes`·D per resident document; 6·D per document of a tile, with its cast;
    6·D + 36·`width` per query of a pass, in two dtypes and with its results; 6 per score of a product, and 288·`width`
    per query of it for the selection of the largest; 24·D per pair that is scored again, in float64.

    Raises `OptionError` if not even blocks of one row fit.
    """
    sixteenth = memory_gib * 2**30 / 16
    resident_bytes, document_bytes = stored_bytes * num_documents * embedding_dim, 6 * embedding_dim
    query_bytes, pair_bytes = 6 * embedding_dim + 36 * width, 24 * embedding_dim
    if sixteenth < (minimum := max(query_bytes, pair_bytes / _WORK, 288 * width)):
        rule = f"must be >= {math.ceil(16 * minimum / 2**30 * 1e6) / 1e6:g} for this width and number of candidates"
        raise OptionError("gpu_memory_gib", memory_gib, rule, "raise it, or lower last_rank")
    is_resident, work = resident_bytes <= _RESIDENT * sixteenth, min(_WORK_BYTES, int(_WORK * sixteenth))
    # One row of scores takes at most half of the work buffer.
    tile_rows = min(_TILE_ROWS, num_documents, int(_TILE * sixteenth) // document_bytes, max(1, work // 12))
    pass_queries = min(num_queries, int(_QUERIES * sixteenth) // query_bytes)
    product_bytes = 6 * tile_rows + 288 * width
    product_queries, num_pairs = min(pass_queries, QUERY_CHUNK, work // product_bytes), work // pair_bytes
    used = max(product_queries * product_bytes, num_pairs * pair_bytes)
    used += pass_queries * query_bytes + tile_rows * document_bytes
    return SearchSizes(
        is_resident, tile_rows, pass_queries, product_queries, num_pairs, used + (resident_bytes if is_resident else 0)
    )


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise OptionError("gpu", True, "needs a CUDA device", "leave it out, or check the driver")


@contextmanager
def exact_products() -> Iterator[None]:
    """A context in which a GPU sums products in float32 and does not use TF32, as the score bound assumes."""
    matmul = torch.backends.cuda.matmul
    precision, reduced = torch.get_float32_matmul_precision(), matmul.allow_fp16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        matmul.allow_fp16_reduced_precision_reduction = reduced


class GpuSearch(ExactSearch):
    """The results of `ExactSearch`, computed on a GPU.

    The coarse search multiplies in float16: the values of unit vectors are in [-1, 1], where float16 is eight times as
    precise as bfloat16 and equally fast. Its results are scored again on the device in float64. If the error bound does
    not exclude a missed document, the query is searched again with float32 products, and then, if there are more equal
    documents than the slack, on the CPU.

    Documents stay on the device if three quarters of the memory are enough. Otherwise they are read twice in every pass
    over them: 100M of width 768 take 154 GB in float16.

    Precision: a score is the inner product summed in float64, rounded to float32. Its last bit may differ from that of
        `ExactSearch` if the sum is within 1e-15 of the middle of two float32 numbers.
    Determinism: except for that, results do not depend on memory, tiles, shards or the number of queries in a call.

    Args:
        documents: Unit vectors.
        memory_gib: Device memory that may be used, in GiB (see `search_sizes`), not counting CUDA's own context.
        device: Device of the search; "cpu" for comparisons.

    Raises:
        OptionError: If there is no such GPU, or the memory is too small (at the first search).
    """

    def __init__(
        self, documents: VectorShards, memory_gib: float = MEMORY_GIB, device: torch.device | str = "cuda"
    ) -> None:
        super().__init__(documents)
        self._device, self._memory_gib = torch.device(device), memory_gib
        if self._device.type == "cuda":
            require_gpu()
        self._dtypes = [torch.float16, torch.float32]
        self._stored = torch.float16 if documents.vector_format == "float16" else torch.float32
        self._resident: list[Tensor] = []

    def sizes(self, num_queries: int, top_k: int) -> SearchSizes:
        itemsize, documents = self._stored.itemsize, self.documents
        width = min(kept_documents(top_k), documents.num_rows)
        return search_sizes(documents.num_rows, documents.embedding_dim, itemsize, width, num_queries, self._memory_gib)

    def _scanned(self, dtype: torch.dtype, query_QD: Floats, top_k: int) -> tuple[TopK, npt.NDArray[np.bool_]]:
        sizes = self.sizes(len(query_QD), top_k)
        parts = []
        with exact_products(), torch.inference_mode():
            for start in range(0, len(query_QD), sizes.pass_queries):
                query_nD = torch.from_numpy(query_QD[start : start + sizes.pass_queries]).to(self._device)
                parts.append(self._pass(query_nD, dtype, top_k, sizes))
        score_QK, row_QK, last_Q = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        best = TopK(score_QK, row_QK)
        if kept_documents(top_k) >= self.documents.num_rows:
            return best, np.zeros(len(query_QD), np.bool_)
        error = _float16_error(self.documents.embedding_dim) if dtype == torch.float16 else 0.0
        document_error = 0.0 if self._stored == dtype else error
        return best, score_QK[:, -1] <= score_bound(last_Q, error, document_error, query_QD.shape[1], dtype)

    def _pass(
        self, query_QD: Tensor, dtype: torch.dtype, top_k: int, sizes: SearchSizes
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Scores and rows of the best documents of some queries, (Q, K), and the lowest coarse score retained, (Q,)."""
        num_rows = self.documents.num_rows
        width, rounded_QD = min(kept_documents(top_k), num_rows), query_QD.to(dtype)
        score_QW = torch.full((len(query_QD), width), -math.inf, device=self._device)
        row_QW = torch.full((len(query_QD), width), -1, dtype=torch.int64, device=self._device)
        for first_row, tile_TD in self._tiles(sizes):
            tile_DT = tile_TD.to(dtype).T
            for start in range(0, len(query_QD), sizes.product_queries):
                chunk = slice(start, start + sizes.product_queries)
                score_QK, index_QK = topk_per_row(rounded_QD[chunk] @ tile_DT, min(width, len(tile_TD)))
                both_QK = torch.cat([score_QW[chunk], score_QK], dim=1)
                score_QW[chunk], best_QW = both_QK.topk(width, dim=1, sorted=False)
                row_QW[chunk] = torch.cat([row_QW[chunk], index_QK + first_row], dim=1).gather(1, best_QW)
        last_Q = score_QW.amin(dim=1)
        # Each query's rows in order, so that the stable sort orders equal scores by row.
        row_QW = row_QW.sort(dim=1).values
        for first_row, tile_TD in self._tiles(sizes):
            query_P, rank_P = ((row_QW >= first_row) & (row_QW < first_row + len(tile_TD))).nonzero(as_tuple=True)
            for start in range(0, len(query_P), sizes.num_pairs):
                query_n, rank_n = (part[start : start + sizes.num_pairs] for part in (query_P, rank_P))
                document_nD = tile_TD[row_QW[query_n, rank_n] - first_row].double()
                score_QW[query_n, rank_n] = document_nD.mul_(query_QD[query_n]).sum(dim=1).float()
        score_QW, order_QW = score_QW.sort(dim=1, descending=True, stable=True)
        score_QK, row_QK = score_QW[:, :top_k], row_QW.gather(1, order_QW[:, :top_k])
        return score_QK.cpu().numpy(), row_QK.cpu().numpy(), last_Q.cpu().numpy()

    def _tiles(self, sizes: SearchSizes) -> Iterator[tuple[int, Tensor]]:
        """All documents in tiles on the device, (T, D) in the stored dtype, each with its first row."""
        if self._resident:
            first_row = 0
            for tile_TD in self._resident:
                yield first_row, tile_TD
                first_row += len(tile_TD)
            return
        is_cuda, resident = self._device.type == "cuda", []
        shape = (sizes.tile_rows, self.documents.embedding_dim)
        staged_TD = torch.empty(shape, dtype=self._stored, pin_memory=is_cuda)
        for first_row, array_TD in fill(staged_TD.numpy(), self.documents):
            tile_TD = staged_TD[: len(array_TD)].to(self._device, copy=True)
            square_T = torch.linalg.vector_norm(tile_TD, dim=1, dtype=torch.float32).square()
            invalid_n = (~((square_T - 1).abs() < UNIT_TOLERANCE)).nonzero()[:1, 0]
            if len(invalid_n):
                # Raises an error that names the vector's shard and its row in it.
                self.documents.take(invalid_n.cpu().numpy() + first_row)
            resident += [tile_TD] if sizes.is_resident else []
            yield first_row, tile_TD
        self._resident = resident


def kept_documents(top_k: int) -> int:
    """Number of documents that the coarse search retains so that they nearly always include the true top k."""
    return top_k + top_k // 4 + SLACK


def _float16_error(embedding_dim: int) -> float:
    """A bound on the distance of a unit vector from its float16 values: relative error, and error of subnormals."""
    return float(1.01 * 2.0**-11 + embedding_dim**0.5 * 2.0**-25)
