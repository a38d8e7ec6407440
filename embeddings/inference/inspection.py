"""Inspection of models: pooling weights of tokens, loads of experts, and the effect of contexts on vectors."""

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common import InputError, OptionError
from embeddings.common.text import TextRole
from embeddings.common.types import PaddedTokens, plan_mini_batches
from embeddings.data.tokenize import TextTokenizer, TokenSpan
from embeddings.inference.encoder import Context, Encoder, Vectors, unit_rows
from embeddings.models.anchor_token import AnchorTokenPooling
from embeddings.models.attention_capture import AttentionCapture
from embeddings.models.contextual import ContextualEmbedder
from embeddings.models.embedder import Embedder, capture_of
from embeddings.models.latent_attention import LatentAttentionPooling
from embeddings.models.moe.upcycling import COUNTS, has_experts, moe_layers, read_routing
from embeddings.models.pooling import evaluating, plain_backbone
from embeddings.models.poolings import pooling_name


class SpannedText(NamedTuple):
    """A text of a mini-batch: its row among all texts, prompt and text as one string, and the spans of its tokens."""

    row: int
    text: str
    spans: list[TokenSpan]


def spanned_batches(
    embedder: Embedder, texts: Sequence[str], prompt_name: str | None, role: TextRole, mini_batch_tokens: int
) -> Iterator[tuple[list[SpannedText], PaddedTokens]]:
    """Tokenise texts with a prompt of the model, and yield padded mini-batches on its device."""
    prompt = embedder.text.prompt(prompt_name, role)
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    tokens, spans = tokenizer(texts, role, prompt), tokenizer.spans(texts, role, prompt)
    for rows_n in plan_mini_batches(tokens.lengths_N, mini_batch_tokens):
        batch = [SpannedText(row, prompt + texts[row], spans[row]) for row in rows_n.tolist()]
        padded = tokens.padded(rows_n, embedder.pad_token_id)
        yield batch, PaddedTokens(*(tensor.to(embedder.device) for tensor in padded))


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """The tokens of one text and their weights.

    Attributes:
        text: Prompt and text as one string, to which the spans refer.
        spans: Position of each of the T tokens in it.
        weight_T: Weight of each token, (T,) float32; they sum to 1, and are 0 for tokens that are not pooled.
        pooled_T: Whether a token is pooled, (T,) bool: all except the prompt.
    """

    text: str
    spans: list[TokenSpan]
    weight_T: npt.NDArray[np.float32]
    pooled_T: npt.NDArray[np.bool_]


def token_weights(
    embedder: Embedder,
    texts: Sequence[str],
    pooling: AnchorTokenPooling | None = None,
    *,
    prompt_name: str | None = None,
    role: TextRole = "document",
    mini_batch_tokens: int = 4096,
) -> list[TokenWeights]:
    """The weight that `AnchorTokenPooling` assigns to each token of each text, for the states of the last layer.

    Args:
        embedder: The model; it is not changed.
        texts: Texts without prompts; the result has the same order.
        pooling: The pooling that computes the weights; None for the model's anchor-token pooling, or a default one.
        prompt_name: Name of the model's prompt to put before each text; None for the prompt named like the role.
        role: Role whose length limit is used.
        mini_batch_tokens: Maximum padded tokens of a mini-batch.

    Source: MGH, §2.2, Eq. 2 to 4.
    """
    model_pooling = embedder.pooling if isinstance(embedder.pooling, AnchorTokenPooling) else None
    pooling = pooling or model_pooling or AnchorTokenPooling(embedder.hidden_size)
    weights_by_row: dict[int, TokenWeights] = {}
    with _attention_capture(embedder, pooling) as capture, evaluating(embedder), torch.inference_mode():
        for batch, (ids_nL, attention_nL, pooled_nL) in spanned_batches(
            embedder, texts, prompt_name, role, mini_batch_tokens
        ):
            with capture.open() as layers:
                embedder.backbone(input_ids=ids_nL, attention_mask=attention_nL.long())
                weight_nL = pooling.weights(pooled_nL, attention_nL, layers()).float().cpu().numpy()
            for spanned, weight_L, pooled_L in zip(batch, weight_nL, pooled_nL.cpu().numpy(), strict=True):
                row, text, spans = spanned
                weights_by_row[row] = TokenWeights(text, spans, weight_L[: len(spans)], pooled_L[: len(spans)])
    return [weights_by_row[row] for row in range(len(texts))]


