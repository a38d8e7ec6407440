"""`show`: pictures of a run or a model, one function a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from embeddings.inference.token_weights import TokenWeights
    from embeddings.models import AnchorTokenPooling, Embedder


def curves(run: Path | list[Path], output: Path | None = None) -> None:
    """Draw the loss and nDCG@10 of some runs over their optimiser steps.

    Args:
        run: The run's folder, which holds the `metrics.csv` that `fit` wrote; several as `[RUN,RUN]`, in one picture.
        output: The PNG file to write; `curves.png` in the run's folder, or for several here, where none is given.
    """
    from embeddings.common import OptionError
    from embeddings.figures import check_output, draw_curves

    runs = [run] if isinstance(run, Path) else run
    if not runs:
        raise OptionError("run", runs, "must name a run", "give a folder such as checkpoints/runs/NAME/version_0")
    path = output or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    check_output(path)
    draw_curves(runs, path)
    print(f"wrote {path}")


def anchor_tokens(
    texts: list[str],
    model: str,
    output: Path = Path("anchor-tokens.png"),
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
    axis: Literal["key", "query"] | None = None,
    layers: int | list[int] | None = None,
    per_head: bool | None = None,
    include_first: bool | None = None,
    by_visible_queries: bool | None = None,
) -> None:
    """Draw where anchor-token-aware pooling puts its weight in some texts, and print it as a table.

    A model that pools so shows its own weights, any other one those that such a pooling would give.

    Args:
        texts: The texts, drawn below each other on one scale.
        model: A model directory or Hub id.
        output: The PNG file to write.
        prompt_name: Which of the model's prompts goes before each text; the one of the role's name where none is given.
            Its tokens have no weight.
        role: Whose prompt and length limit hold for the texts.
        axis: `key`: what a token receives; `query`: how evenly it looks about. The pooling's own, or `key`, if left
            out, and so the others.
        layers: Whose attention counts, from 0 or, negative, from the last: `-1`, or several as `[-1,-2]`.
        per_head: Whether heads count alike.
        include_first: Whether the text's first token is pooled.
        by_visible_queries: Whether a weight is divided by the number of queries that see the token, as the key axis
            needs under a causal mask.
    """
    from embeddings.common import OptionError
    from embeddings.common.text import one_line
    from embeddings.figures import check_output, draw_anchor_tokens
    from embeddings.inference import Encoder
    from embeddings.inference.token_weights import token_weights

    for text in texts:
        if not text.strip():
            raise OptionError("TEXT", text, "must not be empty", "give a sentence")
    check_output(output)
    embedder = Encoder.from_pretrained(model).embedder
    given = {
        "axis": axis,
        "layers": [layers] if isinstance(layers, int) else layers,
        "per_head": per_head,
        "include_first": include_first,
        "by_visible_queries": by_visible_queries,
    }
    pooling, whose = _pooling(embedder, {name: value for name, value in given.items() if value is not None})
    weights = token_weights(embedder, texts, pooling, prompt_name=prompt_name, role=role)
    _check_tokens(texts, weights)
    title, subtitle = f"{one_line(Path(model).name, 40)}{whose}", f"Anchor-token-aware pooling, {_settings(pooling)}."
    draw_anchor_tokens(weights, title, subtitle, output)
    print(f"{title}\n{subtitle}")
    for found in weights:
        print(f"\n{_table(found)}")
    print(f"\nwrote {output}")


def _check_tokens(texts: list[str], weights: "list[TokenWeights]") -> None:
    """Refuse a text of which nothing is pooled but special tokens."""
    from embeddings.common import OptionError

    for text, found in zip(texts, weights, strict=True):
        if not any(pooled and not span.is_special for pooled, span in zip(found.pooled_T, found.spans, strict=True)):
            rule = "must hold a token of its own"
            raise OptionError("TEXT", text[:40], rule, "the model's tokenizer drops all of it")


def _pooling(embedder: "Embedder", given: dict[str, object]) -> "tuple[AnchorTokenPooling, str]":
    """The pooling whose weights are shown, and whose it is, as the end of a title that begins with the model's name.

    Raises:
        OptionError: If a setting is impossible.
    """
    from embeddings.common import OptionError
    from embeddings.inference.token_weights import default_pooling, own_pooling
    from embeddings.models import AnchorTokenPooling
    from embeddings.models.directory import pooling_name

    own = own_pooling(embedder)
    settings = (own or default_pooling(embedder)).arguments()
    try:
        pooling = AnchorTokenPooling(embedder.hidden_size, **{**settings, **given})
    except ValueError as error:
        raise OptionError("layers", given.get("layers"), str(error), "leave it out for the last layer") from error
    if own is None:
        name = pooling_name(embedder.pooling).replace("_", "-")
        return pooling, f" ({name} pooling): anchor weights as they would be"
    same = pooling.arguments() == settings
    return pooling, ": its own anchor weights" if same else ": anchor weights with other settings than its own"


def _settings(pooling: "AnchorTokenPooling") -> str:
    """The settings that weights depend on, in words."""
    layers = ", ".join(map(str, pooling.layers))
    words = [f"{pooling.axis} axis", f"layer{'s' * (len(pooling.layers) > 1)} {layers}"]
    words += ["heads count alike"] * pooling.per_head
    words += ["without the first token"] * (not pooling.include_first)
    words += ["by visible queries"] * pooling.by_visible_queries
    return ", ".join(words)


def _table(weights: "TokenWeights") -> str:
    """Each token's weight, then the shares of the weight by place."""
    from embeddings.figures.anchor_tokens import PLACE_NAMES, weighted_pieces
    from embeddings.inference.anchor_shares import shares_of

    num_pooled = int(weights.pooled_T.sum())
    lines = ["  weight  over mean  token"]
    for piece in weighted_pieces(weights):
        text = piece.text if piece.is_special else " ".join(piece.text.split()) or repr(piece.text)
        text += f"  ({piece.num_tokens} tokens)" if piece.num_tokens > 1 else ""
        weight, over_mean = f"{piece.weight:.4f}", f"{piece.weight * num_pooled / piece.num_tokens:.2f}"
        if not piece.is_pooled:
            weight = over_mean = "-"
        lines.append(f"{weight:>8}  {over_mean:>9}  {text}")
    shares = shares_of(weights)
    lines += ["", f"{'share of':<16}{'the weight':>12}{'the tokens':>12}"]
    for place, name in PLACE_NAMES.items():
        lines.append(f"{name:<16}{shares.weight[place]:>12.1%}{shares.tokens[place]:>12.1%}")
    return "\n".join(lines)
