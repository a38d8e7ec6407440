"""Floor 1: losses on batches of embeddings, and the router losses of sparse models."""

from embeddings.losses.distillation import MarginMSE, SimilarityDistillation
from embeddings.losses.info_nce import InfoNCE, MatryoshkaInfoNCE
from embeddings.losses.load_balancing import LoadBalancing, load_balancing_loss, router_z_loss
from embeddings.losses.masks import SurrogateFilter, is_negative_mask
from embeddings.losses.tiles import similarity_matrix, tiled_cross_entropy

__all__ = [
    "InfoNCE",
    "LoadBalancing",
    "MarginMSE",
    "MatryoshkaInfoNCE",
    "SimilarityDistillation",
    "SurrogateFilter",
    "is_negative_mask",
    "load_balancing_loss",
    "router_z_loss",
    "similarity_matrix",
    "tiled_cross_entropy",
]
