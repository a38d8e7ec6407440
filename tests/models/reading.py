"""Padded tokens of texts or random ids for the models of these tests; a check of the code in a model directory."""

import ast
import sys

import torch

from embeddings.common import TextSettings, TokenBatch
from embeddings.data.tokenize import TextTokenizer


def tokenised(tokenizer, texts, prompt="", max_length=64, pool_prompt=False):
    """The texts with the prompt before each, tokenised as in training and padded."""
    settings = TextSettings(max_length, max_length, pool_prompt=pool_prompt)
    return TextTokenizer(tokenizer, settings)(texts, "query", prompt).padded(pad_token_id=tokenizer.pad_token_id)


def random_tokens(vocab_size, lengths, skip=0, seed=0):
    """Random ids (above 3) for these lengths; the first `skip` tokens of each text are not pooled."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return TokenBatch.from_lists(ids, [[i >= skip for i in range(length)] for length in lengths]).padded()


def carried_code(folder):
    """The names of a directory's Python files, after a check that they import only allowed packages and each other."""
    files = {path.stem for path in folder.glob("*.py")}
    # Triton is installed with CUDA builds of torch; its import is inside `try`.
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "safetensors", "triton"}
    for name in files:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in (files if node.level else allowed), (name, node.module)
    return files
