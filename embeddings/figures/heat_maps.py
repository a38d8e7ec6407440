"""Heat maps of expert loads, latent weights and zeros, and texts with tokens shaded by weight.

The arguments of each `draw_…` function include a title, a subtitle and the file to write. Heat maps are PNG files and
need matplotlib (else `MissingExtraError`); texts shaded by anchor-token-aware pooling (MGH, Fig. 5) are an HTML page.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common import InputError
from embeddings.data.tokenize import TokenSpan
from embeddings.figures.drawing import (
    BLACK,
    EDGE,
    GREY,
    LINE_BREAK,
    drawn_label,
    is_dark,
    pyplot,
    shades,
    write_heading,
    write_page,
    write_png,
)
from embeddings.inference.inspection import PLACES, ExpertLoads, LatentWeights, Place, TokenWeights, shares_of
from embeddings.models.model_files import MatrixZeros
from embeddings.models.moe.upcycling import load_metrics

# With more experts the cells are too narrow for numbers.
MAX_NUMBERED = 32
# matplotlib cannot draw figures of 65,536 pixels in width or height.
MAX_EXPERTS = 4096
MAX_ROWS = 1000
MAX_COLUMNS = 64
MEAN = "mean"
SPACE = "␣"
_MAX_TOKEN_NAME = 18
_NAME_SIZE = 9.0


def draw_expert_loads(loads: ExpertLoads, title: str, subtitle: str, output: Path) -> None:
    """Plot the share of each sparse layer's tokens per expert: one row per layer, one column per expert.

    Beside each row are its entropy (1: all experts are loaded equally), the busiest expert's tokens over an even share,
    and the number of idle experts. Too many experts for one figure are an `InputError`.
    """
    num_layers, num_experts = loads.count_YX.shape
    if num_experts > MAX_EXPERTS:
        what = f"has {num_experts} experts per layer, more than the maximum of {MAX_EXPERTS} for a figure"
        raise InputError("the model", what, "choose a model with fewer")
    cell = 0.64 if num_experts <= 16 else 0.46 if num_experts <= MAX_NUMBERED else max(0.03, 9 / num_experts)
    width = max(9.0, num_experts * cell + 3.2)
    figure, axis = pyplot().subplots(figsize=(width, num_layers * 0.4 + 2.4), layout="constrained")
    share_YX = loads.share_YX.numpy()
    # Even shares have a middle shade: with a smaller maximum, small differences would look large.
    max_share = min(1.0, max(float(share_YX.max()), 2 / num_experts))
    step = 1 if num_experts <= MAX_NUMBERED else max(1, 2 ** ((num_experts - 1).bit_length() - 4))
    ticks = range(0, num_experts, step)
    image = _draw_map(axis, share_YX, list(map(str, loads.layers)), ticks, max_share, is_gridded=num_experts <= 64)
    axis.set_xlabel("expert", size=9)
    axis.set_ylabel("layer", size=9)
    if num_experts <= MAX_NUMBERED:
        _write_cells(axis, share_YX, max_share, "idle", 8.5 if num_experts <= 16 else 7.0)
    load = load_metrics(loads.count_YX)
    rows = zip(load.entropy_Y.tolist(), load.highest_Y.tolist(), load.idle_Y.tolist(), strict=True)
    cells = [(f"{entropy:.3f}", f"{highest:.2f}", f"{idle}") for entropy, highest, idle in rows]
    _write_statistics(axis, ("load\nentropy", "busiest\n/ even", "idle\nexperts"), cells)
    _draw_scale(figure, image, [axis], "share of a layer's assignments", 1 / num_experts)
    write_heading(figure, axis, title, subtitle, int(width * 10))
    write_png(figure, output)


def draw_zeros(zeros: Sequence[MatrixZeros], title: str, subtitle: str, output: Path) -> None:
    """Plot the share of zeros: one row per layer, one column per matrix; beside it the share in the whole layer.

    Too many layers or matrices for one figure are an `InputError`.
    """
    layers = list(dict.fromkeys(matrix.layer for matrix in zeros))
    names = list(dict.fromkeys(matrix.name for matrix in zeros))
    if len(layers) > MAX_ROWS or len(names) > MAX_COLUMNS:
        what = f"has {len(layers)} layers of {len(names)} matrices; the maximum for a figure is {MAX_ROWS}"
        raise InputError("the model", f"{what} of {MAX_COLUMNS}", "choose a model with fewer")
    share_NC = np.full((len(layers), len(names)), np.nan)
    for matrix in zeros:
        share_NC[layers.index(matrix.layer), names.index(matrix.name)] = matrix.fraction
    width = max(9.0, len(names) * 0.8 + 3.0)
    figure, axis = pyplot().subplots(figsize=(width, len(layers) * 0.32 + 3.6), layout="constrained")
    image = _draw_map(axis, share_NC, list(map(str, layers)), range(len(names)), 1.0)
    axis.set_xticks(range(len(names)), labels=names, parse_math=False, size=8, rotation=30, ha="right")
    axis.set_ylabel("layer", size=9)
    _write_cells(axis, share_NC, 1.0, "0.0%", 8.0)
    _write_statistics(axis, ("of the\nlayer",), [(f"{share:.1%}",) for share in layer_shares(zeros).values()])
    scale = figure.colorbar(image, ax=[axis], location="bottom", shrink=0.4, aspect=40, anchor=(0.0, 0.5), pad=0.02)
    scale.set_ticks([0.0, 0.5, 1.0], labels=["0%", "50%", "100%"])
    scale.set_label("share of zeros in the weights of a matrix", size=8.5, color=GREY, loc="left")
    scale.outline.set_visible(False)
    write_heading(figure, axis, title, subtitle, int(width * 10))
    write_png(figure, output)


def layer_shares(zeros: Sequence[MatrixZeros]) -> dict[int, float]:
    """The share of zeros among all weights of each layer's matrices, by layer."""
    counts: dict[int, tuple[int, int]] = {}
    for matrix in zeros:
        num_zeros, num_weights = counts.get(matrix.layer, (0, 0))
        counts[matrix.layer] = num_zeros + matrix.num_zeros, num_weights + matrix.num_weights
    return {layer: num_zeros / num_weights for layer, (num_zeros, num_weights) in counts.items()}


