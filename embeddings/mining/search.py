"""The nearest documents of queries by cosine among all documents, on a CPU or a GPU, over shards larger than memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import check_vectors
from embeddings.common.progress import progress_bar, tracked
from embeddings.inference.encoder import has_native_bfloat16
from embeddings.inference.search import PAIRS, TileSearch, TopK, num_candidates, require_top_k
from embeddings.inference.vector_folder import VectorShards

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# Memory of a search on a GPU and on a CPU, in GiB.
MEMORY_GIB, CPU_MEMORY_GIB = 16.0, 1.0
# Larger tiles and work buffers are not faster.
_TILE_ROWS = 131_072
_WORK_BYTES = 2 << 30
# Sixteenths of the memory for resident documents, for a tile, for the queries of a pass, and for results of products.
_RESIDENT, _TILE, _QUERIES, _WORK = 12, 1, 1, 2


class DocumentSearch(Protocol):
    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The documents nearest to each unit vector, (Q, K), best first, ties by row.

        K is at most the number of documents; row -1 with score -inf if fewer documents are found.
        """


class SearchSizes(NamedTuple):
    """The block sizes of a search, and whether all documents stay on the device.

    `pass_queries` queries share a pass over the documents, `product_queries` share one product with a tile, and
    `num_pairs` pairs are scored again at once.
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
    """The block sizes with which a search fits its memory; `width` candidates are scored again per query.

    Bytes for vectors of width D: `stored_bytes`·D per resident document; 6·D per document of a tile, with its cast;
    6·D + 64·`width` per query of a pass; 6 per score of a product, and 400·`width` per query of it; 16·D per pair that
    is scored again.
    """
    sixteenth = memory_gib * 2**30 / 16
    resident_bytes, document_bytes = stored_bytes * num_documents * embedding_dim, 6 * embedding_dim
    query_bytes, pair_bytes = 6 * embedding_dim + 64 * width, 16 * embedding_dim
    if sixteenth < (minimum := max(query_bytes, pair_bytes / _WORK, 400 * width)):
        rule = f"must be >= {math.ceil(16 * minimum / 2**30 * 1e6) / 1e6:g} for this width and number of candidates"
        raise OptionError("gpu_memory_gib", memory_gib, rule, "raise it, or lower last_rank")
    is_resident, work = resident_bytes <= _RESIDENT * sixteenth, min(_WORK_BYTES, int(_WORK * sixteenth))
    # One row of scores takes at most half of the work buffer.
    tile_rows = min(_TILE_ROWS, num_documents, int(_TILE * sixteenth) // document_bytes, max(1, work // 12))
    pass_queries = min(num_queries, int(_QUERIES * sixteenth) // query_bytes)
    product_bytes = 6 * tile_rows + 400 * width
    product_queries, num_pairs = min(pass_queries, work // product_bytes), work // pair_bytes
    used = max(product_queries * product_bytes, num_pairs * pair_bytes)
    used += pass_queries * query_bytes + tile_rows * document_bytes + is_resident * resident_bytes
    return SearchSizes(is_resident, tile_rows, pass_queries, product_queries, num_pairs, used)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise OptionError("gpu", True, "needs a CUDA device", "leave it out, or check the driver")


class ExactSearch:
    """The documents with the largest inner product with each query, of all documents.

    Products are in bfloat16 if a CPU supports it, in float16 on a GPU, else in float32; what may be among the best is
    scored again in float32, pair by pair. On a GPU the documents stay if three quarters of the memory are enough;
    otherwise they are read in every pass of queries.

    Args:
        documents: Unit vectors.
        device: Device of the products.
        memory_gib: Memory that may be used, in GiB (see `search_sizes`), without CUDA's own context; None for 16 on a
            GPU, and 1 on a CPU.
    """

    def __init__(
        self, documents: VectorShards, device: torch.device | str = "cpu", memory_gib: float | None = None
    ) -> None:
        self.documents, self.device = documents, torch.device(device)
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            require_gpu()
        self._memory_gib = MEMORY_GIB if memory_gib is None and is_cuda else memory_gib
        self._dtype = torch.float32
        if is_cuda or has_native_bfloat16(self.device):
            self._dtype = torch.float16 if is_cuda else torch.bfloat16
        self._stored = torch.float16 if documents.vector_format == "float16" and is_cuda else torch.float32
        self._resident: list[Tensor] = []

    def sizes(self, num_queries: int, top_k: int) -> SearchSizes:
        number, width = self.documents.num_rows, self.documents.embedding_dim
        candidates = min(num_candidates(top_k, self._dtype), number)
        # On a CPU any number of candidates is accepted.
        on_cpu = max(CPU_MEMORY_GIB, 6400 * candidates / 2**30)
        memory_gib = on_cpu if self._memory_gib is None else self._memory_gib
        return search_sizes(number, width, self._stored.itemsize, candidates, num_queries, memory_gib)

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """See `DocumentSearch`."""
        check_search(self.documents, query_QD, top_k)
        sizes, parts = self.sizes(len(query_QD), top_k), list[TopK]()
        width = num_candidates(top_k, self._dtype) if self._dtype == torch.float32 else top_k
        starts = range(0, len(query_QD), sizes.pass_queries)
        with full_products(), torch.inference_mode():
            for start in progress_bar(None, "search", "pass", iterable=starts):
                query_nD = torch.tensor(query_QD[start : start + sizes.pass_queries], device=self.device)
                num_pairs = sizes.num_pairs if self.device.type == "cuda" else PAIRS
                best = TileSearch(query_nD, width, sizes.product_queries, self._dtype, num_pairs)
                for tile_TD in tracked(self._tiles(sizes), self.documents.num_rows, "search", "document", len):
                    best.add_tile(tile_TD)
                parts.append(best.result())
        score_QC, row_QC = (np.concatenate(each) for each in zip(*parts, strict=True))
        if self._dtype != torch.float32:
            return TopK(score_QC, row_QC)
        # The last bits of a product in float32 depend on how many queries share it.
        query_P = np.repeat(np.arange(len(query_QD)), row_QC.shape[1])
        score_QC = pair_scores(query_QD, query_P, row_QC.ravel(), self.documents).reshape(row_QC.shape)
        order_QK = np.lexsort((row_QC, -score_QC), axis=1)[:, :top_k]
        return TopK(np.take_along_axis(score_QC, order_QK, axis=1), np.take_along_axis(row_QC, order_QK, axis=1))

    def _tiles(self, sizes: SearchSizes) -> Iterator[Tensor]:
        if self._resident:
            yield from self._resident
            return
        resident: list[Tensor] = []
        for start in range(0, self.documents.num_rows, sizes.tile_rows):
            row_T = np.arange(start, min(start + sizes.tile_rows, self.documents.num_rows))
            tile_TD = torch.from_numpy(self.documents.take(row_T)).to(self.device, self._stored)
            resident += [tile_TD] if sizes.is_resident and self.device.type == "cuda" else []
            yield tile_TD
        self._resident = resident


@contextmanager
def full_products() -> Iterator[None]:
    """A context in which a GPU sums products in float32 and does not use TF32."""
    matmul = torch.backends.cuda.matmul
    precision, reduced = torch.get_float32_matmul_precision(), matmul.allow_fp16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        matmul.allow_fp16_reduced_precision_reduction = reduced


def check_search(documents: VectorShards, query_QD: Floats, top_k: int) -> None:
    require_top_k(top_k)
    if query_QD.shape[1] != documents.embedding_dim:
        what = f"contains vectors of width {documents.embedding_dim}, the queries' is {query_QD.shape[1]}"
        raise InputError(str(documents.folder), what, "encode both with one model")
    check_vectors(query_QD, "query vectors", unit=True)


def pair_scores(query_QD: Floats, query_P: Rows, row_P: Rows, documents: VectorShards) -> Floats:
    """The inner products of pairs of a query and a document, (P,) float32; documents are read in order."""
    order_P, score_P = np.argsort(row_P, kind="stable"), np.empty(len(row_P), np.float32)
    for start in range(0, len(row_P), PAIRS):
        pairs = order_P[start : start + PAIRS]
        score_P[pairs] = np.vecdot(query_QD[query_P[pairs]], documents.take(row_P[pairs]))
    return score_P
