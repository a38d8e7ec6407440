"""`encode`, `index`, `search` and `evaluate`: vectors of texts, the documents nearest to a query, and scores."""

import io
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from embeddings.common import InputError, OptionError
from embeddings.common.errors import program, refuse_given
from embeddings.common.io import write_json
from embeddings.common.jobs import ArrayTask, TaskOptions
from embeddings.common.process import logger, tune_malloc
from embeddings.common.text import choose_prompt, printable
from embeddings.evaluation import evaluate_folders, format_results
from embeddings.evaluation.mteb_library import Instructions, load_mteb
from embeddings.inference import (
    ContextDraw,
    CorpusSearch,
    Encoder,
    VectorFolder,
    draw_context,
    encode_corpus,
    parse_devices,
)
from embeddings.inference.search import require_multiplier, require_top_k
from embeddings.inference.vectors import bytes_per_vector
from embeddings.mining import VectorIndex, build_index, recall_of
from embeddings.mining.vector_index import INDEX_FILE

PrecisionName = Literal["auto", "float32", "bfloat16", "int8"]
FormatName = Literal["float32", "float16", "int8", "binary"]
# From this size on a corpus file is worth encoding once.
LARGE_CORPUS_BYTES = 2**20


def encode(
    model: str,
    input: Path,
    output: Path,
    prompt_name: str | None = None,
    prompt: str | None = None,
    role: Literal["document", "query"] = "document",
    columns: dict[str, str] | None = None,
    precision: PrecisionName = "auto",
    dimensions: int | None = None,
    vector_format: FormatName = "float32",
    shard_size: int = 8192,
    context: Path | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    devices: int | str | None = None,
    tokenizer_workers: int | None = None,
) -> None:
    """Encode the texts of a file into a folder of vectors, shard by shard; the same line resumes after a kill.

    The folder can be searched, and gives `mine`, `cluster` and `filter` the vectors of the texts that it holds
    (`--document-vectors`, `--query-vectors`).

    Args:
        model: A model directory or Hub id.
        input: A JSONL file (`.gz` too) or Parquet file with `text`, and `_id` and `title` where there are any.
        output: The folder to write: `vectors-*.npy`, `documents-*.jsonl`, `manifest.json`.
        prompt_name: Which of the model's prompts goes before each text; the one of the role's name where none is given.
        prompt: What goes before each text, in place of one of the model's prompts, such as `"query: "`.
        role: Whose prompt and length limit hold for the texts.
        columns: Column of `text`, `_id` or `title`, where it has another name: `{text: query}`.
        precision: Format of matrix products; `auto` is bfloat16 where the hardware has it. `int8`, on a CPU, is
            faster than float32 and costs some of the score.
        dimensions: How many leading dimensions of each vector are kept, of a model trained so; all if left out.
        vector_format: How vectors are stored: `int8` with a scale for each vector, `binary` as signs, eight in a
            byte. `search` reads all formats, `index` float32 and float16, other commands float32.
        shard_size: Texts of a shard.
        context: The corpus that a contextual model reads each text in, a file or an encoded folder; a search takes the
            same. Without it the model reads texts alone.
        context_size: How many documents are drawn, of a small corpus some twice; as the model takes if left out.
        context_seed: Seed of the draw.
        devices: Devices that share the shards, a process on each: how many GPUs (without GPUs: how many parts of the
            CPU), or their names, as `cuda:0,cuda:1`. One GPU, or the CPU, if left out.
        tokenizer_workers: Processes that tokenise ahead of the devices; one for each GPU, none on a CPU, if left out.
    """
    chosen = choose_prompt("prompt", prompt_name, prompt)
    names = () if devices is None else parse_devices(devices)
    encoder = load_encoder(model, precision, dimensions, *names[:1])
    if tokenizer_workers is None:
        tokenizer_workers = 0 if encoder.device.type == "cpu" else max(1, len(names))
    drawn = draw_named_context(encoder, context, context_size, context_seed)
    warn_without_context(encoder, drawn is not None, "--context")
    texts: dict[str, Any] = {"prompt_name": chosen, "role": role, "columns": columns}
    texts["context"] = None if drawn is None else drawn.encoded(encoder)
    kept: dict[str, Any] = {"shard_size": shard_size, "vector_format": vector_format}
    folder = encode_corpus(encoder, input, output, **texts, **kept, devices=names, tokenizer_workers=tokenizer_workers)
    size = f"{vector_format}, {bytes_per_vector(vector_format, folder.embedding_dim)} bytes each"
    print(f"wrote {folder.num_documents} vectors of width {folder.embedding_dim} to {output}: {size}")