def busiest_latents(texts: Sequence[LatentWeights], max_latents: int) -> list[int]:
    """The latents with the largest mean weight, the largest first; texts count equally regardless of length."""
    mean_R = np.mean([weights.mean_R for weights in texts], axis=0)
    order: list[int] = np.argsort(-mean_R, kind="stable")[:max_latents].tolist()
    return order


def spread(weight_R: npt.NDArray[np.float32]) -> float:
    """The effective number of latents of a weight: the exponential of its entropy, 1 to R."""
    positive = weight_R[weight_R > 0].astype(np.float64)
    return float(np.exp(-(positive * np.log(positive)).sum()))


def token_name(text: str, span: TokenSpan) -> str:
    """A token's characters in the text, or its name for special tokens."""
    return span.token if span.is_special else text[span.start : span.end].strip() or SPACE


def draw_latent_weights(
    texts: Sequence[LatentWeights], num_columns: int, title: str, subtitle: str, output: Path
) -> None:
    """Plot one heat map of weights per text: one row per token, one column per latent.

    The columns are the `num_columns` busiest latents over all texts, the same for each text. Beside each row are the
    sum of the other latents, and the effective number of latents. The last row is the mean over the text's tokens, as
    in the paper. Too many tokens for one figure are an `InputError`.

    Source: NV-Embed, appendix D, Fig. 2. Differs: rows are tokens, of one head or the mean of all; for the paper's
        figure see `draw_latents_by_text`.
    """
    num_rows = sum(len(weights.spans) + 1 for weights in texts)
    if num_rows > MAX_ROWS:
        raise InputError("TEXT", f"needs {num_rows} rows; the maximum for a figure is {MAX_ROWS}", "use shorter texts")
    latents = busiest_latents(texts, num_columns)
    names = [[*(drawn_label(token_name(w.text, span), _MAX_TOKEN_NAME) for span in w.spans), MEAN] for w in texts]
    captions = [drawn_label(weights.text, 100) for weights in texts]
    width = max(9.0, len(latents) * 0.3 + 4)
    size = (width, 0.21 * num_rows + 0.9 * len(texts) + 1.8)
    figure, axes = pyplot().subplots(
        len(texts), 1, figsize=size, layout="constrained", squeeze=False, height_ratios=[*map(len, names)]
    )
    num_latents = texts[0].weight_TR.shape[1]
    max_share = min(1.0, max(2 / num_latents, *(float(weights.weight_TR.max()) for weights in texts)))
    for axis, weights, row_names, caption in zip(axes[:, 0], texts, names, captions, strict=True):
        rows_NR = np.concatenate([weights.weight_TR, weights.mean_R[None]])
        image = _draw_map(axis, rows_NR[:, latents], row_names, range(len(latents)), max_share, columns=latents)
        axis.xaxis.tick_top()
        axis.axhline(len(row_names) - 1.5, color=GREY, linewidth=1.0)
        axis.get_yticklabels()[-1].set(weight="bold")
        axis.set_xlabel(caption, size=_NAME_SIZE, loc="left", parse_math=False)
        others = np.maximum(0.0, 1 - rows_NR[:, latents].sum(axis=1))
        cells = [(f"{rest:.1%}", f"{spread(weight_R):.1f}") for rest, weight_R in zip(others, rows_NR, strict=True)]
        _write_statistics(axis, ("others", "spread"), cells)
    _draw_scale(figure, image, list(axes[:, 0]), "share of a token's attention", 1 / num_latents)
    write_heading(figure, axes[0, 0], title, subtitle, int(width * 10))
    write_png(figure, output)


