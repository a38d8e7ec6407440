"""Contextual models: their layers, the forward pass behind a context, and their sentence-transformers modules.

A context is set on the first module, or its vectors are passed to each call:

    model = SentenceTransformer(DIR, trust_remote_code=True)
    model[0].set_context(texts_of_the_corpus)
    vectors = model.encode_document(texts)
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
from transformers.masking_utils import sliding_window_bidirectional_overlay, sliding_window_overlay

from .pooling import MeanPooling, first_position, learned_positions, plain_backbone
from .portable import SavedLayer, TextTransformer, load_backbone, load_tensors, read_text, save_json, save_tensors

CONTEXT_FOLDER = "0_Context"
CONTEXT_SETTINGS = "context.json"
CONTEXT_WEIGHTS = "context.safetensors"
# sentence-transformers' name for the folder of the third module.
RESIDUAL_FOLDER = "2_ResidualHead"
_TEXTS_AT_ONCE = 32


class FirstStage(nn.Module):
    """Maps context documents to context vectors: encoder, mean pooling, Linear-GELU-Linear.

    `context_size` is the width of the second stage's word embeddings, H. Documents are truncated to `max_length` tokens
    (None for no limit); with `pools_prompt` all tokens are pooled, whatever the pooling mask.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2; the projection is from the released code, not the paper.
    """

    def __init__(
        self,
        backbone: nn.Module,
        backbone_size: int,
        context_size: int,
        max_length: int | None = None,
        pools_prompt: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.max_length = max_length
        self.pools_prompt = pools_prompt
        self.pooling = MeanPooling(backbone_size)
        self.projection = nn.Sequential(
            nn.Linear(backbone_size, backbone_size), nn.GELU(), nn.Linear(backbone_size, context_size)
        )

    def forward(self, input_ids_ML: Tensor, attention_mask_ML: Tensor, pooling_mask_ML: Tensor) -> Tensor:
        """One vector per context document, (M, H), from ids padded on the right and boolean masks."""
        if self.max_length is not None and input_ids_ML.shape[1] > self.max_length:
            parts = (input_ids_ML, attention_mask_ML, pooling_mask_ML.clone())
            input_ids_ML, attention_mask_ML, pooling_mask_ML = (part[:, : self.max_length] for part in parts)
            # The last token is pooled, because a document truncated within its prompt has no other pooled token.
            last_M1 = attention_mask_ML.sum(dim=1, keepdim=True).clamp(min=1) - 1
            pooling_mask_ML.scatter_(1, last_M1, True)
        output = self.backbone(input_ids=input_ids_ML, attention_mask=attention_mask_ML.long())
        pooled_ML = attention_mask_ML.bool() if self.pools_prompt else pooling_mask_ML
        return self.project(self.pooling(output.last_hidden_state, pooled_ML))

    def project(self, pooled_MH: Tensor) -> Tensor:
        first: nn.Module = self.projection[0]
        vector_MH: Tensor = self.projection(pooled_MH.to(next(first.parameters()).dtype))
        return vector_MH.to(torch.promote_types(vector_MH.dtype, torch.float32))

    # A model's hash includes these texts.
    def extra_repr(self) -> str:
        length = [] if self.max_length is None else [f"max_length={self.max_length}"]
        return ", ".join([*length, *(["pools_prompt=True"] if self.pools_prompt else [])])


class ContextSlots(nn.Module):
    """The J context vectors of each text of a batch: one shared context, with dropout, padded with a null vector.

    In training each slot of a text has the null vector with probability `dropout_fraction`, so that the model learns to
    work with any number of documents. A model without a null vector has no empty slots: a smaller context makes the
    input shorter.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 (sequence dropout), §5 (its fraction) and the released code.
    """

    null_H: Tensor

    def __init__(
        self, num_context: int, context_size: int, dropout_fraction: float = 0.005, has_null: bool = True
    ) -> None:
        super().__init__()
        self.num_context = num_context
        self.dropout_fraction = dropout_fraction
        self.has_null = has_null
        if has_null:
            self.null_H = nn.Parameter(torch.randn(context_size) * 0.01)
        else:  # only its width, device and dtype are used
            self.register_buffer("null_H", torch.zeros(context_size), persistent=False)

    def forward(self, context_MH: Tensor | None, num_texts: int) -> Tensor:
        """The context vectors of N texts from M <= J vectors or None, (N, J, H), or (N, M, H) without a null vector."""
        width = len(self.null_H)
        context_MH = self.null_H.new_empty(0, width) if context_MH is None else context_MH
        if context_MH.ndim != 2 or context_MH.shape[1] != width or len(context_MH) > self.num_context:
            shape = tuple(context_MH.shape)
            raise ValueError(f"context must be at most {self.num_context} vectors of width {width}, got {shape}")
        if not self.has_null:
            return context_MH.to(self.null_H.dtype).expand(num_texts, -1, -1)
        null_NJH = self.null_H.expand(num_texts, self.num_context, width)
        num_empty = self.num_context - len(context_MH)
        full_JH = torch.cat([context_MH.to(self.null_H.dtype), self.null_H.expand(num_empty, width)])
        full_NJH = full_JH.expand(num_texts, -1, -1)
        if not self.training:
            return full_NJH
        # Also drawn for a fraction of 0, so that every rank's graph contains the null vector.
        dropped_NJ = torch.rand(num_texts, self.num_context, device=full_NJH.device) < self.dropout_fraction
        return torch.where(dropped_NJ[:, :, None], null_NJH, full_NJH)

    def extra_repr(self) -> str:
        null = "" if self.has_null else ", has_null=False"
        return f"num_context={self.num_context}, dropout_fraction={self.dropout_fraction}{null}"


class SoftPrompt(nn.Module):
    """Learned vectors between context and text, (S, H): Linear-ReLU-Linear of a constant vector of ones.

    Source: the released code of arXiv:2410.02525, with S = 8; not in the paper.
    """

    def __init__(self, num_soft_prompts: int, context_size: int) -> None:
        super().__init__()
        self.num_soft_prompts = num_soft_prompts
        self.context_size = context_size
        self.layers = nn.Sequential()
        if num_soft_prompts:
            last = nn.Linear(context_size, num_soft_prompts * context_size)
            self.layers = nn.Sequential(nn.Linear(context_size, context_size), nn.ReLU(), last)
        self.register_buffer("ones_H", torch.ones(context_size), persistent=False)

    def forward(self) -> Tensor:
        assert isinstance(self.ones_H, Tensor)
        if not self.num_soft_prompts:
            return self.ones_H.new_empty(0, self.context_size)
        vectors: Tensor = self.layers(self.ones_H)
        return vectors.view(self.num_soft_prompts, self.context_size)


class ResidualProjection(nn.Module):
    """A vector plus Linear-ReLU-Linear of it; the last layer is initialised with zeros, which is the identity.

    Without `adds_pooled` the vector is not added, and the last layer is initialised at random.

    Source: the released code of arXiv:2410.02525; not in the paper. Differs: the release has random weights at first.
    """

    def __init__(self, hidden_size: int, adds_pooled: bool = True) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.adds_pooled = adds_pooled
        last = nn.Linear(hidden_size, hidden_size)
        if adds_pooled:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), last)

    def forward(self, vector_NH: Tensor) -> Tensor:
        first: nn.Module = self.layers[0]
        branch_NH: Tensor = self.layers(vector_NH.to(next(first.parameters()).dtype))
        return vector_NH + branch_NH if self.adds_pooled else branch_NH

    def settings(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden_size, "adds_pooled": self.adds_pooled}

    def extra_repr(self) -> str:
        return "" if self.adds_pooled else "adds_pooled=False"


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
        size, limit = settings["context_size"], settings["context_max_length"]
        return cls(
            FirstStage(backbone, settings["backbone_size"], size, limit, settings["pools_prompt"]),
            ContextSlots(settings["num_context"], size, settings["context_dropout"], settings["has_null"]),
            SoftPrompt(settings["num_soft_prompts"], size),
            settings["has_positions"],
        )


def states_behind_context(
    backbone: nn.Module,
    context_NMH: Tensor,
    soft_prompt_SH: Tensor,
    input_ids_NL: Tensor,
    attention_mask_NL: Tensor,
    has_positions: bool = False,
) -> Tensor:
    """The states of a text's tokens, (N, L, H), with M context vectors and S soft-prompt vectors before them.

    With rotary positions, every context vector has index 0; soft prompt and text have indices from M. With learned
    position embeddings, only the text has positions, from the table's first position. In layers with a window the
    prefix sees all tokens and all tokens see it. With `has_positions` the prefix is like ordinary tokens.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 and §10.4, and the released code, which does not rotate context
        tokens. Differs: §10.4 as printed sets them to zero within attention, so that a text could not depend on them.
    """
    model = plain_backbone(backbone)
    words: Any = model.get_input_embeddings()
    word_NLH = words(input_ids_NL)
    (num_texts, length), device = input_ids_NL.shape, input_ids_NL.device
    prefix_NPH = torch.cat([context_NMH, soft_prompt_SH.expand(num_texts, -1, -1)], dim=1).to(word_NLH.dtype)
    num_context, num_prefix = context_NMH.shape[1], prefix_NPH.shape[1]
    seen_NT = torch.cat([attention_mask_NL.new_ones(num_texts, num_prefix), attention_mask_NL], dim=1).bool()
    inputs: dict[str, Any] = {"attention_mask": seen_NT.long()}
    if not has_positions:
        position_T, prefix_NPH = without_positions(
            model, torch.arange(num_prefix + length, device=device), prefix_NPH, num_context
        )
        mask = _attention_mask(model, seen_NT, num_prefix, word_NLH.dtype)
        inputs = {"attention_mask": mask, "position_ids": position_T[None]}
    output = backbone(inputs_embeds=torch.cat([prefix_NPH, word_NLH], dim=1), **inputs)
    states: Tensor = output.last_hidden_state
    return states[:, num_prefix:]


def without_positions(
    model: PreTrainedModel, index_T: Tensor, prefix_NPH: Tensor, num_context: int
) -> tuple[Tensor, Tensor]:
    """The positions of tokens after a prefix without positions, and the prefix as the model's input.

    `index_T` is each token's index from the start of its prefix of P vectors, `num_context` of which are context. The
    position embedding that the model will add is subtracted from the prefix.
    """
    learned = learned_positions(model)
    if learned is None:
        return index_T.masked_fill(index_T < num_context, 0), prefix_NPH
    first = first_position(learned)
    position_T = (index_T - prefix_NPH.shape[1]).clamp(min=0) + first
    return position_T, prefix_NPH - learned(index_T.new_full((1,), first))


def _near(config: Any, index_T: Tensor) -> Tensor:
    """Whether a token sees another within its window, (T, T), by the rule of the backbone's own mask."""
    query_T1, window = index_T[:, None], config.sliding_window
    if getattr(config, "use_bidirectional_attention", False) and getattr(config, "is_causal", True):
        # Gemma 3 sees in both directions as far as a causal mask sees to the left, one token less than other encoders.
        sees = sliding_window_overlay(window)
        return sees(0, 0, query_T1, index_T) & sees(0, 0, index_T, query_T1)  # type: ignore[no-any-return]
    return sliding_window_bidirectional_overlay(window)(0, 0, query_T1, index_T)  # type: ignore[no-any-return]


