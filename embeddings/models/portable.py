"""sentence-transformers modules that a model directory contains.

The modules of sentence-transformers itself cannot exclude a prompt's tokens from the pooling exactly (they tokenise the
prompt separately), keep the end-of-sequence token under truncation, or pool by attention. A directory that needs one
of these contains this file and its siblings.

This file travels inside model directories: it imports only torch, transformers (with its safetensors) and its siblings.
"""

import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from .pooling import Pooling
from .poolings import POOLINGS

TEXT_FILE = "text_settings.json"


class TextTransformer(nn.Module):
    """Maps texts to token states and the mask of the tokens that enter the pooling.

    The first module of a sentence-transformers pipeline. `encode_query` truncates to the query length, everything else
    to the document length, including prompt and special tokens. The other arguments are those of `TextSettings`.
    """

    save_in_root = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        query_max_length: int,
        document_max_length: int,
        append_eos: bool,
        pool_prompt: bool,
        suffix: str = "",
        pool_start: bool = True,
        pooling_rule: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.query_max_length = query_max_length
        self.max_seq_length = document_max_length
        self.append_eos = append_eos
        self.pool_prompt = pool_prompt
        self.suffix = suffix
        self.pool_start = pool_start
        self.pooling_rule = pooling_rule

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, task: str | None = None, **_: Any
    ) -> dict[str, Tensor]:
        """Ids and masks of the texts after a prompt, padded on the right."""
        max_length = self.query_max_length if task == "query" else self.max_seq_length
        ids, firsts = self.tokenize_exactly(inputs, prompt or "", max_length)
        lengths_N = torch.tensor([len(row) for row in ids])
        position_L = torch.arange(int(lengths_N.max()))
        attention_NL = position_L < lengths_N[:, None]
        longest, pad = len(position_L), self.tokenizer.pad_token_id
        return {
            "input_ids": torch.tensor([row + [pad] * (longest - len(row)) for row in ids]),
            "attention_mask": attention_NL.long(),
            "pooling_mask": attention_NL & (position_L >= torch.tensor(firsts)[:, None]),
        }

    def tokenize_exactly(self, texts: Sequence[str], prompt: str, max_length: int) -> tuple[list[list[int]], list[int]]:
        """Ids of each text after its prompt, tokenised together, and the index of its first token to be pooled.

        If no token of the text remains, the special tokens after it are pooled, or else the last token.
        """
        probe = self.tokenizer("a", return_special_tokens_mask=True)
        num_trailing = probe["special_tokens_mask"][::-1].index(0)
        eos = self.tokenizer.eos_token_id
        closed = self.tokenizer(f"a{self.suffix}")["input_ids"] if self.suffix else probe["input_ids"]
        appended = closed[len(probe["input_ids"]) :]
        appended += [eos] if self.append_eos and probe["input_ids"][-1] != eos else []
        # In NV-Embed's released code the end-of-sequence token is part of the text, so truncation may remove it.
        limit = max_length - (0 if self.pooling_rule == "instruction_count" else len(appended))
        joined = [prompt + text for text in texts]
        encoded = self.tokenizer(joined, truncation=True, max_length=limit, return_offsets_mapping=True)
        colon, num_counted = self.tokenizer.convert_tokens_to_ids(":"), len(self.tokenizer.tokenize(prompt))
        # The token of a text without tokens.
        known = (getattr(self.tokenizer, f"{name}_token_id") for name in ("eos", "sep", "pad", "unk"))
        stand_in = next(int(token) for token in known if token is not None)
        measured = self.tokenizer(prompt)["input_ids"] + appended
        num_measured = len(measured) - bool({*measured[-1:]} & {*self.tokenizer.all_special_ids})
        ids, firsts = [], []
        for row, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            first, end_of_text = 0, len(row) - num_trailing
            if self.pool_prompt:
                pass
            elif self.pooling_rule == "after_colon":
                first = row.index(colon) + 1 if colon in row else 0
            elif self.pooling_rule == "instruction_count":
                first = num_counted
            elif self.pooling_rule == "prompt_length":
                first = num_measured if prompt else 0
            elif prompt or not self.pool_start:
                # Special tokens span no characters, so they do not count as text.
                first = next((i for i, (_, end) in enumerate(offsets) if end > len(prompt)), end_of_text)
            ids.append((row + appended)[:max_length] or [stand_in])
            firsts.append(min(first, len(ids[-1]) - 1))
        return ids, firsts

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        output = self.model(**{name: features[name] for name in ("input_ids", "attention_mask")})
        return {**features, "token_embeddings": output.last_hidden_state}

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        self.model.save_pretrained(output_path)
        self.tokenizer.save_pretrained(output_path)
        save_json(self.settings(), output_path, TEXT_FILE)

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments except model and tokenizer, as JSON types."""
        lengths = {"query_max_length": self.query_max_length, "document_max_length": self.max_seq_length}
        flags = {name: getattr(self, name) for name in ("append_eos", "pool_prompt", "suffix", "pool_start")}
        return {**lengths, **flags, **({"pooling_rule": self.pooling_rule} if self.pooling_rule else {})}

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        model_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        config_kwargs: dict[str, Any] | None = None,
        **loading: Any,
    ) -> Self:
        """The module of a directory or Hub id, with the arguments that sentence-transformers passes on."""
        where = {"subfolder": subfolder, **hub_arguments(loading)}
        settings = json.loads(read_text(model_name_or_path, TEXT_FILE, where))
        # The backbone may need code of the directory too; the caller decides whether to trust it.
        common = {**where, "trust_remote_code": loading.get("trust_remote_code", False)}
        options = {**common, **(config_kwargs or {}), **(model_kwargs or {})}
        own_parts = cls.load_own_parts(model_name_or_path, where, options)
        model = load_backbone(model_name_or_path, options)
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **{**common, **(processor_kwargs or {})})
        return cls(model, tokenizer, **own_parts, **settings)

    @classmethod
    def load_own_parts(cls, name: str, where: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Further constructor arguments that a subclass loads; `options` are for loading a backbone."""
        return {}


