"""`encode`, `index`, `search` and `evaluate`: vectors of texts, search and evaluation."""

import sys
from dataclasses import asdict, dataclass
from operator import ne
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from embeddings.cli.parser import listed
from embeddings.common import InputError, OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.io import GENERATOR, check_manifest, require_own_output, write_json
from embeddings.common.jobs import TaskOptions
from embeddings.common.own_folder import record_files
from embeddings.common.process import logger, tune_malloc
from embeddings.common.text import choose_prompt, printable
from embeddings.evaluation import RetrievalFolder, evaluate_folders, evaluate_hybrid, format_hybrid, format_results
from embeddings.evaluation.folders import read_retrieval_folder
from embeddings.evaluation.hybrid import tune_search
from embeddings.evaluation.mteb_library import Instructions, load_mteb
from embeddings.inference import (
    BM25,
    Context,
    CorpusSearch,
    Encoder,
    Fusion,
    FusionRule,
    HybridSearch,
    Precision,
    VectorFolder,
    VectorFormat,
    choose_context,
    encode_corpus,
    index_words,
    open_words,
    parse_devices,
)
from embeddings.inference.bm25 import ANY_LANGUAGE, tokenizer
from embeddings.inference.hybrid import WEIGHT, WORDS_FOLDER
from embeddings.inference.search import require_multiplier, require_top_k
from embeddings.inference.vector_folder import bytes_per_vector
from embeddings.inference.vector_table import VectorTable, encode_table
from embeddings.mining import VectorIndex, build_index, recall_of
from embeddings.mining.ivf import INDEX_FILE
from embeddings.models.model_files import SCORES_FILE

# The weight that is chosen on queries.
TUNE: Literal["tune"] = "tune"


@dataclass(frozen=True)
class ContextOptions:
    """The context documents of a contextual model.

    Args:
        context: The corpus to draw context documents from, a file or an encoded folder; without it there is no context.
        context_size: Number of context documents to draw, repeated if the corpus is small; default the model's number.
        context_seed: Random seed of this draw.
    """

    context: Path | None = None
    context_size: int | None = None
    context_seed: int = 0

    def draw(self, encoder: Encoder) -> Context | None:
        if self.context is not None:
            return choose_context(encoder, self.context, self.context_size, self.context_seed)
        given = {"context_size": self.context_size, "context_seed": self.context_seed or None}
        refuse_given(given, "needs a corpus to draw from", "name one with --context")
        return None


@dataclass(frozen=True)
class HybridOptions:
    """Search by vectors and words.

    Args:
        hybrid: Whether BM25 scores are fused with the scores of the vectors (see `fusion`).
        hybrid_weight: Weight of BM25 in a fused score, from 0 (vectors only) to 1 (BM25 only); default 0.2, or that of
            the folder's BM25 index. `tune` chooses it on the queries of `evaluate`.
        fusion: `zscore` standardises both scores over the corpus, `minmax` scales those of the best documents of each
            list, `rrf` adds reciprocal ranks. Default `zscore`, or `minmax` with an index or binary vectors.
        language: Language of the texts: any, one that PyStemmer stems, or none (words as they are); default that of the
            folder's BM25 index, or any.
    """

    hybrid: bool = False
    hybrid_weight: float | Literal["tune"] | None = None
    fusion: Fusion | None = None
    language: str | None = None

    def rule(self, compares_all: bool = True, may_tune: bool = False) -> FusionRule | None:
        """The fusion rule, with the default weight if it is to be tuned; None without `hybrid`."""
        if not self.hybrid:
            given = {"hybrid_weight": self.hybrid_weight, "fusion": self.fusion, "language": self.language}
            refuse_given(given, "needs --hybrid", "add it, or leave this out")
            return None
        tokenizer(self.chosen_language)
        if self.hybrid_weight == TUNE and not may_tune:
            hint = "tune it with evaluate, or store it with index"
            raise OptionError("hybrid_weight", TUNE, "needs queries with judgments", hint)
        return FusionRule.of(self.fusion, WEIGHT if self.hybrid_weight == TUNE else self.hybrid_weight, compares_all)

    @property
    def chosen_language(self) -> str:
        return ANY_LANGUAGE if self.language is None else self.language


