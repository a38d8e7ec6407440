"""How some texts attend to latents, as heat maps: NV-Embed's Fig. 2, and the same token by token."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common import InputError
from embeddings.data.tokenize import TokenSpan
from embeddings.figures.glyphs import drawable, installed_fonts, shortened, width
from embeddings.figures.page import draw_scale, write, write_heading
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.shades import BLACK, EDGE, GREY, shades
from embeddings.inference.inspection import LatentWeights

# Of all texts together: matplotlib draws no picture of 65,536 dots' height.
MOST_ROWS = 1000
MOST_COLUMNS = 64
MEAN = "mean"
SPACE = "␣"

# In points, 72 to the inch.
_ROW, _RIGHT = 15.0, 16.0
_STATISTIC = 50.0
_TITLE, _SUBTITLE, _CAPTION, _HEADER, _GAP, _FOOTER = 20.0, 14.0, 22.0, 16.0, 14.0, 74.0
_MARGIN = 22.0
_LEAST_WIDTH = 660.0
_LONGEST_NAME = 18
_NAME_SIZE = 9.0
_STATISTICS = ("others", "spread")


def busiest_latents(texts: Sequence[LatentWeights], most: int) -> list[int]:
    """The latents with the largest mean weight, the largest first; each text counts alike, whatever its length."""
    mean_R = np.mean([weights.mean_R for weights in texts], axis=0)
    order: list[int] = np.argsort(-mean_R, kind="stable")[:most].tolist()
    return order


def spread(weight_R: npt.NDArray[np.float32]) -> float:
    """Over how many latents a weight is spread: the exponential of its entropy, 1 to R."""
    positive = weight_R[weight_R > 0].astype(np.float64)
    return float(np.exp(-(positive * np.log(positive)).sum()))


def token_name(text: str, span: TokenSpan) -> str:
    """What a token is called: its characters in the text, or its own name where it has none."""
    return span.token if span.is_special else text[span.start : span.end].strip() or SPACE


def draw_latent_weights(
    texts: Sequence[LatentWeights], num_columns: int, title: str, subtitle: str, output: Path
) -> None:
    """Draw a heat map a text: a row a token, a column a latent, the darker a cell the larger the weight.

    The columns are the busiest latents over all texts, so that texts compare; what the others have together stands
    beside each row, and over how many latents its weight is spread. The last row is the mean over the text's tokens,
    which is the paper's row.

    Args:
        texts: At least one, of one model.
        num_columns: How many latents have a column.
        title: The line above all.
        subtitle: What else is to be known, wrapped over lines.
        output: The PNG file to write.

    Raises:
        InputError: If the texts have more tokens than a picture has room for.
        MissingExtraError: If matplotlib is not installed.
    Source: NV-Embed, appendix D, Fig. 2. Differs: a row a token, and heads averaged or one of them; for the paper's own
        picture see `draw_latents_by_text`.
    """
    num_rows = sum(len(weights.spans) + 1 for weights in texts)
    if num_rows > MOST_ROWS:
        what = f"fills {num_rows} rows, and a picture has room for {MOST_ROWS}"
        raise InputError("TEXT", what, "give shorter or fewer texts")
    latents = busiest_latents(texts, num_columns)
    fonts = installed_fonts()
    names = [
        [shortened(drawable(token_name(weights.text, span), fonts.known), _LONGEST_NAME) for span in weights.spans]
        for weights in texts
    ]
    left = _MARGIN + 8 + 0.602 * _NAME_SIZE * max(sum(map(width, name)) for own in names for name in (MEAN, *own))
    cell = max(22.0 if len(latents) <= 32 else 17.0, 420.0 / len(latents))
    page_width = max(_LEAST_WIDTH, left + len(latents) * cell + 2 * _STATISTIC + _RIGHT)
    notes = textwrap.wrap(subtitle, int((page_width - 2 * _MARGIN) / 4.6))
    top = _MARGIN + _TITLE + len(notes) * _SUBTITLE
    height = top + len(texts) * (_CAPTION + _HEADER + _ROW + _GAP) + num_rows * _ROW + _FOOTER
    figure = pyplot().figure(figsize=(page_width / 72, height / 72), facecolor="white")
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, page_width), ylim=(height, 0))
    page.set_axis_off()
    write(page, _MARGIN, _MARGIN + 8, title, size=12, weight="bold", color=BLACK)
    for line, note in enumerate(notes, start=1):
        write(page, _MARGIN, _MARGIN + 10 + line * _SUBTITLE, note, size=9, color=GREY)
    num_latents = texts[0].weight_TR.shape[1]
    # An even share has a middle shade; an emptier picture than that would look as if something stood out.
    most = min(1.0, max(2 / num_latents, *(float(weights.weight_TR.max()) for weights in texts)))
    for weights, own in zip(texts, names, strict=True):
        caption = shortened(drawable(weights.text, fonts.known), int((page_width - 2 * _MARGIN) / 5.6))
        write(page, _MARGIN, top + _CAPTION, caption, size=_NAME_SIZE, color=BLACK, family=list(fonts.names))
        top += _CAPTION + _HEADER
        place = (left / page_width, 1 - (top + (len(own) + 1) * _ROW) / height)
        size = (len(latents) * cell / page_width, (len(own) + 1) * _ROW / height)
        image = _draw_map(figure.add_axes((*place, *size)), weights, own, latents, most, list(fonts.names))
        _write_statistics(page, weights, latents, left + len(latents) * cell, top)
        top += (len(own) + 1) * _ROW + _ROW + _GAP
    draw_scale(figure, image, left, (page_width, height), "share of a token's attention", 1 / num_latents)
    write_png(figure, output)


def draw_latents_by_text(texts: Sequence[LatentWeights], title: str, subtitle: str, output: Path) -> None:
    """Draw one heat map: a row a text, a column each latent of each head, the weights averaged over the text's tokens.

    Every latent has its column, in its own order, and the heads stand side by side.

    Args:
        texts: At least one, of one model.
        title: The line above all.
        subtitle: What else is to be known, wrapped over lines.
        output: The PNG file to write.

    Raises:
        InputError: If there are more texts than a picture has room for.
        MissingExtraError: If matplotlib is not installed.
    Source: NV-Embed, appendix D, Fig. 2: 20 reviews by 4,096 columns, 512 latents in each of 8 heads.
    """
    if len(texts) > MOST_ROWS:
        raise InputError("TEXT", f"are {len(texts)}, and a picture has room for {MOST_ROWS}", "give fewer texts")
    fonts = installed_fonts()
    num_heads, num_latents = texts[0].mean_AR.shape
    rows_NC = np.stack([weights.mean_AR.reshape(-1) for weights in texts])
    names = [shortened(drawable(weights.text, fonts.known), 2 * _LONGEST_NAME) for weights in texts]
    figure, axis = pyplot().subplots(figsize=(12, 2.2 + 0.24 * len(texts)), layout="constrained", facecolor="white")
    # Linear from nothing to the largest weight: most latents get next to nothing of most texts.
    image = axis.imshow(rows_NC, cmap=shades(), vmin=0.0, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(texts)), labels=names, parse_math=False, family=list(fonts.names), size=_NAME_SIZE)
    middles = [(head + 0.5) * num_latents - 0.5 for head in range(num_heads)]
    axis.set_xticks(middles, labels=[f"head {head}" for head in range(num_heads)], size=_NAME_SIZE)
    axis.set_xlabel(f"{num_latents} latents in each head", size=8.5, color=GREY)
    axis.tick_params(length=0, colors=BLACK)
    for head in range(1, num_heads):
        axis.axvline(head * num_latents - 0.5, color=GREY, linewidth=0.8)
    scale = figure.colorbar(image, ax=axis, pad=0.01)
    scale.set_label(f"weight, mean over a text's tokens (even: {1 / num_latents:.2%})", size=8.5, color=GREY)
    write_heading(figure, axis, title, subtitle, 150)
    write_png(figure, output)


def _draw_map(
    axis: Any, weights: LatentWeights, names: list[str], latents: list[int], most: float, families: list[str]
) -> Any:
    """One text's heat map, its tokens and latents named; returns the image."""
    rows = np.concatenate([weights.weight_TR, weights.mean_R[None]])[:, latents]
    image = axis.imshow(rows, cmap=shades(), vmin=0.0, vmax=most, aspect="auto", interpolation="nearest")
    axis.set_xticks(range(len(latents)), labels=[str(latent) for latent in latents])
    axis.set_yticks(range(len(names) + 1), labels=[*names, MEAN], parse_math=False)
    axis.tick_params(length=0, colors=BLACK)
    axis.xaxis.tick_top()
    for label in axis.get_xticklabels():
        label.set(size=7.5, color=GREY)
    for label in axis.get_yticklabels():
        label.set(size=_NAME_SIZE, family=families)
    axis.get_yticklabels()[-1].set(weight="bold")
    axis.set_xlabel("latent", size=8.5, color=GREY)
    axis.set_xticks([place - 0.5 for place in range(1, len(latents))], minor=True)
    axis.set_yticks([place - 0.5 for place in range(1, len(names) + 1)], minor=True)
    axis.grid(which="minor", color=EDGE, linewidth=0.6)
    axis.tick_params(which="minor", length=0)
    axis.axhline(len(names) - 0.5, color=GREY, linewidth=1.0)
    for spine in axis.spines.values():
        spine.set(color=EDGE, linewidth=0.8)
    return image


def _write_statistics(page: Any, weights: LatentWeights, latents: list[int], left: float, top: float) -> None:
    """Beside each row what the latents without a column have, and its spread."""
    for column, name in enumerate(_STATISTICS):
        page.text(left + (column + 0.5) * _STATISTIC + 4, top - 5, name, size=8.5, color=GREY, ha="center")
    for row, weight_R in enumerate([*weights.weight_TR, weights.mean_R]):
        others = max(0.0, 1 - float(weight_R[latents].sum()))
        for column, value in enumerate((f"{others:.1%}", f"{spread(weight_R):.1f}")):
            place = left + (column + 0.5) * _STATISTIC + 4, top + (row + 0.5) * _ROW
            page.text(*place, value, size=8.5, color=BLACK, ha="center", va="center")
