"""`mine`, `cluster`, `filter` and `synthesize`: jobs that make training records, or choose among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import sub
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.retrieval import load_encoder
from embeddings.common import OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.jobs import TaskOptions, discard_on_user_error, require_free
from embeddings.common.text import format_table
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached, record_place
from embeddings.evaluation import find_evaluation_folders, read_evaluation_folder
from embeddings.evaluation.folders import (
    ClassificationFolder,
    RerankingFolder,
    RetrievalFolder,
    corpus_texts,
    read_retrieval_files,
    retrieval_files_of,
)
from embeddings.inference import Encoder
from embeddings.mining import (
    ClusterSettings,
    Decontaminator,
    EncodedTexts,
    EncodingOptions,
    EvaluationTexts,
    FilterRules,
    LevelRules,
    MiningReport,
    NegativeRules,
    PairFeatures,
    Reranker,
    SearchOptions,
    Teachers,
    cluster_pairs,
    encode_pairs,
    filter_pairs,
    mine_negatives,
)
from embeddings.mining.clusters import Bm25Features, VectorFeatures, check_svd_dim
from embeddings.mining.faiss_library import load_faiss
from embeddings.mining.negatives import TextQrels
from embeddings.synthesis import (
    METHODS,
    Budget,
    ChatClient,
    Limits,
    Plan,
    PromptOptions,
    Sampling,
    SynthesisReport,
    Templates,
    generate,
)
from embeddings.synthesis.validate import check_levels

SuspectRows = Literal["refuse", "leave_out", "keep"]


@dataclass(frozen=True)
class JudgeOptions:
    """What tells how relevant a text is, besides the teachers that choose negatives.

    Args:
        levels: What gives negatives a level from 1, the hardest, to 4, for the curriculum: `quantiles`, quarters of the
            teacher's similarity over candidates and as many drawn documents; `grades`, human judgments: a step below
            the positive, further below, irrelevant or not judged, drawn.
        judgments: For `grades`, a qrels file (`FOLDER/qrels.tsv`, `FOLDER/qrels/train.tsv`) whose folder's corpus is
            searched; its queries are found by their text.
        reranker: A cross-encoder (sentence-transformers), a directory or Hub id, whose scores of positives and chosen
            negatives are the output's `scores`, which the loss MarginMSE follows.
    """

    levels: Literal["quantiles", "grades"] | None = None
    judgments: Path | None = None
    reranker: str | None = None


def mine(
    model: str | list[str],
    input: str | list[str],
    output: Path,
    corpus: Path | None = None,
    columns: dict[str, str] | None = None,
    conversion: Literal["pairs", "sts"] = "pairs",
    min_score: float | None = None,
    suspect_rows: SuspectRows = "leave_out",
    shard_size: int = 8192,
    *,
    judge: JudgeOptions,
    rules: NegativeRules,
    search: SearchOptions,
    encoding: EncodingOptions,
    task: TaskOptions,
) -> None:
    """Mine hard negatives that are no hidden positives; the same line resumes after a kill.

    Candidates are the documents nearest to each query. Its own positives and its own text are removed, and so is what a
    teacher scores too near to the positive.

    Args:
        model: A model directory or Hub id, the teacher; several as `[MODEL, MODEL]`, each of which can refuse.
        input: A file, a glob, a list of these, or `hub:organisation/name`, of what `conversion` says.
        output: The Parquet or `.jsonl` file to write; `NAME.manifest.json` and the folder of work lie beside it.
        corpus: A file of more documents, with `text` and an optional `title`, beside the records' positives.
        columns: Column of a field, for fields whose column has another name.
        conversion: What the input holds: `pairs`, records with `query` and `positive`; `sts`, rows with `sentence1`,
            `sentence2` and `score`, of which each pair of a high score becomes two records, one in each direction.
        min_score: Least score of such a pair; 4 unless given.
        suspect_rows: What becomes of records that contradict themselves.
        shard_size: Records of a shard.
        judge: What tells how relevant a text is, besides the teachers.
        rules: What makes a candidate a negative.
        search: How the nearest documents are found.
        encoding: How texts become vectors.
        task: Which part of the work this process does.
    """
    models = [model] if isinstance(model, str) else model
    encoded = encoding.encoded(len(models))
    search.check()
    levels, judgments, judged = judge.levels, judge.judgments, None
    if judgments is not None:
        judged, corpus = _judged_texts(judgments, levels, corpus)
    reranker = None if judge.reranker is None else Reranker(judge.reranker, *encoding.device_names[:1])
    report = mine_negatives(
        SourceConfig("input", input, conversion, columns=columns or {}, suspect_rows=suspect_rows, min_score=min_score),
        output,
        Teachers(models, partial(_load, encoding=encoding), **encoding.prompts, encoded=encoded, reranker=reranker),
        rules,
        search=search,
        levels=None if levels is None else LevelRules(levels, judged, str(judgments)),
        corpus=corpus,
        vectors=encoding.vectors,
        devices=encoding.device_names,
        shard_size=shard_size,
        task=task.resolve(),
    )
    print("this task's shards are done, others are missing" if report is None else mining_table(report))


def _load(model: str, encoding: EncodingOptions) -> Encoder:
    return load_encoder(model, encoding.precision, None, *encoding.device_names[:1])


def _judged_texts(qrels: Path, levels: str | None, corpus: Path | None) -> tuple[TextQrels, Path]:
    """The judgments in a qrels file, by text, and the corpus that they are about."""
    if levels != "grades":
        raise OptionError("judgments", str(qrels), "have no effect without --levels grades", "leave them out")
    files = retrieval_files_of(qrels)
    if corpus is not None:
        raise OptionError("corpus", str(corpus), f"is {files.corpus} with judgments", "leave it out")
    data = read_retrieval_files(files)
    found = data.qrels
    rows = zip(found.query_J.tolist(), found.document_J.tolist(), found.relevance_J.tolist(), strict=True)
    judged = ((data.queries[query], data.documents[document], grade) for query, document, grade in rows)
    return TextQrels.of(judged, str(qrels)), files.corpus


def mining_table(report: MiningReport) -> str:
    """What each rule removed, and what was left, as text."""
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
    lines.append(f"{report.num_short} records have fewer negatives than num_negatives, {report.num_empty} of them none")
    return "\n".join([*lines, f"wrote {report.num_negatives} negatives to {report.output}"])


def cluster(
    input: str | list[str],
    output: Path,
    model: str | None = None,
    features: Literal["vectors", "bm25"] = "vectors",
    svd_dim: int | None = None,
    columns: dict[str, str] | None = None,
    suspect_rows: SuspectRows = "leave_out",
    negatives: bool = False,
    *,
    settings: ClusterSettings,
    encoding: EncodingOptions,
    task: TaskOptions,
) -> None:
    """Cluster the records of one source by query and document; the same line resumes after a kill.

    Train with `sampler: ClusteredBatchSampler` and `clusters: {NAME: OUTPUT}`, the source NAME having the same path,
    columns and suspect_rows as here.

    Args:
        input: A file, a glob, a list of these, or `hub:organisation/name`, of records with `query` and `positive`.
        output: The folder to write. Vectors go to `OUTPUT.vectors` unless `vectors` names another folder; training
            reads them as a source's `surrogate_vectors`.
        model: The surrogate, a model directory or Hub id, for features `vectors`.
        features: Cluster by the surrogate's vectors, or by words alone (BM25 weights and a truncated SVD).
        svd_dim: Width that vectors [query; document] are reduced to, or none; for bm25 the width of each text, 128.
        columns: Column of a field, for fields whose column has another name.
        suspect_rows: What becomes of records that contradict themselves.
        negatives: Whether the records' negatives get vectors too, to filter false ones; clusters stay the same.
        settings: How the rows are clustered.
        encoding: How texts become vectors.
        task: Which part of the work this process does.
    """
    if features == "vectors" and model is None:
        raise OptionError("model", None, "must be given", "name a model directory, or use --features bm25")
    if features == "bm25":
        _check_words_only(model, negatives, encoding)
    load_faiss(settings.gpu)
    config = SourceConfig("input", input, columns=columns or {}, suspect_rows=suspect_rows)
    source = open_cached(config)
    row_name = partial(record_place, config, source)
    num_clusters = settings.resolve_num_clusters(len(source.table))
    require_free(output)
    folder = encoding.vectors or output.with_name(f"{output.name}.vectors")
    with discard_on_user_error(output, folder):
        if model is None:
            made: PairFeatures = Bm25Features(source, svd_dim, settings.seed, row_name)
        else:
            encoder = _load(model, encoding)
            check_svd_dim(svd_dim, encoder.embedding_dim)
            # Refuse what k-means has no memory for before the source is encoded.
            settings.resolve_training_rows(len(source.table), num_clusters, svd_dim or 2 * encoder.embedding_dim)
            how: dict[str, Any] = {"encoded": encoding.encoded()[0], "task": task.resolve(), **encoding.prompts}
            how |= {"negatives": negatives, "devices": encoding.device_names}
            vectors = encode_pairs(encoder, source, folder, **how)
            made = VectorFeatures(vectors, svd_dim, settings.seed, row_name)
        found = cluster_pairs(made, source, output, settings, task.resolve())
    if found is None:
        print(f"this task's part of {output} is done, others have rows to assign")
    else:
        print(f"wrote {found.num_clusters} clusters of {found.num_rows} rows to {output}")


def _check_words_only(model: str | None, negatives: bool, encoding: EncodingOptions) -> None:
    (encoded,) = encoding.encoded()
    if model is not None or encoding.vectors is not None or encoded != EncodedTexts():
        raise OptionError("features", "bm25", "uses neither model nor vectors", "leave them out")
    given: dict[str, Any] = {"negatives": negatives or None, "devices": encoding.devices}
    for name, value in encoding.prompts.items():
        given |= {name[:-5]: value["text"]} if isinstance(value, dict) else {name: value}
    refuse_given(given, "has no effect on words, which need no vectors")


def filter_records(
    input: str | list[str],
    output: Path,
    model: str | None = None,
    decontaminate: Path | list[Path] | None = None,
    decontaminate_documents: bool = True,
    bm25_threshold: float | None = None,
    columns: dict[str, str] | None = None,
    conversion: Literal["pairs", "class_by_example", "class_by_label", "binary_by_label"] = "pairs",
    suspect_rows: SuspectRows = "leave_out",
    shard_size: int = 65_536,
    *,
    rules: FilterRules,
    encoding: EncodingOptions,
    task: TaskOptions,
) -> None:
    """Keep the training records that are worth training on; the same line resumes after a kill.

    The rules, in this order: copies, near-copies, records equal or similar to evaluation texts, and records whose query
    has other documents nearer to it than its own. Input is one source; where it holds several languages, records of one
    are compared with each other alone with `--segment-by language`.

    Args:
        input: A file, a glob, a list of these, or `hub:organisation/name`, of what `conversion` says.
        output: The Parquet or `.jsonl` file to write; `NAME.manifest.json` and the folder of work lie beside it.
        model: A model directory or Hub id that judges consistency; without a model there is no such rule.
        decontaminate: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`.
        decontaminate_documents: Whether documents of retrieval folders count; not where training shares their corpus.
        bm25_threshold: Share of an evaluation text's BM25 weight from which a text is similar to it, up to 1.
        columns: Column of a field, for fields whose column has another name.
        conversion: What the input holds: `pairs`, records with `query` and `positive`; the others, rows with `text` and
            `label`, to which the rules on copies and evaluation texts apply.
        suspect_rows: What becomes of records that contradict themselves.
        shard_size: Records of a shard.
        rules: Which records are removed.
        encoding: How texts become vectors.
        task: Which part of the work this process does.
    """
    report = filter_pairs(
        SourceConfig("input", input, conversion, columns=columns or {}, suspect_rows=suspect_rows),
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
    given: Path | list[Path] | None, bm25_threshold: float | None, documents: bool = True
) -> Decontaminator | None:
    """What knows the texts of evaluation folders, or None where none is given."""
    if given is None:
        rule = "needs evaluation texts to compare with"
        refuse_given({"bm25_threshold": bm25_threshold}, rule, "give --decontaminate FOLDER")
        return None
    return Decontaminator(evaluation_texts(given if isinstance(given, list) else [given], documents), bm25_threshold)


def evaluation_texts(roots: list[Path], documents: bool = True) -> EvaluationTexts:
    """The texts that the evaluation folders at or below some folders test on, in the roles of query and document.

    Texts of retrieval and reranking folders have one role, and count as documents only where `documents` is set.
    """
    queries: list[str] = []
    found: list[str] = []
    for path in (path for root in roots for path in find_evaluation_folders(root)):
        folder = read_evaluation_folder(path)
        if isinstance(folder, RetrievalFolder | RerankingFolder):
            queries += folder.queries
            found += folder.documents if documents else []
            continue
        # Nothing is scored by the texts that a classification folder trains on.
        texts = folder.test_texts if isinstance(folder, ClassificationFolder) else corpus_texts(folder)
        queries += texts
        found += texts
    return EvaluationTexts(queries, found)


def removal_table(name: str, total: int, removed: Mapping[str, int]) -> str:
    left = accumulate(removed.values(), sub, initial=total)
    rows = zip([name, *removed], ["", *removed.values()], left, strict=True)
    return format_table([["", "removed", "left"], *rows])


def synthesize(
    endpoint: str,
    model: str,
    output: Path,
    regenerate_negatives: str | list[str] | None = None,
    columns: dict[str, str] | None = None,
    suspect_rows: SuspectRows | None = None,
    judge: str | None = None,
    dry_run: bool = False,
    *,
    plan: Plan,
    prompts: PromptOptions,
    sampling: Sampling,
    limits: Limits,
    budget: Budget,
) -> None:
    """Write synthetic training records by a language model; the same line resumes after a kill, and pays nothing twice.

    The model brainstorms tasks, then writes an example for each draw of a task and its placeholders. Any endpoint of
    OpenAI's chat protocol will do; the key is the environment variable OPENAI_API_KEY, and none where it is not set.

    Args:
        endpoint: Base address, as `http://HOST:PORT/v1`.
        model: The model's name at the endpoint.
        output: The folder to write: `CATEGORY.jsonl` (or `records.jsonl`), and a journal of every answer.
        regenerate_negatives: Records that get four new negatives each: a file, a glob, a list, or `hub:OWNER/NAME`.
        columns: Column of a field of these records, for fields whose column has another name.
        suspect_rows: What becomes of records among them that contradict themselves; `leave_out` where nothing is given.
        judge: A model directory or Hub id; the report says whether its similarity to the query falls by level.
        dry_run: Whether to print prompts, ask nothing and write nothing.
        plan: What is asked for.
        prompts: What fills the prompts.
        sampling: How the model answers.
        limits: How the endpoint is used.
        budget: What the answers may cost.
    """
    templates = Templates(METHODS[plan.method], prompts)
    if judge is not None and plan.method == "nv_embed":
        raise OptionError("judge", judge, "has no effect on nv_embed, which has no levels", "leave it out")
    # Loaded before anything is paid for.
    encoder = None if judge is None or dry_run else load_encoder(judge)
    if regenerate_negatives is None:
        refuse_given({"columns": columns, "suspect_rows": suspect_rows}, "needs regenerate_negatives")
        if dry_run:
            print(generate.dry_run(plan, templates))
            return
        client = ChatClient(endpoint, sampling, limits.timeout_seconds)
        report = generate.synthesize(output, plan, templates, client, limits=limits, budget=budget)
    else:
        unused = {name: getattr(plan, name) for name in ("num_examples", "num_tasks", "shares", "tasks")}
        unused |= {"seeds": prompts.seeds, "languages": prompts.languages}
        unused["method"] = None if plan.method == "mgh" else plan.method
        refuse_given(unused, "has no effect on regenerate_negatives")
        rows = suspect_rows or "leave_out"
        source = SourceConfig("input", regenerate_negatives, columns=columns or {}, suspect_rows=rows)
        if dry_run:
            print(generate.regenerate_dry_run(source, templates))
            return
        client = ChatClient(endpoint, sampling, limits.timeout_seconds)
        report = generate.regenerate_negatives(
            source, output, templates, client, seed=plan.seed, limits=limits, budget=budget
        )
    print(synthesis_table(report, output))
    if encoder is not None:
        print(level_table(str(judge), encoder, [output / name for name in report.num_records]))


def level_table(judge: str, encoder: Encoder, paths: list[Path]) -> str:
    """How similar the negatives of each level of records are to their queries by a model, as text."""
    found = check_levels(paths, encoder)
    rows = [("  positive", f"{found.positive:.3f}")]
    rows += [(f"  level {level}", f"{mean:.3f}") for level, mean in enumerate(found.levels, start=1)]
    lines = [f"mean cosine with the query by {judge}, {found.num_records} records:", format_table(rows)]
    lines.append(f"similarity falls from level to level in {found.falling_fraction:.0%} of the records")
    return "\n".join(lines if found.is_falling else [*lines, "the means do not fall from level to level"])


def synthesis_table(report: SynthesisReport, output: Path) -> str:
    """What was asked for, what came of it, and what it took, as text."""
    written = sum(report.num_records.values())
    lines = [f"{report.num_answers} answers, {written} records of {report.num_wanted}"]
    groups = {"rejected": report.rejected, "repaired": report.repaired, "tried again": report.retries}
    counts = {(group, what): count for group, found in groups.items() for what, count in found.items()}
    if counts:
        rows = [(f"  {group}: {what.replace('_', ' ')}", count) for (group, what), count in counts.items()]
        lines.append(format_table(rows))
    if report.num_given_up:
        lines.append(f"{report.num_given_up} records have no answer that could be used")
    tokens = report.prompt_tokens + report.completion_tokens
    lines.append(f"{tokens} tokens: {report.prompt_tokens} of prompts, {report.completion_tokens} of answers")
    if report.cost is not None:
        lines.append(f"cost {report.cost:.2f}")
    if not report.complete:
        lines.append(f"the token budget is used up, {report.num_unasked} records were not asked for;")
        lines.append("the same line with a larger token_budget resumes")
    lines += [f"wrote {count} records to {output / name}" for name, count in report.num_records.items()]
    return "\n".join(lines)
