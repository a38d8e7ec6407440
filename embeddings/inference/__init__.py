"""Floor 2: texts to vectors, and the nearest documents of a query, by vector or by word."""

from embeddings.inference.anchor_shares import AnchorShares, anchor_shares
from embeddings.inference.bm25 import BM25
from embeddings.inference.context import Context, ContextDraw
from embeddings.inference.context_choice import choose_context, draw_context, require_context_size, sample_context
from embeddings.inference.contextual_shift import ContextualShift, contextual_shift
from embeddings.inference.corpus import Document, read_corpus
from embeddings.inference.corpus_search import CorpusSearch, Hit, search_corpus
from embeddings.inference.devices import parse_devices
from embeddings.inference.encoder import Encoder
from embeddings.inference.expert_loads import ExpertLoads, expert_loads
from embeddings.inference.latent_weights import LatentWeights, latent_weights
from embeddings.inference.precision import Precision
from embeddings.inference.search import TopK, search_top_k, unit_rows
from embeddings.inference.sign_search import search_signs
from embeddings.inference.token_weights import TokenWeights, token_weights
from embeddings.inference.vector_folder import VectorFolder, encode_corpus
from embeddings.inference.vector_formats import VectorFormat
from embeddings.inference.vector_shards import VectorShards

__all__ = [
    "BM25",
    "AnchorShares",
    "Context",
    "ContextDraw",
    "ContextualShift",
    "CorpusSearch",
    "Document",
    "Encoder",
    "ExpertLoads",
    "Hit",
    "LatentWeights",
    "Precision",
    "TokenWeights",
    "TopK",
    "VectorFolder",
    "VectorFormat",
    "VectorShards",
    "anchor_shares",
    "choose_context",
    "contextual_shift",
    "draw_context",
    "encode_corpus",
    "expert_loads",
    "latent_weights",
    "parse_devices",
    "read_corpus",
    "require_context_size",
    "sample_context",
    "search_corpus",
    "search_signs",
    "search_top_k",
    "token_weights",
    "unit_rows",
]