def draw_latents_by_text(texts: Sequence[LatentWeights], title: str, subtitle: str, output: Path) -> None:
    """Plot one heat map of mean weights over tokens: one row per text, one column per latent of each head.

    Too many texts for one figure are an `InputError`.
    Source: NV-Embed, appendix D, Fig. 2: 20 reviews by 4,096 columns, 512 latents in each of 8 heads.
    """
    if len(texts) > MAX_ROWS:
        raise InputError("TEXT", f"{len(texts)} texts; the maximum for a figure is {MAX_ROWS}", "use fewer texts")
    num_heads, num_latents = texts[0].mean_AR.shape
    rows_NC = np.stack([weights.mean_AR.reshape(-1) for weights in texts])
    names = [drawn_label(weights.text, 2 * _MAX_TOKEN_NAME) for weights in texts]
    figure, axis = pyplot().subplots(figsize=(12, 2.2 + 0.24 * len(texts)), layout="constrained", facecolor="white")
    # Linear from 0 to the largest weight: in most texts the weights of most latents are almost 0.
    image = axis.imshow(rows_NC, cmap=shades(), vmin=0.0, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(texts)), labels=names, parse_math=False, size=_NAME_SIZE)
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
    axis: Any,
    share_NC: npt.NDArray[Any],
    names: Sequence[str],
    ticks: Sequence[int],
    max_share: float,
    *,
    columns: Sequence[int] | None = None,
    is_gridded: bool = True,
) -> Any:
    """Draw a heat map of shares with labels for its rows and some columns; returns the image."""
    image = axis.imshow(share_NC, cmap=shades(), vmin=0.0, vmax=max_share, aspect="auto", interpolation="nearest")
    axis.set_xticks(ticks, labels=[str(tick if columns is None else columns[tick]) for tick in ticks], size=8)
    axis.set_yticks(range(len(names)), labels=names, size=_NAME_SIZE, parse_math=False)
    axis.tick_params(colors=BLACK, length=0)
    axis.set_xticks([column - 0.5 for column in range(1, share_NC.shape[1])] if is_gridded else [], minor=True)
    axis.set_yticks([row - 0.5 for row in range(1, len(names))], minor=True)
    axis.grid(which="minor", color=EDGE, linewidth=0.7)
    axis.tick_params(which="minor", length=0)
    for spine in axis.spines.values():
        spine.set(color=EDGE, linewidth=0.8)
    return image


def _write_cells(axis: Any, share_NC: npt.NDArray[Any], max_share: float, zero: str, size: float) -> None:
    """Write the share into each cell in a readable colour; `zero` is written for 0, nothing for NaN."""
    for row, column in np.argwhere(np.isfinite(share_NC)):
        share = float(share_NC[row, column])
        colour = "white" if is_dark(shades()(share / max_share)) else BLACK if share else GREY
        axis.text(column, row, f"{share:.1%}" if share else zero, size=size, ha="center", va="center", color=colour)


