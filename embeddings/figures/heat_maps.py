"""HTML pages of shaded cells: expert loads, latent weights, and texts whose tokens are shaded by weight."""

from collections.abc import Mapping, Sequence
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
    shown_NC, share_NR = row_NR[:, latents], row_NR.astype(np.float64)
    entropy_N = -(share_NR * np.log(np.maximum(share_NR, 1e-300))).sum(axis=1)
    statistics = {
        "others": [f"{max(0.0, 1 - shown):.1%}" for shown in shown_NC.sum(axis=1).tolist()],
        # The effective number of latents.
        "spread": [f"{number:.1f}" for number in np.exp(entropy_N).tolist()],
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


class Piece(NamedTuple):
    """A part of a text. `value` is a token's weight relative to the mean, None for what is not pooled."""

    text: str
    value: float | None = None
    hint: str = ""
    is_special: bool = False


def pieces_of(weights: TokenWeights) -> list[Piece]:
    """The complete text in order; byte-level tokens that share a character are one piece."""
    tokens: list[tuple[TokenSpan, list[int]]] = []
    for index, span in enumerate(weights.spans):
        last = tokens[-1][0] if tokens else None
        if last is not None and not (last.is_special or span.is_special) and span.start < last.end:
            both = last._replace(start=min(last.start, span.start), end=max(last.end, span.end))
            tokens[-1] = both, [*tokens[-1][1], index]
        else:
            tokens.append((span, [index]))
    pieces, end, num_pooled = list[Piece](), 0, int(np.count_nonzero(weights.pooled_T))
    for span, indices in tokens:
        weight, value, hint = float(weights.weight_T[indices].sum()), None, "not pooled" if span.is_special else ""
        if weights.pooled_T[indices].any():
            value = weight / len(indices) * num_pooled
            hint = f"weight {weight:.4f}, {value:.2f} times the mean"
        if span.is_special:
            share = "" if value is None else f"{weight:.1%}"
            pieces.append(Piece(f"{span.token} {share}", value, hint, True))
            continue
        text = weights.text[span.start : span.end]
        blank = len(text) - len(text.lstrip(" \t")) if text.strip() else 0
        pieces.append(Piece(weights.text[end : span.start + blank]))
        pieces.append(Piece(text[blank:].replace("\n", f"{LINE_BREAK}\n"), value, hint))
        end = max(end, span.end)
    rest = weights.text[end:]
    return [*pieces, Piece(f"{rest[:80]} …" if rest.strip() else "")]


def draw_anchor_tokens(texts: Sequence[TokenWeights], title: str, subtitle: str, output: Path) -> None:
    """Write an HTML page of texts whose pooled tokens are shaded by weight times the number of pooled tokens.

    Source: MGH, Fig. 5, lower part. Differs: shades are weights relative to their mean.
    """
    pieces_by_text = list(map(pieces_of, texts))
    max_value = max((piece.value or 0.0 for pieces in pieces_by_text for piece in pieces), default=0.0) or 1e-12
    # By the square root, so that small values differ beside one large one.
    shaded = [
        {
            "pieces": [
                (piece, "" if piece.value is None else _style((piece.value / max_value) ** 0.5)) for piece in pieces
            ],
            "caption": _caption(weights),
        }
        for pieces, weights in zip(pieces_by_text, texts, strict=True)
    ]
    meaning = (
        "weight of a token relative to the mean of its text's tokens (mean pooling: 1 for all), by the square root"
    )
    scale = {"largest": f"{max_value:.2g}", "meaning": meaning}
    write_page(output, "heat_maps.html", title=title, subtitle=subtitle, texts=shaded, scale=_scale(), **scale)


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
