"""Floor 3: pictures of runs and models, one file a picture; matplotlib is known here alone."""

from embeddings.figures.anchor_tokens import draw_anchor_tokens
from embeddings.figures.clusters import draw_clusters
from embeddings.figures.contextual_shift import draw_contextual_shift
from embeddings.figures.curves import draw_curves
from embeddings.figures.expert_loads import draw_expert_loads
from embeddings.figures.latent_weights import draw_latent_weights
from embeddings.figures.png import check_output
from embeddings.figures.report import write_report
from embeddings.figures.routing_curves import draw_routing_curves
from embeddings.figures.sweep import draw_sweep

__all__ = [
    "check_output",
    "draw_anchor_tokens",
    "draw_clusters",
    "draw_contextual_shift",
    "draw_curves",
    "draw_expert_loads",
    "draw_latent_weights",
    "draw_routing_curves",
    "draw_sweep",
    "write_report",
]
