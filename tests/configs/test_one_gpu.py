"""The configs of known models agree with their cards, and train stand-ins of the same architectures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import processors
from torch.nn import Identity
from transformers import Gemma3TextConfig, Gemma3TextModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from embeddings.data.tokenize import TextTokenizer
from embeddings.inference import Encoder
from tests.configs.files import CONFIGS, read, small_run
from tests.helpers.runs import write_pairs
from tests.helpers.tiny import bpe_tokenizer, save_backbone, sentencepiece_tokenizer, wordpiece_tokenizer
from tests.models.contextual_models import tiny_modernbert

FILES = sorted(path.stem for path in (CONFIGS / "one_gpu").iterdir())
SMALL = {"vocab_size": 640, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192}
# Typed from the cards a second time: checkpoint, pooling, longest document, prompts.
SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
CARDS = {
    "qwen3_embedding_0.6b": ("Qwen/Qwen3-Embedding-0.6B", "LastTokenPooling", 8192, {"query": SEARCH}),
    "embedding_gemma_300m": (
        "google/embeddinggemma-300m", "MeanPooling", 2048,
        {"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
    "modernbert_base": ("answerdotai/ModernBERT-base", "MeanPooling", 8192, {}),
    "modernbert_large": ("answerdotai/ModernBERT-large", "MeanPooling", 8192, {}),
}  # fmt: skip


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that ends texts with <|endoftext|>, its padding token, and has another end-of-sequence token."""
    tokenizer = bpe_tokenizer()
    last = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    template = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", last)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    return tokenizer


def stand_in(name: str, folder: Path) -> str:
    """A tiny model of the config's architecture, with its kind of tokenizer."""
    torch.manual_seed(0)
    if name.startswith("modernbert"):
        return save_backbone(str(folder), tiny_modernbert(), wordpiece_tokenizer())
    if name.startswith("qwen"):
        return save_backbone(str(folder), Qwen3Model(Qwen3Config(**SMALL)), qwen_tokenizer())
    model = Gemma3TextModel(Gemma3TextConfig(**SMALL, sliding_window=16, use_bidirectional_attention=True))
    save_backbone(str(folder / "backbone"), model, sentencepiece_tokenizer())
    layers = [Dense(*sizes, bias=False, activation_function=Identity()) for sizes in ((32, 128), (128, 32))]
    modules = [Transformer(str(folder / "backbone")), Pooling(32, "mean"), *layers, Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)
    return str(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_config_agrees_with_the_models_card(name: str) -> None:
    checkpoint, pooling, longest, prompts = CARDS[name]
    content = read(f"one_gpu/{name}")
    model, text = content["model"]["init_args"], content["data"]["init_args"]["text"]
    assert model["backbone"]["name"] == model.get("initial_model", checkpoint) == checkpoint
    assert model["pooling"]["class_path"].endswith(f".{pooling}")
    assert (text["document_max_length"], text.get("prompts", {})) == (longest, prompts)
    assert model.get("normalize", True)
    assert not text.get("append_eos", False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith("qwen3") else pytest.mark.slow)
        for name in FILES
        if name != "modernbert_large"
    ],
)
def test_a_config_trains_a_stand_in_that_encodes_as_its_card_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl", num_pairs=16, num_negatives=1)
    model = {"backbone": {"name": stand_in(name, tmp_path / "stand_in")}}
    model |= {"initial_model": model["backbone"]["name"]} if name.startswith("embedding_gemma") else {}
    small: dict[str, Any] = {
        "trainer": {"precision": "32-true", "max_epochs": 1},
        "model": {"init_args": model},
        "data": {"init_args": {"batch_size": 8, "num_workers": 0, "cache_dir": "cache"}},
    }
    files: list[str | Path] = [CONFIGS / "own_pairs.yaml", CONFIGS / "one_gpu" / f"{name}.yaml"]
    cli = small_run(tmp_path, files, small, "--data.sources", "[{name: mine, path: pairs.jsonl}]")
    assert cli.trainer.global_step == 2

    ours = Encoder.from_pretrained("checkpoints/own_pairs", precision="float32", device="cpu")
    text = ours.embedder.text
    assert (text.prompts, text.document_max_length) == (CARDS[name][3], CARDS[name][2])
    ids = TextTokenizer(ours.embedder.tokenizer, text)(["the fox"], "query").input_ids_T.tolist()
    if name.startswith("qwen"):
        ends = ours.embedder.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
        assert (ids[-1], ends[1] in ids) == (ends[0], False)
    assert (ours.embedder.head is not None) == name.startswith("embedding_gemma")
    theirs = SentenceTransformer("checkpoints/own_pairs", device="cpu", model_kwargs={"dtype": "float32"})
    texts = ["pad the fox", "a lazy dog " * 20]
    for role in ("query", "document"):
        expected, found = (getattr(encoder, f"encode_{role}")(texts) for encoder in (theirs, ours))
        assert np.abs(expected - found).max() <= 1e-4
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() <= 1e-5
