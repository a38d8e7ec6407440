"""A contextual embedding model: a text's vector depends on documents of its corpus."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import InputError, OptionError, PaddedTokens, TextSettings, TokenBatch, require_minimum
from embeddings.common.text import Similarity
from embeddings.common.types import take_texts
from embeddings.models.backbone import BackboneConfig, enable_checkpointing, highest_id, load_model, num_positions
from embeddings.models.bidirectional import relative_difference, short_window, tolerated_difference, trial_ids
from embeddings.models.context_layers import (
    CONTEXT_FOLDER,
    CONTEXT_WEIGHTS,
    RESIDUAL_FOLDER,
    ContextParts,
    ContextSlots,
    FirstStage,
    ResidualProjection,
    SoftPrompt,
    states_behind_context,
)
from embeddings.models.directory import (
    ContextForm,
    ModelParts,
    is_contextual,
    read_context_options,
    read_model_directory,
)
from embeddings.models.embedder import Embedder
from embeddings.models.half_precision import use_half_precision
from embeddings.models.model_files import load_weights, resolve_model
from embeddings.models.pooling import MeanPooling, evaluating, learned_positions, plain_backbone
from embeddings.models.unpadded import UnpaddedMode, Unpadding, has_window, unpadding_of


class ContextualEmbedder(Embedder):
    """Maps tokens and a context to vectors: CDE's two stages.

    The first stage computes one vector per context document. The second stage attends over [J context vectors | S
    soft-prompt vectors | word embeddings], pools only the states of the text's tokens, and applies a residual
    projection, which is initialised as the identity. Context vectors have no positions, so their order has no effect.
    Queries and documents share the weights; the two stages do not.

    Args:
        first_stage_backbone: The encoder of context documents, of the same tokenizer.
        backbone: The encoder of texts with their context; a decoder must have no causal mask.
        tokenizer: The tokenizer of both, padding on the right.
        num_context: Context vectors before each text, J. The paper uses 512, and 64 in its small setting.
        num_soft_prompts: Soft-prompt vectors, S; 0 for the paper's model, 8 as released.
        residual_projection: Whether a residual projection follows the pooling, as released; not in the paper.
        context_dropout: Probability of replacing a context vector of a text by the null vector in training.
        context_max_length: Maximum tokens of a context document in the first stage; None for no limit.
        normalize: Whether vectors have unit length.
        text: Text settings; context and soft prompt do not count in its maximum lengths.
        form: Options in which the released models differ.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.2 (Eq. 5 and 6) and §10.4, and the released code. Differs: the
        residual branch is initialised with zeros; context tokens are not rotated, as released (see
        `states_behind_context`); a context document is one vector, never several as in §10.11.
    """

    entries = ("embed_context",)
    _LIMITED_BY = "the positions that the backbone has beside context and soft prompt"
    _SHORTEN = "lower it or num_context"

    def __init__(
        self,
        first_stage_backbone: nn.Module,
        backbone: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_context: int = 512,
        num_soft_prompts: int = 8,
        residual_projection: bool = True,
        context_dropout: float = 0.005,
        context_max_length: int | None = None,
        normalize: bool = True,
        text: TextSettings | None = None,
        similarity: Similarity = "cosine",
        form: ContextForm | None = None,
    ) -> None:
        form = ContextForm() if form is None else form
        numbers = {"num_context": num_context, "num_soft_prompts": num_soft_prompts}
        numbers |= {} if context_max_length is None else {"context_max_length": context_max_length}
        for name, number in numbers.items():
            require_minimum(name, number, int(name != "num_soft_prompts"), "leave it out for the usual value")
        if not 0.0 <= context_dropout <= 1.0:
            raise OptionError("context_dropout", context_dropout, "must be in [0, 1]", "released: 0.005")
        check_dropout(context_dropout, form.has_null, "context_dropout")
        plain = plain_backbone(backbone)
        hidden_size = int(plain.config.hidden_size)
        super().__init__(
            backbone, tokenizer, MeanPooling(hidden_size), normalize=normalize, text=text, similarity=similarity
        )
        words: Any = plain.get_input_embeddings()
        self.context_size = size = int(words.weight.shape[1])
        use_half_precision(first_stage_backbone)
        first = plain_backbone(first_stage_backbone)
        _check_first_stage(first, tokenizer, context_max_length)
        _check_positions_of_context(backbone, form)
        first_size = int(first.config.hidden_size)
        self.has_positions = form.has_positions
        self.first_stage = FirstStage(first_stage_backbone, first_size, size, context_max_length, form.pools_prompt)
        self.slots = ContextSlots(num_context, size, context_dropout, form.has_null)
        self.soft_prompt = SoftPrompt(num_soft_prompts, size)
        self.residual = ResidualProjection(hidden_size, form.adds_pooled) if residual_projection else None
        self.first_unpadding: Unpadding | None = None
        self.train()

    def unpad(self, mode: UnpaddedMode = "auto", first_stage: UnpaddedMode | None = None) -> None:
        """Choose whether a `TokenBatch` is padded, in the first stage by `first_stage`, by default `mode`."""
        if not self.has_positions and has_window(self.backbone):
            if mode is True:
                rule = "is not supported: layers with a window see the whole context"
                raise OptionError("backbone.unpadded", mode, rule, "leave it out")
            super().unpad(False)
        else:
            super().unpad(mode)
        self.first_unpadding = unpadding_of(self.first_stage.backbone, mode if first_stage is None else first_stage)

    def ignored_dropout(self, device: torch.device) -> float:
        first, backbone = self.first_unpadding, self.first_stage.backbone
        return max(super().ignored_dropout(device), 0.0 if first is None else first.ignored_dropout(backbone, device))

    @property
    def num_context(self) -> int:
        """Context vectors before each text, J."""
        return self.slots.num_context

    @property
    def num_extra_tokens(self) -> int:
        """Number of vectors before each text's tokens: J context vectors and S soft-prompt vectors."""
        return self.slots.num_context + self.soft_prompt.num_soft_prompts

    @property
    def longest_text(self) -> int | None:
        """Maximum number of tokens in a text after a context; None if positions set no limit."""
        learned = super().longest_text
        # The indices of a rotary model include the prefix.
        limit = getattr(plain_backbone(self.backbone).config, "max_position_embeddings", None)
        return learned if learned is not None or limit is None else int(limit) - self.num_extra_tokens

    @property
    def longest_context_document(self) -> int | None:
        """Maximum number of tokens in a context document; None if positions set no limit."""
        return num_positions(self.first_stage.backbone)

    def check_lengths(self, text: TextSettings, owner: str = "data.text") -> None:
        """Check that both stages have positions for these lengths: documents are inputs of the first stage too."""
        super().check_lengths(text, owner)
        limit, length = self.longest_context_document, text.document_max_length
        if self.first_stage.max_length is not None:
            length = min(length, self.first_stage.max_length)
        if limit is not None and length > limit:
            rule = f"must be <= {limit}, the positions that the first stage has for a context document"
            fix = "lower it, or set model.context.max_length"
            raise OptionError(f"{owner}.document_max_length", text.document_max_length, rule, fix)

    def extra_repr(self) -> str:
        return "has_positions=True" if self.has_positions else ""

    def embed_context(self, tokens: PaddedTokens | TokenBatch) -> Tensor:
        """The first stage: vectors of M documents, (M, H) float32, not normalised; H as in the word embeddings."""
        if isinstance(tokens, TokenBatch):
            if self.first_unpadding is not None and self.first_unpadding.applies_to(self.first_stage.backbone, tokens):
                return self._first_stage_unpadded(self.first_unpadding, tokens)
            tokens = self._padded(tokens, self.first_stage.backbone, self.longest_context_document)
        vector_MH: Tensor = self.first_stage(tokens.input_ids_NL, tokens.attention_mask_NL, tokens.pooling_mask_NL)
        return vector_MH

    def _first_stage_unpadded(self, unpadding: Unpadding, tokens: TokenBatch) -> Tensor:
        """The vectors of context documents without padding, (M, H); truncated and pooled as in `FirstStage`."""
        first, limit = self.first_stage, self.first_stage.max_length
        if limit is not None and int(tokens.lengths_N.max()) > limit:
            tokens = truncated(tokens, torch.arange(len(tokens)), limit)
        state_TH, places = unpadding.states(first.backbone, tokens)
        pooled_T = torch.ones_like(tokens.pooling_mask_T) if first.pools_prompt else tokens.pooling_mask_T
        return first.project(first.pooling.of_unpadded(state_TH, pooled_T, places))

    def forward(self, tokens: PaddedTokens | TokenBatch, context: Tensor | None = None) -> Tensor:
        """One vector per text.

        Args:
            tokens: N texts padded on the right, or a `TokenBatch`, which is padded or not as `unpad` chose.
            context: Vectors of `embed_context`, (M, H) with M <= J, shared by all texts; the model's null vector, if it
                has one, fills the remaining slots, or all slots for None.

        Returns:
            Vectors, (N, D) float32, of unit length if `normalize`.
        """
        if isinstance(tokens, TokenBatch):
            num_texts, longest = len(tokens), int(tokens.lengths_N.max())
            if self.unpadding is None or not self.unpadding.applies_to(self.backbone, tokens):
                tokens = self._padded(tokens, self.backbone, self.longest_text, self.num_extra_tokens)
        else:
            num_texts, longest = tokens.input_ids_NL.shape
        limit = self.longest_text
        if limit is not None and longest > limit:
            rule = f"must leave texts of at most {limit} tokens beside {self.num_extra_tokens} of context and prompt"
            raise OptionError("data.text.document_max_length", longest, rule, "lower it or num_context")
        context_NJH = self.slots(context, num_texts)
        inputs = self.backbone, context_NJH, self.soft_prompt()
        if isinstance(tokens, TokenBatch):
            assert self.unpadding is not None
            state_TH, places = self.unpadding.states_behind_context(*inputs, tokens, self.has_positions)
            vector_ND = self.pooling.of_unpadded(state_TH, tokens.pooling_mask_T, places)
        else:
            ids_NL, attention_NL, pooling_NL = tokens
            vector_ND = self.pooling(
                states_behind_context(*inputs, ids_NL, attention_NL, self.has_positions), pooling_NL
            )
        if self.residual is not None:
            vector_ND = self.residual(vector_ND)
        vector_ND = vector_ND.to(torch.promote_types(vector_ND.dtype, torch.float32))
        return F.normalize(vector_ND, dim=-1) if self.normalize else vector_ND

    @classmethod
    def from_config(cls, config: BackboneConfig) -> Self:
        """The contextual model of a directory, in training mode, both backbones loaded with the config's options."""
        embedder = super().from_config(config)
        # The layers of a model that was trained with bf16-true are in bfloat16.
        for layers in (embedder.context_parts().layers(), embedder.residual):
            if layers is not None:
                layers.float()
        if config.gradient_checkpointing:
            enable_checkpointing(plain_backbone(embedder.first_stage.backbone))
        return embedder

    @classmethod
    def _of_directory(
        cls, folder: Path, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dropout: float | None = None
    ) -> Self:
        options = read_context_options(folder)
        parts = read_model_directory(folder, backbone, tokenizer, contextual=True)
        if type(parts.pooling) is not MeanPooling or parts.head is not None or parts.norm is not None:
            what = "has another pooling than the mean, a layer norm or a head"
            raise InputError(str(folder), what, "export the model again")
        attention = backbone.config._attn_implementation
        first = load_model(folder / CONTEXT_FOLDER, backbone.dtype, attention, dropout=dropout)
        try:
            common: Any = {name: getattr(parts, name) for name in ("normalize", "text", "similarity")}
            embedder = cls(first, backbone, tokenizer, **common, **options)
        except (OptionError, TypeError) as error:
            raise InputError(str(folder), f"its parts do not fit: {error}", "export the model again") from error
        embedder.trained_widths = parts.trained_widths
        load_weights(embedder.context_parts().layers(), folder / CONTEXT_FOLDER / CONTEXT_WEIGHTS)
        if embedder.residual is not None:
            load_weights(embedder.residual, folder / RESIDUAL_FOLDER / "model.safetensors")
        return embedder

    def _parts(self) -> ModelParts:
        return replace(super()._parts(), context=self.context_parts())

    def context_parts(self) -> ContextParts:
        return ContextParts(self.first_stage, self.slots, self.soft_prompt, self.has_positions, self.residual)


