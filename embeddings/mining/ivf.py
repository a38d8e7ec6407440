"""The nearest documents of queries, approximately: only the lists of documents nearest to a query are searched."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.directions import require_directions
from embeddings.common.errors import OptionError
from embeddings.common.randomness import derive_seed
from embeddings.inference.search import TopK
from embeddings.inference.vector_shards import VectorShards, save_vectors
from embeddings.mining.faiss_library import faiss_version, load_faiss, new_lists, without_missing
from embeddings.mining.jobs import ArrayTask, ShardedJob, load_shard
from embeddings.mining.kmeans import kmeans_run
from embeddings.mining.knn import best_of_tiles, check_search, in_order
from embeddings.mining.scans import Floats, Rows

MOST_LISTS = 4096
SAMPLE_PER_LIST = 64
ITERATIONS = 10
PROBES = 32
# Documents kept beyond the top k, since float32 scores do not yet decide the order.
SLACK = 16


class IvfSearch:
    """Documents of large inner product of each query, from the lists whose centroids are nearest to it.

    Centroids come from spherical k-means on a sample; each document belongs to the list of its nearest centroid, and
    only its list's number is stored. Tiles of the documents become faiss inverted lists on the fly. Documents that are
    found are scored and ordered as by `ExactSearch`; which are found differs from it by the lists that are not probed.

    Determinism: a function of documents, lists, probes and seed, on one kind of device.
    Memory: the sample (while training), the centroids, and two tiles of 48 MiB.

    Args:
        documents: Unit vectors.
        centroid_CD: Centroids of the lists, (C, D) float32, unit norm.
        lists: Where `list-<i>.npy` lies for each shard of the documents, (n,) int32.
        num_probes: Lists searched for a query.
        gpu: Whether faiss runs on the first GPU.

    Raises:
        MissingExtraError: If faiss is not installed.
        OptionError: If a GPU is asked for and there is none.
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
        """The nearest documents of each query that its lists hold.

        Args:
            query_QD: Unit vectors, (Q, D) float32.
            top_k: Documents of a query, at most.

        Returns:
            Scores and rows, (Q, K), best first, of equal scores the lower row first; row -1 with score -inf where the
            lists hold no more.

        Raises:
            InputError: If a vector is zero, not finite or not of unit length, or the widths differ.
            OptionError: If `top_k` is not positive, or more than a GPU returns.
        """
        check_search(self.documents, query_QD, top_k, self.gpu)
        width = min(top_k + SLACK, self.documents.num_rows)
        probes = self._faiss.knn(query_QD, self.centroid_CD, self.num_probes, metric=self._faiss.METRIC_INNER_PRODUCT)
        found = best_of_tiles(self.documents, len(query_QD), width, partial(self._tile_top_k, query_QD, probes))
        return in_order(query_QD, found.index_QK, self.documents, top_k)

    def _tile_top_k(
        self,
        query_QD: Floats,
        probes: tuple[Floats, Rows],
        chunk: slice,
        first_row: int,
        tile_TD: Floats,
        top_k: int,
    ) -> tuple[Floats, Rows]:
        faiss, list_T = self._faiss, self._lists_of(first_row, len(tile_TD))
        index = new_lists(self._quantizer, len(self.centroid_CD))
        index.nprobe = self.num_probes
        index.add_core(len(tile_TD), faiss.swig_ptr(tile_TD), None, faiss.swig_ptr(list_T))
        if self.gpu:
            index = faiss.index_cpu_to_gpu(self._resources, 0, index)
            index.nprobe = self.num_probes
        probe_score_QP, probe_QP = (part[chunk] for part in probes)
        score_QK, row_QK = index.search_preassigned(query_QD[chunk], top_k, probe_QP, probe_score_QP)
        return without_missing(score_QK, row_QK), np.where(row_QK < 0, -1, row_QK + first_row)

    def _lists_of(self, first_row: int, count: int) -> Rows:
        """The lists of some documents, one after another, (count,) int64."""
        size, found = self.documents.shard_size, []
        for shard in range(first_row // size, (first_row + count - 1) // size + 1):
            start = self.documents.rows(shard).start
            lists = load_shard(_list_path(self.lists, shard), mapped=True)
            found.append(lists[max(0, first_row - start) : first_row + count - start])
        return np.concatenate(found).astype(np.int64)


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
    """Train the lists of some documents and sort the documents into them; what is there already is kept.

    Args:
        documents: Unit vectors.
        folder: The folder to write: `centroids/`, `lists/`.
        num_probes: Lists searched for a query, or None for 32, or all where there are fewer.
        num_lists: Lists, or None for 4 times the square root of the number of documents, at most 4,096 and one for
            every 39 documents (fewer are too few to place a centroid, says faiss).
        seed: Seed of the sample and of the k-means.
        gpu: Whether faiss runs on the first GPU.
        task: Which shards are this process's; it goes on with what the others left.

    Raises:
        InputError: If a vector is zero, not finite or not of unit length, or the folder was made of other inputs.
        MissingExtraError: If faiss is not installed.
        OptionError: If there are more lists than documents or fewer than probes, or there is no GPU.
    """
    load_faiss(gpu)
    num_lists, num_probes = ivf_sizes(documents.num_rows, num_lists, num_probes)
    fields = {
        "num_rows": documents.num_rows,
        "embedding_dim": documents.embedding_dim,
        "num_lists": num_lists,
        "seed": seed,
        "gpu": gpu,
        "faiss": faiss_version(),
    }
    training = ShardedJob(Path(folder) / "centroids", {"kind": "ivf centroids", **fields}, 1, stem="vectors")
    training.run(partial(_train, documents, num_lists, seed, gpu), task, take_over=True)
    training.finish()
    centroid_CD = np.array(VectorShards(training.folder, num_lists, documents.embedding_dim, num_lists).load(0))
    shards = {"kind": "ivf lists", **fields, "shard_size": documents.shard_size}
    sorting = ShardedJob(Path(folder) / "lists", shards, documents.num_shards, stem="list")
    sorting.run(partial(_sort_shard, documents, centroid_CD, gpu), task, take_over=True)
    sorting.finish()
    return IvfSearch(documents, centroid_CD, sorting.folder, num_probes, gpu)


def ivf_sizes(num_documents: int, num_lists: int | None = None, num_probes: int | None = None) -> tuple[int, int]:
    """The number of lists, and of those that are searched for a query: what is given, or `build_ivf`'s defaults.

    Raises:
        OptionError: If there are more lists than documents or fewer than probes.
    """
    if num_lists is None:
        num_lists = max(1, min(int(4 * num_documents**0.5), MOST_LISTS, num_documents // 39))
    if not 1 <= num_lists <= num_documents:
        rule = f"must lie in 1 … {num_documents}, the number of documents"
        raise OptionError("num_lists", num_lists, rule, "leave it out for the default")
    if num_probes is None:
        num_probes = min(PROBES, num_lists)
    if not 1 <= num_probes <= num_lists:
        raise OptionError("num_probes", num_probes, f"must lie in 1 … {num_lists}, the number of lists", "lower it")
    return num_lists, num_probes


def _train(documents: VectorShards, num_lists: int, seed: int, gpu: bool, shard: int, path: Path) -> None:
    """Write the centroids of a sample that is spread evenly over the documents."""
    for shard, vector_ND in enumerate(documents):
        require_directions(vector_ND, str(documents.path(shard)), unit=True)
    sample_nD = documents.take(sample_rows(documents.num_rows, num_lists, seed))
    save_vectors(path, train_centroids(sample_nD, num_lists, seed, gpu))


def sample_rows(num_documents: int, num_lists: int, seed: int) -> Rows:
    """The documents that lists are trained on, 64 a list: one drawn from each of equal stretches, (n,) int64."""
    count = min(num_documents, num_lists * SAMPLE_PER_LIST)
    edges = np.arange(count + 1) * num_documents // count
    return np.random.default_rng(derive_seed(seed, "ivf sample")).integers(edges[:-1], edges[1:])


def train_centroids(sample_nD: Floats, num_lists: int, seed: int, gpu: bool = False) -> Floats:
    """The centroids of lists, (C, D) float32, by spherical k-means on unit vectors."""
    lists_seed = derive_seed(seed, "ivf") % 2**31
    return kmeans_run(sample_nD, num_lists, num_iterations=ITERATIONS, seed=lists_seed, gpu=gpu).centroids


def _sort_shard(documents: VectorShards, centroid_CD: Floats, gpu: bool, shard: int, path: Path) -> None:
    """Write the nearest centroid of each document of a shard."""
    faiss = load_faiss(gpu)
    vector_ND = np.ascontiguousarray(documents.load(shard))
    _, list_N1 = faiss.knn(vector_ND, centroid_CD, 1, metric=faiss.METRIC_INNER_PRODUCT)
    assert list_N1.min() >= 0
    lists: npt.NDArray[np.int32] = list_N1[:, 0].astype(np.int32)
    with open(path, "wb") as file:
        np.save(file, lists)


def _list_path(folder: Path, shard: int) -> Path:
    return folder / f"list-{shard:05d}.npy"
