"""Floor 3: pictures of runs and models, one file a picture; matplotlib is known here alone."""

from embeddings.figures.anchor_tokens import draw_anchor_tokens
from embeddings.figures.curves import draw_curves
from embeddings.figures.png import check_output
from embeddings.figures.sweep import draw_sweep

__all__ = ["check_output", "draw_anchor_tokens", "draw_curves", "draw_sweep"]
