"""Floor 1: backbones, poolings and embedding models."""

from embeddings.models.anchor_token import AnchorTokenPooling
from embeddings.models.backbone import BackboneConfig, keep_layers, load_backbone
from embeddings.models.bidirectional import check_bidirectional, make_bidirectional
from embeddings.models.contextual import ContextualEmbedder, load_embedder
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import FromScratch, HeadSettings, LanguageModel
from embeddings.models.latent_attention import LatentAttentionPooling, SelfAttentionPooling
from embeddings.models.lora import LoraSettings, add_lora
from embeddings.models.model_card import PushedModel, push_to_hub
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel
from embeddings.models.moe.upcycling import (
    Upcycling,
    parameter_counts,
    set_expert_backend,
    to_rotary,
    upcycle,
    write_rotary_model,
)
from embeddings.models.pooling import ClsPooling, LastTokenPooling, MeanPooling, Pooling, WeightedMeanPooling

__all__ = [
    "AnchorTokenPooling",
    "BackboneConfig",
    "ClsPooling",
    "ContextualEmbedder",
    "Embedder",
    "FromScratch",
    "HeadSettings",
    "LanguageModel",
    "LastTokenPooling",
    "LatentAttentionPooling",
    "LoraSettings",
    "MeanPooling",
    "Pooling",
    "PushedModel",
    "RotaryMoeConfig",
    "RotaryMoeModel",
    "SelfAttentionPooling",
    "Upcycling",
    "WeightedMeanPooling",
    "add_lora",
    "check_bidirectional",
    "keep_layers",
    "load_backbone",
    "load_embedder",
    "make_bidirectional",
    "parameter_counts",
    "push_to_hub",
    "set_expert_backend",
    "to_rotary",
    "upcycle",
    "write_rotary_model",
]