@contextmanager
def _attention_capture(embedder: Embedder, pooling: AnchorTokenPooling) -> Iterator[AttentionCapture]:
    """Capture the attention of the pooling's layers, with the model's own capture detached."""
    if isinstance(embedder, ContextualEmbedder):
        what = "is contextual, but anchor weights need a model that reads each text alone"
        raise InputError("the model", what, "use a model without a context")
    with ExitStack() as stack:
        if embedder.capture is not None:
            embedder.capture.detach()
            stack.callback(embedder.capture.attach)
        capture = capture_of(embedder.backbone, pooling)
        assert capture is not None
        stack.callback(capture.detach)
        yield capture


Place = Literal["first", "last", "punctuation", "rest"]
PLACES: tuple[Place, ...] = get_args(Place)


class AnchorShares(NamedTuple):
    """Mean shares by kind of token: of the weight, and of the number of pooled tokens (the share in mean pooling)."""

    weight: dict[Place, float]
    tokens: dict[Place, float]


def shares_of(texts: Sequence[TokenWeights]) -> AnchorShares:
    """The mean shares over one or more texts; every text counts equally, regardless of its length.

    Source: MGH, §5.2 and Fig. 5, where the first token, punctuation and the last token have the largest weights.
    """
    sums = np.zeros((2, len(PLACES)))
    for weights in texts:
        places = place_of(weights)
        counts = np.array([[place == known for place in places] for known in PLACES], dtype=np.float64)
        sums += counts @ weights.weight_T.astype(np.float64), counts.sum(axis=1) / weights.pooled_T.sum()
    weight, tokens = (dict(zip(PLACES, row, strict=True)) for row in (sums / len(texts)).tolist())
    return AnchorShares(weight, tokens)


def place_of(weights: TokenWeights) -> list[Place | None]:
    """The kind of each token of a text, None if it is not pooled."""
    pooled = np.flatnonzero(weights.pooled_T)
    places: list[Place | None] = [None] * len(weights.spans)
    for index in pooled.tolist():
        span = weights.spans[index]
        marks = "" if span.is_special else weights.text[span.start : span.end].strip()
        is_punctuation = all(unicodedata.category(mark).startswith("P") for mark in marks)
        places[index] = "punctuation" if marks and is_punctuation else "rest"
    places[pooled[-1]] = "last"
    places[pooled[0]] = "first"
    return places


@dataclass(frozen=True, eq=False)
class LatentWeights:
    """The tokens of one text and their attention to the latents.

    Attributes:
        text: Prompt and text as one string, to which the spans refer.
        spans: Position of each of the T pooled tokens in it; other tokens, such as the prompt, do not attend.
        weight_TR: Attention of each token to the R latents in one head, or the mean over the heads, (T, R) float32.
    """

    text: str
    spans: list[TokenSpan]
    weight_TR: npt.NDArray[np.float32]

    @property
    def mean_R(self) -> npt.NDArray[np.float32]:
        """The mean over the tokens, (R,)."""
        return np.asarray(self.weight_TR.mean(axis=0))


def latent_weights(
    embedder: Embedder,
    texts: Sequence[str],
    *,
    head: int | None = None,
    prompt_name: str | None = None,
    role: TextRole = "document",
    mini_batch_tokens: int = 4096,
) -> list[LatentWeights]:
    """The attention of each token of each text to the latents; the arguments are those of `token_weights`.

    `head` selects one head, from 0; None for the mean over the heads.

    Source: NV-Embed, §3.2, Eq. 1, and appendix D.
    """
    pooling = latent_pooling(embedder)
    if head is not None and not 0 <= head < pooling.num_heads:
        rule = f"must be from 0 to {pooling.num_heads - 1}: the model has {pooling.num_heads} heads"
        raise OptionError("head", head, rule, "leave it out for the mean over the heads")
    weights_by_row: dict[int, LatentWeights] = {}
    with evaluating(embedder), torch.inference_mode():
        for batch, (ids_nL, attention_nL, pooled_nL) in spanned_batches(
            embedder, texts, prompt_name, role, mini_batch_tokens
        ):
            state_nLH = embedder.backbone(input_ids=ids_nL, attention_mask=attention_nL.long()).last_hidden_state
            for spanned, state_LH, pooled_L in zip(batch, state_nLH, pooled_nL, strict=True):
                weight_ATR = pooling.weights(state_LH[pooled_L]).float().cpu().numpy()
                weight_TR = weight_ATR.mean(axis=0) if head is None else weight_ATR[head]
                pooled_spans = [*compress(spanned.spans, pooled_L.tolist())]
                weights_by_row[spanned.row] = LatentWeights(spanned.text, pooled_spans, weight_TR)
    return [weights_by_row[row] for row in range(len(texts))]


