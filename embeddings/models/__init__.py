"""Floor 1: backbones, poolings, and the embedding model made of them."""

from embeddings.models.anchor_token import AnchorTokenPooling
from embeddings.models.backbone import BackboneConfig, load_backbone
from embeddings.models.bidirectional import check_bidirectional, make_bidirectional
from embeddings.models.contextual import ContextualEmbedder, load_embedder
from embeddings.models.embedder import Embedder
from embeddings.models.from_scratch import FromScratch
from embeddings.models.language_model import HeadSettings, LanguageModel
from embeddings.models.latent_attention import LatentAttentionPooling
from embeddings.models.lora import LoraSettings, add_lora, merge_lora
from embeddings.models.pooling import ClsPooling, LastTokenPooling, MeanPooling, Pooling, WeightedMeanPooling
from embeddings.models.self_attention import SelfAttentionPooling

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
    "SelfAttentionPooling",
    "WeightedMeanPooling",
    "add_lora",
    "check_bidirectional",
    "load_backbone",
    "load_embedder",
    "make_bidirectional",
    "merge_lora",
]
