"""Texts to padded tokens, written out as a loop: what the models of these tests are fed."""

import ast
import sys

import torch

from embeddings.common import TokenBatch


def read(
    tokenizer,
    texts,
    prompt="",
    max_length=64,
    append_eos=False,
    pool_prompt=False,
):
    """The texts behind the prompt; a token is pooled if it reaches past the prompt or stands after the text."""
    all_ids, all_masks = [], []
    for text in texts:
        encoded = tokenizer(
            prompt + text,
            truncation=True,
            max_length=max_length - append_eos,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        ids, mask, seen_text = list(encoded["input_ids"]), [], False
        specials = encoded["special_tokens_mask"]
        for position, (_start, end) in enumerate(encoded["offset_mapping"]):
            ordinary_before = 0 in specials[:position]
            seen_text = seen_text or (not specials[position] and end > len(prompt))
            mask.append(seen_text or bool(specials[position] and ordinary_before) or not prompt or pool_prompt)
        if append_eos:
            ids.append(tokenizer.eos_token_id)
            mask.append(True)
        if not ids:
            ids, mask = [tokenizer.eos_token_id], [True]
        mask[-1] = True
        all_ids.append(ids)
        all_masks.append(mask)
    return TokenBatch.from_lists(all_ids, all_masks).padded(pad_token_id=tokenizer.pad_token_id)


def random_tokens(vocab_size, lengths, skip=0, seed=0):
    """Random ids (above 3) of the given lengths; the first `skip` tokens of each text are not pooled."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return TokenBatch.from_lists(ids, [[i >= skip for i in range(length)] for length in lengths]).padded()


def carried_code(folder):
    """The names of a directory's files of code, after a check that each imports what everybody has, or another."""
    files = {path.stem for path in folder.glob("*.py")}
    # Triton comes with torch where torch has CUDA, and its import is tried.
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "safetensors", "triton"}
    for name in files:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in (files if node.level else allowed), (name, node.module)
    return files
