"""`show latent-attention`: which latents the tokens of some texts attend to."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from embeddings.inference.latent_weights import LatentWeights

# Latents named beside a token, and beside the mean of a text's tokens.
_OF_A_TOKEN, _OF_A_TEXT = 3, 8


def latent_attention(
    texts: list[str],
    model: str,
    output: Path = Path("latent-attention.png"),
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
    head: int | None = None,
    num_latents: int = 24,
    by_text: bool = False,
) -> None:
    """Draw how the tokens of some texts attend to the latents of a model that pools by them, and print it as a table.

    Args:
        texts: The texts, drawn below each other over the same latents.
        model: A model directory or Hub id.
        output: The PNG file to write.
        prompt_name: Which of the model's prompts goes before each text; the one of the role's name where none is given.
            Its tokens attend to nothing.
        role: Whose prompt and length limit hold for the texts.
        head: The head whose attention is shown, from 0; the mean over all of them if left out.
        num_latents: How many latents have a column: the busiest over all texts.
        by_text: Whether a text is one row, the mean over its tokens, with a column for every latent of every head: the
            picture of NV-Embed's Fig. 2.
    """
    from embeddings.common import OptionError
    from embeddings.common.text import one_line
    from embeddings.figures import check_output, draw_latent_weights
    from embeddings.figures.latent_weights import MOST_COLUMNS, draw_latents_by_text
    from embeddings.inference import Encoder
    from embeddings.inference.latent_weights import latent_pooling, latent_weights

    for text in texts:
        if not text.strip():
            raise OptionError("TEXT", text, "must not be empty", "give a sentence")
    if not 1 <= num_latents <= MOST_COLUMNS:
        rule = f"must be from 1 to {MOST_COLUMNS}, what a picture has room for"
        raise OptionError("num_latents", num_latents, rule, "24 is usual")
    check_output(output)
    embedder = Encoder.from_pretrained(model).embedder
    found = latent_weights(embedder, texts, head=head, prompt_name=prompt_name, role=role)
    for text, weights in zip(texts, found, strict=True):
        if all(span.is_special for span in weights.spans):
            raise OptionError(
                "TEXT", text[:40], "must hold a token of its own", "the model's tokenizer drops all of it"
            )
    pooling = latent_pooling(embedder)
    total, shown = len(pooling.latents), min(num_latents, len(pooling.latents))
    if by_text:
        title = f"{one_line(Path(model).name, 40)}: what its texts attend to"
        subtitle = "Latent attention, the mean over each text's tokens (NV-Embed, Fig. 2)."
        draw_latents_by_text(found, title, subtitle, output)
        print(f"{title}\n{subtitle}\n\nwrote {output}")
        return
    heads = f"mean of {pooling.num_heads} heads" if head is None else f"head {head} of {pooling.num_heads}"
    title = f"{one_line(Path(model).name, 40)}: what its tokens attend to"
    subtitle = (
        f"Latent attention, {heads}. Columns: the {shown} busiest of {total} latents over all texts, counted from 0. "
        "Spread: over how many latents a row's attention lies (exponential of its entropy)."
    )
    draw_latent_weights(found, num_latents, title, subtitle, output)
    print(f"{title}\n{subtitle}")
    for weights in found:
        print(f"\n{_table(weights)}")
    print(f"\nwrote {output}")


def _table(weights: "LatentWeights") -> str:
    """Each token's heaviest latents, then those of the mean over the tokens."""
    from embeddings.figures.latent_weights import MEAN, spread, token_name

    lines = ["  spread  token             latents, the heaviest first"]
    rows = zip(weights.spans, weights.weight_TR, strict=True)
    named = [(" ".join(token_name(weights.text, span).split()), weight_R, _OF_A_TOKEN) for span, weight_R in rows]
    for name, weight_R, most in [*named, (MEAN, weights.mean_R, _OF_A_TEXT)]:
        heaviest = (-weight_R).argsort(kind="stable")[:most]
        shares = "  ".join(f"{latent} ({weight_R[latent]:.1%})" for latent in heaviest.tolist())
        lines.append(f"{spread(weight_R):>8.1f}  {name:<16}  {shares}")
    return "\n".join(lines)
