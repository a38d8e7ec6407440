"""`mine`, `cluster`, `filter` and `synthesize`: jobs that create, select or group training records."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.parser import listed
from embeddings.cli.retrieval import load_encoder
from embeddings.common import OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.jobs import TaskOptions, discard_on_user_error, require_free
from embeddings.common.text import format_table
from embeddings.data import SourceConfig
from embeddings.data.readers import open_reader
from embeddings.data.sources import SuspectRows
from embeddings.data.store import open_cached, record_place
from embeddings.evaluation import find_evaluation_folders, read_evaluation_folder
from embeddings.evaluation.folders import RetrievalFolder, read_retrieval_files, retrieval_files, retrieval_files_of
from embeddings.inference import Encoder
from embeddings.mining import (
    ClusterSettings,
    Decontaminator,
    EncodingOptions,
    EvaluationTexts,
    FilterRules,
    LevelRules,
    MiningReport,
    NegativeRules,
    Reranker,
    SearchOptions,
    Teachers,
    cluster_pairs,
    encode_pairs,
    filter_pairs,
    mine_negatives,
)
from embeddings.mining.clusters import VectorFeatures, check_svd_dim
from embeddings.mining.kmeans import check_gpu
from embeddings.mining.negatives import TextQrels
from embeddings.synthesis import (
    METHODS,
    ChatClient,
    Limits,
    Plan,
    PromptOptions,
    Sampling,
    SynthesisReport,
    Templates,
    generate,
)


@dataclass(frozen=True)
class RecordOptions:
    """The records of one source.

    Args:
        input: A file, a glob, a list of these, or `hub:organisation/name`.
        columns: Column name of each field whose column has a different name.
        suspect_rows: How to treat records that contradict themselves.
    """

    input: str | list[str]
    columns: dict[str, str | None] | None = None
    suspect_rows: SuspectRows = "leave_out"

    def source(self, **options: Any) -> SourceConfig:
        given = {"columns": self.columns or {}, "suspect_rows": self.suspect_rows, **options}
        return SourceConfig("input", self.input, **given)


def mine(
    model: str | list[str],
    output: Path,
    corpus: Path | None = None,
    conversion: Literal["pairs", "sts"] = "pairs",
    min_score: float | None = None,
    levels: Literal["quantiles", "grades"] | None = None,
    judgments: Path | None = None,
    reranker: str | None = None,
    shard_size: int = 8192,
    *,
    records: RecordOptions,
    rules: NegativeRules,
    search: SearchOptions,
    encoding: EncodingOptions,
    task: TaskOptions,
) -> None:
    """Mine hard negatives and remove false ones; to resume, run the same command again.

    Candidates are the documents nearest to each query. The query's own positives and text are removed, and also the
    candidates whose teacher score is too close to the positive's.

    Args:
        model: The teacher, a model directory or Hub id; several as `[MODEL, MODEL]`, each of which can reject.
        output: The Parquet or `.jsonl` file to write, with `OUTPUT.manifest.json` and the working folder beside it.
        corpus: A file of more candidate documents, with `text` and an optional `title`, besides the records' positives.
        conversion: `pairs`: records with `query` and `positive`; `sts`: rows with `sentence1`, `sentence2` and `score`,
            of which each pair with a high score becomes two records, one in each direction.
        min_score: Minimum score of such a pair; default 4.
        levels: How negatives get a level from 1, the hardest, to 4. `quantiles`: quarters of the teacher's similarity
            over the candidates and random documents. `grades`: human judgments: one step below the positive, further
            below, irrelevant or not judged, random.
        judgments: For `grades`, a qrels file (`FOLDER/qrels/train.tsv`) whose folder's corpus is searched. Its queries
            are matched by their text.
        reranker: A cross-encoder, a directory or Hub id, whose scores become the targets of the loss MarginMSE.
        shard_size: Records per shard.
    """
    models = listed(model)
    encoded = encoding.encoded(len(models))
    search.check()
    judged = None
    if judgments is not None:
        judged, corpus = _judged_texts(judgments, levels, corpus)
    judge = None if reranker is None else Reranker(reranker, *encoding.device_names[:1])
    report = mine_negatives(
        records.source(conversion=conversion, min_score=min_score),
        output,
        Teachers(models, partial(_load, encoding=encoding), **encoding.prompts, encoded=encoded, reranker=judge),
        rules,
        search=search,
        levels=None if levels is None else LevelRules(levels, judged, str(judgments)),
        corpus=corpus,
        vectors=encoding.vectors,
        devices=encoding.device_names,
        shard_size=shard_size,
        task=task.resolve(),
    )
    print("this task's shards are done, other tasks' shards are missing" if report is None else mining_table(report))


def _load(model: str, encoding: EncodingOptions) -> Encoder:
    return load_encoder(model, encoding.precision, None, *encoding.device_names[:1])


def _judged_texts(qrels: Path, levels: str | None, corpus: Path | None) -> tuple[TextQrels, Path]:
    """The judgments of a qrels file with texts in place of ids, and their corpus file."""
    if levels != "grades":
        raise OptionError("judgments", str(qrels), "has no effect without --levels grades", "leave it out")
    files = retrieval_files_of(qrels)
    if corpus is not None:
        raise OptionError("corpus", str(corpus), f"is always {files.corpus} with these judgments", "leave it out")
    data = read_retrieval_files(files, show_progress=True)
    ids = data.qrels
    rows = zip(ids.query_J.tolist(), ids.document_J.tolist(), ids.relevance_J.tolist(), strict=True)
    judged = ((data.queries[query], data.documents[document], grade) for query, document, grade in rows)
    return TextQrels.of(judged, str(qrels)), files.corpus


def mining_table(report: MiningReport) -> str:
    """How many candidates each rule removed and how many remain, as text."""
    removed = {reason.replace("_", " "): count for reason, count in report.removed.items()}
    table = removal_table("candidates", report.num_candidates, removed)
    lines = [f"{report.num_queries} queries, {report.num_documents} documents", table]
    for level, part in (report.by_level or {}).items():
        scores = "no scores"
        if part["num_negatives"]:
            low, mean, high = (f"{part[f'{name}_score']:.3f}" for name in ("lowest", "mean", "highest"))
            scores = f"scores {low} to {high}, mean {mean}"
        count, lacking = part["num_negatives"], part["num_lacking"]
        lines.append(f"level {level}: {count} negatives, {scores}; {lacking} records have none")
    lines.append(f"{report.num_short} records have fewer negatives than requested, {report.num_empty} of them none")
    return "\n".join([*lines, f"wrote {report.num_negatives} negatives to {report.output}"])


def cluster(
    model: str,
    output: Path,
    svd_dim: int | None = None,
    negatives: bool = False,
    *,
    records: RecordOptions,
    settings: ClusterSettings,
    encoding: EncodingOptions,
    task: TaskOptions,
) -> None:
    """Cluster the records of one source by query and document; to resume, run the same command again.

    Train with `sampler: ClusteredBatchSampler` and `clusters: {NAME: OUTPUT}`. The source NAME must have the same path,
    columns and suspect_rows as here.

    Args:
        model: The surrogate model, a directory or Hub id.
        output: The folder to write. Vectors go to `OUTPUT.vectors` unless `vectors` names another folder; training
            reads them as a source's `surrogate_vectors`.
        svd_dim: Width that [query; document] vectors are reduced to; default all.
        negatives: Whether to encode the records' negatives too, to filter false ones; the clusters do not change.
    """
    check_gpu(settings.library)
    config = records.source()
    source = open_cached(config)
    num_clusters = settings.resolve_num_clusters(len(source.table))
    require_free(output)
    folder = encoding.vectors or output.with_name(f"{output.name}.vectors")
    with discard_on_user_error(output, folder):
        encoder = _load(model, encoding)
        check_svd_dim(svd_dim, encoder.embedding_dim)
        # Check the memory that k-means needs before the source is encoded.
        settings.resolve_training_rows(len(source.table), num_clusters, svd_dim or 2 * encoder.embedding_dim)
        vectors = encode_pairs(
            encoder,
            source,
            folder,
            encoded=encoding.encoded()[0],
            task=task.resolve(),
            negatives=negatives,
            devices=encoding.device_names,
            **encoding.prompts,
        )
        features = VectorFeatures(vectors, svd_dim, settings.seed, partial(record_place, config, source))
        clusters = cluster_pairs(features, source, output, settings, task.resolve())
    if clusters is None:
        print(f"this task's share of {output} is done, other tasks still have rows to assign")
    else:
        print(f"wrote {clusters.num_clusters} clusters of {clusters.num_rows} rows to {output}")


def filter_records(
    output: Path,
    model: str | None = None,
    decontaminate: Path | list[Path] | None = None,
    decontaminate_documents: bool = True,
    bm25_threshold: float | None = None,
    conversion: Literal["pairs", "class_by_example", "class_by_label", "binary_by_label"] = "pairs",
    shard_size: int = 65_536,
    *,
    records: RecordOptions,
    rules: FilterRules,
    encoding: EncodingOptions,
    task: TaskOptions,
) -> None:
    """Remove training records that are not worth training on; to resume, run the same command again.

    Removed are, in this order: duplicates, near-duplicates, records equal or similar to evaluation texts, inconsistent
    records, whose query is closer to other documents than to its own, and easy ones, whose query is much closer to its
    own. The input is one source. With `--segment-by language`, records are compared only within a language.

    Args:
        output: The Parquet or `.jsonl` file to write, with `OUTPUT.manifest.json` and the working folder beside it.
        model: A model directory or Hub id that finds inconsistent and easy records; without it they are kept.
        decontaminate: An evaluation folder, or a folder of them; several as `[FOLDER, FOLDER]`.
        decontaminate_documents: Whether to compare with the corpora of retrieval folders, which training may use.
        bm25_threshold: The share of an evaluation text's BM25 weight that makes a text similar to it, at most 1.
        conversion: `pairs`: records with `query` and `positive`; the others: rows with `text` and `label`, of which
            only duplicates and evaluation texts are removed.
        shard_size: Records per shard.
    """
    report = filter_pairs(
        records.source(conversion=conversion),
        output,
        rules,
        decontaminator=decontaminator(decontaminate, bm25_threshold, decontaminate_documents),
        encoder=None if model is None else _load(model, encoding),
        vectors=encoding.vectors,
        encoded=encoding.encoded()[0],
        **encoding.prompts,
        devices=encoding.device_names,
        shard_size=shard_size,
        task=task.resolve(),
    )
    print(removal_table("records", report.num_records, report.removed))
    print(f"wrote {report.num_records - sum(report.removed.values())} records to {report.output}")


def decontaminator(
    folders: Path | list[Path] | None, bm25_threshold: float | None, documents: bool = True
) -> Decontaminator | None:
    """The decontaminator for the texts of evaluation folders; None without folders."""
    if folders is None:
        rule = "needs evaluation texts to compare with"
        given = {"bm25_threshold": bm25_threshold, "decontaminate_documents": None if documents else False}
        refuse_given(given, rule, "give --decontaminate FOLDER")
        return None
    return Decontaminator(evaluation_texts(listed(folders), documents), bm25_threshold)


def evaluation_texts(roots: list[Path], documents: bool = True) -> EvaluationTexts:
    """The test texts of all evaluation folders at or below `roots`, as queries and as documents.

    Documents of retrieval and reranking folders are included if `documents` is set; those with a title also without
    it, as training texts may be. Texts of other folders have both roles.
    """
    queries: list[str] = []
    document_texts: list[str] = []
    for path in (path for root in roots for path in find_evaluation_folders(root)):
        folder = read_evaluation_folder(path, show_progress=True)
        if isinstance(folder, RetrievalFolder):
            queries += folder.queries
            document_texts += folder.documents if documents else []
            if documents and folder.kind == "retrieval":
                rows = open_reader(retrieval_files(path).corpus, ("title", "text"), ("text",))
                document_texts += [row["text"] for _, row in rows if row.get("title") and row["text"]]
            continue
        # A classification folder's training texts are not test texts.
        texts = folder.splits["test"]["text"] if folder.kind == "classification" else folder.context_texts
        queries += texts
        document_texts += texts
    return EvaluationTexts(queries, document_texts)


def removal_table(name: str, total: int, removed: Mapping[str, int]) -> str:
    remaining = accumulate(removed.values(), sub, initial=total)
    rows = zip([name, *removed], ["", *removed.values()], remaining, strict=True)
    return format_table([["", "removed", "left"], *rows])


def synthesize(
    endpoint: str,
    model: str,
    output: Path,
    regenerate_negatives: str | list[str] | None = None,
    columns: dict[str, str | None] | None = None,
    suspect_rows: SuspectRows = "leave_out",
    dry_run: bool = False,
    *,
    plan: Plan,
    prompts: PromptOptions,
    sampling: Sampling,
    limits: Limits,
    task: TaskOptions,
) -> None:
    """Generate training records with a language model; to resume, run the same command again: no answer is paid twice.

    The model brainstorms tasks, then writes an example for each randomly drawn task and its placeholders. Any endpoint
    with OpenAI's chat protocol works. The API key, if any, is the environment variable OPENAI_API_KEY.

    Args:
        endpoint: Base URL, such as `http://HOST:PORT/v1`.
        model: The model's name at the endpoint.
        output: The folder to write: `CATEGORY.jsonl` (or `records.jsonl`), and a journal of all answers.
        regenerate_negatives: Records that get four new negatives each: a file, a glob, a list, or `hub:OWNER/NAME`.
        columns: Column name of each field of these records whose column has a different name.
        suspect_rows: How to treat those of these records that contradict themselves.
        dry_run: Whether to print the prompts only, without requests and files.
    """
    templates = Templates(METHODS[plan.method], prompts)
    source = None
    if regenerate_negatives is None:
        given = {"columns": columns, "suspect_rows": None if suspect_rows == "leave_out" else suspect_rows}
        refuse_given(given, "needs --regenerate-negatives")
    elif plan.method == "nv_embed":
        raise OptionError("method", plan.method, "has no prompt for negatives", "use mgh to regenerate them")
    else:
        source = RecordOptions(regenerate_negatives, columns, suspect_rows).source()
    if dry_run:
        print(generate.dry_run(plan, templates) if source is None else generate.regenerate_dry_run(source, templates))
        return
    client, array_task = ChatClient(endpoint, sampling, limits), task.resolve()
    if source is None:
        report = generate.synthesize(output, plan, templates, client, array_task)
    else:
        report = generate.regenerate_negatives(source, output, templates, client, seed=plan.seed, task=array_task)
    print(synthesis_table(report, output, "this task's share of the" if array_task.count > 1 else "the"))


def synthesis_table(report: SynthesisReport, output: Path, whose: str) -> str:
    """The numbers of answers, records, rejections and tokens, as text; `whose` token budget limits them."""
    written = sum(report.num_records.values())
    lines = [f"{report.num_answers} answers, {written} records of {report.num_wanted}"]
    lines += [f"  rejected: {what.replace('_', ' ')}  {count}" for what, count in report.rejected.items()]
    if report.retries:
        lines.append(f"{report.retries} failed requests were retried")
    if report.num_given_up:
        lines.append(f"{report.num_given_up} records have no usable answer")
    tokens = report.prompt_tokens + report.completion_tokens
    lines.append(f"{tokens} tokens: {report.prompt_tokens} of prompts, {report.completion_tokens} of answers")
    if not report.complete:
        needed = (
            f"the next request may take {report.num_tokens_needed:,} tokens, more than {whose} token budget leaves;"
        )
        unasked = f"{report.num_unasked} records were not requested, {report.num_unfinished} have no usable answer yet;"
        lines += [needed, unasked, "to resume, run the same command with a larger token_budget"]
    lines += [f"wrote {count} records to {output / name}" for name, count in report.num_records.items()]
    return "\n".join(lines)
