"""Floor 2: texts to vectors, and the nearest documents of a query."""

from embeddings.inference.choose_context import choose_context, sample_context
from embeddings.inference.context import Context
from embeddings.inference.corpus import Document, read_corpus
from embeddings.inference.encoder import Encoder
from embeddings.inference.precision import Precision
from embeddings.inference.search import TopK, search_top_k, unit_rows
from embeddings.inference.vector_folder import Hit, VectorFolder, encode_corpus, search_corpus
from embeddings.inference.vector_shards import VectorShards

__all__ = [
    "Context",
    "Document",
    "Encoder",
    "Hit",
    "Precision",
    "TopK",
    "VectorFolder",
    "VectorShards",
    "choose_context",
    "encode_corpus",
    "read_corpus",
    "sample_context",
    "search_corpus",
    "search_top_k",
    "unit_rows",
]
