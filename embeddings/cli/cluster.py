"""`cluster`: the rows of a source that lie near each other, for batches that are hard."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from embeddings.data.cache import CachedSource
    from embeddings.mining.clusters import ClusterSettings
    from embeddings.mining.features import PairFeatures, RowName


def cluster(
    input: str | list[str],
    output: Path,
    model: str | None = None,
    features: Literal["vectors", "bm25"] = "vectors",
    cluster_size: int | None = None,
    num_clusters: int | None = None,
    num_iterations: int = 100,
    num_runs: int = 3,
    svd_dim: int | None = None,
    max_training_rows: int | None = None,
    memory_gib: float = 16.0,
    num_neighbours: int = 32,
    columns: dict[str, str] | None = None,
    suspect_rows: Literal["refuse", "leave_out", "keep"] = "refuse",
    vectors: Path | None = None,
    query_vectors: Path | None = None,
    document_vectors: Path | None = None,
    negatives: bool = False,
    query_prompt_name: str | None = None,
    document_prompt_name: str | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
    shard_size: int = 65_536,
    gpu: bool = False,
    task_index: int | None = None,
    num_tasks: int | None = None,
) -> None:
    """Cluster the records of one source by query and document; the same line resumes after a kill.

    Train with `sampler: ClusteredBatchSampler` and `clusters: {NAME: OUTPUT}`, the source NAME having the same path,
    columns and suspect_rows as here.

    Args:
        input: A file, a glob, a list of these, or `hub:organisation/name`, of records with `query` and `positive`.
        output: The folder to write: `cluster_ids.npy`, `rows_by_cluster.npy`, `offsets.npy`, `centroids.npy`,
            `neighbours.npy`, `manifest.json`.
        model: The surrogate, a model directory or Hub id, for features `vectors`.
        features: Cluster by the surrogate's vectors, or by words alone (BM25 weights and a truncated SVD).
        cluster_size: Mean rows of a cluster, 512 where neither this nor num_clusters is given.
        num_clusters: Number of clusters, in place of cluster_size.
        num_iterations: Iterations of k-means.
        num_runs: Runs of k-means, of which the best is kept.
        svd_dim: Width that vectors [query; document] are reduced to, or none; for bm25 the width of each text, 128.
        max_training_rows: Most rows that k-means is trained on; as many as memory_gib holds where none is given.
        memory_gib: Most memory that training k-means takes, in GiB. Where not all rows fit, a random sample is trained
            on; every row is assigned, from disk.
        num_neighbours: Nearest clusters listed for each, for the sampler's tour.
        columns: Column of a field, for fields whose column has another name.
        suspect_rows: What becomes of records that contradict themselves.
        vectors: Folder of the input's vectors by the same model, written where they are not there yet; by default
            `OUTPUT.vectors`. Training reads it as a source's `surrogate_vectors`.
        query_vectors: A folder that `encode --role query` wrote with the same model: queries found in it by their text
            are not encoded again.
        document_vectors: The same of documents.
        negatives: Whether the records' negatives get vectors too, so that training can filter false negatives among
            them; clusters are the same either way.
        query_prompt_name: Which of the model's prompts goes before each query.
        document_prompt_name: Which goes before each document.
        query_prompt: What goes before each query, in place of one of the model's prompts, such as `"query: "`; a
            record's own instruction takes the place of `{instruction}`.
        document_prompt: What goes before each document.
        precision: Format of matrix products of the model.
        seed: Decides every random choice.
        shard_size: Records that are assigned at once.
        gpu: Whether k-means and the assignment run on the GPUs (needs the extra `gpu`).
        task_index: Which of several processes this is, from 0; a SLURM array's task by itself.
        num_tasks: How many processes share the work.
    """
    from embeddings.common import OptionError
    from embeddings.common.text import choose_prompt
    from embeddings.data import SourceConfig
    from embeddings.data.cache import open_cached, record_place
    from embeddings.mining.clusters import CLUSTER_SIZE, ClusterSettings, cluster_pairs, require_free
    from embeddings.mining.encoded_texts import EncodedTexts
    from embeddings.mining.faiss_library import load_faiss
    from embeddings.mining.jobs import ArrayTask
    from embeddings.mining.outputs import nothing_left_of

    task = ArrayTask.resolve(task_index, num_tasks)
    if cluster_size is not None and num_clusters is not None:
        raise OptionError("num_clusters", num_clusters, "takes the place of cluster_size", "give one of the two")
    settings = ClusterSettings(
        cluster_size=CLUSTER_SIZE if cluster_size is None else cluster_size,
        num_clusters=num_clusters,
        num_iterations=num_iterations,
        num_runs=num_runs,
        max_training_rows=max_training_rows,
        memory_gib=memory_gib,
        num_neighbours=num_neighbours,
        shard_size=shard_size,
        seed=seed,
        gpu=gpu,
    )
    if features == "vectors" and model is None:
        raise OptionError("model", None, "must be given", "name a model directory, or use --features bm25")
    encoded = EncodedTexts(query_vectors, document_vectors)
    if features == "bm25" and (model is not None or vectors is not None or encoded != EncodedTexts()):
        raise OptionError("features", features, "uses neither model nor vectors", "leave them out")
    prompts = {
        "query_prompt_name": choose_prompt("query_prompt", query_prompt_name, query_prompt),
        "document_prompt_name": choose_prompt("document_prompt", document_prompt_name, document_prompt),
    }
    for name, value in (("negatives", negatives or None), *prompts.items()):
        if features == "bm25" and value is not None:
            option, given = (name[:-5], value["text"]) if isinstance(value, dict) else (name, value)
            raise OptionError(option, given, "has no effect on words, which need no vectors", "leave it out")
    load_faiss(gpu)
    config = SourceConfig("input", input, columns=columns or {}, suspect_rows=suspect_rows)
    source = open_cached(config)
    row_name = partial(record_place, config, source)
    settings.resolve_num_clusters(len(source.table))
    require_free(output)
    folder = vectors or output.with_name(f"{output.name}.vectors")
    with nothing_left_of(output, folder):
        if model is None:
            from embeddings.mining.sparse_features import Bm25Features

            made: PairFeatures = Bm25Features(source, svd_dim, seed, row_name)
        else:
            encode = {"negatives": negatives, "encoded": encoded, "task": task, **prompts}
            made = _vector_features(model, precision, svd_dim, source, folder, settings, row_name, **encode)
        found = cluster_pairs(made, source, output, settings, task)
    if found is None:
        print(f"this task's part of {output} is done; other tasks have rows to assign yet")
    else:
        print(f"wrote {found.num_clusters} clusters of {found.num_rows} rows to {output}")


def _vector_features(
    model: str,
    precision: Literal["auto", "float32", "bfloat16"],
    svd_dim: int | None,
    source: "CachedSource",
    folder: Path,
    settings: "ClusterSettings",
    row_name: "RowName",
    **encode: Any,
) -> "PairFeatures":
    """The surrogate's vectors of a source as features, encoded (`encode_pairs`) where they are not there yet."""
    from embeddings.inference import Encoder
    from embeddings.mining.features import VectorFeatures, check_svd_dim
    from embeddings.mining.pair_vectors import encode_pairs

    encoder = Encoder.from_pretrained(model, precision=precision, show_progress=True)
    check_svd_dim(svd_dim, encoder.embedding_dim)
    # What k-means has no memory for is refused before the source is encoded.
    num_rows = len(source.table)
    num_clusters = settings.resolve_num_clusters(num_rows)
    settings.resolve_training_rows(num_rows, num_clusters, svd_dim or 2 * encoder.embedding_dim)
    vectors = encode_pairs(encoder, source, folder, **encode)
    return VectorFeatures(vectors, svd_dim, settings.seed, row_name)
