"""sentence-transformers modules that a contextual model's directory contains.

A context is set on the first module and used until another is set:

    model = SentenceTransformer(DIR, trust_remote_code=True)
    model[0].set_context(texts_of_the_corpus)
    vectors = model.encode_document(texts)

Alternatively, pass the context's vectors to each call:

    context = model[0].embed_context(texts_of_the_corpus)
    vectors = model.encode_document(texts, dataset_embeddings=context)

This file travels inside model directories: it imports only torch, transformers and its siblings.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .context_layers import ContextSlots, FirstStage, ResidualProjection, SoftPrompt, plain_model, states_behind_context
from .portable import SavedLayer, TextTransformer, load_backbone, load_tensors, read_text, save_json, save_tensors

CONTEXT_FOLDER = "0_Context"
CONTEXT_SETTINGS = "context.json"
CONTEXT_WEIGHTS = "context.safetensors"
# sentence-transformers' name for the folder of the third module.
RESIDUAL_FOLDER = "2_ResidualHead"
_TEXTS_AT_ONCE = 32


class ContextParts(NamedTuple):
    """The parts of a contextual model that a plain one does not have; the residual projection is a separate module."""

    first_stage: FirstStage
    slots: ContextSlots
    soft_prompt: SoftPrompt
    has_positions: bool = False
    residual: ResidualProjection | None = None

    def layers(self) -> nn.ModuleDict:
        """The layers of `CONTEXT_WEIGHTS`: all except the two backbones and the residual projection."""
        parts = {"projection": self.first_stage.projection, "slots": self.slots, "soft_prompt": self.soft_prompt}
        return nn.ModuleDict(parts)

    def save(self, folder: Path) -> None:
        """Write the layers' weights and settings into the folder of the first stage's backbone."""
        # Code of the backbone is moved to the parent directory, the only one where transformers looks for it.
        for file in folder.glob("*.py"):
            file.replace(folder.parent / file.name)
        settings = {
            "num_context": self.slots.num_context,
            "context_dropout": self.slots.dropout_fraction,
            "num_soft_prompts": self.soft_prompt.num_soft_prompts,
            "backbone_size": self.first_stage.pooling.hidden_size,
            "context_size": self.soft_prompt.context_size,
            "context_max_length": self.first_stage.max_length,
            "pools_prompt": self.first_stage.pools_prompt,
            "has_positions": self.has_positions,
            "has_null": self.slots.has_null,
        }
        save_json(settings, folder, CONTEXT_SETTINGS)
        save_tensors(self.layers(), folder / CONTEXT_WEIGHTS)

    @classmethod
    def of_settings(cls, backbone: nn.Module, settings: dict[str, Any]) -> Self:
        """The layers of a directory without their weights; older directories lack some settings."""
        size = settings["context_size"]
        limit, pools_prompt = settings.get("context_max_length"), settings.get("pools_prompt", False)
        return cls(
            FirstStage(backbone, settings["backbone_size"], size, limit, pools_prompt),
            ContextSlots(settings["num_context"], size, settings["context_dropout"], settings["has_null"]),
            SoftPrompt(settings["num_soft_prompts"], size),
            settings.get("has_positions", False),
        )


class ContextualTransformer(TextTransformer):
    """Maps texts with a context to token states and the mask of the tokens that enter the pooling.

    The first module of a sentence-transformers pipeline. Empty slots have the null vector; see `ContextSlots`.
    `document_prompt` is the default prompt of context documents.
    """

    # Arguments that `encode` passes on to `forward`.
    forward_kwargs = ("dataset_embeddings",)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        context: ContextParts,
        document_prompt: str = "",
        **text: Any,
    ) -> None:
        super().__init__(model, tokenizer, **text)
        self.parts = context
        self.first_stage, self.slots, self.soft_prompt = context[:3]
        self.document_prompt = document_prompt
        self.context_MH: Tensor | None = None

    def set_context(self, texts: Sequence[str] | None, prompt: str | None = None) -> None:
        """Set the context documents of all following texts, or None for no context; see `embed_context`."""
        self.context_MH = self.embed_context(texts, prompt) if texts else None

    @torch.no_grad()
    def embed_context(self, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """The vectors of context documents, (M, H) float32, not normalised; `prompt` defaults to `document_prompt`."""
        prompt = self.document_prompt if prompt is None else prompt
        if not texts:
            raise ValueError("a context needs at least one document")
        if len(texts) > self.slots.num_context:
            raise ValueError(f"this model accepts at most {self.slots.num_context} context documents, got {len(texts)}")
        vectors = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            features = self.preprocess(texts[start : start + _TEXTS_AT_ONCE], prompt=prompt)
            inputs = [features[name] for name in ("input_ids", "attention_mask", "pooling_mask")]
            vectors.append(self.first_stage(*(tensor.to(self.slots.null_H.device) for tensor in inputs)))
        return torch.cat(vectors)

    def forward(self, features: dict[str, Any], dataset_embeddings: Any = None) -> dict[str, Any]:
        """Add the states of the text's tokens to the features; `dataset_embeddings` overrides `set_context`."""
        ids_NL, attention_NL = features["input_ids"], features["attention_mask"].bool()
        context_MH = self.context_MH
        if dataset_embeddings is not None:
            context_MH = torch.as_tensor(dataset_embeddings, dtype=torch.float32)
            # Vectors of unit length are those of texts.
            if (context_MH.norm(dim=-1) - 1).abs().max() < 1e-3:
                raise ValueError("dataset_embeddings must be the result of model[0].embed_context(documents)")
        context_MH = None if context_MH is None else context_MH.to(ids_NL.device)
        context_NJH = self.slots(context_MH, len(ids_NL))
        inputs = (context_NJH, self.soft_prompt(), ids_NL, attention_NL, self.parts.has_positions)
        state_NLH = states_behind_context(self.model, *inputs)
        return {**features, "token_embeddings": state_NLH}

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write both stages, the tokenizer and the settings, without a context that was set."""
        super().save(output_path)
        folder = Path(output_path, CONTEXT_FOLDER)
        plain_model(self.first_stage.backbone).save_pretrained(folder)
        self.parts.save(folder)

    @classmethod
    def load_own_parts(cls, name: str, where: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """The first stage with the context's layers, and the prompt of context documents."""
        first_where = {**where, "subfolder": f"{where['subfolder']}/{CONTEXT_FOLDER}".strip("/")}
        backbone = load_backbone(name, {**options, **first_where})
        parts = ContextParts.of_settings(backbone, json.loads(read_text(name, CONTEXT_SETTINGS, first_where)))
        load_tensors(parts.layers(), name, CONTEXT_WEIGHTS, first_where)
        config = json.loads(read_text(name, "config_sentence_transformers.json", where))
        return {"context": parts, "document_prompt": (config.get("prompts") or {}).get("document") or ""}


class ResidualHead(SavedLayer):
    """The residual projection after the pooling; see `ResidualProjection`."""

    def __init__(self, hidden_size: int, adds_pooled: bool = True) -> None:
        super().__init__()
        self.layer = ResidualProjection(hidden_size, adds_pooled)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """The features with the projected vectors, (N, H)."""
        return {**features, "sentence_embedding": self.layer(features["sentence_embedding"])}
