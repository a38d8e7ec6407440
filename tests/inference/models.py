"""A tiny embedding model for the tests of everything after training."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.common import TextSettings
from embeddings.inference.encoder import Encoder
from embeddings.models.embedder import Embedder
from embeddings.models.pooling import MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
WORDS += ["pads", "sequences", "to", "one", "length"]


# Training a vocabulary breaks ties differently each time, and the hash of a model includes its vocabulary.
_tokenizer = cache(wordpiece_tokenizer)


def tiny_embedder(dropout: float = 0.0, normalize: bool = True, **text: object) -> Embedder:
    """A random two-layer BERT with mean pooling, in evaluation mode."""
    settings = TextSettings(**{"query_max_length": 16, "document_max_length": 64, **text})
    model = tiny_bert(dropout=dropout)
    embedder = Embedder(model, _tokenizer(), MeanPooling(32), normalize=normalize, text=settings)
    return embedder.eval()


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct texts of 1 to 30 words."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for row in range(count):
        num_words = int(torch.randint(1, 31, (1,), generator=generator))
        picks = torch.randint(len(WORDS), (num_words,), generator=generator).tolist()
        texts.append(f"{row} " + " ".join(WORDS[pick] for pick in picks))
    return texts


def write_corpus(path: Path, texts: list[str]) -> Path:
    """A corpus file whose ids are d0, d1, …."""
    rows = ({"_id": f"d{row}", "text": text} for row, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def on_encode(monkeypatch: pytest.MonkeyPatch, see: Callable[[Encoder, list[str], dict[str, Any]], object]) -> None:
    """Call `see(encoder, texts, options)` before each call of an encoder."""
    encode = Encoder.encode_blocks

    def seen(self: Encoder, texts: list[str], *args: Any, **options: Any) -> Any:
        see(self, texts, options)
        return encode(self, texts, *args, **options)

    monkeypatch.setattr(Encoder, "encode_blocks", seen)


def counted_encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every call of an encoder appends its number of texts."""
    counts: list[int] = []
    on_encode(monkeypatch, lambda _, texts, __: counts.append(len(texts)))
    return counts


def given_prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A list to which every call of an encoder with a role and a prompt appends both."""
    given: list[tuple[str, str]] = []
    on_encode(monkeypatch, lambda _, __, options: given.append((options["role"], options["prompt"])))
    return given


def encode_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if an encoder gets a text that is not empty; the empty text is used to check a prompt."""

    def refuse(_: Encoder, texts: list[str], __: dict[str, Any]) -> None:
        if any(texts):
            pytest.fail(f"{len(texts)} texts are encoded again")

    on_encode(monkeypatch, refuse)
