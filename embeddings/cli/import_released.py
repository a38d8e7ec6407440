"""`import`: a published checkpoint becomes a model directory."""

from pathlib import Path


def import_checkpoint(
    source: str, output: Path, revision: str | None = None, base: list[str] | str | None = None
) -> None:
    """Write the model directory of a published checkpoint, without running its code.

    Known are NV-Embed v1 and v2, nomic-embed-text-v1, v1.5 and v2-moe, nomic-bert-2048, cde-small v1 and v2, LLM2Vec's
    adapters, and sentence-transformers directories. Read are config.json, safetensors, the tokenizer and what a
    sentence-transformers directory says. The checkpoint must be whole and of its family alone; what it has that the
    model has no use for is named.

    Args:
        source: A directory or Hub id.
        output: The directory to write; one that is there is replaced once the new one is whole.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter was trained on, where its own files do not say it: a directory or Hub id, or a list of
            them, adapters first and the decoder last.
    """
    from embeddings.interop.released import import_released

    made = import_released(source, output, revision, [base] if isinstance(base, str) else base or ())
    left = made.report.left
    names = f", left {len(left)} ({', '.join(left[:4])}{', …' if len(left) > 4 else ''})" if left else ", left none"
    print(f"wrote {output} from {made.family}: used {len(made.report.used)} tensors, none missing{names}")
