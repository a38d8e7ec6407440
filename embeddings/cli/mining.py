"""`mine`: hard negatives for the records of a training set."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from embeddings.data.store import CachedSource
    from embeddings.mining.clusters import ClusterSettings
    from embeddings.mining.duplicates import EvaluationTexts
    from embeddings.mining.features import PairFeatures, RowName
    from embeddings.mining.filter import FilterReport
    from embeddings.mining.mine import MiningReport
    from embeddings.mining.qrels import JudgedTexts


def mine(
    model: str | list[str],
    input: str | list[str],
    output: Path,
    corpus: Path | None = None,
    margin: float | None = 0.95,
    absolute_margin: float | None = None,
    num_negatives: int | None = None,
    levels: Literal["quantiles", "grades"] | None = None,
    judgments: Path | None = None,
    first_rank: int = 1,
    last_rank: int = 100,
    choice: Literal["top", "random"] = "top",
    index: Literal["exact", "ivf"] = "exact",
    num_probes: int | None = None,
    num_lists: int | None = None,
    gpu: bool = False,
    query_prompt_name: str | None = None,
    document_prompt_name: str | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    columns: dict[str, str] | None = None,
    conversion: Literal["pairs", "sts"] = "pairs",
    min_score: float | None = None,
    suspect_rows: Literal["refuse", "leave_out", "keep"] = "refuse",
    vectors: Path | None = None,
    query_vectors: Path | list[Path] | None = None,
    document_vectors: Path | list[Path] | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
    shard_size: int = 8192,
    task_index: int | None = None,
    num_tasks: int | None = None,
) -> None:
    """Mine hard negatives that are no hidden positives; the same line resumes after a kill.

    Candidates are the documents nearest to each query. Its own positives and its own text go, and what a teacher scores
    too near to the positive.

    Args:
        model: A model directory or Hub id, the teacher; several as `[MODEL, MODEL]`, each of which can refuse.
        input: A file, a glob, a list of these, or `hub:organisation/name`, of what `conversion` says.
        output: The Parquet file to write; `NAME.manifest.json` and the folder of work lie beside it.
        corpus: A file of more documents, with `text` and maybe `title`, beside the records' positives.
        margin: Share of the positive's score that a negative stays below; `null` for none.
        absolute_margin: Distance by which a negative's score stays below the positive's.
        num_negatives: Negatives of a query; 7 unless given, and with `levels` 4, one of each level.
        levels: What gives negatives a level from 1, the hardest, to 4, as the curriculum needs them: `quantiles` cuts a
            query's candidates and as many documents drawn from all into quarters of the teacher's similarity; `grades`
            takes people's judgments: a step below the positive, further below, irrelevant or not judged, drawn.
        judgments: For `grades`, a qrels file (`FOLDER/qrels.tsv`, `FOLDER/qrels/train.tsv`); its folder's corpus
            is searched, and its queries are found by their text among those of the records.
        first_rank: Rank of the first document considered, from 1; the query's own texts have none.
        last_rank: Rank of the last one.
        choice: Take the hardest of what is left, or draw from it.
        index: Compare with every document, or only with those of the nearest lists.
        num_probes: Lists that `ivf` searches for a query.
        num_lists: Lists of `ivf`.
        gpu: Whether faiss searches on the first GPU.
        query_prompt_name: Which of the model's prompts goes before each query.
        document_prompt_name: Which goes before each document.
        query_prompt: What goes before each query, in place of one of the model's prompts, such as `"query: "`; a
            record's own instruction takes the place of `{instruction}`.
        document_prompt: What goes before each document.
        columns: Column of a field, for fields whose column has another name.
        conversion: What the input holds: `pairs`, records with `query` and `positive`; `sts`, rows with `sentence1`,
            `sentence2` and `score`, of which each pair of a high score becomes two records, one in each direction.
        min_score: Least score of such a pair; 4 unless given.
        suspect_rows: What becomes of records that contradict themselves.
        vectors: Folder of the vectors, written where they are not there yet; the folder of work where none is given.
        query_vectors: A folder that `encode --role query` wrote with the same model: queries found in it by their text
            are not encoded again. Of several models one folder each, as `[FOLDER, FOLDER]`.
        document_vectors: The same of documents, such as `encode` made of the corpus.
        precision: Format of matrix products.
        seed: Seed of the draw and of the lists.
        shard_size: Records of a shard.
        task_index: Which of several processes this is, from 0; a SLURM array's task by itself.
        num_tasks: How many processes share the work.
    """
    from embeddings.common.jobs import ArrayTask
    from embeddings.data import SourceConfig
    from embeddings.inference import Encoder
    from embeddings.mining.faiss_library import load_faiss
    from embeddings.mining.mine import SearchOptions, Teachers, mine_negatives
    from embeddings.mining.negatives import LevelRules, NegativeRules
    from embeddings.mining.pair_vectors import EncodingOptions

    def load(name: str) -> Encoder:
        return Encoder.from_pretrained(name, precision=precision, show_progress=True)

    encoding = EncodingOptions(
        vectors,
        query_vectors,
        document_vectors,
        query_prompt_name,
        document_prompt_name,
        query_prompt,
        document_prompt,
        precision,
    )
    models = [model] if isinstance(model, str) else model
    encoded = encoding.encoded(len(models))
    load_faiss(gpu)
    judged, corpus = (None, corpus) if judgments is None else _judged_texts(judgments, levels, corpus)
    report = mine_negatives(
        SourceConfig("input", input, conversion, columns=columns or {}, suspect_rows=suspect_rows, min_score=min_score),
        output,
        Teachers(models, load, **encoding.prompts, encoded=encoded),
        NegativeRules(num_negatives, margin, absolute_margin, first_rank, last_rank, choice, seed),
        search=SearchOptions(index, num_probes, num_lists, gpu),
        levels=None if levels is None else LevelRules(levels, judged, str(judgments)),
        corpus=corpus,
        vectors=vectors,
        shard_size=shard_size,
        task=ArrayTask.resolve(task_index, num_tasks),
    )
    print("this task's shards are there, others are missing yet" if report is None else mining_table(report))


def _judged_texts(qrels: Path, levels: str | None, corpus: Path | None) -> "tuple[JudgedTexts, Path]":
    """The judgments in a qrels file, by text, and the corpus that they are of.

    Raises:
        OptionError: If they cannot take effect, or a corpus is given beside theirs.
        InputError: If they cannot be used.
    """
    from embeddings.common import OptionError
    from embeddings.evaluation.folders import read_retrieval_files, retrieval_files_of
    from embeddings.mining.qrels import JudgedTexts

    if levels != "grades":
        raise OptionError("judgments", str(qrels), "have no effect without --levels grades", "leave them out")
    files = retrieval_files_of(qrels)
    if corpus is not None:
        raise OptionError("corpus", str(corpus), f"is {files.corpus} with judgments", "leave it out")
    data = read_retrieval_files(files)
    found = data.qrels
    rows = zip(found.query_J.tolist(), found.document_J.tolist(), found.relevance_J.tolist(), strict=True)
    judged = ((data.queries[query], data.documents[document], grade) for query, document, grade in rows)
    return JudgedTexts.of(judged, str(qrels)), files.corpus


def mining_table(report: "MiningReport") -> str:
    """What each rule removed, and what was left, as text."""
    lines = [
        f"{report.num_queries} queries, {report.num_documents} documents",
        f"{'':<30}{'removed':>14}{'left':>14}",
        f"{'candidates':<44}{report.num_candidates:>14}",
    ]
    left = report.num_candidates
    for reason, count in report.removed.items():
        left -= count
        lines.append(f"{reason.replace('_', ' '):<30}{count:>14}{left:>14}")
    for level, part in (report.by_level or {}).items():
        scores = "no scores"
        if part["num_negatives"]:
            low, mean, high = (f"{part[f'{name}_score']:.3f}" for name in ("lowest", "mean", "highest"))
            scores = f"scores {low} to {high}, mean {mean}"
        count, lacking = part["num_negatives"], part["num_lacking"]
        lines.append(f"level {level}: {count} negatives, {scores}; {lacking} records have none")
    lines.append(f"{report.num_short} records have fewer negatives than asked for, {report.num_empty} of them none")
    return "\n".join([*lines, f"wrote {report.num_negatives} negatives to {report.output}"])


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
    from embeddings.common.jobs import ArrayTask, discard_on_user_error, require_free
    from embeddings.data import SourceConfig
    from embeddings.data.store import open_cached, record_place
    from embeddings.mining.clusters import ClusterSettings, cluster_pairs
    from embeddings.mining.faiss_library import load_faiss
    from embeddings.mining.pair_vectors import EncodedTexts, EncodingOptions

    task = ArrayTask.resolve(task_index, num_tasks)
    settings = ClusterSettings(
        cluster_size=cluster_size,
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
    encoding = EncodingOptions(
        vectors,
        query_vectors,
        document_vectors,
        query_prompt_name,
        document_prompt_name,
        query_prompt,
        document_prompt,
        precision,
    )
    (encoded,), prompts = encoding.encoded(), encoding.prompts
    if features == "bm25" and (model is not None or vectors is not None or encoded != EncodedTexts()):
        raise OptionError("features", features, "uses neither model nor vectors", "leave them out")
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
    with discard_on_user_error(output, folder):
        if model is None:
            from embeddings.mining.features import Bm25Features

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


def filter_records(
    input: str | list[str],
    output: Path,
    model: str | None = None,
    top_k: int | None = None,
    segment_size: int = 1_000_000,
    segment_by: Literal["source", "language"] = "source",
    remove_copies: bool = True,
    near_duplicates: float | None = None,
    shingle: Literal["word", "character"] = "word",
    decontaminate: Path | list[Path] | None = None,
    decontaminate_documents: bool = True,
    bm25_threshold: float | None = None,
    columns: dict[str, str] | None = None,
    conversion: Literal["pairs", "class_by_example", "class_by_label", "binary_by_label"] = "pairs",
    suspect_rows: Literal["refuse", "leave_out", "keep"] = "refuse",
    vectors: Path | None = None,
    query_vectors: Path | None = None,
    document_vectors: Path | None = None,
    query_prompt_name: str | None = None,
    document_prompt_name: str | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
    shard_size: int = 65_536,
    task_index: int | None = None,
    num_tasks: int | None = None,
) -> None:
    """Keep the training records that are worth training on; the same line resumes after a kill.

    The rules, in this order: copies, near-copies, records equal or similar to evaluation texts, and records whose query
    has other documents nearer to it than its own. Input is one source; where it holds several languages, records of one
    are compared with each other alone with `--segment-by language`.

    Args:
        input: A file, a glob, a list of these, or `hub:organisation/name`, of what `conversion` says.
        output: The Parquet file to write; `NAME.manifest.json` and the folder of work lie beside it.
        model: A model directory or Hub id that judges consistency; no model, no such rule.
        top_k: Keep a pair whose document is among this many nearest to its query; 2 where a model is given.
        segment_size: Records that are compared with each other for consistency.
        segment_by: Compare records of the whole source, or those of one `language` (a field that every record then has;
            `--columns {language: lang}` where its column has another name).
        remove_copies: Whether a record with an earlier one's query and positives goes.
        near_duplicates: Similarity from which query and positives are those of an earlier record, 0.5 to 1.
        shingle: Compare near-copies by runs of 3 words, or of 5 characters (languages without spaces).
        decontaminate: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`.
        decontaminate_documents: Whether a document of a retrieval folder takes records out; false where training and
            evaluation share one corpus by design.
        bm25_threshold: Share of an evaluation text's BM25 weight from which a text is similar to it, up to 1.
        columns: Column of a field, for fields whose column has another name.
        conversion: What the input holds: `pairs`, records with `query` and `positive`; the others, rows with `text` and
            `label`, for which there are the rules on copies and on evaluation texts.
        suspect_rows: What becomes of records that contradict themselves.
        vectors: Folder of the input's vectors by the same model, written where they are not there yet.
        query_vectors: A folder that `encode --role query` wrote with the same model: queries found in it by their text
            are not encoded again.
        document_vectors: The same of documents.
        query_prompt_name: Which of the model's prompts goes before each query.
        document_prompt_name: Which goes before each document.
        query_prompt: What goes before each query, in place of one of the model's prompts, such as `"query: "`; a
            record's own instruction takes the place of `{instruction}`.
        document_prompt: What goes before each document.
        precision: Format of matrix products.
        seed: Seed of which records are compared with each other.
        shard_size: Records of a shard.
        task_index: Which of several processes this is, from 0; a SLURM array's task by itself.
        num_tasks: How many processes share the work.
    """
    from embeddings.common import OptionError
    from embeddings.common.jobs import ArrayTask
    from embeddings.data import SourceConfig
    from embeddings.inference import Encoder
    from embeddings.mining.duplicates import Decontaminator
    from embeddings.mining.filter import FilterRules, filter_pairs
    from embeddings.mining.pair_vectors import EncodingOptions

    task = ArrayTask.resolve(task_index, num_tasks)
    encoding = EncodingOptions(
        vectors,
        query_vectors,
        document_vectors,
        query_prompt_name,
        document_prompt_name,
        query_prompt,
        document_prompt,
        precision,
    )
    rules = FilterRules(remove_copies, near_duplicates, shingle, top_k, segment_size, seed, segment_by)
    if decontaminate is None and bm25_threshold is not None:
        rule = "needs evaluation texts to compare with"
        raise OptionError("bm25_threshold", bm25_threshold, rule, "give --decontaminate FOLDER")
    decontaminator = None
    if decontaminate is not None:
        folders = decontaminate if isinstance(decontaminate, list) else [decontaminate]
        decontaminator = Decontaminator(evaluation_texts(folders, decontaminate_documents), bm25_threshold)
    report = filter_pairs(
        SourceConfig("input", input, conversion, columns=columns or {}, suspect_rows=suspect_rows),
        output,
        rules,
        decontaminator=decontaminator,
        encoder=None if model is None else Encoder.from_pretrained(model, precision=precision, show_progress=True),
        vectors=vectors,
        encoded=encoding.encoded()[0],
        **encoding.prompts,
        shard_size=shard_size,
        task=task,
    )
    print(filter_table(report))


def evaluation_texts(roots: list[Path], documents: bool = True) -> "EvaluationTexts":
    """The texts of the evaluation folders at or below some folders.

    Queries and documents of retrieval and reranking folders; of the other kinds all texts that are tested on, in both
    roles.

    Args:
        roots: Where to look.
        documents: Whether the documents of retrieval and reranking folders count.
    """
    from embeddings.evaluation import find_evaluation_folders, read_evaluation_folder
    from embeddings.evaluation.folders import ClassificationFolder, RerankingFolder, RetrievalFolder, corpus_texts
    from embeddings.mining.duplicates import EvaluationTexts

    queries: list[str] = []
    found: list[str] = []
    for path in (path for root in roots for path in find_evaluation_folders(root)):
        folder = read_evaluation_folder(path)
        if isinstance(folder, RetrievalFolder | RerankingFolder):
            queries += folder.queries
            found += folder.documents if documents else []
            continue
        # Of a classification the part to train on is left out: nothing is scored by its texts.
        texts = folder.test_texts if isinstance(folder, ClassificationFolder) else corpus_texts(folder)
        queries += texts
        found += texts
    return EvaluationTexts(queries, found)


def filter_table(report: "FilterReport") -> str:
    """What each rule took out, and what was left, as text."""
    left, lines = (
        report.num_records,
        [f"{'':<30}{'removed':>12}{'left':>12}", f"{'records':<42}{report.num_records:>12}"],
    )
    for rule, count in report.removed.items():
        left -= count
        lines.append(f"{rule:<30}{count:>12}{left:>12}")
    return "\n".join([*lines, f"wrote {left} records to {report.output}"])
