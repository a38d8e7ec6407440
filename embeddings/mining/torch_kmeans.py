"""Spherical k-means in torch, for GPUs: nearest centroids by tiled products, and means by sums over sorted rows."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from embeddings.common.progress import progress_bar
from embeddings.inference.search import TileSearch, TopK
from embeddings.mining.faiss_library import load_faiss
from embeddings.mining.search import Floats, Rows, full_products

# Vectors that are on the device at once if not all fit, centroids in one product, and scores in memory.
_CHUNK_ROWS, _TILE_CENTROIDS, _TILE_SCORES = 1 << 18, 1 << 16, 1 << 28
# Share of the free memory of a GPU for vectors that stay there; the rest is for a chunk, its sorted copy and scores.
_RESIDENT_SHARE = 0.7
# Relative distance from its copy of a centroid that is placed in a large cluster, because its own had no vectors.
_MOVE = 1 / 1024


class DeviceVectors:
    """Unit vectors, (N, d), of which as many as fit stay on a device; the others are copied to it in every round.

    Products are in float16 with sums in float32 on CUDA, where a vector may go to a centroid whose cosine is smaller by
    less than 1e-3, and in float32 elsewhere. Sums over vectors are in float32 and in a fixed order.
    """

    def __init__(self, vectors: Floats, device: torch.device | str) -> None:
        self.vectors, self.device = vectors, torch.device(device)
        self._dtype = _product_dtype(self.device)
        limit = self._rows_that_fit()
        self._num_resident = len(vectors) if len(vectors) <= limit else limit // _CHUNK_ROWS * _CHUNK_ROWS
        self._resident = list(self._copies(0, self._num_resident))

    def round(self, centroids: Floats, shown: Callable[[int], object]) -> tuple[Floats, Rows, float]:
        """One assignment: the sum and the number of each cluster's vectors, and the mean cosine to the centroids."""
        centroid_KD = torch.from_numpy(centroids).to(self.device)
        rounded_KD = centroid_KD.to(self._dtype)
        sum_KD = torch.zeros_like(centroid_KD)
        count_K = torch.zeros(len(centroids), dtype=torch.int64, device=self.device)
        for chunk_nD in self._chunks():
            nearest_n = _nearest(chunk_nD, rounded_KD)
            sizes_K = torch.zeros_like(count_K).scatter_add_(0, nearest_n, torch.ones_like(nearest_n))
            # `index_add_` would add in an order that changes from run to run.
            sorted_nD = chunk_nD[nearest_n.argsort(stable=True)]
            sum_KD += torch.segment_reduce(sorted_nD, "sum", lengths=sizes_K, unsafe=True)
            count_K += sizes_K
            shown(len(chunk_nD))
        # The sum of the cosines is that of each centroid's product with its cluster's sum.
        objective = float(torch.linalg.vecdot(sum_KD.double(), centroid_KD.double()).sum()) / len(self.vectors)
        return sum_KD.cpu().numpy(), count_K.cpu().numpy(), objective

    def _chunks(self) -> Iterator[Tensor]:
        yield from self._resident
        yield from self._copies(self._num_resident, len(self.vectors))

    def _copies(self, first: int, end: int) -> Iterator[Tensor]:
        for start in range(first, end, _CHUNK_ROWS):
            yield torch.from_numpy(self.vectors[start : min(start + _CHUNK_ROWS, end)]).to(self.device)

    def _rows_that_fit(self) -> int:
        if self.device.type != "cuda":
            return len(self.vectors)
        free, _ = torch.cuda.mem_get_info(self.device)
        row_bytes = 4 * self.vectors.shape[1]
        work = 6 * _TILE_SCORES + 3 * _CHUNK_ROWS * row_bytes
        return int(max(0.0, _RESIDENT_SHARE * (free - work)) / row_bytes)


def device_kmeans(
    vectors: Floats, centroids: Floats, num_iterations: int, device: torch.device | str, title: str
) -> tuple[Floats, float]:
    """Rounds of spherical k-means from unit centroids; the last centroids and the last assignment's mean cosine."""
    objective = 0.0
    with (
        torch.inference_mode(),
        full_products(),
        progress_bar(num_iterations * len(vectors), title, "vector", unit_scale=True) as bar,
    ):
        rows = DeviceVectors(vectors, device)
        for _ in range(num_iterations):
            sum_KD, count_K, objective = rows.round(centroids, bar.update)
            centroids = unit_means(sum_KD, count_K)
    return centroids, objective


def unit_means(sum_KD: Floats, count_K: Rows) -> Floats:
    """The unit mean of each cluster, (k, d) float32, from its sum and its size; changes the sizes."""
    centroids: Floats = sum_KD * (np.float32(1) / np.maximum(count_K, 1).astype(np.float32))[:, None]
    # As in faiss, neighbouring values move in opposite directions.
    moves_D = np.where(np.arange(sum_KD.shape[1]) % 2, -_MOVE, _MOVE).astype(np.float32)
    for empty in np.flatnonzero(count_K == 0).tolist():
        largest = int(count_K.argmax())
        centroids[empty] = centroids[largest] * (1 + moves_D)
        centroids[largest] *= 1 - moves_D
        count_K[empty] = count_K[largest] // 2
        count_K[largest] -= count_K[empty]
    load_faiss().normalize_L2(centroids)
    return centroids


class DeviceCentroids:
    """Centroids on a device, searched as an index of faiss: exact, by scores in float32."""

    def __init__(self, centroids: Floats, device: torch.device | str) -> None:
        self._tiles = torch.split(torch.tensor(centroids, device=device), _TILE_CENTROIDS)

    def search(self, vectors: Floats, count: int) -> TopK:
        """The scores and rows of the `count` centroids with the largest inner products, (n, count) each."""
        with torch.inference_mode(), full_products():
            vector_ND = torch.tensor(vectors, device=self._tiles[0].device)
            chunk, dtype = max(1, _TILE_SCORES // len(self._tiles[0]) // 2), _product_dtype(vector_ND.device)
            best = TileSearch(vector_ND, count, chunk, dtype, num_pairs=_CHUNK_ROWS)
            for tile_TD in self._tiles:
                best.add_tile(tile_TD)
            return best.result()


def _product_dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" and torch.version.cuda is not None else torch.float32


def _nearest(vector_nD: Tensor, centroid_KD: Tensor) -> Tensor:
    """The centroid with the largest inner product with each vector, the first of equal ones, (n,) int64."""
    tile = min(len(centroid_KD), _TILE_CENTROIDS)
    parts = []
    for block_bD in torch.split(vector_nD, max(1, _TILE_SCORES // tile)):
        rounded_bD = block_bD.to(centroid_KD.dtype)
        best_b, nearest_b = _largest(rounded_bD, centroid_KD[:tile])
        for start in range(tile, len(centroid_KD), tile):
            score_b, index_b = _largest(rounded_bD, centroid_KD[start : start + tile])
            nearest_b = torch.where(score_b > best_b, index_b + start, nearest_b)
            best_b = torch.maximum(score_b, best_b)
        parts.append(nearest_b)
    return torch.cat(parts)


def _largest(vector_bD: Tensor, centroid_TD: Tensor) -> tuple[Tensor, Tensor]:
    if vector_bD.dtype == torch.float32:
        score_bT = vector_bD @ centroid_TD.T
    else:
        score_bT = torch.mm(vector_bD, centroid_TD.T, out_dtype=torch.float32)
    largest = score_bT.max(dim=1)
    return largest.values, largest.indices
