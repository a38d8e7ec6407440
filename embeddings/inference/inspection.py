"""What a model does inside: where its pooling puts weight, which experts tokens go to, how contexts move vectors."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common import InputError, OptionError
from embeddings.common.text import TextRole
from embeddings.common.types import plan_mini_batches
from embeddings.data.tokenize import TextTokenizer, TokenSpan
from embeddings.inference.encoder import Context, Encoder, evaluating
from embeddings.inference.vectors import unit_rows
from embeddings.models.anchor_token import AnchorTokenPooling
from embeddings.models.attention_capture import AttentionCapture
from embeddings.models.contextual import ContextualEmbedder
from embeddings.models.embedder import Embedder, capture_of
from embeddings.models.latent_attention import LatentAttentionPooling
from embeddings.models.lora import plain_backbone
from embeddings.models.moe.upcycling import COUNTS, has_experts, moe_layers, read_routing
from embeddings.models.poolings import pooling_name


class SpannedText(NamedTuple):
    """A text of a mini-batch: its row among all texts, prompt and text as one string, and the places of its tokens."""

    row: int
    text: str
    spans: list[TokenSpan]


class SpannedBatch(NamedTuple):
    """A padded mini-batch of n texts on the model's device, (n, L) each: ids, is a token, is pooled."""

    texts: list[SpannedText]
    ids_nL: Tensor
    attention_nL: Tensor
    pooled_nL: Tensor