def load_encoder(
    model: str, precision: PrecisionName = "auto", dimensions: int | None = None, device: str | None = None
) -> Encoder:
    """The encoder of a model directory with a progress bar; on a CPU this process keeps freed memory from here on."""
    encoder = Encoder.from_pretrained(
        model, device=device, precision=precision, dimensions=dimensions, show_progress=True
    )
    if encoder.device.type == "cpu":
        tune_malloc()
    warn_of_untrained(encoder, [] if dimensions is None else [dimensions])
    return encoder


def draw_named_context(encoder: Encoder, source: Path | None, size: int | None, seed: int) -> ContextDraw | None:
    """The context documents drawn from a corpus, or None where none is named."""
    if source is None:
        if size is not None:
            raise OptionError("context_size", size, "needs a corpus to draw from", "name one with --context")
        return None
    return draw_context(encoder, source, size, seed)


def warn_of_untrained(encoder: Encoder, widths: list[int]) -> None:
    """Warn where vectors are cut to a width that the model was not trained at, as far as it says."""
    trained = encoder.embedder.trained_widths
    untrained = [width for width in widths if 0 < width < encoder.embedder.embedding_dim and width not in trained]
    if untrained:
        given = ", ".join(map(str, untrained))
        known = f"was trained at {', '.join(map(str, trained))}" if trained else "does not say that it was trained so"
        logger.warning("--dimensions %s: the model %s; scores may suffer", given, known)


def warn_without_context(encoder: Encoder, has_context: bool, option: str) -> None:
    if encoder.num_context and not has_context:
        logger.warning("the model is contextual, and without %s it reads texts with no context", option)


