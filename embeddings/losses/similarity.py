"""How alike two vectors are."""

from typing import Literal

import torch
from torch import Tensor

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
        Vectors, (N, D) float32 (float64 where the input is).

    Precision: norms in float32 whatever the input dtype, autocast or not.
    """
    vector_ND = vector_ND.to(working_dtype(vector_ND))
    if similarity == "dot":
        return vector_ND
    return torch.nn.functional.normalize(vector_ND, dim=-1, eps=1e-12)


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