def spanned_batches(
    embedder: Embedder, texts: Sequence[str], prompt_name: str | None, role: TextRole, mini_batch_tokens: int
) -> Iterator[SpannedBatch]:
    """Texts with one of the model's prompts, padded mini-batch by mini-batch, each text once; see `token_weights`."""
    prompt = embedder.text.prompt(prompt_name, role)
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    tokens, spans = tokenizer(texts, role, prompt), tokenizer.spans(texts, role, prompt)
    assert [len(own) for own in spans] == tokens.lengths_N.tolist()
    for rows_n in plan_mini_batches(tokens.lengths_N, mini_batch_tokens):
        own = [SpannedText(row, prompt + texts[row], spans[row]) for row in rows_n.tolist()]
        padded = tokens.padded(rows_n, embedder.pad_token_id)
        yield SpannedBatch(own, *(part.to(embedder.device) for part in padded))


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """The tokens of one text and their weights.

    Attributes:
        text: Prompt and text as one string, which the spans count in.
        spans: Position of each of the T tokens in it.
        weight_T: Weight of each token, (T,) float32: 1 over the text, 0 where a token is not pooled.
        pooled_T: Whether a token may enter the pooling, (T,) bool: all but the prompt.
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
    """The weight of each token of each text, as `AnchorTokenPooling` gives it to the states of the last layer.

    Args:
        embedder: The model; it is left as found.
        texts: Texts without their prompts; the result has their order.
        pooling: Whose weights; None for the model's own anchor-token pooling, else for one with defaults.
        prompt_name: Which of the model's prompts goes before each text; None for the one of the role's name.
        role: Whose length limit holds.
        mini_batch_tokens: Maximum padded tokens of a mini-batch.

    Precision: the backbone in the format of its weights, the weights in float32.
    Raises:
        InputError: If the model is contextual.
        OptionError: If the backbone has no such layer or prompt, or its attention cannot be read or is causal.
    Source: MGH, §2.2, Eq. 2 to 4.
    """
    own = embedder.pooling if isinstance(embedder.pooling, AnchorTokenPooling) else None
    pooling = pooling or own or AnchorTokenPooling(embedder.hidden_size)
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


@contextmanager
def _tapped(embedder: Embedder, pooling: AnchorTokenPooling) -> Iterator[AttentionCapture]:
    """A capture of the attention of the pooling's layers, in place of the model's own."""
    if isinstance(embedder, ContextualEmbedder):
        what = "is contextual, and anchor weights are of a model that reads each text alone"
        raise InputError("the model", what, "use a model without a context")
    own = embedder.capture
    with ExitStack() as stack:
        if own is not None:
            own.detach()
            stack.callback(own.attach)
        tap = capture_of(embedder.backbone, pooling)
        assert tap is not None
        stack.callback(tap.detach)
        yield tap


Place = Literal["first", "last", "punctuation", "rest"]
PLACES: tuple[Place, ...] = get_args(Place)
# Texts that are weighed at once: what a corpus costs in memory.
TEXTS_PER_BLOCK = 1024


class AnchorShares(NamedTuple):
    """Mean shares by kind of token: of the weight, and of the pooled tokens (as mean pooling has it)."""

    weight: dict[Place, float]
    tokens: dict[Place, float]
    num_texts: int


def anchor_shares(
    embedder: Embedder,
    texts: Sequence[str],
    pooling: AnchorTokenPooling | None = None,
    *,
    prompt_name: str | None = None,
    role: TextRole = "document",
    mini_batch_tokens: int = 4096,
) -> AnchorShares:
    """The mean shares of the weight over a corpus; every text counts alike, whatever its length.

    A pooled token is the first, the last (`[CLS]` and `[SEP]` where a model has them), punctuation, or the rest.
    Arguments and errors are those of `token_weights`; no text at all is an error too.

    Precision: means in float64.
    Source: MGH, §5.2 and Fig. 5, which name the first token, punctuation and the last token as what weighs most.
    """
    if not texts:
        raise OptionError("texts", [], "must not be empty", "give a text")
    how: Any = {"prompt_name": prompt_name, "role": role, "mini_batch_tokens": mini_batch_tokens}
    blocks = (texts[start : start + TEXTS_PER_BLOCK] for start in range(0, len(texts), TEXTS_PER_BLOCK))
    return shares_of(weights for block in blocks for weights in token_weights(embedder, block, pooling, **how))


def shares_of(texts: Iterable[TokenWeights]) -> AnchorShares:
    """The mean shares of texts, at least one."""
    sums, num_texts = np.zeros((2, len(PLACES))), 0
    for weights in texts:
        places = place_of(weights)
        counts = np.array([[place == known for place in places] for known in PLACES], dtype=np.float64)
        sums += counts @ weights.weight_T.astype(np.float64), counts.sum(axis=1) / weights.pooled_T.sum()
        num_texts += 1
    weight, tokens = (dict(zip(PLACES, row, strict=True)) for row in (sums / num_texts).tolist())
    return AnchorShares(weight, tokens, num_texts)


def place_of(weights: TokenWeights) -> list[Place | None]:
    """The place of each token of a text, None where it is not pooled."""
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
        text: Prompt and text as one string, which the spans count in.
        spans: Position of each of the T pooled tokens in it; others, such as those of a prompt, attend to nothing.
        weight_ATR: Weight of each of the R latents for each token in each head, (A, T, R) float32: 1 over the latents.
    """

    text: str
    spans: list[TokenSpan]
    weight_ATR: npt.NDArray[np.float32]

    @property
    def weight_TR(self) -> npt.NDArray[np.float32]:
        """The mean over the heads, (T, R)."""
        return np.asarray(self.weight_ATR.mean(axis=0))

    @property
    def mean_AR(self) -> npt.NDArray[np.float32]:
        """The mean over the tokens, (A, R): a row of NV-Embed's Fig. 2, the heads side by side."""
        return np.asarray(self.weight_ATR.mean(axis=1))

    @property
    def mean_R(self) -> npt.NDArray[np.float32]:
        """The mean over the tokens and the heads, (R,)."""
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

    `head` is the one head that is kept, from 0; None for all of them.

    Precision: the backbone in the format of its weights, the softmax in float32.
    Raises:
        InputError: If the model pools without latents.
        OptionError: If it has no such head or prompt.
    Source: NV-Embed, §3.2, Eq. 1, and appendix D.
    """
    pooling = latent_pooling(embedder)
    if head is not None and not 0 <= head < pooling.num_heads:
        rule = f"must be from 0 to {pooling.num_heads - 1}, the model's heads"
        raise OptionError("head", head, rule, "leave it out for the mean over the heads")
    found: dict[int, LatentWeights] = {}
    with evaluating(embedder), torch.inference_mode():
        for batch in spanned_batches(embedder, texts, prompt_name, role, mini_batch_tokens):
            inputs = {"input_ids": batch.ids_nL, "attention_mask": batch.attention_nL.long()}
            state_nLH = embedder.backbone(**inputs).last_hidden_state
            for one, state_LH, pooled_L in zip(batch.texts, state_nLH, batch.pooled_nL, strict=True):
                weight_ATR = pooling.weights(state_LH[pooled_L])
                weight_ATR = weight_ATR if head is None else weight_ATR[head : head + 1]
                pooled = pooled_L[: len(one.spans)].tolist()
                own = [span for span, is_pooled in zip(one.spans, pooled, strict=True) if is_pooled]
                found[one.row] = LatentWeights(one.text, own, weight_ATR.float().cpu().numpy())
    return [found[row] for row in range(len(texts))]


def latent_pooling(embedder: Embedder) -> LatentAttentionPooling:
    """The model's pooling by latents; an `InputError` where it has another one."""
    if not isinstance(embedder.pooling, LatentAttentionPooling):
        name = pooling_name(embedder.pooling).replace("_", "-")
        raise InputError("the model", f"has {name} pooling, and no latents", "give one with latent-attention pooling")
    return embedder.pooling


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """The number of tokens that the router sent to each expert of each sparse layer.

    Attributes:
        layers: Indices of the Y sparse layers, from 0.
        count_YX: Tokens sent to each of X experts, (Y, X) int64; each row adds up to `num_tokens` times `top_k`.
        top_k: Experts a token, K.
    """

    layers: list[int]
    count_YX: Tensor
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Tokens that were routed, of prompts and special ones too."""
        return int(self.count_YX[0].sum()) // self.top_k

    @property
    def share_YX(self) -> Tensor:
        """Each expert's share of its layer's (token, expert) assignments, (Y, X) float64."""
        return self.count_YX.double() / self.count_YX.sum(dim=1, keepdim=True).clamp(min=1)


def expert_loads(
    encoder: Encoder, texts: Sequence[str], prompt_name: str | None = None, role: TextRole = "document"
) -> ExpertLoads:
    """Encode some texts and count where their tokens, and their prompt's, go; a text that occurs twice counts once.

    Precision: the encoder's; a token near a tie between two experts may go elsewhere in another.
    Raises:
        InputError: If the model has no experts, or is contextual.
        OptionError: If the model has no such prompt.
    """
    backbone = encoder.embedder.backbone
    if encoder.num_context:
        raise InputError("the model", "is contextual, and reads more than each text's tokens", "give one that is not")
    if not has_experts(backbone):
        raise InputError("the model", "is dense: it has no experts to send tokens to", "give a sparse one")
    with read_routing(backbone) as sums:
        encoder.encode(texts, prompt_name, role=role)
        count_YX = sums()[COUNTS].cpu()
    return ExpertLoads(moe_layers(backbone), count_YX, int(plain_backbone(backbone).config.experts_per_token))


Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ContextualShift:
    """Unit vectors of N documents in C contexts, (C, N, D) float32, and without a context, (N, D)."""

    vector_CND: Vectors
    alone_ND: Vectors

    @property
    def own_cosine_NP(self) -> Vectors:
        """Each document's cosines between any two of its contexts, (N, C (C - 1) / 2)."""
        first, second = np.triu_indices(len(self.vector_CND), k=1)
        return np.asarray(np.einsum("pnd,pnd->np", self.vector_CND[first], self.vector_CND[second]))

    @property
    def alone_cosine_N(self) -> Vectors:
        """Each document's mean cosine of its vectors in contexts with the one without, (N,)."""
        return np.asarray(np.einsum("cnd,nd->cn", self.vector_CND, self.alone_ND).mean(axis=0))

    @property
    def other_cosine_N(self) -> Vectors:
        """Each document's cosine with the nearest other document in the same context, mean over contexts, (N,)."""
        cosine_CNN = np.einsum("cnd,cmd->cnm", self.vector_CND, self.vector_CND)
        places = np.arange(cosine_CNN.shape[1])
        cosine_CNN[:, places, places] = -np.inf
        return np.asarray(cosine_CNN.max(axis=2).mean(axis=0))

    @property
    def stays_nearest(self) -> float:
        """The share of vectors that are nearer to one of their own document than to any of another, in other contexts.

        The paper says so of its figure.
        """
        num_contexts, num_documents, width = self.vector_CND.shape
        vector_VD = self.vector_CND.reshape(-1, width)
        context_V, document_V = np.divmod(np.arange(num_contexts * num_documents), num_documents)
        cosine_VV = vector_VD @ vector_VD.T
        cosine_VV[context_V[:, None] == context_V] = -np.inf
        return float((document_V[cosine_VV.argmax(axis=1)] == document_V).mean())


def contextual_shift(encoder: Encoder, texts: Sequence[str], contexts: Sequence[Context]) -> ContextualShift:
    """Encode two or more different documents in each of two or more contexts (see `choose_context`), and without one.

    Raises:
        OptionError: If there are fewer documents or contexts, or the model takes no context, or none as large.
    """
    for name, items in (("documents", texts), ("contexts", contexts)):
        if len(items) < 2:
            raise OptionError(name, len(items), "must be two or more, to be compared", "give more")
    vectors = [unit_rows(encoder.encode(texts, None, context, role="document")) for context in (*contexts, None)]
    return ContextualShift(np.stack(vectors[:-1]), vectors[-1])
