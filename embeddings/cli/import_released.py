"""`import`: a published checkpoint becomes a model directory."""

from pathlib import Path


def import_checkpoint(
    source: str,
    output: Path,
    revision: str | None = None,
    base: list[str] | str | None = None,
    known_as: str | None = None,
    assume: dict[str, int | float] | None = None,
) -> None:
    """Write the model directory of a published checkpoint, without running its code.

    Known are NV-Embed v1 and v2, nomic-embed-text-v1, v1.5 and v2-moe, nomic-bert-2048, cde-small v1 and v2, LLM2Vec's
    adapters, and sentence-transformers directories. Read are config.json, safetensors, the tokenizer and what a
    sentence-transformers directory says. The checkpoint must be whole and of its family alone; what it has that the
    model has no use for is named. An embedding model gets a card, `README.md`, with the source, the licence that the
    source's own card states, prompts and use. Numbers that the model needs and no file states (cde-small's heads,
    rotation and windows, the longest text) are printed, and kept in import.json.

    Args:
        source: A directory or Hub id.
        output: The directory to write; one that is there is replaced once the new one is whole.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter was trained on, where its own files do not say it: a directory or Hub id, or a list of
            them, adapters first and the decoder last.
        known_as: The published name of a model whose directory is called otherwise, where its card uses vectors in a
            way that no file states: `nomic-embed-text-v1.5` (layer norm, and the widths to cut to) or
            `nomic-embed-text-v2-moe` (the widths).
        assume: Numbers that no file states, in place of those of the published models, by the names that this command
            prints: `--assume.num_attention_heads 8`.
    """
    from embeddings.interop.released import import_released

    bases = [base] if isinstance(base, str) else base or ()
    made = import_released(source, output, revision, bases, known_as, assume)
    left = made.report.left
    names = f", left {len(left)} ({', '.join(left[:4])}{', …' if len(left) > 4 else ''})" if left else ", left none"
    used_as = "" if made.used_as is None else f"; vectors as the card of {made.used_as} has them"
    print(f"wrote {output} from {made.family}: used {len(made.report.used)} tensors, none missing{names}{used_as}")
    if made.assumed:
        numbers = ", ".join(f"{name} {value:g}" for name, value in made.assumed.items())
        print(f"assumed, since no file states it: {numbers}; --assume.NAME gives another")
