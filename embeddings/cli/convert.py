"""`convert`: a checkpoint with learned positions becomes one with rotary ones."""

from pathlib import Path


def convert(
    source: str,
    output: Path,
    num_positions: int = 2048,
    rope_theta: float = 10_000.0,
    keep_head: bool = True,
) -> None:
    """Write the rotary model of an XLM-R, RoBERTa or BERT checkpoint.

    All weights but the position table stay, so the model has to get used to its new positions before it is of use:
    `fit` with `lightning_configs/methods/mlm_adapt.yaml`.

    Args:
        source: A directory or Hub id of XLM-R, RoBERTa or BERT, with its language-model head or without.
        output: The directory to write; one that is there is replaced once the new one is whole.
        num_positions: Tokens that the model is meant for; its tokenizer cuts longer texts.
        rope_theta: Base of the rotation's angles.
        keep_head: Whether the language-model head goes along, which the adaptation needs.
    """
    from embeddings.models.rotary import write_rotary_model

    made = write_rotary_model(source, output, num_positions, rope_theta, keep_head)
    vocabulary = f"vocabulary of {made.vocabulary_before:,} rows padded to {made.vocabulary_after:,}"
    print(
        f"wrote {output}: {made.num_parameters:,} parameters, {vocabulary}, "
        f"rotary positions for {num_positions:,} tokens"
    )
