"""`encode`, `search` and `evaluate`: what a finished model directory is for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from embeddings.inference import ContextDraw, Encoder, Hit
    from embeddings.inference.corpus_search import NearestRows

PrecisionName = Literal["auto", "float32", "bfloat16", "int8"]
FormatName = Literal["float32", "float16", "int8", "binary"]


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
        precision: Format of matrix products; `auto` is bfloat16 where the hardware has it. `int8`, on a processor, is
            faster than float32 and costs some of the score.
        dimensions: How many of the first numbers of each vector are kept, of a model that was trained so; all if left
            out.
        vector_format: How the numbers of vectors are kept: `int8` with a scale for each vector, `binary` as signs
            alone, eight in a byte. `search` reads all of them, `index` float32 and float16, other commands float32.
        shard_size: Texts of a shard.
        context: The corpus that a contextual model reads each text in, a file or an encoded folder; the output keeps
            what was drawn from it, so that a search takes the same. Without it the model reads texts alone.
        context_size: How many documents are drawn; as many as the model takes if left out. A corpus with fewer gives
            some of them more than once.
        context_seed: Seed of the draw.
        devices: Devices that share the shards, a process on each: how many GPUs (without GPUs: how many parts of the
            processor), or their names, as `cuda:0,cuda:1`. One GPU, or the processor, if left out.
        tokenizer_workers: Processes that tokenise ahead of the devices; if left out one for each GPU, and on a
            processor none.
    """
    from embeddings.common.text import choose_prompt
    from embeddings.inference import encode_corpus, parse_devices
    from embeddings.inference.vector_formats import bytes_per_vector

    chosen = choose_prompt("prompt", prompt_name, prompt)
    names = () if devices is None else parse_devices(devices)
    encoder = _encoder(model, precision, dimensions, *names[:1])
    if tokenizer_workers is None:
        tokenizer_workers = 0 if encoder.device.type == "cpu" else max(1, len(names))
    drawn = _draw(encoder, context, context_size, context_seed)
    _warn_without_context(encoder, drawn is not None, "--context")
    texts: dict[str, Any] = {"prompt_name": chosen, "role": role, "columns": columns}
    texts["context"] = None if drawn is None else drawn.encoded(encoder)
    kept: dict[str, Any] = {"shard_size": shard_size, "vector_format": vector_format}
    folder = encode_corpus(encoder, input, output, **texts, **kept, devices=names, tokenizer_workers=tokenizer_workers)
    size = f"{vector_format}, {bytes_per_vector(vector_format, folder.embedding_dim)} bytes each"
    print(f"wrote {folder.num_documents} vectors of width {folder.embedding_dim} to {output}: {size}")


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
        query: What to look for. Without it queries are read line by line, until an empty line: from a terminal, or with
            `interactive` from any standard input.
        model: A model directory or Hub id.
        corpus: A corpus file, or a folder that `encode` wrote with the same model.
        top_k: How many documents.
        index: Compare with every document, or only with those that the folder's index finds (see `index`).
        rescore_multiplier: With a folder of binary vectors, how many documents near by their signs are scored by the
            query's own numbers for each one printed; 4 if left out.
        interactive: Whether queries are read from standard input even if that is no terminal.
        precision: Format of matrix products.
        dimensions: How many of the first numbers of each vector are compared; an encoded folder must hold as many.
        context: The corpus that a contextual model reads query and documents in, a file or an encoded folder. An
            encoded folder knows its own and refuses another.
        context_size: How many documents are drawn; as many as the model takes if left out.
        context_seed: Seed of the draw.
    """
    from embeddings.cli.interactive import answer_lines
    from embeddings.inference import CorpusSearch
    from embeddings.inference.search import require_top_k
    from embeddings.inference.sign_search import require_multiplier

    _require_query(query, interactive)
    require_top_k(top_k)
    if rescore_multiplier is not None:
        require_multiplier(rescore_multiplier)
    nearest = None if index == "exact" else _index_of(corpus)
    encoder = _encoder(model, precision, dimensions)
    drawn = _draw(encoder, context, context_size, context_seed)
    searched = CorpusSearch(encoder, corpus, context=drawn, nearest=nearest, rescore_multiplier=rescore_multiplier)
    _warn_without_context(encoder, searched.has_context, "--context")

    def answer(query: str) -> None:
        (hits,) = searched.search([query], top_k)
        _print_hits(hits)

    if query is None:
        answer_lines(answer)
    else:
        answer(query)


def _require_query(query: str | None, interactive: bool) -> None:
    """Check that a query is given, or else a place where queries can be read."""
    from embeddings.cli.interactive import is_terminal
    from embeddings.common import OptionError

    if query is not None and interactive:
        raise OptionError("interactive", True, "must be left out where a query is given", "drop one of them")
    if query is None and not interactive and not is_terminal():
        raise OptionError("query", None, "must be given", "write it last, or read queries with --interactive true")
    if query is not None and not query.strip():
        raise OptionError("query", query, "must not be empty", "say what to look for")


def _index_of(corpus: Path) -> "NearestRows":
    """The search in the index of an encoded folder.

    Raises:
        InputError: If there is none, or it does not fit the folder.
        OptionError: If the corpus is a file.
    """
    from embeddings.common import OptionError
    from embeddings.inference import VectorFolder
    from embeddings.mining import VectorIndex

    if not corpus.is_dir():
        raise OptionError("index", "ivf", "needs an encoded folder", "run encode and index first, and name the folder")
    return VectorIndex.open(VectorFolder.open(corpus)).search


def _print_hits(hits: "list[Hit]") -> None:
    from embeddings.common.text import printable

    for hit in hits:
        print(f"{hit.score:.3f}  {printable(hit.document_id)}\n       {printable(' '.join(hit.text.split()))[:160]}")


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
    task_index: int | None = None,
    num_tasks: int | None = None,
) -> None:
    """Score a model on evaluation folders (`--data`) or on tasks of mteb (`--tasks`).

    Args:
        model: A model directory or Hub id.
        data: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`.
        tasks: Tasks or benchmarks of mteb, groups of tasks (`mteb-english-56`, `mgh-26`, `beir`, `miracl`), or folders
            as for `data`, which are then scored as mteb scores their kind; several as `[NAME, NAME]`. After a kill the
            same line goes on at the first task that is not done.
        prompt_name: Which of the model's prompts goes before queries (retrieval, reranking) or every text (others).
        instructions: With `tasks`, what queries (retrieval) or every text (the other kinds) is encoded with, by task:
            the published tables `nv-embed` and `mgh`, or a JSON file `{"instructions": {TASK: TEXT}}`. Not beside
            `prompt_name`.
        output: A JSON file for the scores; with `tasks` the folder of their results, in mteb's format, a `scores.csv`
            beside those of each model and its settings.
        precision: Format of matrix products.
        dimensions: How many of the first numbers of each vector are compared, of a model that was trained so; several
            as `[384, 128]`, from one encoding; all if left out.
        context_size: How many documents of each folder's or task's own corpus a contextual model reads its texts in;
            without it the model reads texts alone.
        context_seed: Seed of the draw.
        task_index: Which of several processes that share the tasks this is, from 0; a SLURM array's task by itself.
        num_tasks: How many processes share the tasks.
    """
    from embeddings.cli.tasks import TaskPlan
    from embeddings.common import OptionError

    if (data is None) == (tasks is None):
        given = "neither" if data is None else "both"
        raise OptionError("data", given, "or tasks must be given", "--data FOLDER, or --tasks NAME --output FOLDER")
    widths = [dimensions] if isinstance(dimensions, int) else dimensions
    settings = {"prompt_name": prompt_name, "context_size": context_size, "context_seed": context_seed}
    if tasks is not None:
        plan = TaskPlan.of(tasks, output, instructions, task_index, num_tasks, widths=widths, **settings)
    else:
        folders = _folders(data, output, instructions=instructions, task_index=task_index, num_tasks=num_tasks)
    encoder = _encoder(model, precision, None)
    _warn_of_untrained(encoder, widths or [])
    _warn_without_context(encoder, context_size is not None, "--context-size")
    if tasks is not None:
        print(plan.run(encoder, model))
    else:
        _score_folders(encoder, folders, output, widths=widths, **settings)


def _folders(data: Path | list[Path] | None, output: Path | None, **without_effect: Any) -> list[Path]:
    """The folders to score, where nothing else is amiss with the options that go with them."""
    from embeddings.common import InputError, OptionError

    for option, value in without_effect.items():
        if value is not None:
            raise OptionError(option, value, "has no effect without --tasks", "leave it out")
    folders = data if isinstance(data, list) else [data] if data is not None else []
    if not folders:
        raise InputError("--data", "names no folder", "name one, or several as [FOLDER, FOLDER]")
    if output is not None and output.is_dir():
        raise InputError(f"--output {output}", "is a directory", "name a JSON file")
    return folders


def _score_folders(encoder: "Encoder", folders: list[Path], output: Path | None, **settings: Any) -> None:
    """Print the scores on folders, and write them where a file is named."""
    from dataclasses import asdict

    from embeddings.common.fileio import write_json
    from embeddings.evaluation import evaluate_folders, format_results

    results = evaluate_folders(encoder, folders, **settings)
    print(format_results(results))
    if output is not None:
        trained = {"trained_widths": list(encoder.embedder.trained_widths)}
        write_json(output, [{**asdict(result), **trained} for result in results])


def _encoder(model: str, precision: PrecisionName, dimensions: int | None, device: str | None = None) -> "Encoder":
    """The encoder of a model directory with a progress bar."""
    from embeddings.inference import Encoder

    encoder = Encoder.from_pretrained(
        model, device=device, precision=precision, dimensions=dimensions, show_progress=True
    )
    _warn_of_untrained(encoder, [] if dimensions is None else [dimensions])
    return encoder


def _warn_of_untrained(encoder: "Encoder", widths: list[int]) -> None:
    """Say so where vectors are to be cut to a width that the model was not trained at, as far as it says."""
    from embeddings.common.log import logger

    trained = encoder.embedder.trained_widths
    untrained = [width for width in widths if 0 < width < encoder.embedder.embedding_dim and width not in trained]
    if untrained:
        given = ", ".join(map(str, untrained))
        known = f"was trained at {', '.join(map(str, trained))}" if trained else "does not say that it was trained so"
        logger.warning("--dimensions %s: the model %s; scores may suffer", given, known)


def _warn_without_context(encoder: "Encoder", has_context: bool, option: str) -> None:
    """Say so where a model that reads texts in a context is given none."""
    from embeddings.common.log import logger

    if encoder.num_context and not has_context:
        logger.warning("the model is contextual, and without %s it reads texts with no context", option)


def _draw(encoder: "Encoder", source: Path | None, size: int | None, seed: int) -> "ContextDraw | None":
    """The context documents drawn from a corpus, or None where none is named."""
    from embeddings.common import OptionError
    from embeddings.inference import draw_context

    if source is None:
        if size is not None:
            raise OptionError(
                "context_size", size, "needs a corpus to draw from", "name one with --context, or drop it"
            )
        return None
    return draw_context(encoder, source, size, seed)