def encode(
    model: str,
    input: Path,
    output: Path,
    prompt_name: str | None = None,
    prompt: str | None = None,
    role: Literal["document", "query"] = "document",
    columns: dict[str, str] | None = None,
    precision: Precision = "auto",
    dimensions: int | None = None,
    vector_format: VectorFormat = "float32",
    shard_size: int | None = None,
    devices: int | str | None = None,
    tokenizer_workers: int | None = None,
    *,
    context: ContextOptions,
    task: TaskOptions,
) -> None:
    """Encode the texts of a file into a folder of vectors, in shards; to resume, run the same command again.

    The folder can be searched. `mine`, `cluster` and `filter` can reuse its vectors (`--document-vectors`,
    `--query-vectors`). An output `NAME.parquet` is one file for databases: id, title, text, other fields, vector.

    Args:
        model: A model directory or Hub id.
        input: A JSONL (also `.gz`) or Parquet file with `text`, and optionally `_id` and `title`.
        output: The folder to write: `vectors-*.npy`, `documents-*.jsonl`, `manifest.json`; or a `.parquet` file, whose
            working folder `NAME.parquet.work` may be deleted at the end.
        prompt_name: Name of the model's prompt to prepend to each text; default the one named like the role.
        prompt: Text to prepend to each text in place of a prompt of the model, such as `"query: "`.
        role: Role of the texts, which determines the default prompt and the maximum length.
        columns: Column names of `text`, `_id` or `title`, if they differ: `{text: query}`.
        precision: Format of matrix products; `auto` is bfloat16 on hardware for it, `int8` is for a CPU only.
        dimensions: Number of leading dimensions to keep of each vector, for a Matryoshka model; default all.
        vector_format: `int8` stores a scale for each vector, `binary` signs. `search` reads all formats, `index`
            float32 and float16, other commands float32.
        shard_size: Texts per shard, of which an interruption loses one; default 1,024 or 8,192, by device and model.
        devices: Devices that share the shards, one process on each: a number, or names such as `cuda:0,cuda:1`.
        tokenizer_workers: Processes that tokenise in advance; default one for each GPU, none on a CPU.
    """
    chosen = choose_prompt("prompt", prompt_name, prompt)
    is_table = output.suffix == ".parquet"
    if is_table and vector_format != "float32":
        raise OptionError("vector_format", vector_format, "must be float32 in a Parquet file", "leave it out")
    if is_table:
        refuse_given({"context": context.context}, "cannot be stored in a Parquet file", "encode into a folder")
    names = () if devices is None else parse_devices(devices)
    encoder = load_encoder(model, precision, dimensions, *names[:1])
    if tokenizer_workers is None:
        tokenizer_workers = 0 if encoder.device.type == "cpu" else max(1, len(names))
    drawn = context.draw(encoder)
    warn_without_context(encoder, drawn is not None, "--context")
    texts: dict[str, Any] = {"prompt_name": chosen, "role": role, "columns": columns, "context": drawn}
    files: dict[str, Any] = {"shard_size": shard_size, "vector_format": vector_format}
    work: dict[str, Any] = {"devices": names, "tokenizer_workers": tokenizer_workers, "task": task.resolve()}
    folder: VectorFolder | VectorTable | None
    if is_table:
        del texts["context"], files["vector_format"]
        folder = encode_table(encoder, input, output, **texts, **files, **work)
    else:
        folder = encode_corpus(encoder, input, output, **texts, **files, **work)
    if folder is None:
        print(f"encoded the shards of this task; shards of other tasks are missing in {output}")
        return
    size = f"{vector_format}, {bytes_per_vector(vector_format, folder.embedding_dim)} bytes each"
    print(f"wrote {folder.num_documents} vectors of width {folder.embedding_dim} to {output}: {size}")


def load_encoder(
    model: str, precision: Precision = "auto", dimensions: int | None = None, device: str | None = None
) -> Encoder:
    """The encoder of a model, with a progress bar; on a CPU, malloc is tuned for the rest of the process."""
    encoder = Encoder.from_pretrained(
        model, device=device, precision=precision, dimensions=dimensions, show_progress=True
    )
    if encoder.device.type == "cpu":
        tune_malloc()
    warn_of_untrained(encoder, [] if dimensions is None else [dimensions])
    return encoder


