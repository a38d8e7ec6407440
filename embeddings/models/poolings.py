"""The poolings by their names in configs and model directories.

A new pooling changes two files: its own and this one. A model directory contains a shorter `poolings.py` with the
model's pooling only (see `directory`).
"""

from embeddings.common import OptionError

from .anchor_token import AnchorTokenPooling
from .latent_attention import LatentAttentionPooling
from .pooling import ClsPooling, LastTokenPooling, MeanPooling, Pooling, SelfAttentionPooling, WeightedMeanPooling

POOLINGS: dict[str, type[Pooling]] = {
    "mean": MeanPooling,
    "cls": ClsPooling,
    "last_token": LastTokenPooling,
    "weighted_mean": WeightedMeanPooling,
    "latent_attention": LatentAttentionPooling,
    "self_attention": SelfAttentionPooling,
    "anchor_token": AnchorTokenPooling,
}


def pooling_name(pooling: Pooling) -> str:
    """The name of a pooling in the table, or an `OptionError`."""
    for name, kind in POOLINGS.items():
        if type(pooling) is kind:
            return name
    rule = "cannot be written into a model directory"
    raise OptionError("pooling", type(pooling).__name__, rule, f"use one of {', '.join(POOLINGS)}")
