"""`encode`, `search` and `evaluate`: what a finished model directory is for."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from embeddings.inference import Encoder

PrecisionName = Literal["auto", "float32", "bfloat16"]


def encode(
    model: str,
    input: Path,
    output: Path,
    prompt_name: str | None = None,
    precision: PrecisionName = "auto",
    shard_size: int = 8192,
) -> None:
    """Encode the texts of a file into a folder of vectors, shard by shard; the same line resumes after a kill.

    Args:
        model: A model directory or Hub id.
        input: A JSONL file (`.gz` too) with `text`, and `_id` and `title` where there are any.
        output: The folder to write: `vectors-*.npy`, `documents-*.jsonl`, `manifest.json`.
        prompt_name: Which of the model's prompts goes before each text.
        precision: Format of matrix products; `auto` is bfloat16 where the hardware has it.
        shard_size: Texts of a shard.
    """
    from embeddings.inference import encode_corpus

    folder = encode_corpus(_encoder(model, precision), input, output, prompt_name=prompt_name, shard_size=shard_size)
    print(f"wrote {folder.num_documents} vectors of width {folder.embedding_dim} to {output}")


def search(query: str, model: str, corpus: Path, top_k: int = 5, precision: PrecisionName = "auto") -> None:
    """Print the documents nearest to a query.

    Args:
        query: What to look for.
        model: A model directory or Hub id.
        corpus: A corpus file, or a folder that `encode` wrote with the same model.
        top_k: How many documents.
        precision: Format of matrix products.
    """
    from embeddings.inference import search_corpus

    (hits,) = search_corpus(_encoder(model, precision), corpus, [query], top_k)
    for hit in hits:
        print(f"{hit.score:.3f}  {hit.document_id}\n       {' '.join(hit.text.split())[:160]}")


def evaluate(
    model: str,
    data: Path | list[Path],
    prompt_name: str | None = None,
    output: Path | None = None,
    precision: PrecisionName = "auto",
) -> None:
    """Score a model on evaluation folders: retrieval, sentence similarity, classification and clustering.

    Args:
        model: A model directory or Hub id.
        data: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`.
        prompt_name: Which of the model's prompts goes before queries (retrieval) or every text (the other kinds).
        output: A JSON file for the scores.
        precision: Format of matrix products.
    """
    from dataclasses import asdict

    from embeddings.common.fileio import write_json
    from embeddings.evaluation import evaluate_folders, format_results

    results = evaluate_folders(
        _encoder(model, precision), data if isinstance(data, list) else [data], prompt_name=prompt_name
    )
    print(format_results(results))
    if output is not None:
        write_json(output, [asdict(result) for result in results])


def _encoder(model: str, precision: PrecisionName) -> "Encoder":
    """The encoder of a model directory with a progress bar."""
    from embeddings.inference import Encoder

    return Encoder.from_pretrained(model, precision=precision, show_progress=True)
