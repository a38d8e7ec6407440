"""What a model attends to, uses and leaves out: heat maps of experts, latents and zeros, and texts with shaded tokens.

Each `draw_…` function takes a title, a subtitle and the file to write. A heat map is a PNG file and needs matplotlib
(else `MissingExtraError`); the texts, shaded by anchor-token-aware pooling as in MGH's Fig. 5, are an HTML page.
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

# With more experts the cells are narrow and hold no numbers.
MAX_NUMBERED = 32
# matplotlib draws no picture of 65,536 pixels' width or height.
MAX_EXPERTS = 4096
MAX_ROWS = 1000
MAX_COLUMNS = 64
MEAN = "mean"
SPACE = "␣"
_MAX_TOKEN_NAME = 18
_NAME_SIZE = 9.0


def draw_expert_loads(loads: ExpertLoads, title: str, subtitle: str, output: Path) -> None:
    """Draw a row a sparse layer and a column an expert, the darker a cell the more of the layer's tokens it has.

    Beside each row are its entropy (1: all experts loaded alike), the busiest expert's tokens over an even share, and
    the number of experts that have none. More experts than a picture has room for are an `InputError`.
    """
    num_layers, num_experts = loads.count_YX.shape
    if num_experts > MAX_EXPERTS:
        what = f"has {num_experts} experts a layer, and a picture has room for {MAX_EXPERTS}"
        raise InputError("the model", what, "draw one with fewer")
    cell = 0.64 if num_experts <= 16 else 0.46 if num_experts <= MAX_NUMBERED else max(0.03, 9 / num_experts)
    width = max(9.0, num_experts * cell + 3.2)
    figure, axis = pyplot().subplots(figsize=(width, num_layers * 0.4 + 2.4), layout="constrained")
    share_YX = loads.share_YX.numpy()
    # An even share has a middle shade: with a smaller maximum an even picture would look uneven.
    most = min(1.0, max(float(share_YX.max()), 2 / num_experts))
    step = 1 if num_experts <= MAX_NUMBERED else max(1, 2 ** ((num_experts - 1).bit_length() - 4))
    ticks = range(0, num_experts, step)
    image = _draw_map(axis, share_YX, list(map(str, loads.layers)), ticks, most, is_gridded=num_experts <= 64)
    axis.set_xlabel("expert", size=9)
    axis.set_ylabel("layer", size=9)
    if num_experts <= MAX_NUMBERED:
        _write_cells(axis, share_YX, most, "idle", 8.5 if num_experts <= 16 else 7.0)
    load = load_metrics(loads.count_YX)
    rows = zip(load.entropy_Y.tolist(), load.highest_Y.tolist(), load.idle_Y.tolist(), strict=True)
    cells = [(f"{entropy:.3f}", f"{highest:.2f}", f"{idle}") for entropy, highest, idle in rows]
    _write_statistics(axis, ("load\nentropy", "busiest\n/ even", "idle\nexperts"), cells)
    _draw_scale(figure, image, [axis], "share of a layer's assignments", 1 / num_experts)
    write_heading(figure, axis, title, subtitle, int(width * 10))
    write_png(figure, output)


def draw_zeros(zeros: Sequence[MatrixZeros], title: str, subtitle: str, output: Path) -> None:
    """Draw a row a layer and a column a matrix, the darker a cell the larger the share of zeros; beside it the layer's.

    More layers or matrices than a picture has room for are an `InputError`.
    """
    layers = list(dict.fromkeys(found.layer for found in zeros))
    names = list(dict.fromkeys(found.name for found in zeros))
    if len(layers) > MAX_ROWS or len(names) > MAX_COLUMNS:
        what = f"has {len(layers)} layers of {len(names)} matrices, and a picture has room for {MAX_ROWS}"
        raise InputError("the model", f"{what} of {MAX_COLUMNS}", "draw one with fewer")
    share_NC = np.full((len(layers), len(names)), np.nan)
    for found in zeros:
        share_NC[layers.index(found.layer), names.index(found.name)] = found.fraction
    width = max(9.0, len(names) * 0.8 + 3.0)
    figure, axis = pyplot().subplots(figsize=(width, len(layers) * 0.32 + 3.6), layout="constrained")
    image = _draw_map(axis, share_NC, list(map(str, layers)), range(len(names)), 1.0)
    axis.set_xticks(range(len(names)), labels=names, parse_math=False, size=8, rotation=30, ha="right")
    axis.set_ylabel("layer", size=9)
    _write_cells(axis, share_NC, 1.0, "0.0%", 8.0)
    _write_statistics(axis, ("of the\nlayer",), [(f"{share:.1%}",) for share in layer_shares(zeros).values()])
    scale = figure.colorbar(image, ax=[axis], location="bottom", shrink=0.4, aspect=40, anchor=(0.0, 0.5), pad=0.02)
    scale.set_ticks([0.0, 0.5, 1.0], labels=["0%", "50%", "100%"])
    scale.set_label("share of a matrix's weights that are zero", size=8.5, color=GREY, loc="left")
    scale.outline.set_visible(False)
    write_heading(figure, axis, title, subtitle, int(width * 10))
    write_png(figure, output)


def layer_shares(zeros: Sequence[MatrixZeros]) -> dict[int, float]:
    """The share of zeros among all weights of each layer's matrices, by layer."""
    counts: dict[int, tuple[int, int]] = {}
    for found in zeros:
        num_zeros, num_weights = counts.get(found.layer, (0, 0))
        counts[found.layer] = num_zeros + found.num_zeros, num_weights + found.num_weights
    return {layer: num_zeros / num_weights for layer, (num_zeros, num_weights) in counts.items()}


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
    """A token's characters in the text, or its own name where it has none."""
    return span.token if span.is_special else text[span.start : span.end].strip() or SPACE


