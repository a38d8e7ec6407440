"""A search on the CPU of the vectors of inverted lists."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from embeddings.common.progress import progress_bar
from embeddings.inference.search import BestDocuments, TopK
from embeddings.mining.faiss_library import load_faiss
from embeddings.mining.search import Floats, Rows

# Queries of a block for each list, which share its product, and scores of a block, 512 MiB, at most.
_LIST_QUERIES, _BLOCK_SCORES, _MAX_THREADS = 64, 1 << 27, 8
# Pairs of a query and a list that a thread scores, and queries whose best vectors it chooses, at a time.
_PAIRS, _CHOSEN_TOGETHER = 16_384, 256


class Lists:
    """The vectors of inverted lists, as views of their memory; each list is in one part.

    faiss reads every list again for each query; here all queries of a block share one product with a list.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        swig_view, width = load_faiss().rev_swig_ptr, parts[0].d
        # The views are valid while the parts exist.
        self._parts = parts
        self._size_C = np.zeros(parts[0].nlist, np.int64)
        self._vectors: dict[int, torch.Tensor] = {}
        rows: dict[int, Rows] = {}
        for part in parts:
            lists = part.invlists
            for number in range(part.nlist):
                if size := lists.list_size(number):
                    codes = swig_view(lists.get_codes(number), 4 * width * size)
                    rows[number] = swig_view(lists.get_ids(number), size)
                    self._vectors[number] = torch.from_numpy(codes.view(np.float32).reshape(-1, width)).T
                    self._size_C[number] = size
        self._start_C = np.cumsum(self._size_C) - self._size_C
        self._row_N: Rows = np.concatenate([rows[number] for number in sorted(rows)])

    def search(self, query_QD: Floats, list_QP: Rows, top_k: int) -> TopK:
        """The best vectors of each query in its lists, by blocks of queries with lists in common."""
        order_Q = np.argsort(list_QP[:, 0], kind="stable")
        query_QD, list_QP = query_QD[order_Q], list_QP[order_Q]
        num_lists, num_probes = len(self._size_C), list_QP.shape[1]
        # A long list is near more queries than a short one.
        vectors_searched = num_probes * int(np.square(self._size_C).sum()) // len(self._row_N)
        block = min(_LIST_QUERIES * num_lists // num_probes, _BLOCK_SCORES // max(1, vectors_searched))
        best = BestDocuments(len(query_QD), top_k, max(_LIST_QUERIES, block))
        for number, chunk in enumerate(progress_bar(None, "search", "block", iterable=best.chunks)):
            best.add(number, *self._search_block(query_QD[chunk], list_QP[chunk], top_k))
        found, place_Q = best.result(), np.argsort(order_Q)
        return TopK(found.score_QK[place_Q], found.index_QK[place_Q])

    def best(self, query_QD: Floats, list_QP: Rows) -> tuple[Floats, Rows]:
        """The score and the row of the best vector of each query in its lists, (Q, 1) each; -inf and -1 for none."""
        score_n, place_n = np.full(list_QP.size, -np.inf, np.float32), np.zeros(list_QP.size, np.int64)

        def keep(pair_n: Rows, number: int, product_nL: torch.Tensor) -> None:
            largest = product_nL.max(dim=1)
            score_n[pair_n], place_n[pair_n] = largest.values, largest.indices + int(self._start_C[number])

        self._products(query_QD, list_QP, keep)
        score_QP = score_n.reshape(list_QP.shape)
        probe_Q1 = score_QP.argmax(axis=1)[:, None]
        score_Q1 = np.take_along_axis(score_QP, probe_Q1, axis=1)
        row_Q1 = self._row_N[np.take_along_axis(place_n.reshape(list_QP.shape), probe_Q1, axis=1)]
        return score_Q1, np.where(np.isneginf(score_Q1), -1, row_Q1)

    def _products(self, query_QD: Floats, list_QP: Rows, use: Callable[[Rows, int, torch.Tensor], None]) -> None:
        """Give `use` the products of each list with its queries: the queries' places in `list_QP`, list, products."""
        # All pairs of a query and a list, by list.
        pair_n = np.argsort(list_QP, axis=None, kind="stable")
        query_n, list_n = pair_n // list_QP.shape[1], list_QP.ravel()[pair_n]
        bounds = [*np.flatnonzero(np.diff(list_n, prepend=-1)).tolist(), len(list_n)]
        step = max(1, _PAIRS * (len(bounds) - 1) // len(list_n))

        def multiply(first: int) -> None:
            places = bounds[first : first + step + 1]
            query_nD = torch.from_numpy(query_QD[query_n[places[0] : places[-1]]])
            for start, stop in pairwise(places):
                number = int(list_n[start])
                if (vector_DL := self._vectors.get(number)) is not None:
                    # torch is faster than numpy at products of a few rows.
                    use(pair_n[start:stop], number, query_nD[start - places[0] : stop - places[0]].mm(vector_DL))

        _in_threads(multiply, range(0, len(bounds) - 1, step))

    def _search_block(self, query_QD: Floats, list_QP: Rows, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and rows of each query's best vectors in its lists, (Q, K); the score of missing ones is -inf."""
        num_queries = len(query_QD)
        end_QP = self._size_C[list_QP].cumsum(axis=1)
        start_QP = end_QP - self._size_C[list_QP]
        # The scores of one query after another; those with its lists by list.
        offset_Q = np.concatenate([np.zeros(1, np.int64), end_QP[:, -1].cumsum()])
        score_S, place_n = np.empty(offset_Q[-1], np.float32), (offset_Q[:-1, None] + start_QP).ravel()
        # Views of the scores by the length of a list; making one takes longer than a product.
        views: dict[int, Floats] = {}

        def keep(pair_n: Rows, _: int, product_nL: torch.Tensor) -> None:
            size = product_nL.shape[1]
            if size not in views:
                views[size] = sliding_window_view(score_S, size, writeable=True)
            views[size][place_n[pair_n]] = product_nL.numpy()

        self._products(query_QD, list_QP, keep)
        first_QP = self._start_C[list_QP] - start_QP
        found_QK, row_QK = np.full((num_queries, top_k), -np.inf, np.float32), np.zeros((num_queries, top_k), np.int64)

        def choose(first: int) -> None:
            for query in range(first, min(first + _CHOSEN_TOGETHER, num_queries)):
                score_s = score_S[offset_Q[query] : offset_Q[query + 1]]
                count = min(top_k, len(score_s))
                if count < len(score_s):
                    column_k = score_s.argpartition(len(score_s) - count)[len(score_s) - count :]
                else:
                    column_k = np.arange(count)
                # The list of a column is the first that ends behind it.
                probe_k = end_QP[query].searchsorted(column_k, side="right")
                found_QK[query, :count] = score_s[column_k]
                row_QK[query, :count] = self._row_N[first_QP[query, probe_k] + column_k]

        _in_threads(choose, range(0, num_queries, _CHOSEN_TOGETHER))
        return torch.from_numpy(found_QK), torch.from_numpy(row_QK)


def _in_threads(work: Callable[[int], None], starts: range) -> None:
    """Call `work` with each start, in as many threads as torch has, at most 8."""
    with ThreadPoolExecutor(min(torch.get_num_threads(), _MAX_THREADS)) as pool:
        list(pool.map(work, starts))
