"""What each token of a text weighs in anchor-token-aware pooling, whatever pooling the model has."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common import InputError
from embeddings.common.mini_batches import plan_mini_batches
from embeddings.common.text import TextRole
from embeddings.data.tokenize import TextTokenizer, TokenSpan
from embeddings.inference.evaluating import evaluating

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
    prompt = embedder.text.prompt(prompt_name, role)
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    tokens, spans = tokenizer(texts, role, prompt), tokenizer.spans(texts, role, prompt)
    found: list[TokenWeights | None] = [None] * len(texts)
    with _tapped(embedder, pooling) as tap, evaluating(embedder), torch.inference_mode():
        for rows_n in plan_mini_batches(tokens.lengths_N, mini_batch_tokens):
            padded = tokens.padded(rows_n, embedder.pad_token_id)
            ids_nL, attention_nL, pooled_nL = (part.to(embedder.device) for part in padded)
            with tap.open() as layers:
                embedder.backbone(input_ids=ids_nL, attention_mask=attention_nL.long())
                weight_nL = pooling.weights(pooled_nL, attention_nL, layers()).float().cpu().numpy()
            for row, weight_L, pooled_L in zip(rows_n.tolist(), weight_nL, padded.pooling_mask_NL.numpy(), strict=True):
                length = len(spans[row])
                assert length == int(tokens.lengths_N[row])
                found[row] = TokenWeights(prompt + texts[row], spans[row], weight_L[:length], pooled_L[:length])
    return [weights for weights in found if weights is not None]


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
