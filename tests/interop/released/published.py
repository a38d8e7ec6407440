"""Writing folders in published formats, and comparing the vectors of imported models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from embeddings.inference import Encoder

TEXTS = ["the quick brown fox", "how do I pad sequences to one length 7 8 9", "a", "return the sum of two numbers"]
State = dict[str, Tensor]


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0, std: float = 0.3) -> State:
    """Random tensors; the weights of norms are around one."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * std
        is_norm = name.endswith(("norm.weight", "ln.weight", "norm1.weight", "norm2.weight", "norm_context.weight"))
        state[name] = tensor + 1 if is_norm or "layernorm" in name or name.endswith("layer_norm.weight") else tensor
    return state


def write_checkpoint(
    folder: Path, config: dict[str, Any], state: State, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A published folder: config.json, model.safetensors and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def describe(folder: Path, width: int, normalize: bool = True, **settings: Any) -> None:
    """The files of a sentence-transformers directory with mean pooling."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    entries = [
        {"idx": row, "name": str(row), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for row, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for _, path in kinds[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def encoded(folder: Path, texts: list[str] = TEXTS, role: str = "document", **options: Any) -> Tensor:
    """The vectors of a model directory by `Encoder`, of several texts of different lengths at once."""
    encoder = Encoder.from_pretrained(str(folder), precision="float32", device="cpu")
    return torch.from_numpy(np.asarray(encoder.encode(texts, role=role, **options)))


def by_library(
    folder: Path, role: str = "document", context: list[str] | None = None, texts: list[str] = TEXTS, **options: Any
) -> Tensor:
    """The same vectors by sentence-transformers; tests that call it use the fixture `remote_code`."""
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    if context is not None:
        model[0].set_context(context)
    encode = model.encode_query if role == "query" else model.encode_document
    return torch.from_numpy(encode(texts, **options))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Check that vectors are equal to 1e-5, and that no two texts have the same vector."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    rows, width = found.shape
    assert torch.pdist(found).min() > 1e-2
    assert rows > 1 < width


def each(texts: list[str], vector: Callable[[str], Tensor]) -> Tensor:
    """The unit vectors of texts, computed one by one."""
    return torch.nn.functional.normalize(torch.stack([vector(text) for text in texts]), dim=-1)


def changed_config(folder: Path, **fields: Any) -> None:
    """Set fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