def warn_of_untrained(encoder: Encoder, widths: list[int]) -> None:
    """Warn if vectors are truncated to a width that the model does not list as trained."""
    trained = encoder.embedder.trained_widths
    untrained = [width for width in widths if 0 < width < encoder.embedder.embedding_dim and width not in trained]
    if untrained:
        listed = ", ".join(map(str, untrained))
        known = f"was trained at {', '.join(map(str, trained))}" if trained else "lists no trained widths"
        logger.warning("--dimensions %s: the model %s; scores may be lower", listed, known)


def warn_without_context(encoder: Encoder, has_context: bool, option: str) -> None:
    if encoder.num_context and not has_context:
        logger.warning("the model is contextual; without %s it encodes texts without context", option)


def search(
    query: str | None,
    model: str,
    corpus: Path,
    top_k: int = 5,
    index: Literal["exact", "ivf"] = "exact",
    rescore_multiplier: int | None = None,
    interactive: bool = False,
    precision: Precision = "auto",
    dimensions: int | None = None,
    *,
    context: ContextOptions,
    hybrid: HybridOptions,
) -> None:
    """Print the documents nearest to a query, or to each line of standard input if no query is given.

    `--hybrid` ranks by vectors and words; an encoded folder then needs a BM25 index (`index --hybrid`).

    Args:
        query: The query. Without it, queries are read from the terminal, one per line, until an empty line.
        model: A model directory or Hub id.
        corpus: A corpus file, which each search encodes again, or a folder that `encode` wrote with the same model.
        top_k: Number of documents to print.
        index: `exact` compares with every document, `ivf` only with those that the folder's index finds (see `index`).
        rescore_multiplier: Binary vectors to rescore with the float query vector, per printed document; default 4.
        interactive: Whether to read queries from standard input even if it is not a terminal.
        precision: Format of matrix products.
        dimensions: Number of leading dimensions to compare; an encoded folder must have the same number.
    """
    if query is None and not interactive and not sys.stdin.isatty():
        raise OptionError("query", None, "must be given", "write it last, or read queries with --interactive")
    if query is not None:
        refuse_given({"interactive": interactive or None}, "has no effect with a query")
        if not query.strip():
            raise OptionError("query", query, "must not be empty", "write what to search for")
    require_top_k(top_k)
    if rescore_multiplier is not None:
        require_multiplier(rescore_multiplier)
    if index == "ivf" and not corpus.is_dir():
        raise OptionError("index", "ivf", "needs an encoded folder", "run encode and index first, then give the folder")
    rule = hybrid.rule(index == "exact")
    if rule is not None and corpus.is_dir():
        # A missing index is reported before the model is loaded.
        open_words(VectorFolder.open(corpus), hybrid.language)
    nearest = None if index == "exact" else VectorIndex.open(VectorFolder.open(corpus)).search
    encoder = load_encoder(model, precision, dimensions)
    drawn = context.draw(encoder)
    searched = CorpusSearch(encoder, corpus, context=drawn, nearest=nearest, rescore_multiplier=rescore_multiplier)
    warn_without_context(encoder, searched.context is not None, "--context")
    ranked: CorpusSearch | HybridSearch = searched
    if rule is not None:
        options: dict[str, Any] = {"weight": hybrid.hybrid_weight, "fusion": hybrid.fusion}
        ranked = HybridSearch(searched, language=hybrid.language, **options)
    if query is not None:
        _print_hits(ranked, query, top_k)
        return
    try:
        while line := _next_line():
            start = perf_counter()
            _print_hits(ranked, line, top_k)
            print(f"       {1000 * (perf_counter() - start):.0f} ms", flush=True)
    except UnicodeDecodeError:
        raise InputError("standard input", "is not valid UTF-8", "write it as UTF-8") from None


