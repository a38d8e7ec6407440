"""Floor 1: from files to examples."""

from embeddings.data.dataset import SourceDataset, open_source
from embeddings.data.examples import Example, Negative, RowDraw
from embeddings.data.mixture import Mixture
from embeddings.data.records import Record, parse_record
from embeddings.data.sources import SourceConfig

__all__ = [
    "Example",
    "Mixture",
    "Negative",
    "Record",
    "RowDraw",
    "SourceConfig",
    "SourceDataset",
    "open_source",
    "parse_record",
]
