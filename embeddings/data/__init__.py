"""Floor 1: from files to contrastive batches. The names that need Lightning or torch load it on first use."""

from typing import TYPE_CHECKING

from embeddings.common.lazy import lazy_names

if TYPE_CHECKING:
    from embeddings.data.collate import ContrastiveCollator
    from embeddings.data.datamodule import EmbeddingDataModule
    from embeddings.data.dataset import SourceDataset, open_source
    from embeddings.data.examples import Example, Negative, RowDraw
    from embeddings.data.loader import ResumableLoader
    from embeddings.data.mixture import Mixture
    from embeddings.data.records import Record, parse_record
    from embeddings.data.samplers.base import BatchSampler
    from embeddings.data.samplers.blended import BlendedBatchSampler
    from embeddings.data.samplers.clustered import ClusteredBatchSampler
    from embeddings.data.samplers.curriculum import CurriculumBatchSampler
    from embeddings.data.samplers.homogeneous import HomogeneousBatchSampler
    from embeddings.data.sources import SourceConfig
    from embeddings.data.text_datamodule import TextDataModule
    from embeddings.data.text_sources import TextSource
    from embeddings.data.tokenize import TextTokenizer

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
    "Record",
    "ResumableLoader",
    "RowDraw",
    "SourceConfig",
    "SourceDataset",
    "TextDataModule",
    "TextSource",
    "TextTokenizer",
    "open_source",
    "parse_record",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BatchSampler": "samplers.base",
        "BlendedBatchSampler": "samplers.blended",
        "ClusteredBatchSampler": "samplers.clustered",
        "ContrastiveCollator": "collate",
        "CurriculumBatchSampler": "samplers.curriculum",
        "EmbeddingDataModule": "datamodule",
        "Example": "examples",
        "HomogeneousBatchSampler": "samplers.homogeneous",
        "Mixture": "mixture",
        "Negative": "examples",
        "Record": "records",
        "ResumableLoader": "loader",
        "RowDraw": "examples",
        "SourceConfig": "sources",
        "SourceDataset": "dataset",
        "TextDataModule": "text_datamodule",
        "TextSource": "text_sources",
        "TextTokenizer": "tokenize",
        "open_source": "dataset",
        "parse_record": "records",
    },
)
