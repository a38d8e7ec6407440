"""Floor 1: from files to contrastive batches. Imports are lazy, because torch and Lightning are slow."""

from typing import TYPE_CHECKING

from embeddings.common.process import lazy_names

if TYPE_CHECKING:
    from embeddings.data.datamodule import EmbeddingDataModule, ResumableLoader
    from embeddings.data.dataset import Mixture, SourceDataset, open_source, source_from_rows
    from embeddings.data.records import Example, Negative, Record, parse_record
    from embeddings.data.samplers.base import BatchSampler, BlendedBatchSampler, HomogeneousBatchSampler, PlanEntry
    from embeddings.data.samplers.clustered import ClusteredBatchSampler
    from embeddings.data.samplers.curriculum import CurriculumBatchSampler
    from embeddings.data.sources import SourceConfig
    from embeddings.data.text_datamodule import TextDataModule, TextSource
    from embeddings.data.tokenize import ContrastiveCollator, TextTokenizer

__all__ = [
    "BatchSampler",
    "BlendedBatchSampler",
    "ClusteredBatchSampler",
    "ContrastiveCollator",
    "CurriculumBatchSampler",
    "EmbeddingDataModule",
    "Example",
    "HomogeneousBatchSampler",
    "Mixture",
    "Negative",
    "PlanEntry",
    "Record",
    "ResumableLoader",
    "SourceConfig",
    "SourceDataset",
    "TextDataModule",
    "TextSource",
    "TextTokenizer",
    "open_source",
    "parse_record",
    "source_from_rows",
]

__getattr__ = lazy_names(__name__)