def _attention_mask(model: PreTrainedModel, seen_NT: Tensor, num_prefix: int, dtype: torch.dtype) -> Any:
    """The backbone's attention mask, or a dict of masks by layer type if some layers have a window."""
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return seen_NT.long()
    index_T = torch.arange(seen_NT.shape[1], device=seen_NT.device)
    is_text_T = index_T >= num_prefix
    near_TT = _near(model.config, index_T) | ~(is_text_T[:, None] & is_text_T)
    seen_N1TT = seen_NT[:, None, None, :].expand(-1, 1, len(index_T), -1)
    masks = {"full_attention": seen_N1TT, "sliding_attention": seen_N1TT & near_TT}
    if model.config._attn_implementation == "eager":
        masked = torch.finfo(dtype).min
        return {kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, masked) for kind, mask in masks.items()}
    return masks


class ContextualTransformer(TextTransformer):
    """The first module of a sentence-transformers pipeline: maps texts with a context to token states."""

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
        """The vectors of context documents, (M, H) float32; `prompt` defaults to the model's prompt of documents."""
        prompt = self.document_prompt if prompt is None else prompt
        if isinstance(texts, str) or not texts:
            raise ValueError("a context needs a list of at least one document")
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
        super().save(output_path)
        folder = Path(output_path, CONTEXT_FOLDER)
        plain_backbone(self.first_stage.backbone).save_pretrained(folder)
        self.parts.save(folder)

    @classmethod
    def load_own_parts(cls, name: str, where: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
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
        return {**features, "sentence_embedding": self.layer(features["sentence_embedding"])}