def _write_statistics(axis: Any, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write columns of numbers to the right of a heat map, with their names above."""
    for column in range(len(names)):
        offset = {"xytext": (32 + 54 * column, 0), "textcoords": "offset points", "ha": "center"}
        axis.annotate(names[column], (1, 1), xycoords="axes fraction", size=8.5, color=GREY, va="bottom", **offset)
        for row, cells in enumerate(rows):
            axis.annotate(cells[column], (1, row), xycoords=("axes fraction", "data"), size=8.5, va="center", **offset)


def _draw_scale(figure: Any, image: Any, axes: list[Any], label: str, even: float) -> None:
    """Draw the colour bar of a heat map of shares, with the even share marked."""
    scale = figure.colorbar(image, ax=axes, location="bottom", shrink=0.4, aspect=40, anchor=(0.0, 0.5), pad=0.02)
    max_share = image.get_clim()[1]
    # A tick too close to 0 is omitted; the even share is also in the bar's label.
    ticks = [0.0, *([even] if 0.12 * max_share < even < max_share else []), max_share]
    scale.set_ticks(ticks, labels=[f"{tick:.1%}" for tick in ticks])
    scale.set_label(f"{label} (even: {even:.1%})", size=8.5, color=GREY, loc="left")
    scale.ax.tick_params(labelsize=8, colors=GREY, length=2)
    scale.ax.minorticks_off()
    scale.outline.set_visible(False)


PLACE_NAMES: dict[Place, str] = {
    "first": "first token",
    "last": "last token",
    "punctuation": "punctuation",
    "rest": "everything else",
}
# White, then the colours of YlOrRd.
_COLOURS = np.array([(255, 255, 255), (255, 237, 160), (254, 178, 76), (252, 78, 42), (177, 0, 38)], dtype=np.float64)
_SCALE_STEPS = 24


class WeightedPiece(NamedTuple):
    """A token, or several that share characters: their text, its position, and the sum of their weights.

    The text of a special token (`[CLS]`) is its name.
    """

    text: str
    start: int
    end: int
    weight: float
    num_tokens: int
    is_special: bool
    is_pooled: bool


def weighted_pieces(weights: TokenWeights) -> list[WeightedPiece]:
    """The tokens of a text as its characters, in order; byte-level tokens that share a character are merged."""
    pieces: list[WeightedPiece] = []
    rows = zip(weights.spans, weights.weight_T.tolist(), weights.pooled_T.tolist(), strict=True)
    for span, weight, is_pooled in rows:
        last = pieces[-1] if pieces else None
        if last is not None and not (last.is_special or span.is_special) and span.start < last.end:
            pieces.pop()
            start, end = min(last.start, span.start), max(last.end, span.end)
            count, total, is_pooled = last.num_tokens + 1, last.weight + weight, last.is_pooled or is_pooled
        else:
            (start, end), count, total = span[1:3], 1, weight
        text = span.token if span.is_special else weights.text[start:end]
        pieces.append(WeightedPiece(text, start, end, total, count, span.is_special, is_pooled))
    return pieces


def draw_anchor_tokens(texts: Sequence[TokenWeights], title: str, subtitle: str, output: Path) -> None:
    """Write an HTML page of texts with tokens shaded by weight, on one scale.

    A token's shade is its weight times the number of pooled tokens, so that texts of different lengths are comparable.
    Tokens outside the pooling, such as those of a prompt, are not shaded.

    Source: MGH, Fig. 5, lower part. Differs: shades are weights relative to their mean.
    """
    shaded = [list(_pieces(weights)) for weights in texts]
    max_value = max((piece["value"] or 0.0 for pieces in shaded for piece in pieces), default=0.0) or 1e-12
    for piece in (piece for pieces in shaded for piece in pieces if piece["value"] is not None):
        piece["style"] = _style(piece["value"] / max_value)
    scale = [_style((step / _SCALE_STEPS) ** 2) for step in range(_SCALE_STEPS + 1)]
    captioned = [{"pieces": pieces, "caption": _caption(text)} for pieces, text in zip(shaded, texts, strict=True)]
    heading = {"title": title, "subtitle": subtitle}
    write_page(output, "anchor_tokens.html", **heading, texts=captioned, scale=scale, max_value=f"{max_value:.2g}")


def _pieces(weights: TokenWeights) -> Iterator[dict[str, Any]]:
    """The complete text in order: tokens with value, text between them, and special tokens with their share."""
    end, num_pooled = 0, int(np.count_nonzero(weights.pooled_T))
    for piece in weighted_pieces(weights):
        value = piece.weight / piece.num_tokens * num_pooled if piece.is_pooled else None
        hint = f"weight {piece.weight:.4f}, {value:.2f} times the mean" if value is not None else "not pooled"
        entry: dict[str, Any] = {"value": value, "is_special": piece.is_special, "hint": hint, "style": ""}
        if piece.is_special:
            yield {**entry, "text": piece.text, "share": f"{piece.weight:.1%}" if piece.is_pooled else ""}
            continue
        text = weights.text[piece.start : piece.end]
        blank = len(text) - len(text.lstrip(" \t")) if text.strip() else 0
        yield {"value": None, "is_special": False, "hint": "", "text": weights.text[end : piece.start + blank]}
        yield {**entry, "text": text[blank:].replace("\n", f"{LINE_BREAK}\n")}
        end = max(end, piece.end)
    rest = weights.text[end:]
    yield {"value": None, "is_special": False, "hint": "", "text": f"{rest[:80]} …" if rest.strip() else ""}


def _style(share: float) -> str:
    """CSS colours of a value from 0 to 1, by its square root, so that small values differ beside one large one."""
    position = min(1.0, max(0.0, share)) ** 0.5 * (len(_COLOURS) - 1)
    red, green, blue = (round(float(np.interp(position, range(len(_COLOURS)), channel))) for channel in _COLOURS.T)
    text_colour = "#fff" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "#1a1a1a"
    return f"background:#{red:02x}{green:02x}{blue:02x};color:{text_colour}"


def _caption(weights: TokenWeights) -> str:
    shares = shares_of([weights])
    parts = (f"{PLACE_NAMES[place]} {shares.weight[place]:.0%} ({shares.tokens[place]:.0%})" for place in PLACES)
    return f"share of the weight (of the tokens): {', '.join(parts)}"