def search(
    query: str | None,
    model: str,
    corpus: Path,
    top_k: int = 5,
    index: Literal["exact", "ivf"] = "exact",
    rescore_multiplier: int | None = None,
    interactive: bool = False,
    precision: PrecisionName = "auto",
    dimensions: int | None = None,
    context: Path | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
) -> None:
    """Print the documents nearest to a query, or to each of the lines that are typed where none is given.

    Args:
        query: What to look for. Without it queries are read from a terminal, line by line, until an empty one.
        model: A model directory or Hub id.
        corpus: A corpus file, which each search encodes anew, or a folder that `encode` wrote with the same model.
        top_k: How many documents.
        index: Compare with every document, or only with those that the folder's index finds (see `index`).
        rescore_multiplier: How many binary vectors are rescored with the query's full one for each hit; 4 if left out.
        interactive: Whether queries are read from standard input even if that is no terminal.
        precision: Format of matrix products.
        dimensions: How many leading dimensions of each vector are compared; an encoded folder must hold as many.
        context: The corpus that a contextual model reads texts in, a file or an encoded folder; one that `encode` wrote
            for `corpus` knows its own, and refuses another.
        context_size: How many documents are drawn; as many as the model takes if left out.
        context_seed: Seed of the draw.
    """
    if query is not None and interactive:
        raise OptionError("interactive", True, "must be left out where a query is given", "drop one of them")
    if query is None and not interactive and not is_terminal():
        raise OptionError("query", None, "must be given", "write it last, or read queries with --interactive")
    if query is not None and not query.strip():
        raise OptionError("query", query, "must not be empty", "say what to look for")
    require_top_k(top_k)
    if rescore_multiplier is not None:
        require_multiplier(rescore_multiplier)
    if index == "ivf" and not corpus.is_dir():
        raise OptionError("index", "ivf", "needs an encoded folder", "run encode and index first, and name the folder")
    nearest = None if index == "exact" else VectorIndex.open(VectorFolder.open(corpus)).search
    encoder = load_encoder(model, precision, dimensions)
    drawn = draw_named_context(encoder, context, context_size, context_seed)
    if corpus.is_file() and corpus.stat().st_size >= LARGE_CORPUS_BYTES:
        given = {"precision": precision, "dimensions": dimensions, "context": context, "context_size": context_size}
        chosen = {name: value for name, value in given.items() if value not in (None, "auto")}
        words = ["encode", "--model", model, "--input", str(corpus), "--output", f"{corpus}.vectors"]
        words += [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
        line = f"{program()} {shlex.join(words)}"
        logger.info("each search encodes %s anew; encode it once and search %s.vectors: %s", corpus, corpus, line)
    searched = CorpusSearch(encoder, corpus, context=drawn, nearest=nearest, rescore_multiplier=rescore_multiplier)
    warn_without_context(encoder, searched.has_context, "--context")

    def answer(query: str) -> None:
        (hits,) = searched.search([query], top_k)
        for hit in hits:
            text = printable(" ".join(hit.text.split()))[:160]
            print(f"{hit.score:.3f}  {printable(hit.document_id)}\n       {text}")

    if query is None:
        answer_lines(answer)
    else:
        answer(query)


def index(vectors: Path, num_lists: int | None = None, num_probes: int | None = None, seed: int = 0) -> None:
    """Make the index of an encoded folder's vectors, beside them: inverted lists, for `search --index ivf`.

    Its recall@10 against the exact search is printed, of 200 documents of the folder as queries.

    Args:
        vectors: A folder that `encode` wrote; `ivf.faiss` and `ivf.manifest.json` are added to it, or replaced.
        num_lists: Lists; chosen by the number of vectors if left out.
        num_probes: Lists that are searched for a query; 32 if left out, or all where there are fewer.
        seed: Seed of the sample that the lists are trained on.
    """
    folder = VectorFolder.open(vectors)
    made = build_index(folder, num_lists=num_lists, num_probes=num_probes, seed=seed)
    print(
        f"wrote {folder.path / INDEX_FILE}: {folder.num_documents} vectors in {made.num_lists} lists, "
        f"{made.num_probes} searched for a query; recall@10 {recall_of(made, folder):.3f}"
    )


def is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def answer_lines(answer: Callable[[str], None]) -> None:
    """Answer the lines of standard input until its end or an empty one, each with the time that it took."""
    # The bytes: text is decoded ahead, and would fail on a line that is not asked for yet.
    stream = io.BytesIO() if sys.stdin is None else sys.stdin.buffer
    for number in count(1):
        if is_terminal():
            print("query> ", end="", file=sys.stderr, flush=True)
        try:
            query = stream.readline().decode().strip()
        except UnicodeDecodeError:
            raise InputError(f"standard input:{number}", "is not valid UTF-8", "write it as UTF-8") from None
        if not query:
            break
        start = perf_counter()
        answer(query)
        print(f"       {1000 * (perf_counter() - start):.0f} ms", flush=True)


def evaluate(
    model: str,
    data: Path | list[Path] | None = None,
    tasks: str | list[str] | None = None,
    prompt_name: str | None = None,
    instructions: str | None = None,
    output: Path | None = None,
    precision: PrecisionName = "auto",
    dimensions: int | list[int] | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    *,
    task: TaskOptions,
) -> None:
    """Score a model on evaluation folders (`--data`) or on tasks of mteb (`--tasks`).

    Args:
        model: A model directory or Hub id.
        data: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`. mteb scores all kinds but
            retrieval and similarity.
        tasks: Tasks or benchmarks of mteb, groups of tasks (`mteb-english-56`, `mgh-26`, `beir`, `miracl`), sets of
            AIR-Bench (`air-bench`, `air-bench-qa-law-en`, `air-bench-24.04`), or folders as for `data`, which then have
            their results kept; several as `[NAME, NAME]`. After a kill the same line resumes at the first task that is
            not done.
        prompt_name: Which of the model's prompts goes before queries (retrieval, reranking) or every text (others).
        instructions: With `tasks`, what queries (retrieval) or every text (the other kinds) is encoded with, by task:
            the published tables `nv-embed` and `mgh`, or a JSON file `{"instructions": {TASK: TEXT}}`. Not beside
            `prompt_name`.
        output: A JSON file for the scores; with `tasks` the folder of their results, in mteb's format, a `scores.csv`
            beside those of each model and its settings.
        precision: Format of matrix products.
        dimensions: How many leading dimensions of each vector are compared, of a model that was trained so; several as
            `[384, 128]`, from one encoding; all if left out.
        context_size: How many documents of each folder's or task's own corpus a contextual model reads its texts in;
            without it the model reads texts alone.
        context_seed: Seed of the draw.
        task: Which of the tasks this process runs.
    """
    if (data is None) == (tasks is None):
        which = "neither" if data is None else "both"
        raise OptionError("data", which, "or tasks must be given", "--data FOLDER, or --tasks NAME --output FOLDER")
    widths = [dimensions] if isinstance(dimensions, int) else dimensions
    settings: dict[str, Any] = {"prompt_name": prompt_name, "widths": widths}
    settings |= {"context_size": context_size, "context_seed": context_seed}
    if tasks is not None:
        run = _planned_tasks(tasks, output, instructions, task.resolve(), settings)
    else:
        refuse_given({"instructions": instructions, **asdict(task)}, "has no effect without --tasks")
        folders = data if isinstance(data, list) else [data] if data is not None else []
        if not folders:
            raise InputError("--data", "names no folder", "name one, or several as [FOLDER, FOLDER]")
        if output is not None and output.is_dir():
            raise InputError(f"--output {output}", "is a directory", "name a JSON file")
        run = partial(_score_folders, folders=folders, output=output, settings=settings)
    encoder = load_encoder(model, precision, None)
    warn_of_untrained(encoder, widths or [])
    warn_without_context(encoder, context_size is not None, "--context-size")
    print(run(encoder, model))


def _planned_tasks(
    names: str | list[str], output: Path | None, instructions: str | None, task: ArrayTask, settings: dict[str, Any]
) -> Callable[[Encoder, str], str]:
    """What runs this process's tasks of mteb and returns the table of all; what needs no model is checked now."""
    if output is None:
        raise OptionError("output", None, "must name the folder of the tasks' results", "--output FOLDER")
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output}", "is a file", "name a folder")
    table = None if instructions is None else Instructions.read(instructions)
    load_mteb()
    from embeddings.evaluation.air_bench import AirBenchTask, format_domains
    from embeddings.evaluation.task_runs import TaskSettings, find_tasks, format_table, run_tasks

    chosen = TaskSettings(instructions=table, **settings)
    tasks = find_tasks(names)

    def run(encoder: Encoder, model: str) -> str:
        scores = run_tasks(encoder, model, tasks, output, chosen, task.shards(len(tasks)))
        missing = sum(not score.complete for score in scores)
        sets = [(one, score.scores) for one, score in zip(tasks, scores, strict=True) if isinstance(one, AirBenchTask)]
        labelled = [(one.data, known) for one, known in sets if one.data.has_labels]
        domains = f"\n\n{format_domains(labelled)}" if labelled else ""
        others = f"\nthis process's tasks are done, {missing} others are missing" if missing else ""
        return format_table(scores) + domains + others

    return run


def _score_folders(
    encoder: Encoder, model: str, *, folders: list[Path], output: Path | None, settings: dict[str, Any]
) -> str:
    results = evaluate_folders(encoder, folders, **settings)
    if output is not None:
        trained = {"trained_widths": list(encoder.embedder.trained_widths)}
        write_json(output, [{**asdict(result), **trained} for result in results])
    return format_results(results)
