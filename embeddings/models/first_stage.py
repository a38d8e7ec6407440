"""The first stage of a contextual model: one vector for each document of the context.

This file travels inside model directories: it imports nothing but torch and its siblings.
"""

import torch
from torch import Tensor, nn

from .pooling import MeanPooling


class FirstStage(nn.Module):
    """Context documents to the vectors that stand in front of a text: encoder, mean pooling, Linear-GELU-Linear.

    The vectors are not normalised: they are inputs of the second stage, beside its word embeddings. Queries and
    documents share one first stage, whose weights are not the second stage's.

    Args:
        backbone: A Hugging Face encoder or decoder, adapted by peft or not.
        backbone_size: Width of the backbone's states.
        context_size: Width of the second stage's word embeddings, H.
        max_length: Most tokens that are read of a document, its first ones; None for all.
        pools_prompt: Whether all tokens of a document are pooled, whatever the caller leaves out.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2; the projection is the released code's, not the paper's.
    """

    def __init__(
        self,
        backbone: nn.Module,
        backbone_size: int,
        context_size: int,
        max_length: int | None = None,
        pools_prompt: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.max_length = max_length
        self.pools_prompt = pools_prompt
        self.pooling = MeanPooling(backbone_size)
        self.projection = nn.Sequential(
            nn.Linear(backbone_size, backbone_size), nn.GELU(), nn.Linear(backbone_size, context_size)
        )

    def forward(self, input_ids_ML: Tensor, attention_mask_ML: Tensor, pooling_mask_ML: Tensor) -> Tensor:
        """One vector a context document.

        Args:
            input_ids_ML: Token ids, (M, L) int64, padded on the right.
            attention_mask_ML: True where there is a token, (M, L) bool.
            pooling_mask_ML: True where a token enters the pooling, (M, L) bool.

        Returns:
            Vectors, (M, H) float32 (float64 where the weights are).

        Precision: pooling sums in float32; the result is float32 under autocast and for bfloat16 weights too.
        """
        if self.max_length is not None and input_ids_ML.shape[1] > self.max_length:
            input_ids_ML, attention_mask_ML = (
                input_ids_ML[:, : self.max_length],
                attention_mask_ML[:, : self.max_length],
            )
            pooling_mask_ML = pooling_mask_ML[:, : self.max_length].clone()
            # A document that was cut within its prompt would have no pooled token, so the last one is.
            last_M1 = attention_mask_ML.sum(dim=1, keepdim=True).clamp(min=1) - 1
            pooling_mask_ML.scatter_(1, last_M1, True)
        output = self.backbone(input_ids=input_ids_ML, attention_mask=attention_mask_ML.long())
        pooled_ML = attention_mask_ML.bool() if self.pools_prompt else pooling_mask_ML
        pooled_MH = self.pooling(output.last_hidden_state, pooled_ML)
        first: nn.Module = self.projection[0]
        vector_MH: Tensor = self.projection(pooled_MH.to(next(first.parameters()).dtype))
        return vector_MH.to(torch.promote_types(vector_MH.dtype, torch.float32))

    def extra_repr(self) -> str:
        """What decides the vectors beside the weights."""
        length = [] if self.max_length is None else [f"max_length={self.max_length}"]
        return ", ".join([*length, *(["pools_prompt=True"] if self.pools_prompt else [])])