def draw_latent_weights(
    texts: Sequence[LatentWeights], num_columns: int, title: str, subtitle: str, output: Path
) -> None:
    """Draw a heat map a text: a row a token, a column a latent, the darker a cell the larger the weight.

    The `num_columns` busiest latents over all texts have a column, so that texts compare. Beside each row are the sum
    of the other latents, and over how many latents its weight is spread. The last row is the mean over the text's
    tokens, which is the paper's row. More tokens than a picture has room for are an `InputError`.

    Source: NV-Embed, appendix D, Fig. 2. Differs: a row a token, and heads averaged or one of them; for the paper's own
        picture see `draw_latents_by_text`.
    """
    num_rows = sum(len(weights.spans) + 1 for weights in texts)
    if num_rows > MAX_ROWS:
        raise InputError("TEXT", f"needs {num_rows} rows, and a picture has room for {MAX_ROWS}", "give shorter texts")
    latents = busiest_latents(texts, num_columns)
    names = [[*(drawn_label(token_name(w.text, span), _MAX_TOKEN_NAME) for span in w.spans), MEAN] for w in texts]
    captions = [drawn_label(weights.text, 100) for weights in texts]
    width = max(9.0, len(latents) * 0.3 + 4)
    size = (width, 0.21 * num_rows + 0.9 * len(texts) + 1.8)
    figure, axes = pyplot().subplots(
        len(texts), 1, figsize=size, layout="constrained", squeeze=False, height_ratios=[*map(len, names)]
    )
    num_latents = texts[0].weight_TR.shape[1]
    most = min(1.0, max(2 / num_latents, *(float(weights.weight_TR.max()) for weights in texts)))
    for axis, weights, own, caption in zip(axes[:, 0], texts, names, captions, strict=True):
        rows_NR = np.concatenate([weights.weight_TR, weights.mean_R[None]])
        image = _draw_map(axis, rows_NR[:, latents], own, range(len(latents)), most, columns=latents)
        axis.xaxis.tick_top()
        axis.axhline(len(own) - 1.5, color=GREY, linewidth=1.0)
        axis.get_yticklabels()[-1].set(weight="bold")
        axis.set_xlabel(caption, size=_NAME_SIZE, loc="left", parse_math=False)
        others = np.maximum(0.0, 1 - rows_NR[:, latents].sum(axis=1))
        cells = [(f"{rest:.1%}", f"{spread(weight_R):.1f}") for rest, weight_R in zip(others, rows_NR, strict=True)]
        _write_statistics(axis, ("others", "spread"), cells)
    _draw_scale(figure, image, list(axes[:, 0]), "share of a token's attention", 1 / num_latents)
    write_heading(figure, axes[0, 0], title, subtitle, int(width * 10))
    write_png(figure, output)


