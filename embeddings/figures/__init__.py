"""Floor 3: figures of runs and models, and the HTML report. Only this package imports matplotlib."""

from embeddings.figures.clusters import draw_clusters, draw_contextual_shift
from embeddings.figures.drawing import check_output, draw_curves, draw_routing_curves
from embeddings.figures.heat_maps import draw_anchor_tokens, write_heat_maps
from embeddings.figures.report import write_report

__all__ = [
    "check_output",
    "draw_anchor_tokens",
    "draw_clusters",
    "draw_contextual_shift",
    "draw_curves",
    "draw_routing_curves",
    "write_heat_maps",
    "write_report",
]
