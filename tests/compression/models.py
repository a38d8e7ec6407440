"""Small random models of every supported family, as directories."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from embeddings.common import TextSettings
from embeddings.models import Embedder, MeanPooling
from tests.helpers.tiny import bpe_tokenizer, wordpiece_tokenizer

SHAPE = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "mpnet": {},
    "nomic_bert": {},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "jina_embeddings_v3": {},
    "llama": HEADS,
    "mistral": HEADS | {"sliding_window": 4},
    "qwen3": HEADS,
    "gemma": HEADS,
    "gemma2": HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
}
DECODERS = ("llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text")
WORDS = ["pads", "sequences", "to", "one", "length", "the", "quick", "brown", "fox", "jumps", "return", "sum", "of"]


def build(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random backbone in evaluation mode; its weights are large enough for each layer to matter."""
    torch.manual_seed(seed)
    fields = {**SHAPE, **FAMILIES[name], **options}
    config = AutoConfig.for_model(name, **fields)
    has_pooling = name in ("bert", "xlm-roberta", "mpnet", "nomic_bert")
    model = AutoModel.from_config(config, **({"add_pooling_layer": False} if has_pooling else {}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def write_model(folder: Path, name: str = "bert", **options: Any) -> Path:
    """The model directory of a random backbone with mean pooling."""
    tokenizer = bpe_tokenizer() if name in DECODERS else wordpiece_tokenizer()
    text = TextSettings(query_max_length=16, document_max_length=32, prompts={"query": "to: "}, pool_prompt=True)
    Embedder(build(name, **options), tokenizer, MeanPooling(32), text=text).save_pretrained(folder)
    return folder


def some_texts(count: int = 24, seed: int = 0) -> list[str]:
    """Texts of 1 to 12 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    picks = [torch.randint(len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(WORDS[pick] for pick in each) for each in picks]


def write_texts(path: Path, count: int = 24) -> Path:
    """A file with one text per line."""
    path.write_text("\n".join(some_texts(count)) + "\n", encoding="utf-8")
    return path
