"""HTML pages of shaded cells: expert loads, latent weights, and texts whose tokens are shaded by weight."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.data.tokenize import TokenSpan
from embeddings.figures.drawing import write_page
from embeddings.inference.inspection import PLACES, ExpertLoads, LatentWeights, Place, TokenWeights, shares_of
from embeddings.models.moe.upcycling import load_metrics

MEAN = "mean"
SPACE, LINE_BREAK = "␣", "↵"


class HeatMap(NamedTuple):
    """A table of shares, (N, C): a name for each row and column, and further columns of text by name."""

    caption: str
    rows: Sequence[object]
    columns: Sequence[object]
    share_NC: npt.NDArray[Any]
    statistics: Mapping[str, Sequence[str]]


def write_heat_maps(maps: Sequence[HeatMap], even: float, title: str, subtitle: str, output: Path) -> None:
    """Write an HTML page of heat maps on one scale, on which the even share has at most the middle shade."""
    max_share = min(1.0, max(2 * even, *(float(each.share_NC.max()) for each in maps)))
    tables = [
        {
            **each._asdict(),
            "cells": [[(f"{share:.1%}", _style(share / max_share)) for share in row] for row in each.share_NC.tolist()],
        }
        for each in maps
    ]
    scale = {"largest": f"{max_share:.1%}", "meaning": f"an even share is {even:.1%}"}
    write_page(output, "heat_maps.html", title=title, subtitle=subtitle, tables=tables, scale=_scale(), **scale)


def expert_map(loads: ExpertLoads) -> HeatMap:
    """The share of each sparse layer's assignments per expert; an entropy of 1 means that all are loaded equally."""
    load = load_metrics(loads.count_YX)
    statistics = {
        "entropy": [f"{entropy:.3f}" for entropy in load.entropy_Y.tolist()],
        "busiest/even": [f"{highest:.2f}" for highest in load.highest_Y.tolist()],
        "idle": [str(int(idle)) for idle in load.idle_Y.tolist()],
    }
    return HeatMap("", loads.layers, range(loads.count_YX.shape[1]), loads.share_YX.numpy(), statistics)


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
    return span.token if span.is_special else text[span.start : span.end].strip() or SPACE


def latent_maps(texts: Sequence[LatentWeights], num_columns: int) -> list[HeatMap]:
    """The attention of each text's tokens, and their mean, to the `num_columns` busiest latents of all texts.

    Source: NV-Embed, appendix D, Fig. 2. Differs: rows are tokens, of one head or the mean of all.
    """
    latents, maps = busiest_latents(texts, num_columns), []
    for weights in texts:
        names = [*(token_name(weights.text, span) for span in weights.spans), MEAN]
        row_NR = np.concatenate([weights.weight_TR, weights.mean_R[None]])
        maps.append(_latent_map(weights.text, names, row_NR, latents))
    return maps


def text_map(texts: Sequence[LatentWeights], num_columns: int) -> HeatMap:
    """As `latent_maps`, with one row per text: the mean over its tokens (NV-Embed, appendix D, Fig. 2)."""
    row_NR = np.stack([weights.mean_R for weights in texts])
    return _latent_map("", [weights.text for weights in texts], row_NR, busiest_latents(texts, num_columns))


def _latent_map(caption: str, names: Sequence[str], row_NR: npt.NDArray[np.float32], latents: list[int]) -> HeatMap:
    shown_NC = row_NR[:, latents]
    statistics = {
        "others": [f"{max(0.0, 1 - shown):.1%}" for shown in shown_NC.sum(axis=1).tolist()],
        "spread": [f"{spread(weight_R):.1f}" for weight_R in row_NR],
    }
    return HeatMap(caption, names, latents, shown_NC, statistics)


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
    """A token, or several that share characters: their text (a special token's name), position and sum of weights."""

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
    """Write an HTML page of texts whose pooled tokens are shaded by weight times the number of pooled tokens.

    Source: MGH, Fig. 5, lower part. Differs: shades are weights relative to their mean.
    """
    shaded = [list(_pieces(weights)) for weights in texts]
    max_value = max((piece["value"] or 0.0 for pieces in shaded for piece in pieces), default=0.0) or 1e-12
    for piece in (piece for pieces in shaded for piece in pieces if piece["value"] is not None):
        # By the square root, so that small values differ beside one large one.
        piece["style"] = _style((piece["value"] / max_value) ** 0.5)
    captioned = [{"pieces": pieces, "caption": _caption(text)} for pieces, text in zip(shaded, texts, strict=True)]
    meaning = (
        "weight of a token relative to the mean of its text's tokens (mean pooling: 1 for all), by the square root"
    )
    scale = {"largest": f"{max_value:.2g}", "meaning": meaning}
    write_page(output, "heat_maps.html", title=title, subtitle=subtitle, texts=captioned, scale=_scale(), **scale)


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


def _scale() -> list[str]:
    return [_style(step / _SCALE_STEPS) for step in range(_SCALE_STEPS + 1)]


def _style(share: float) -> str:
    """CSS colours of a value from 0 to 1."""
    position = min(1.0, max(0.0, share)) * (len(_COLOURS) - 1)
    red, green, blue = (round(float(np.interp(position, range(len(_COLOURS)), channel))) for channel in _COLOURS.T)
    text_colour = "#fff" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "#1a1a1a"
    return f"background:#{red:02x}{green:02x}{blue:02x};color:{text_colour}"


def _caption(weights: TokenWeights) -> str:
    shares = shares_of([weights])
    parts = (f"{PLACE_NAMES[place]} {shares.weight[place]:.0%} ({shares.tokens[place]:.0%})" for place in PLACES)
    return f"share of the weight (of the tokens): {', '.join(parts)}"
