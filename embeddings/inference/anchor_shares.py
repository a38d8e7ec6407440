"""Where anchor-token-aware pooling puts its weight: on the first token, the last one, punctuation, or the rest."""

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from embeddings.common import OptionError
from embeddings.common.text import TextRole
from embeddings.inference.token_weights import TokenWeights, token_weights

if TYPE_CHECKING:
    from embeddings.models.anchor_token import AnchorTokenPooling
    from embeddings.models.embedder import Embedder

Place = Literal["first", "last", "punctuation", "rest"]
PLACES: tuple[Place, ...] = get_args(Place)
# Texts that are weighed at once: what a corpus costs in memory.
TEXTS_PER_BLOCK = 1024


class AnchorShares(NamedTuple):
    """How much of the weight each kind of token has.

    Attributes:
        weight: Share of the weight by place, mean over texts; 1 in all.
        tokens: Share of the pooled tokens by place, mean over texts: what mean pooling would give.
        num_texts: How many texts.
    """

    weight: dict[Place, float]
    tokens: dict[Place, float]
    num_texts: int


def anchor_shares(
    embedder: "Embedder",
    texts: Sequence[str],
    pooling: "AnchorTokenPooling | None" = None,
    *,
    prompt_name: str | None = None,
    role: TextRole = "document",
    mini_batch_tokens: int = 4096,
) -> AnchorShares:
    """The mean shares of the weight over a corpus; every text counts alike, whatever its length.

    The places are told by the pooled tokens of a text, so that a prompt has none: the first token and the last one
    (`[CLS]` and `[SEP]` where a model has them), tokens between them that are punctuation alone, and the rest.

    Args:
        embedder: The model; it is left as found.
        texts: Texts without their prompts, at least one.
        pooling: Whose weights, as `token_weights` takes it, and the other arguments too.
        prompt_name: Which of the model's prompts goes before each text.
        role: Whose length limit holds.
        mini_batch_tokens: Most padded tokens of a mini-batch.

    Precision: means in float64.
    Raises:
        OptionError: If there is no text; and as `token_weights` does.
    Source: MGH, §5.2 and Fig. 5, which name the first token, punctuation and the last token as what weighs most.
    """
    if not texts:
        raise OptionError("texts", [], "must not be empty", "give a text")
    sums = np.zeros((2, len(PLACES)))
    for start in range(0, len(texts), TEXTS_PER_BLOCK):
        block = token_weights(
            embedder,
            texts[start : start + TEXTS_PER_BLOCK],
            pooling,
            prompt_name=prompt_name,
            role=role,
            mini_batch_tokens=mini_batch_tokens,
        )
        for weights in block:
            sums += _shares(weights)
    weight, tokens = (dict(zip(PLACES, row, strict=True)) for row in (sums / len(texts)).tolist())
    return AnchorShares(weight, tokens, len(texts))


def shares_of(weights: TokenWeights) -> AnchorShares:
    """The shares of one text."""
    weight, tokens = (dict(zip(PLACES, row, strict=True)) for row in _shares(weights).tolist())
    return AnchorShares(weight, tokens, 1)


def place_of(weights: TokenWeights) -> list[Place | None]:
    """The place of each token of a text, None where it is not pooled."""
    pooled = np.flatnonzero(weights.pooled_T)
    places: list[Place | None] = [None] * len(weights.spans)
    for index in pooled.tolist():
        span = weights.spans[index]
        is_punctuation = not span.is_special and _is_punctuation(weights.text[span.start : span.end])
        places[index] = "punctuation" if is_punctuation else "rest"
    places[pooled[-1]] = "last"
    places[pooled[0]] = "first"
    return places


def _shares(weights: TokenWeights) -> "np.typing.NDArray[np.float64]":
    """Shares of the weight and of the tokens by place, (2, places)."""
    places = place_of(weights)
    counts = np.array([[place == known for place in places] for known in PLACES], dtype=np.float64)
    return np.stack([counts @ weights.weight_T.astype(np.float64), counts.sum(axis=1) / weights.pooled_T.sum()])


def _is_punctuation(text: str) -> bool:
    """Whether a token's characters, white space aside, are punctuation in Unicode's sense."""
    marks = text.strip()
    return bool(marks) and all(unicodedata.category(mark).startswith("P") for mark in marks)
