"""How alike two vectors are."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Similarity = Literal["cosine", "dot"]


def working_dtype(vector_ND: Tensor) -> torch.dtype:
    """float32, or float64 where the vectors already are: the dtype similarities and softmaxes are computed in."""
    return torch.float64 if vector_ND.dtype == torch.float64 else torch.float32


def comparable(vector_ND: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """Vectors whose inner products are the similarities: of unit norm for the cosine, as they are for the dot product.

    Args:
        vector_ND: Embeddings, (N, D) float. A zero vector stays zero: its cosine with anything is 0.
        similarity: Which similarity.

    Returns:
        Vectors, (N, D) float32 (float64 where the input is); for the gradient only they and their norms are kept.

    Precision: norms in float32 whatever the input dtype, autocast or not.
    """
    vector_ND = vector_ND.to(working_dtype(vector_ND))
    if similarity == "dot":
        return vector_ND
    unit_ND: Tensor = _UnitNorm.apply(vector_ND)  # type: ignore[no-untyped-call]
    return unit_ND


def similarity_matrix(query_BD: Tensor, candidate_CD: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """The similarity of every query with every candidate, whole.

    For small sets (evaluation, tests); the losses go in tiles.

    Args:
        query_BD: (B, D) float.
        candidate_CD: (C, D) float.
        similarity: Which similarity.

    Returns:
        score_BC: (B, C) float32 (float64 where the input is).

    Precision: the products in float32 whatever the input dtype, autocast or not.
    """
    with torch.autocast(query_BD.device.type, enabled=False):
        return comparable(query_BD, similarity) @ comparable(candidate_CD, similarity).T


class _UnitNorm(torch.autograd.Function):
    """v / |v|; a zero vector stays zero and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, vector_ND: Tensor) -> Tensor:
        """The unit vectors, (N, D)."""
        norm_N1 = torch.linalg.vector_norm(vector_ND, dim=-1, keepdim=True)
        inverse_N1 = torch.where(norm_N1 > 1e-12, 1 / norm_N1, 0)
        unit_ND = vector_ND * inverse_N1
        ctx.save_for_backward(unit_ND, inverse_N1)
        return unit_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> Tensor:
        """(g - (g . u) u) / |v|: what lies along the vector changes nothing."""
        unit_ND, inverse_N1 = ctx.saved_tensors
        along_N1 = torch.linalg.vecdot(gradient_ND, unit_ND)[:, None]
        return torch.addcmul(gradient_ND, unit_ND, along_N1, value=-1).mul_(inverse_N1)
