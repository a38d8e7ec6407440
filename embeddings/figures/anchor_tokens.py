"""A sentence with its tokens shaded by their weight in anchor-token-aware pooling: MGH's Fig. 5."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from embeddings.figures.shaded_text import ShadedPiece, ShadedText, draw_shaded_texts
from embeddings.inference.inspection import PLACES, Place, TokenWeights, shares_of

PLACE_NAMES: dict[Place, str] = {
    "first": "first token",
    "last": "last token",
    "punctuation": "punctuation",
    "rest": "everything else",
}
LABEL = "weight of a token over the mean of its text's tokens (mean pooling: 1 for all)"
SPACE = "␣"


class WeightedPiece(NamedTuple):
    """Tokens that share their characters; nearly always one.

    Attributes:
        text: The characters of the text, or the token's name where it has none.
        start: Its first character's place in the text, from 0.
        end: The place after the last one.
        weight: Sum of their weights.
        num_tokens: How many they are: more than one where a character is split over tokens.
        is_special: Whether it is a token beside the text (`[CLS]`).
        is_pooled: Whether it enters the pooling.
    """

    text: str
    start: int
    end: int
    weight: float
    num_tokens: int
    is_special: bool
    is_pooled: bool


def weighted_pieces(weights: TokenWeights) -> list[WeightedPiece]:
    """The tokens of a text as its own characters, in the order of the tokens.

    Tokens of one character, as byte-level tokenizers make them, are one piece.
    """
    pieces: list[WeightedPiece] = []
    rows = zip(weights.spans, weights.weight_T.tolist(), weights.pooled_T.tolist(), strict=True)
    for span, weight, is_pooled in rows:
        last = pieces[-1] if pieces else None
        shares = last is not None and not (last.is_special or span.is_special) and span.start < last.end
        if last is not None and shares:
            pieces.pop()
            start, end = min(last.start, span.start), max(last.end, span.end)
            count, total, is_pooled = last.num_tokens + 1, last.weight + weight, last.is_pooled or is_pooled
        else:
            (start, end), count, total = span[1:3], 1, weight
        text = span.token if span.is_special else weights.text[start:end]
        pieces.append(WeightedPiece(text, start, end, total, count, span.is_special, is_pooled))
    return pieces


def draw_anchor_tokens(texts: Sequence[TokenWeights], title: str, subtitle: str, output: Path) -> None:
    """Draw texts with their tokens shaded by weight, all on one scale.

    A token's shade is its weight times the number of pooled tokens, so that texts of unlike length compare; tokens
    outside the pooling, a prompt's, have none.

    Args:
        texts: The texts with their weights.
        title: The line above all.
        subtitle: What else is to be known of the weights.
        output: The PNG file to write.

    Raises:
        InputError: If the texts fill more lines than a picture has room for.
        MissingExtraError: If matplotlib is not installed.
    Source: MGH, Fig. 5, lower part. Differs: the shades are of weights over their mean.
    """
    shaded = [ShadedText(shaded_pieces(weights), _caption(weights)) for weights in texts]
    draw_shaded_texts(shaded, title, subtitle, LABEL, output)


def shaded_pieces(weights: TokenWeights) -> list[ShadedPiece]:
    """The whole text in order: tokens and their shade, what lies between them, special tokens and their percentage."""
    found: list[ShadedPiece] = []
    place, num_pooled = 0, int(np.count_nonzero(weights.pooled_T))
    for piece in weighted_pieces(weights):
        shade = piece.weight / piece.num_tokens * num_pooled if piece.is_pooled else None
        if piece.is_special:
            name = f" {piece.text} {piece.weight:.1%} " if piece.is_pooled else piece.text
            found += [ShadedPiece(" ", None), ShadedPiece(name, shade, is_special=True), ShadedPiece(" ", None)]
            continue
        letters = weights.text[piece.start : piece.end]
        own = letters.strip(" \t")
        if own:
            between = letters[: letters.index(own)]
            found.append(ShadedPiece(weights.text[place : piece.start] + between, None))
        else:
            found.append(ShadedPiece(weights.text[place : piece.start], None))
        found.append(ShadedPiece(own or SPACE, shade))
        place = max(place, piece.start + len(letters.rstrip(" \t")) if own else piece.end)
    rest = weights.text[place:].strip()
    return [piece for piece in found if piece.text] + ([ShadedPiece(" …", None)] if rest else [])


def _caption(weights: TokenWeights) -> str:
    shares = shares_of(weights)
    each = (f"{PLACE_NAMES[place]} {shares.weight[place]:.0%} ({shares.tokens[place]:.0%})" for place in PLACES)
    return f"share of the weight (of the tokens): {', '.join(each)}"
