"""The modules that a contextual model's directory brings along, for sentence-transformers to load.

A context is set on the first module and holds until another is set:

    model = SentenceTransformer(DIR, trust_remote_code=True)
    model[0].set_context(texts_of_the_corpus)
    vectors = model.encode_document(texts)

Or the context's vectors are given to each call:

    context = model[0].embed_context(texts_of_the_corpus)
    vectors = model.encode_document(texts, dataset_embeddings=context)

This file travels inside model directories: it imports nothing but torch, transformers and its siblings.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from .context_layers import ContextSlots, FirstStage, ResidualProjection, SoftPrompt, plain_model, states_behind_context
from .portable import TextTransformer, hub_arguments, load_tensors, read_text, save_json, save_tensors

CONTEXT_FOLDER = "0_Context"
CONTEXT_SETTINGS = "context.json"
CONTEXT_WEIGHTS = "context.safetensors"
# The name that sentence-transformers itself gives the folder of the third module.
RESIDUAL_FOLDER = "2_ResidualHead"
_TEXTS_AT_ONCE = 32


class ContextualTransformer(TextTransformer):
    """Texts behind a context to token states, with the mask of the tokens that enter the pooling.

    The first module of a sentence-transformers pipeline. Without a context every slot holds the null vector.

    Args:
        model: The second stage's backbone.
        tokenizer: The tokenizer of both stages, padding on the right.
        first_stage: Makes one vector of each context document.
        slots: Shares the context among the texts.
        soft_prompt: The vectors between context and text.
        has_positions: Whether context vectors have positions.
        document_prompt: What goes before a context document where nothing else is given.
        text: The arguments of `TextTransformer` past the tokenizer.
    """

    # What `encode` passes on to `forward`.
    forward_kwargs = ("dataset_embeddings",)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        first_stage: FirstStage,
        slots: ContextSlots,
        soft_prompt: SoftPrompt,
        has_positions: bool = False,
        document_prompt: str = "",
        **text: Any,
    ) -> None:
        super().__init__(model, tokenizer, **text)
        self.first_stage = first_stage
        self.slots = slots
        self.soft_prompt = soft_prompt
        self.has_positions = has_positions
        self.document_prompt = document_prompt
        self.context_MH: Tensor | None = None

    def set_context(self, texts: Sequence[str] | None, prompt: str | None = None) -> None:
        """Choose the documents that every text is read behind from now on, None for none; see `embed_context`."""
        self.context_MH = self.embed_context(texts, prompt) if texts else None

    @torch.no_grad()
    def embed_context(self, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """The vectors of context documents, (M, H) float32, not normalised.

        Args:
            texts: Documents of the corpus, never queries; at most as many as the model has slots. Of each the first
                tokens are read, as many as in training.
            prompt: Put before each; None for the model's prompt of documents.

        Raises:
            ValueError: If there are none, or more than slots.
        """
        prompt = self.document_prompt if prompt is None else prompt
        if not texts:
            raise ValueError("a context is at least one document")
        if len(texts) > self.slots.num_context:
            raise ValueError(f"this model takes at most {self.slots.num_context} context documents, got {len(texts)}")
        vectors = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            features = self.preprocess(texts[start : start + _TEXTS_AT_ONCE], prompt=prompt)
            inputs = [features[name] for name in ("input_ids", "attention_mask", "pooling_mask")]
            vectors.append(self.first_stage(*(tensor.to(self.slots.null_H.device) for tensor in inputs)))
        return torch.cat(vectors)

    def forward(self, features: dict[str, Any], dataset_embeddings: Any = None) -> dict[str, Any]:
        """The features with the states of the text's tokens added.

        Args:
            features: What `preprocess` gave.
            dataset_embeddings: What `embed_context` gave, (M, H), or None for the context that was set.

        Raises:
            ValueError: If the vectors are too many, of another width, or all of unit length: those of texts.
        """
        ids_NL, attention_NL = features["input_ids"], features["attention_mask"].bool()
        context_MH = self.context_MH
        if dataset_embeddings is not None:
            context_MH = torch.as_tensor(dataset_embeddings, dtype=torch.float32)
            if (context_MH.norm(dim=-1) - 1).abs().max() < 1e-3:
                raise ValueError("dataset_embeddings must be what model[0].embed_context(documents) gives")
        context_MH = None if context_MH is None else context_MH.to(ids_NL.device)
        context_NJH = self.slots(context_MH, len(ids_NL))
        state_NLH = states_behind_context(
            self.model, context_NJH, self.soft_prompt(), ids_NL, attention_NL, self.has_positions
        )
        return {**features, "token_embeddings": state_NLH}

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write both stages, the tokenizer and the settings; a context that was set is not kept."""
        super().save(output_path)
        folder = Path(output_path, CONTEXT_FOLDER)
        plain_model(self.first_stage.backbone).save_pretrained(folder)
        code_to_root(folder)
        settings = context_settings(self.first_stage, self.slots, self.soft_prompt, self.has_positions)
        save_json(settings, folder, CONTEXT_SETTINGS)
        save_tensors(context_layers(self.first_stage, self.slots, self.soft_prompt), folder / CONTEXT_WEIGHTS)

    @classmethod
    def load_own_parts(cls, name: str, where: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """The first stage, the context's layers, and the prompt of its documents."""
        first_where = {**where, "subfolder": f"{where['subfolder']}/{CONTEXT_FOLDER}".strip("/")}
        backbone = AutoModel.from_pretrained(name, **{**options, **first_where})
        settings = json.loads(read_text(name, CONTEXT_SETTINGS, first_where))
        parts = _context_parts(backbone, settings)
        load_tensors(context_layers(*parts), name, CONTEXT_WEIGHTS, first_where)
        described = json.loads(read_text(name, "config_sentence_transformers.json", where))
        own = dict(zip(("first_stage", "slots", "soft_prompt"), parts, strict=True))
        prompt = (described.get("prompts") or {}).get("document") or ""
        return {**own, "has_positions": settings.get("has_positions", False), "document_prompt": prompt}


class ResidualHead(nn.Module):
    """The residual projection after the pooling.

    Args:
        hidden_size: Width of the vectors.
        adds_pooled: Whether they are added to what the projection makes of them.
    """

    def __init__(self, hidden_size: int, adds_pooled: bool = True) -> None:
        super().__init__()
        self.residual = ResidualProjection(hidden_size, adds_pooled)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """The features with the projected vectors, (N, H)."""
        return {**features, "sentence_embedding": self.residual(features["sentence_embedding"])}

    def get_embedding_dimension(self) -> int:
        """Width of the vectors."""
        return self.residual.hidden_size

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the width and the weights."""
        save_json(residual_settings(self.residual), output_path, "config.json")
        save_tensors(self.residual, Path(output_path, "model.safetensors"))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **loading: Any) -> Self:
        """The module of a directory or Hub id, with the arguments that sentence-transformers passes on."""
        where = {"subfolder": subfolder, **hub_arguments(loading)}
        module = cls(**json.loads(read_text(model_name_or_path, "config.json", where)))
        load_tensors(module.residual, model_name_or_path, "model.safetensors", where)
        return module


def context_layers(first_stage: FirstStage, slots: ContextSlots, soft_prompt: SoftPrompt) -> nn.ModuleDict:
    """The layers of one weights file: all that the context needs beside the two backbones."""
    return nn.ModuleDict({"projection": first_stage.projection, "slots": slots, "soft_prompt": soft_prompt})


def residual_settings(residual: ResidualProjection) -> dict[str, Any]:
    """What a residual projection is built from, as plain types."""
    return {"hidden_size": residual.hidden_size, "adds_pooled": residual.adds_pooled}


def context_settings(
    first_stage: FirstStage, slots: ContextSlots, soft_prompt: SoftPrompt, has_positions: bool
) -> dict[str, Any]:
    """What those layers are built from, and how they are read, as plain types."""
    return {
        "num_context": slots.num_context,
        "context_dropout": slots.dropout_fraction,
        "num_soft_prompts": soft_prompt.num_soft_prompts,
        "backbone_size": first_stage.pooling.hidden_size,
        "context_size": soft_prompt.context_size,
        "context_max_length": first_stage.max_length,
        "pools_prompt": first_stage.pools_prompt,
        "has_positions": has_positions,
    }


def code_to_root(folder: Path) -> None:
    """Move the code that a backbone's folder was given to the directory above, where alone transformers looks."""
    for file in folder.glob("*.py"):
        file.replace(folder.parent / file.name)


def _context_parts(backbone: nn.Module, settings: dict[str, Any]) -> tuple[FirstStage, ContextSlots, SoftPrompt]:
    size = settings["context_size"]
    # Earlier directories do not say all of it.
    limit, pools_prompt = settings.get("context_max_length"), settings.get("pools_prompt", False)
    return (
        FirstStage(backbone, settings["backbone_size"], size, limit, pools_prompt),
        ContextSlots(settings["num_context"], size, settings["context_dropout"]),
        SoftPrompt(settings["num_soft_prompts"], size),
    )
