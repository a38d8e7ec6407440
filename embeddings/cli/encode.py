"""`encode`: the texts of a file become a folder of vectors."""

from pathlib import Path
from typing import Any, Literal

from embeddings.common import OptionError
from embeddings.common.process import logger, tune_malloc
from embeddings.common.text import choose_prompt
from embeddings.inference import ContextDraw, Encoder, draw_context, encode_corpus, parse_devices
from embeddings.inference.vectors import bytes_per_vector

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
        precision: Format of matrix products; `auto` is bfloat16 where the hardware has it. `int8`, on a CPU, is
            faster than float32 and costs some of the score.
        dimensions: How many leading dimensions of each vector are kept, of a model that was trained so; all if left
            out.
        vector_format: How vectors are stored: `int8` with a scale for each vector, `binary` as signs, eight in a
            byte. `search` reads all formats, `index` float32 and float16, other commands float32.
        shard_size: Texts of a shard.
        context: The corpus that a contextual model reads each text in, a file or an encoded folder; the output keeps
            what was drawn from it, so that a search takes the same. Without it the model reads texts alone.
        context_size: How many documents are drawn; as many as the model takes if left out. A corpus with fewer gives
            some of them more than once.
        context_seed: Seed of the draw.
        devices: Devices that share the shards, a process on each: how many GPUs (without GPUs: how many parts of the
            CPU), or their names, as `cuda:0,cuda:1`. One GPU, or the CPU, if left out.
        tokenizer_workers: Processes that tokenise ahead of the devices; if left out one for each GPU, and none on
            a CPU.
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
    """Warn where a contextual model has no context."""
    if encoder.num_context and not has_context:
        logger.warning("the model is contextual, and without %s it reads texts with no context", option)
