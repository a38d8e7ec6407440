"""Train text-embedding models: four published recipes as Lightning modules. The names import torch on first use."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

from embeddings.common.process import lazy_names

if TYPE_CHECKING:
    from embeddings.callbacks import ExportModel, GradCacheCallback, RetrievalEvaluation
    from embeddings.cli.trainer import Trainer, mixed_precision
    from embeddings.common import TextSettings
    from embeddings.data import EmbeddingDataModule, SourceConfig, source_from_rows
    from embeddings.inference import Encoder
    from embeddings.losses import InfoNCE
    from embeddings.models import BackboneConfig, Embedder, LoraSettings, MeanPooling
    from embeddings.modules import CDEModule, MGHCurriculumModule, MoEEmbedModule, NVEmbedModule
    from embeddings.training.optim import Schedule

__all__ = [
    "BackboneConfig",
    "CDEModule",
    "Embedder",
    "EmbeddingDataModule",
    "Encoder",
    "ExportModel",
    "GradCacheCallback",
    "InfoNCE",
    "LoraSettings",
    "MGHCurriculumModule",
    "MeanPooling",
    "MoEEmbedModule",
    "NVEmbedModule",
    "RetrievalEvaluation",
    "Schedule",
    "SourceConfig",
    "TextSettings",
    "Trainer",
    "mixed_precision",
    "source_from_rows",
]

__getattr__ = lazy_names(__name__)