def latent_pooling(embedder: Embedder) -> LatentAttentionPooling:
    if not isinstance(embedder.pooling, LatentAttentionPooling):
        name = pooling_name(embedder.pooling).replace("_", "-")
        raise InputError("the model", f"has {name} pooling, without latents", "use one with latent-attention pooling")
    return embedder.pooling


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """The number of tokens that the router sent to each expert of each sparse layer.

    Attributes:
        layers: Indices of the Y sparse layers, from 0.
        count_YX: Tokens sent to each of X experts, (Y, X) int64; each row sums to `num_tokens` times `top_k`.
        top_k: Experts per token, K.
    """

    layers: list[int]
    count_YX: Tensor
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Number of routed tokens, including prompts and special tokens."""
        return int(self.count_YX[0].sum()) // self.top_k

    @property
    def share_YX(self) -> Tensor:
        """Each expert's share of its layer's (token, expert) assignments, (Y, X) float64."""
        return self.count_YX.double() / self.count_YX.sum(dim=1, keepdim=True).clamp(min=1)


def expert_loads(
    encoder: Encoder, texts: Sequence[str], prompt_name: str | None = None, role: TextRole = "document"
) -> ExpertLoads:
    """Encode texts and count the tokens, including the prompt's, that each expert gets; repeated texts count once.

    In another precision, a token near a tie between experts may go to another expert.
    """
    backbone = encoder.embedder.backbone
    if encoder.num_context:
        raise InputError("the model", "is contextual, and reads more than each text's tokens", "use another model")
    if not has_experts(backbone):
        raise InputError("the model", "is dense: it has no experts", "use a sparse model")
    with read_routing(backbone) as sums:
        encoder.encode(texts, prompt_name, role=role)
        count_YX = sums()[COUNTS].cpu()
    return ExpertLoads(moe_layers(backbone), count_YX, int(plain_backbone(backbone).config.experts_per_token))


@dataclass(frozen=True, eq=False)
class ContextualShift:
    """Unit vectors of N documents in C contexts, (C, N, D) float32, and without a context, (N, D)."""

    vector_CND: Vectors
    alone_ND: Vectors

    @property
    def own_cosine_NP(self) -> Vectors:
        """For each document, the cosines between its vectors in any two contexts, (N, C (C - 1) / 2)."""
        first, second = np.triu_indices(len(self.vector_CND), k=1)
        return np.asarray(np.einsum("pnd,pnd->np", self.vector_CND[first], self.vector_CND[second]))

    @property
    def alone_cosine_N(self) -> Vectors:
        """For each document, the mean cosine between its vectors with a context and the one without, (N,)."""
        return np.asarray(np.einsum("cnd,nd->cn", self.vector_CND, self.alone_ND).mean(axis=0))

    @property
    def other_cosine_N(self) -> Vectors:
        """For each document, the cosine with the nearest other document in a context, mean over contexts, (N,)."""
        cosine_CNN = np.einsum("cnd,cmd->cnm", self.vector_CND, self.vector_CND)
        diagonal_N = np.arange(cosine_CNN.shape[1])
        cosine_CNN[:, diagonal_N, diagonal_N] = -np.inf
        return np.asarray(cosine_CNN.max(axis=2).mean(axis=0))

    @property
    def stays_nearest(self) -> float:
        """The share of vectors whose nearest vector from another context is of the same document."""
        num_contexts, num_documents, width = self.vector_CND.shape
        vector_VD = self.vector_CND.reshape(-1, width)
        context_V, document_V = np.divmod(np.arange(num_contexts * num_documents), num_documents)
        cosine_VV = vector_VD @ vector_VD.T
        cosine_VV[context_V[:, None] == context_V] = -np.inf
        return float((document_V[cosine_VV.argmax(axis=1)] == document_V).mean())


def contextual_shift(encoder: Encoder, texts: Sequence[str], contexts: Sequence[Context]) -> ContextualShift:
    """Encode two or more documents with each of two or more contexts, and without one."""
    for name, items in (("documents", texts), ("contexts", contexts)):
        if len(items) < 2:
            raise OptionError(name, len(items), "must be two or more, to be compared", "add some")
    vectors = [unit_rows(encoder.encode(texts, None, context, role="document")) for context in (*contexts, None)]
    return ContextualShift(np.stack(vectors[:-1]), vectors[-1])
