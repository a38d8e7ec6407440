"""All kinds of model directories load with sentence-transformers and without this library.

To repeat this in a separate environment, run `EMBED_KEEP=directories python -m pytest tests/test_fresh_environment.py`,
then `python -I tests/helpers/load_directories.py directories` in that environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from embeddings.common import TextSettings
from embeddings.models import (
    AnchorTokenPooling,
    ContextualEmbedder,
    Embedder,
    LastTokenPooling,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
    Pooling,
    add_lora,
    make_bidirectional,
)
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe
from tests.models.reading import tokenised

TEXTS = ["how do I pad sequences", "the quick brown fox " * 14, "7 jumps", "東京 café", " two numbers", "z"]
CONTEXT = ["the lazy dog", "return the sum of two numbers"]
QUERY = "search_query: "
SETTINGS = TextSettings(query_max_length=40, document_max_length=24, prompts={"query": QUERY})


def decoder(pooling: Pooling) -> Embedder:
    """A decoder without its causal mask and with non-zero adapters."""
    backbone = tiny_mistral()
    make_bidirectional(backbone)
    adapted = add_lora(backbone, LoraSettings(rank=4, alpha=8, dropout=0.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return Embedder(adapted, sentencepiece_tokenizer(), pooling, text=SETTINGS)


def contextual(first: PreTrainedModel, second: PreTrainedModel) -> Embedder:
    """A contextual model; its backbones may need remote code."""
    return ContextualEmbedder(first, second, wordpiece_tokenizer(), num_context=3, num_soft_prompts=2, text=SETTINGS)


MODELS: dict[str, Callable[[], Embedder]] = {
    "mean": lambda: Embedder(
        tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), head=nn.Linear(32, 12), text=TextSettings(40, 24)
    ),
    "mean_prompted": lambda: Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), text=SETTINGS),
    "last_token": lambda: decoder(LastTokenPooling(32)),
    "latent_attention": lambda: decoder(LatentAttentionPooling(32, num_latents=6, num_heads=4, head_dim=8)),
    "anchor_token": lambda: decoder(AnchorTokenPooling(32)),
    "sparse": lambda: Embedder(tiny_moe(), wordpiece_tokenizer(), MeanPooling(32), text=SETTINGS),
    "contextual": lambda: tiny_contextual(text=SETTINGS),
    "contextual_sparse": lambda: contextual(tiny_moe(), tiny_moe(seed=1)),
    "contextual_sparse_first": lambda: contextual(tiny_moe(), tiny_bert()),
    "contextual_sparse_second": lambda: contextual(tiny_bert(), tiny_moe()),
    "normed": lambda: Embedder(
        tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), norm=nn.LayerNorm(32, elementwise_affine=False)
    ),
}
PLAIN = ("mean", "last_token", "normed")


def vectors(embedder: Embedder, role: str) -> Tensor:
    length = embedder.text.query_max_length if role == "query" else embedder.text.document_max_length
    tokens = tokenised(embedder.tokenizer, TEXTS, embedder.text.prompts.get(role, ""), length)
    if hasattr(embedder, "embed_context"):
        context = [embedder.embed_context(tokenised(embedder.tokenizer, CONTEXT, "", 24))]
    else:
        context = []
    vector_ND: Tensor = embedder(tokens, *context)
    return vector_ND


@torch.no_grad()
def write_directories(folder: Path) -> None:
    """Write each model's directory, with the expected vectors."""
    for name, make in MODELS.items():
        torch.manual_seed(0)
        embedder = make().eval()
        embedder.save_pretrained(folder / name)
        expected = torch.stack([vectors(embedder, "query"), vectors(embedder, "document")])
        assert len(torch.unique(expected[1], dim=0)) == len(TEXTS)
        fresh = {
            "texts": TEXTS,
            "vectors": expected.tolist(),
            "trust_remote_code": name not in PLAIN,
            "context": CONTEXT if name.startswith("contextual") else None,
        }
        (folder / name / "fresh.json").write_text(json.dumps(fresh))


@pytest.mark.slow
def test_every_kind_of_directory_returns_equal_vectors_without_this_library(tmp_path: Path) -> None:
    folder = Path(os.environ.get("EMBED_KEEP") or tmp_path / "directories")
    write_directories(folder)
    script = Path(__file__).parent / "helpers" / "load_directories.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(folder)],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors.keys() == MODELS.keys()
    assert max(errors.values()) <= 1e-5, errors
