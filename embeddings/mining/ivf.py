"""Searches by inverted lists (IVF): a query is compared with the documents of the lists nearest to it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import (
    MANIFEST,
    atomic_path,
    check_disk_space,
    check_file_manifest,
    check_manifest,
    check_vectors,
    file_hash,
    fsync_path,
    write_file_manifest,
)
from embeddings.common.jobs import ArrayTask, MakeShard, ShardedJob, load_shard, save_array
from embeddings.common.progress import progress_bar, tracked
from embeddings.common.random import derive_seed
from embeddings.inference.encoder import unit_rows
from embeddings.inference.search import BestDocuments, TopK, require_top_k, search_top_k
from embeddings.inference.vector_folder import VectorFolder, VectorShards
from embeddings.mining.faiss_library import faiss_version, load_faiss, map_lists, new_lists, write_lists
from embeddings.mining.kmeans import (
    CENTROIDS_PER_GROUP,
    GROUP_ITERATIONS,
    MAX_UNGROUPED,
    NearestCentroids,
    kmeans_run,
    nearest_centroids,
)
from embeddings.mining.lists import Lists
from embeddings.mining.search import Floats, Rows, check_search

SAMPLE_PER_LIST = 64
PROBES, GROUPED_PROBES = 32, 48
# Vectors of the first k-means for each group.
SAMPLE_PER_GROUP = 256
# Vectors of a file of lists, which are in memory while it is written.
PART_BYTES = 512 << 20
# faiss on a GPU fails or aborts with more than 65,535 queries in a call, and returns at most 2,048 documents.
QUERY_CHUNK = 16_384
GPU_MAX_DOCUMENTS = 2048

INDEX_FILE, MANIFEST_FILE = "ivf.faiss", "ivf.manifest.json"
_HINT = "make it with the command index"


class IvfSearch:
    """Documents with a large inner product with each query, from the lists with the nearest centroids.

    Args:
        documents: Unit vectors.
        centroid_CD: Centroids of the lists, (C, D) float32, unit norm.
        parts: Memory-mapped lists; each list is in one part.
        num_probes: Lists searched per query.
        gpu: Whether faiss runs on the first GPU.
    """

    def __init__(
        self, documents: VectorShards, centroid_CD: Floats, parts: Sequence[Any], num_probes: int, gpu: bool = False
    ) -> None:
        self.documents, self.centroid_CD, self.num_probes, self.gpu = documents, centroid_CD, num_probes, gpu
        self._parts, self._faiss = parts, load_faiss(gpu)
        self._nearest = NearestCentroids(centroid_CD)
        self._lists = None if gpu else Lists(parts)
        self._resources: Any = self._faiss.StandardGpuResources() if gpu else None

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """See `DocumentSearch`."""
        check_search(self.documents, query_QD, top_k)
        if self.gpu and top_k > GPU_MAX_DOCUMENTS:
            raise OptionError("top_k", top_k, f"must be <= {GPU_MAX_DOCUMENTS} on a GPU", "lower it, or use the CPU")
        score_QP, list_QP = self._nearest.search(query_QD, self.num_probes)
        if self._lists is not None:
            return self._lists.search(query_QD, list_QP, top_k)
        best = BestDocuments(len(query_QD), top_k, QUERY_CHUNK)
        for part in progress_bar(None, "search", "part", iterable=[part for part in self._parts if part.ntotal]):
            index = self._faiss.index_cpu_to_gpu(self._resources, 0, part)
            index.nprobe, count = self.num_probes, min(top_k, part.ntotal)
            for number, chunk in enumerate(progress_bar(None, "search", "block", iterable=best.chunks)):
                found = index.search_preassigned(query_QD[chunk], count, list_QP[chunk], score_QP[chunk])
                best.add(number, *_found(*found))
        return best.result()


def _found(score_QK: Floats, row_QK: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and rows of a search by faiss, which returns row -1 for missing documents."""
    score_QK = np.where(row_QK < 0, np.float32(-np.inf), score_QK)
    return torch.from_numpy(score_QK), torch.from_numpy(np.maximum(row_QK, 0))


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
    """Train the lists and write the documents into them; existing shards are reused.

    Args:
        documents: Unit vectors.
        folder: The folder to write: `centroids/`, `nearest/` with the list of each document, `lists/`.
        num_probes: Lists searched per query, or None for 32 (48 of more than 4,096 lists), or all if there are fewer.
        num_lists: Number of lists, or None for 4 times the square root of the number of documents, at most one per 39
            documents (the minimum that faiss recommends) and at least one per 128.
        seed: Seed of the sample and of the k-means.
        gpu: Whether faiss runs on the first GPU.
        task: Shards that this process computes; afterwards it computes the shards that are still missing.
    """
    load_faiss(gpu)
    num_lists, num_probes = ivf_sizes(documents.num_rows, num_lists, num_probes)
    sizes = {"num_rows": documents.num_rows, "embedding_dim": documents.embedding_dim, "num_lists": num_lists}
    fields = {**sizes, "seed": seed, "gpu": gpu, "faiss": faiss_version()}

    def made(name: str, kind: str, num_shards: int, make: MakeShard, stem: str, suffix: str = ".npy") -> ShardedJob:
        job = ShardedJob(Path(folder) / name, {"kind": kind, **fields}, num_shards, stem=stem, suffix=suffix)
        job.run(make, task, take_over=True)
        job.finish()
        return job

    def train(_: int, path: Path) -> None:
        numbered = enumerate(documents)
        # k-means takes most of the time.
        for shard, vector_ND in progress_bar(
            documents.num_shards, "checking vectors", "shard", iterable=numbered, share=0.1
        ):
            check_vectors(vector_ND, str(documents.path(shard)), unit=True)
        sample_nD = documents.take(sample_rows(documents.num_rows, num_lists, seed))
        save_array(path, train_centroids(sample_nD, num_lists, seed, gpu))

    centroid_CD = load_shard(made("centroids", "ivf centroids", 1, train, "centroids").path(0))
    nearest = NearestCentroids(centroid_CD)

    def assign(shard: int, path: Path) -> None:
        save_array(path, nearest.search(documents.load(shard), 1)[1][:, 0].astype(np.int32))

    assigning = made("nearest", "ivf nearest lists", documents.num_shards, assign, "shard")
    list_N = np.concatenate([load_shard(assigning.path(shard)) for shard in range(documents.num_shards)])
    # A part has neighbouring lists, each whole, with about the same number of documents.
    num_parts = -(-documents.num_rows * 4 * documents.embedding_dim // PART_BYTES)
    end_C = np.cumsum(np.bincount(list_N, minlength=num_lists))
    part_N = (((end_C - 1) * num_parts) // documents.num_rows)[list_N]

    def sort(part: int, path: Path) -> None:
        lists, row_n = new_lists(nearest.all, num_lists), np.flatnonzero(part_N == part)
        for start in progress_bar(None, "filling lists", "block", iterable=range(0, len(row_n), QUERY_CHUNK)):
            rows = row_n[start : start + QUERY_CHUNK]
            add_to_lists(lists, documents.take(rows), rows, list_N[rows])
        write_lists(lists, path)

    sorting = made("lists", "ivf lists", num_parts, sort, "list", ".faiss")
    parts = [map_lists(sorting.path(part)) for part in range(num_parts)]
    return IvfSearch(documents, centroid_CD, parts, num_probes, gpu)


def ivf_sizes(num_documents: int, num_lists: int | None = None, num_probes: int | None = None) -> tuple[int, int]:
    """The number of lists, and of lists searched per query: the arguments, or `build_ivf`'s defaults."""
    if num_lists is None:
        num_lists = max(1, min(int(4 * num_documents**0.5), num_documents // 39), num_documents // 128)
    if not 1 <= num_lists <= num_documents:
        rule = f"must be between 1 and the {num_documents} documents"
        raise OptionError("num_lists", num_lists, rule, "leave it out for the default")
    if num_probes is None:
        num_probes = min(GROUPED_PROBES if num_lists > MAX_UNGROUPED else PROBES, num_lists)
    if not 1 <= num_probes <= num_lists:
        raise OptionError("num_probes", num_probes, f"must be between 1 and the {num_lists} lists", "lower it")
    return num_lists, num_probes


def sample_rows(num_documents: int, num_lists: int, seed: int) -> Rows:
    """The documents that lists are trained on, 64 per list: a random one from each of n equal ranges."""
    count = min(num_documents, num_lists * SAMPLE_PER_LIST)
    edges = np.arange(count + 1) * num_documents // count
    return np.random.default_rng(derive_seed(seed, "ivf sample")).integers(edges[:-1], edges[1:])


def train_centroids(sample_nD: Floats, num_lists: int, seed: int, gpu: bool = False) -> Floats:
    """The centroids of the lists, (C, D); many are trained within the groups of a first k-means, by their sizes."""

    def train(vector_nD: Floats, number: int) -> Floats:
        lists_seed = derive_seed(seed, "ivf") % 2**31
        return kmeans_run(
            vector_nD, number, num_iterations=GROUP_ITERATIONS, seed=lists_seed, gpu="faiss" if gpu else None
        ).centroids

    if num_lists <= MAX_UNGROUPED:
        return train(sample_nD, num_lists)
    num_groups = num_lists // CENTROIDS_PER_GROUP
    step = max(1, len(sample_nD) // (num_groups * SAMPLE_PER_GROUP))
    group_n = nearest_centroids([sample_nD], train(np.ascontiguousarray(sample_nD[::step]), num_groups))
    order_n, size_G = np.argsort(group_n, kind="stable"), np.bincount(group_n, minlength=num_groups)
    lists_G = np.diff(np.cumsum(size_G) * num_lists // len(sample_nD), prepend=0)
    parts = np.split(order_n, np.cumsum(size_G)[:-1])
    grouped = [(part, number) for part, number in zip(parts, lists_G.tolist(), strict=True) if number]
    groups = progress_bar(None, "training lists", "group", iterable=grouped)
    return np.concatenate([train(sample_nD[part], number) for part, number in groups])


def add_to_lists(lists: Any, vector_ND: Floats, row_N: Rows, list_N: npt.NDArray[np.integer]) -> None:
    """Add vectors to their lists, with their rows as ids."""
    swig, list_N = load_faiss().swig_ptr, np.ascontiguousarray(list_N, np.int64)
    lists.add_core(len(vector_ND), swig(vector_ND), swig(row_N), swig(list_N))


class VectorIndex:
    """Inverted lists of an encoded folder's vectors, in a file beside them.

    Attributes:
        num_lists: Number of lists.
        num_probes: Lists searched for a query.
    """

    def __init__(self, lists: Any) -> None:
        self._lists = lists
        self.num_lists, self.num_probes = int(lists.nlist), int(lists.nprobe)

    @classmethod
    def open(cls, folder: VectorFolder) -> Self:
        """The index beside a folder's vectors, mapped into memory; its hash is checked, which reads it once."""
        _require_floats(folder)
        load_faiss()
        path = folder.path / INDEX_FILE
        if not path.is_file():
            raise InputError(str(path), "there is no index of these vectors", _HINT)
        expected = {"kind": "ivf index", "vectors_xxh3_128": file_hash(folder.path / MANIFEST)}
        fields = check_file_manifest(folder.path / MANIFEST_FILE, expected, _HINT)
        if file_hash(path) != fields["output_xxh3_128"]:
            raise InputError(str(path), "is damaged: its bytes are not those that were written", _HINT)
        lists = map_lists(path)
        lists.nprobe = min(fields.integer("num_probes", minimum=1), lists.nlist)
        return cls(lists)

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """See `DocumentSearch`."""
        require_top_k(top_k)
        found = self._lists.search(np.ascontiguousarray(query_QD), min(top_k, self._lists.ntotal))
        best = BestDocuments(len(query_QD), top_k, max(1, len(query_QD)))
        best.add(0, *_found(*found))
        return best.result()


def build_index(
    folder: VectorFolder, *, num_lists: int | None = None, num_probes: int | None = None, seed: int = 0
) -> VectorIndex:
    """Build the index of a folder's vectors, beside them; an existing one is replaced. All vectors are in memory once.

    Args:
        folder: Output of `encode_corpus`.
        num_lists: Number of lists, or None for the default of `build_ivf`.
        num_probes: Lists searched per query, or None for the default of `build_ivf`.
        seed: Seed of the sample and of the k-means.
    """
    _require_floats(folder)
    if check_manifest(folder.path, {}).get("similarity") == "dot":
        what = "has the vectors of a model that compares them by inner products of any length; an index needs cosines"
        raise InputError(str(folder.path), what, "search the folder without an index")
    num_lists, num_probes = ivf_sizes(folder.num_documents, num_lists, num_probes)
    path, manifest = folder.path / INDEX_FILE, folder.path / MANIFEST_FILE
    # Each vector in float32 with its row in 64 bits, and the centroids.
    check_disk_space(path, folder.num_documents * (4 * folder.embedding_dim + 8) + 4 * num_lists * folder.embedding_dim)
    row_n = sample_rows(folder.num_documents, num_lists, seed)
    nearest = NearestCentroids(train_centroids(unit_rows(folder.shards.take(row_n, unit=False)), num_lists, seed))
    lists = new_lists(nearest.all, num_lists)
    for vector_ND in _with_progress(folder, "adding vectors"):
        rows = np.arange(lists.ntotal, lists.ntotal + len(vector_ND))
        vector_ND = np.ascontiguousarray(vector_ND)
        add_to_lists(lists, vector_ND, rows, nearest.search(vector_ND, 1)[1][:, 0])
    # The old manifest is removed once the new file is complete, and before it replaces the old one.
    with atomic_path(path) as temporary:
        write_lists(lists, temporary)
        output_hash = file_hash(temporary)
        fsync_path(temporary)
        manifest.unlink(missing_ok=True)
    fields = {
        "kind": "ivf index",
        "vectors_xxh3_128": file_hash(folder.path / MANIFEST),
        "output_xxh3_128": output_hash,
        "num_lists": num_lists,
        "num_probes": num_probes,
        "seed": seed,
        "faiss": faiss_version(),
    }
    write_file_manifest(manifest, fields)
    return VectorIndex.open(folder)


def recall_of(index: VectorIndex, folder: VectorFolder, num_queries: int = 200) -> float:
    """The share of documents' ten nearest neighbours that an index finds.

    The queries are up to `num_queries` documents, spread evenly over the folder; each query's own row is excluded.
    """
    row_Q = np.unique(np.linspace(0, folder.num_documents - 1, num_queries).astype(np.int64))
    query_QD = unit_rows(folder.shards.take(row_Q, unit=False))
    exact = search_top_k(query_QD, _with_progress(folder, "measuring recall"), 11).index_QK.tolist()
    approximate = index.search(query_QD, 11).index_QK.tolist()
    hits = total = 0
    for query_row, *results in zip(row_Q, exact, approximate, strict=True):
        expected, found = ([row for row in rows if row != query_row][:10] for rows in results)
        hits, total = hits + len({*expected} & {*found}), total + len(expected)
    return hits / total if total else 1.0


def _with_progress(folder: VectorFolder, title: str) -> Iterator[Floats]:
    return tracked(folder.directions(), folder.num_documents, title, "vector", len)


def _require_floats(folder: VectorFolder) -> None:
    folder.require_format("float32", "float16", use="an index, which keeps float32 copies of them,")
