"""Floor 1: losses on batches of embeddings, and the router losses of sparse models."""

from embeddings.losses.distillation import MarginMSE, SimilarityDistillation
from embeddings.losses.info_nce import InfoNCE, MatryoshkaInfoNCE, tiled_cross_entropies
from embeddings.losses.load_balancing import LoadBalancing, load_balancing_loss, router_z_loss
from embeddings.losses.surrogates import SurrogateFilter

__all__ = [
    "InfoNCE",
    "LoadBalancing",
    "MarginMSE",
    "MatryoshkaInfoNCE",
    "SimilarityDistillation",
    "SurrogateFilter",
    "load_balancing_loss",
    "router_z_loss",
    "tiled_cross_entropies",
]