def load_backbone(name: str, options: dict[str, Any]) -> PreTrainedModel:
    """The backbone of a directory or Hub id, without a pooling layer: it is unused, and loading would warn about it."""
    where = ("subfolder", "revision", "token", "cache_dir", "local_files_only", "trust_remote_code")
    config = AutoConfig.from_pretrained(name, **{key: options[key] for key in where if key in options})
    model_class: Any = MODEL_MAPPING.get(type(config), None)
    if model_class is not None and "add_pooling_layer" in inspect.signature(model_class).parameters:
        options = {"add_pooling_layer": False, **options}
    model: PreTrainedModel = AutoModel.from_pretrained(name, **options)
    return model


class SavedLayer(nn.Module):
    """A module around one layer, saved as `config.json` and, if the layer has weights, `model.safetensors`."""

    layer: Any

    def settings(self) -> dict[str, Any]:
        return self.layer.settings()  # type: ignore[no-any-return]

    def get_embedding_dimension(self) -> int:
        return int(self.layer.hidden_size)

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        save_layer(self.layer, self.settings(), Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **loading: Any) -> Self:
        where = {"subfolder": subfolder, **hub_arguments(loading)}
        module = cls(**json.loads(read_text(model_name_or_path, "config.json", where)))
        if module.layer.state_dict():
            load_tensors(module.layer, model_name_or_path, "model.safetensors", where)
        return module


class MaskedPooling(SavedLayer):
    """One vector per text from the states of its pooled tokens, by a pooling of `POOLINGS`."""

    def __init__(self, name: str, hidden_size: int, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.name = name
        self.layer = POOLINGS[name](hidden_size, **arguments)

    def settings(self) -> dict[str, Any]:
        return pooling_settings(self.name, self.layer)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        state_NLH, pooling_NL = features["token_embeddings"], features["pooling_mask"]
        captured: tuple[Any, ...] = ()
        if self.layer.captured_layers:
            captured = (features["attention_mask"].bool(), features["captured_attention"])
        return {**features, "sentence_embedding": self.layer(state_NLH, pooling_NL, *captured)}


def pooling_settings(name: str, pooling: Pooling) -> dict[str, Any]:
    """The arguments of `MaskedPooling`, as JSON types."""
    return {"name": name, "hidden_size": pooling.hidden_size, "arguments": pooling.arguments()}


def save_layer(layer: nn.Module, settings: dict[str, Any], folder: Path, prefix: str = "") -> None:
    """Write a layer's settings and weights, if any, into an existing folder."""
    save_json(settings, folder, "config.json")
    if layer.state_dict():
        save_tensors(layer, folder / "model.safetensors", prefix)


def save_tensors(module: nn.Module, file: Path, prefix: str = "") -> None:
    state = {f"{prefix}{name}": tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, file, metadata={"format": "pt"})


def save_json(value: dict[str, Any], *path: str | os.PathLike[str]) -> None:
    Path(*path).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_tensors(module: nn.Module, name: str, filename: str, where: dict[str, Any]) -> None:
    module.load_state_dict(load_file(str(cached_file(name, filename, **where))))


def hub_arguments(loading: dict[str, Any]) -> dict[str, Any]:
    """sentence-transformers' arguments for the location of a file on the Hub, under transformers' names."""
    where = {"token": loading.get("token"), "cache_dir": loading.get("cache_folder")}
    return {**where, "revision": loading.get("revision"), "local_files_only": loading.get("local_files_only", False)}


def read_text(name: str, filename: str, where: dict[str, Any]) -> str:
    return Path(str(cached_file(name, filename, **where))).read_text(encoding="utf-8")
