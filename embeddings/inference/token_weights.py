"""What each token of a text weighs in anchor-token-aware pooling, whatever pooling the model has."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common import InputError
from embeddings.common.text import TextRole
from embeddings.data.tokenize import TokenSpan
from embeddings.inference.evaluating import evaluating
from embeddings.inference.spanned_batches import spanned_batches

if TYPE_CHECKING:
    from embeddings.models.anchor_token import AnchorTokenPooling
    from embeddings.models.attention_tap import AttentionTap
    from embeddings.models.embedder import Embedder


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """The tokens of one text and their weights.

    Attributes:
        text: Prompt and text as one string, which the spans count in.
        spans: Where each token lies in it, T of them.
        weight_T: Weight of each token, (T,) float32: 1 over the text, 0 where a token is not pooled.
        pooled_T: Whether the text settings let a token enter the pooling, (T,) bool: all but the prompt.
    """

    text: str
    spans: list[TokenSpan]
    weight_T: npt.NDArray[np.float32]
    pooled_T: npt.NDArray[np.bool_]


def token_weights(
    embedder: "Embedder",
    texts: Sequence[str],
    pooling: "AnchorTokenPooling | None" = None,
    *,
    prompt_name: str | None = None,
    role: TextRole = "document",
    mini_batch_tokens: int = 4096,
) -> list[TokenWeights]:
    """The weight of each token of each text, as `AnchorTokenPooling` gives it to the states of the last layer.

    Args:
        embedder: The model; it is left as found.
        texts: N texts without their prompts.
        pooling: Whose weights; None for the model's own pooling where that is one of anchor tokens, else for what such
            a pooling would give with its defaults.
        prompt_name: Which of the model's prompts goes before each text; None for the one of the role's name.
        role: Whose length limit holds.
        mini_batch_tokens: Most padded tokens of a mini-batch.

    Returns:
        N of them, in the order of the texts.

    Precision: the backbone in the format of its weights, the weights in float32.
    Raises:
        InputError: If the model is contextual.
        OptionError: If the backbone has no such layer or prompt, its attention cannot be read, or is causal where the
            key axis needs to see both ways.
    Source: MGH, §2.2, Eq. 2 to 4.
    """
    pooling = pooling or own_pooling(embedder) or default_pooling(embedder)
    found: dict[int, TokenWeights] = {}
    with _tapped(embedder, pooling) as tap, evaluating(embedder), torch.inference_mode():
        for batch in spanned_batches(embedder, texts, prompt_name, role, mini_batch_tokens):
            with tap.open() as layers:
                embedder.backbone(input_ids=batch.ids_nL, attention_mask=batch.attention_nL.long())
                weight_nL = pooling.weights(batch.pooled_nL, batch.attention_nL, layers()).float().cpu().numpy()
            for one, weight_L, pooled_L in zip(batch.texts, weight_nL, batch.pooled_nL.cpu().numpy(), strict=True):
                length = len(one.spans)
                found[one.row] = TokenWeights(one.text, one.spans, weight_L[:length], pooled_L[:length])
    return [found[row] for row in range(len(texts))]


def own_pooling(embedder: "Embedder") -> "AnchorTokenPooling | None":
    """The model's own pooling where that is one of anchor tokens."""
    from embeddings.models.anchor_token import AnchorTokenPooling

    return embedder.pooling if isinstance(embedder.pooling, AnchorTokenPooling) else None


def default_pooling(embedder: "Embedder") -> "AnchorTokenPooling":
    """Anchor-token-aware pooling with its defaults, as wide as the model."""
    from embeddings.models.anchor_token import AnchorTokenPooling

    return AnchorTokenPooling(embedder.hidden_size)


@contextmanager
def _tapped(embedder: "Embedder", pooling: "AnchorTokenPooling") -> Iterator["AttentionTap"]:
    """A tap of the pooling's layers, in the place of the model's own."""
    from embeddings.models.contextual import ContextualEmbedder
    from embeddings.models.embedder import tap_of

    if isinstance(embedder, ContextualEmbedder):
        what = "is contextual, and anchor weights are of a model that reads each text alone"
        raise InputError("the model", what, "use a model without a context")
    own = embedder.tap
    if own is not None:
        own.detach()
    try:
        tap = tap_of(embedder.backbone, pooling)
        assert tap is not None
        try:
            yield tap
        finally:
            tap.detach()
    finally:
        if own is not None:
            own.attach()
