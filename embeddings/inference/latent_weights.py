"""How the tokens of some texts attend to the latents of a model that pools by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common import InputError, OptionError
from embeddings.common.text import TextRole
from embeddings.data.tokenize import TokenSpan
from embeddings.inference.evaluating import evaluating
from embeddings.inference.spanned_batches import spanned_batches

if TYPE_CHECKING:
    from embeddings.models.embedder import Embedder
    from embeddings.models.latent_attention import LatentAttentionPooling


@dataclass(frozen=True, eq=False)
class LatentWeights:
    """The tokens of one text and their attention to the latents.

    Attributes:
        text: Prompt and text as one string, which the spans count in.
        spans: Where each pooled token lies in it, T of them; others, as those of a prompt, attend to nothing.
        weight_ATR: Weight of each latent for each token in each head, (A, T, R) float32: 1 over the latents.
    """

    text: str
    spans: list[TokenSpan]
    weight_ATR: npt.NDArray[np.float32]

    @property
    def weight_TR(self) -> npt.NDArray[np.float32]:
        """The mean over the heads, (T, R)."""
        weight_TR: npt.NDArray[np.float32] = self.weight_ATR.mean(axis=0)
        return weight_TR

    @property
    def mean_AR(self) -> npt.NDArray[np.float32]:
        """The mean over the tokens, (A, R): a row of NV-Embed's Fig. 2, the heads side by side."""
        mean_AR: npt.NDArray[np.float32] = self.weight_ATR.mean(axis=1)
        return mean_AR

    @property
    def mean_R(self) -> npt.NDArray[np.float32]:
        """The mean over the tokens and the heads, (R,)."""
        mean_R: npt.NDArray[np.float32] = self.weight_TR.mean(axis=0)
        return mean_R


def latent_weights(
    embedder: "Embedder",
    texts: Sequence[str],
    *,
    head: int | None = None,
    prompt_name: str | None = None,
    role: TextRole = "document",
    mini_batch_tokens: int = 4096,
) -> list[LatentWeights]:
    """The attention of each token of each text to the latents.

    Args:
        embedder: The model; it is left as found.
        texts: N texts without their prompts.
        head: The one head that is kept, from 0; None for all of them.
        prompt_name: Which of the model's prompts goes before each text; None for the one of the role's name.
        role: Whose length limit holds.
        mini_batch_tokens: Most padded tokens of a mini-batch.

    Returns:
        N of them, in the order of the texts.

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


def latent_pooling(embedder: "Embedder") -> "LatentAttentionPooling":
    """The model's pooling by latents.

    Raises:
        InputError: If it has another one.
    """
    from embeddings.models.directory import pooling_name
    from embeddings.models.latent_attention import LatentAttentionPooling

    if not isinstance(embedder.pooling, LatentAttentionPooling):
        name = pooling_name(embedder.pooling).replace("_", "-")
        raise InputError("the model", f"has {name} pooling, and no latents", "give one with latent-attention pooling")
    return embedder.pooling
