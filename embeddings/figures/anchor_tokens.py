"""Texts with their tokens shaded by their weight in anchor-token-aware pooling, as an HTML page: MGH's Fig. 5."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embeddings.figures.drawing import LINE_BREAK, write_page
from embeddings.inference.inspection import PLACES, Place, TokenWeights, shares_of

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