def draw_latents_by_text(texts: Sequence[LatentWeights], title: str, subtitle: str, output: Path) -> None:
    """Draw one heat map: a row a text, a column each latent of each head in order, the mean over the text's tokens.

    More texts than a picture has room for are an `InputError`.
    Source: NV-Embed, appendix D, Fig. 2: 20 reviews by 4,096 columns, 512 latents in each of 8 heads.
    """
    if len(texts) > MAX_ROWS:
        raise InputError("TEXT", f"are {len(texts)}, and a picture has room for {MAX_ROWS}", "give fewer texts")
    num_heads, num_latents = texts[0].mean_AR.shape
    rows_NC = np.stack([weights.mean_AR.reshape(-1) for weights in texts])
    names = [drawn_label(weights.text, 2 * _MAX_TOKEN_NAME) for weights in texts]
    figure, axis = pyplot().subplots(figsize=(12, 2.2 + 0.24 * len(texts)), layout="constrained", facecolor="white")
    # Linear from 0 to the largest weight: most latents get almost nothing of most texts.
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
    most: float,
    *,
    columns: Sequence[int] | None = None,
    is_gridded: bool = True,
) -> Any:
    """A heat map of shares with its rows and some columns named; returns the image."""
    image = axis.imshow(share_NC, cmap=shades(), vmin=0.0, vmax=most, aspect="auto", interpolation="nearest")
    axis.set_xticks(ticks, labels=[str(tick if columns is None else columns[tick]) for tick in ticks], size=8)
    axis.set_yticks(range(len(names)), labels=names, size=_NAME_SIZE, parse_math=False)
    axis.tick_params(colors=BLACK, length=0)
    axis.set_xticks([place - 0.5 for place in range(1, share_NC.shape[1])] if is_gridded else [], minor=True)
    axis.set_yticks([place - 0.5 for place in range(1, len(names))], minor=True)
    axis.grid(which="minor", color=EDGE, linewidth=0.7)
    axis.tick_params(which="minor", length=0)
    for spine in axis.spines.values():
        spine.set(color=EDGE, linewidth=0.8)
    return image


def _write_cells(axis: Any, share_NC: npt.NDArray[Any], most: float, zero: str, size: float) -> None:
    """The share in each cell that has one, in letters that can be read on its shade; `zero` where it is 0."""
    for row, column in np.argwhere(np.isfinite(share_NC)):
        share = float(share_NC[row, column])
        colour = "white" if is_dark(shades()(share / most)) else BLACK if share else GREY
        axis.text(column, row, f"{share:.1%}" if share else zero, size=size, ha="center", va="center", color=colour)