def _next_line() -> str:
    if sys.stdin.isatty():
        print("query> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _print_hits(searched: CorpusSearch | HybridSearch, query: str, top_k: int) -> None:
    (hits,) = searched.search([query], top_k)
    for hit in hits:
        text = printable(" ".join(hit.text.split()))[:160]
        print(f"{hit.score:.3f}  {printable(hit.document_id)}\n       {text}")


def index(
    vectors: Path,
    num_lists: int | None = None,
    num_probes: int | None = None,
    seed: int | None = None,
    hybrid: bool = False,
    language: str | None = None,
    hybrid_weight: float | Literal["tune"] | None = None,
    model: str | None = None,
    data: Path | None = None,
) -> None:
    """Build an index of an encoded folder: inverted lists for `search --index ivf`, or BM25 for `search --hybrid`.

    For inverted lists the command prints the recall@10 compared with exact search, for 200 documents of the folder as
    queries.

    Args:
        vectors: A folder that `encode` wrote; `ivf.faiss` and `ivf.manifest.json` in it, or with `hybrid` the folder
            `words`, are created or replaced.
        num_lists: Number of lists; default depends on the number of vectors.
        num_probes: Number of lists to search for each query; default 32, or 48 of more than 4,096.
        seed: Random seed of the sample on which the lists are trained; default 0.
        hybrid: Whether to build the BM25 index of the documents' words instead of inverted lists.
        language: Language of the words: any (the default), one that PyStemmer stems, or none (words as they are).
        hybrid_weight: Weight of BM25 in searches of the folder that name none; default 0.2. `tune` chooses it by the
            nDCG@10 of the queries of `data`.
        model: The model of the vectors, for `tune`.
        data: A retrieval folder with the documents of the vectors, in the same order, for `tune`.
    """
    tuning = {"model": model, "data": data}
    if hybrid_weight != TUNE:
        refuse_given(tuning, "needs --hybrid-weight tune")
    elif model is None or data is None:
        raise OptionError("hybrid_weight", TUNE, "needs --model and --data", "name the model, and a retrieval folder")
    if hybrid:
        of_lists = {"num_lists": num_lists, "num_probes": num_probes, "seed": seed}
        refuse_given(of_lists, "has no effect on a BM25 index", "leave it out, or build the lists without --hybrid")
        language = ANY_LANGUAGE if language is None else language
        tokenizer(language)
        folder = VectorFolder.open(vectors)
        words, weight = None, None if hybrid_weight == TUNE else hybrid_weight
        if model is not None and data is not None:
            precision = check_manifest(folder.path, {})["precision"]
            retrieval, words = _same_documents(folder, data), BM25(folder.texts(), tokenizer(language))
            encoder = load_encoder(model, precision)
            if folder.embedding_dim < encoder.embedding_dim:
                encoder.dimensions = folder.embedding_dim
            tuned = tune_search(CorpusSearch(encoder, vectors), words, retrieval)
            weight = tuned.rule.weight
            print(tuned)
        words = index_words(folder, language, weight, words)
        size = f"{words.num_texts} documents, {words.num_tokens} different words (language: {language})"
        print(f"wrote {folder.path / WORDS_FOLDER}: {size}")
        return
    refuse_given({"language": language, "hybrid_weight": hybrid_weight}, "needs --hybrid", "add it, or leave this out")
    folder = VectorFolder.open(vectors)
    made = build_index(folder, num_lists=num_lists, num_probes=num_probes, seed=0 if seed is None else seed)
    print(
        f"wrote {folder.path / INDEX_FILE}: {folder.num_documents} vectors in {made.num_lists} lists, "
        f"{made.num_probes} searched for a query; recall@10 {recall_of(made, folder):.3f}"
    )


def _same_documents(vectors: VectorFolder, data: Path) -> RetrievalFolder:
    """A retrieval folder, of which the rows of documents are those of the vectors."""
    folder = read_retrieval_folder(data)
    shards = map(vectors.shards.rows, range(vectors.shards.num_shards))
    ids = (each.document_id for shard in shards for each in vectors.documents(shard))
    if len(folder.documents) != vectors.num_documents or any(map(ne, ids, folder.document_ids)):
        raise InputError(str(data), f"has other documents than {vectors.path}", "name a folder with the same corpus")
    return folder


def evaluate(
    model: str,
    data: Path | list[Path] | None = None,
    tasks: str | list[str] | None = None,
    prompt_name: str | None = None,
    instructions: str | None = None,
    output: Path | None = None,
    precision: Precision = "auto",
    dimensions: int | list[int] | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    *,
    task: TaskOptions,
    hybrid: HybridOptions,
) -> None:
    """Score a model on evaluation folders (`--data`) or mteb tasks (`--tasks`).

    Args:
        model: A model directory or Hub id.
        data: An evaluation folder, or a folder of them; several as `[FOLDER, FOLDER]`.
        tasks: mteb tasks or benchmarks, task groups (`mteb-english-56`, `mgh-26`, `beir`, `miracl`), AIR-Bench sets
            (`air-bench`, `air-bench-qa-law-en`, `air-bench-24.04`), or folders as for `data`; several as
            `[NAME, NAME]`. To resume at the first unfinished task, run the same command again.
        prompt_name: Name of the model's prompt for queries (retrieval, reranking) or all texts (other kinds).
        instructions: With `tasks`, the instruction of each task: the published tables `nv-embed` and `mgh`, or a JSON
            file `{"instructions": {TASK: TEXT}}`. Not together with `prompt_name`.
        output: A JSON file for the scores; with `tasks`, a folder for results in mteb's format and a `scores.csv`.
        precision: Format of matrix products.
        dimensions: Number of leading dimensions to compare, for a Matryoshka model; several as `[384, 128]`.
        context_size: Number of documents that a contextual model draws as context from each folder's or task's corpus.
        context_seed: Random seed of this draw.

    `--hybrid` scores dense search, BM25 and both on retrieval folders, with the 95 % interval of hybrid - dense.
    """
    if (data is None) == (tasks is None):
        which = "neither" if data is None else "both"
        raise OptionError("data", which, "or tasks must be given", "--data FOLDER, or --tasks NAME --output FOLDER")
    widths = None if dimensions is None else listed(dimensions)
    settings: dict[str, Any] = {"prompt_name": prompt_name, "widths": widths}
    settings |= {"context_size": context_size, "context_seed": context_seed}

    def load() -> Encoder:
        encoder = load_encoder(model, precision, None)
        warn_of_untrained(encoder, widths or [])
        warn_without_context(encoder, context_size is not None, "--context-size")
        return encoder

    if data is not None:
        if data == []:
            raise InputError("--data", "has no folder", "give one, or several as [FOLDER, FOLDER]")
        refuse_given({"instructions": instructions, **asdict(task)}, "has no effect without --tasks")
        rule, roots = hybrid.rule(may_tune=True), listed(data)
        if output is not None:
            require_own_output(output)
        encoder = load()
        if rule is None:
            results = evaluate_folders(encoder, roots, **settings)
            rows, table = [asdict(result) for result in results], format_results(results)
        else:
            settings["tune"] = hybrid.hybrid_weight == TUNE
            fused = evaluate_hybrid(encoder, roots, rule, hybrid.chosen_language, **settings)
            rows, table = [result.row() for result in fused], format_hybrid(fused)
        if output is not None:
            trained = {"trained_widths": list(encoder.embedder.trained_widths)}
            write_json(output, [{"generator": GENERATOR, **row, **trained} for row in rows])
            if output.name == SCORES_FILE:
                record_files(output.parent, SCORES_FILE)
        print(table)
        return
    if hybrid.rule(may_tune=True) is not None:
        raise OptionError("hybrid", True, "needs the folders of --data", "leave it out with --tasks")
    if output is None:
        raise OptionError("output", None, "must be the folder for the tasks' results", "give --output FOLDER")
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output}", "is a file", "give a folder")
    this_task, texts = task.resolve(), None if instructions is None else Instructions.read(instructions)
    load_mteb()
    from embeddings.evaluation.air_bench import AirBenchTask, format_domains
    from embeddings.evaluation.task_runs import TaskSettings, find_tasks, format_table, run_tasks

    found, chosen = find_tasks(tasks or []), TaskSettings(instructions=texts, **settings)
    scores = run_tasks(load(), model, found, output, chosen, this_task.shards(len(found)))
    print(format_table(scores))
    pairs = [(one, score.scores) for one, score in zip(found, scores, strict=True) if isinstance(one, AirBenchTask)]
    labelled = [(one.data, values) for one, values in pairs if one.data.has_labels]
    if labelled:
        print(f"\n{format_domains(labelled)}")
    missing = sum(not score.complete for score in scores)
    if missing:
        print(f"this process's tasks are done, {missing} others are missing")
