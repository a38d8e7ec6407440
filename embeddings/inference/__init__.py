"""Floor 2: texts to vectors, and the nearest documents of a query, by vector or by word."""

from embeddings.inference.bm25 import BM25
from embeddings.inference.context import choose_context, require_context_size, sample_context
from embeddings.inference.encoder import Context, Encoder, unit_rows
from embeddings.inference.hybrid import Fusion, FusionRule, HybridSearch, index_words, open_words
from embeddings.inference.inspection import (
    ContextualShift,
    ExpertLoads,
    LatentWeights,
    TokenWeights,
    contextual_shift,
    expert_loads,
    latent_weights,
    token_weights,
)
from embeddings.inference.precision import Precision
from embeddings.inference.search import CorpusSearch, Hit, TopK, search_signs, search_top_k
from embeddings.inference.vector_folder import (
    Document,
    VectorFolder,
    VectorFormat,
    VectorShards,
    encode_corpus,
    parse_devices,
    read_corpus,
)
from embeddings.inference.vector_table import VectorTable, encode_table

__all__ = [
    "BM25",
    "Context",
    "ContextualShift",
    "CorpusSearch",
    "Document",
    "Encoder",
    "ExpertLoads",
    "Fusion",
    "FusionRule",
    "Hit",
    "HybridSearch",
    "LatentWeights",
    "Precision",
    "TokenWeights",
    "TopK",
    "VectorFolder",
    "VectorFormat",
    "VectorShards",
    "VectorTable",
    "choose_context",
    "contextual_shift",
    "encode_corpus",
    "encode_table",
    "expert_loads",
    "index_words",
    "latent_weights",
    "open_words",
    "parse_devices",
    "read_corpus",
    "require_context_size",
    "sample_context",
    "search_signs",
    "search_top_k",
    "token_weights",
    "unit_rows",
]