def load_embedder(
    name: str | os.PathLike[str],
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Embedder:
    """Load a directory or Hub id as an `Embedder` or `ContextualEmbedder`; arguments as in `from_pretrained`."""
    kind = ContextualEmbedder if is_contextual(resolve_model(os.fspath(name), revision)) else Embedder
    return kind.from_pretrained(name, revision, device, dtype)


def truncated(tokens: TokenBatch, rows_n: Tensor, max_length: int) -> TokenBatch:
    """Context documents `rows_n` with at most `max_length` tokens; their last token is pooled, also within a prompt."""
    tokens = take_texts(tokens, rows_n, max_length)
    tokens.pooling_mask_T[sum(tokens.placed()) - 1] = True
    return tokens


def check_dropout(fraction: float, has_null: bool, option: str) -> None:
    """Check that a model has the null vector that context dropout needs; an `OptionError` if not."""
    if fraction and not has_null:
        rule = "must be 0: the model has no null vector, which dropout puts in place of a context vector"
        raise OptionError(option, fraction, rule, "set it to 0")


def _check_positions_of_context(backbone: nn.Module, form: ContextForm) -> None:
    name, fix = type(plain_backbone(backbone)).__name__, "take an encoder, or a decoder with `bidirectional: true`"
    rule = None if form.has_positions else broken_rule(backbone)
    if form.has_positions and learned_positions(plain_backbone(backbone)) is not None:
        rule, fix = "must have rotary positions if context vectors have positions", "leave form.has_positions out"
    if rule is not None:
        raise OptionError("backbone", name, rule, fix)


# Other implementations derive masks and packing from positions, which context tokens do not have.
_ATTENTIONS = ("eager", "sdpa")


@torch.no_grad()
def broken_rule(backbone: nn.Module) -> str | None:
    """The rule for a context without positions that a backbone breaks, or None; runs four tiny forward passes."""
    model = plain_backbone(backbone)
    attention = model.config._attn_implementation
    if attention not in _ATTENTIONS:
        return f"must be loaded with {' or '.join(_ATTENTIONS)} attention, not {attention}"
    if getattr(model.config, "relative_attention_num_buckets", None) is not None:
        return "must not use relative positions, which cannot be disabled for context tokens"
    if model.device.type == "meta":  # the model of `plan`, which has no weights
        return None
    words: Any = model.get_input_embeddings()
    ids_NL = trial_ids(model, 2, 12)
    mask_NL = torch.ones_like(ids_NL, dtype=torch.bool)
    mask_NL[1, 9:] = False
    context_NMH, empty_SH = words(ids_NL[:, 3:6]), words.weight.new_zeros(0, words.weight.shape[1])
    contexts = (context_NMH, context_NMH.flip(1), context_NMH[:, :0])
    with evaluating(backbone), short_window(model):
        ordered, flipped, alone = (
            states_behind_context(backbone, context, empty_SH, ids_NL, mask_NL)[mask_NL] for context in contexts
        )
        by_tokens = backbone(input_ids=ids_NL, attention_mask=mask_NL.long()).last_hidden_state[mask_NL]
    rules = {
        "must not depend on the order of its context": (ordered.float(), flipped.float()),
        "must have the same states for input embeddings as for tokens": (alone.float(), by_tokens.float()),
    }
    for rule, (states, expected) in rules.items():
        if not relative_difference(states, expected) <= tolerated_difference(model):
            return rule
    return "must attend to the context before a text" if torch.equal(ordered, alone) else None


def _check_first_stage(first: Any, tokenizer: PreTrainedTokenizerBase, context_max_length: int | None) -> None:
    """Check that the first stage has embeddings for the tokenizer's ids and positions for `context_max_length`."""
    highest, rows = highest_id(tokenizer), first.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        rule = f"must have embeddings for the second stage's tokenizer, whose highest id is {highest}"
        raise OptionError("first_stage_backbone", f"{rows} embeddings", rule, "take two backbones of one tokenizer")
    limit = num_positions(first)
    if limit is not None and context_max_length is not None and context_max_length > limit:
        rule = f"must be <= {limit}, the positions that the first stage has"
        raise OptionError("context_max_length", context_max_length, rule, "lower it")