def _write_statistics(axis: Any, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns of numbers at the right of a heat map, with their names above."""
    for column in range(len(names)):
        offset = {"xytext": (32 + 54 * column, 0), "textcoords": "offset points", "ha": "center"}
        axis.annotate(names[column], (1, 1), xycoords="axes fraction", size=8.5, color=GREY, va="bottom", **offset)
        for row, cells in enumerate(rows):
            axis.annotate(cells[column], (1, row), xycoords=("axes fraction", "data"), size=8.5, va="center", **offset)


def _draw_scale(figure: Any, image: Any, axes: list[Any], label: str, even: float) -> None:
    """The colours of a heat map of shares, with the even share marked."""
    scale = figure.colorbar(image, ax=axes, location="bottom", shrink=0.4, aspect=40, anchor=(0.0, 0.5), pad=0.02)
    most = image.get_clim()[1]
    # Labels need room: the even share is in the bar's own label too.
    ticks = [0.0, *([even] if 0.12 * most < even < most else []), most]
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
    """Tokens that share their characters, nearly always one: their text, its place, the sum of their weights.

    The text is the token's name where it is special (`[CLS]`), outside the text.
    """

    text: str
    start: int
    end: int
    weight: float
    num_tokens: int
    is_special: bool
    is_pooled: bool


def weighted_pieces(weights: TokenWeights) -> list[WeightedPiece]:
    """The tokens of a text as its own characters, in order; byte-level ones that share a character are one."""
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
    """Write an HTML page of texts with their tokens shaded by weight, all on one scale.

    A token's shade is its weight times the number of pooled tokens, so that texts of different lengths compare. Tokens
    outside the pooling, such as a prompt's, have no shade.

    Source: MGH, Fig. 5, lower part. Differs: the shades are of weights over their mean.
    """
    shaded = [list(_pieces(weights)) for weights in texts]
    most = max((piece["value"] or 0.0 for pieces in shaded for piece in pieces), default=0.0) or 1e-12
    for piece in (piece for pieces in shaded for piece in pieces if piece["value"] is not None):
        piece["style"] = _style(piece["value"] / most)
    scale = [_style((step / _SCALE_STEPS) ** 2) for step in range(_SCALE_STEPS + 1)]
    shown = [{"pieces": pieces, "caption": _caption(weights)} for pieces, weights in zip(shaded, texts, strict=True)]
    heading = {"title": title, "subtitle": subtitle}
    write_page(output, "anchor_tokens.html", **heading, texts=shown, scale=scale, most=f"{most:.2g}")


def _pieces(weights: TokenWeights) -> Iterator[dict[str, Any]]:
    """All of the text in order: tokens with their value, what is between them, and special tokens with their share."""
    place, num_pooled = 0, int(np.count_nonzero(weights.pooled_T))
    for piece in weighted_pieces(weights):
        value = piece.weight / piece.num_tokens * num_pooled if piece.is_pooled else None
        hint = f"weight {piece.weight:.4f}, {value:.2f} times the mean" if value is not None else "not pooled"
        shown: dict[str, Any] = {"value": value, "is_special": piece.is_special, "hint": hint, "style": ""}
        if piece.is_special:
            yield {**shown, "text": piece.text, "share": f"{piece.weight:.1%}" if piece.is_pooled else ""}
            continue
        letters = weights.text[piece.start : piece.end]
        blank = len(letters) - len(letters.lstrip(" \t")) if letters.strip() else 0
        yield {"value": None, "is_special": False, "hint": "", "text": weights.text[place : piece.start + blank]}
        yield {**shown, "text": letters[blank:].replace("\n", f"{LINE_BREAK}\n")}
        place = max(place, piece.end)
    rest = weights.text[place:]
    yield {"value": None, "is_special": False, "hint": "", "text": f"{rest[:80]} …" if rest.strip() else ""}


def _style(share: float) -> str:
    """Background and letters of a value from 0 to 1, by its square root: one large value leaves the others apart."""
    place = min(1.0, max(0.0, share)) ** 0.5 * (len(_COLOURS) - 1)
    red, green, blue = (round(float(np.interp(place, range(len(_COLOURS)), channel))) for channel in _COLOURS.T)
    letters = "#fff" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "#1a1a1a"
    return f"background:#{red:02x}{green:02x}{blue:02x};color:{letters}"


def _caption(weights: TokenWeights) -> str:
    shares = shares_of([weights])
    each = (f"{PLACE_NAMES[place]} {shares.weight[place]:.0%} ({shares.tokens[place]:.0%})" for place in PLACES)
    return f"share of the weight (of the tokens): {', '.join(each)}"
