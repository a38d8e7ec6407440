"""An embedding model without a trainer: backbone, pooling, head, normalisation and text settings."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import InputError, OptionError, PaddedTokens, TextSettings, TokenBatch
from embeddings.common.own_folder import replaced_folder
from embeddings.common.text import LENGTHS, Similarity
from embeddings.models.attention_capture import AttentionCapture
from embeddings.models.backbone import BackboneConfig, load_backbone, load_model, load_tokenizer, num_positions
from embeddings.models.bidirectional import is_causal
from embeddings.models.directory import ModelParts, read_model_directory, write_model_directory
from embeddings.models.half_precision import KeepsFrequencies, use_half_precision
from embeddings.models.model_card import write_model_card
from embeddings.models.model_files import FrozenBase, resolve_model
from embeddings.models.pooling import Pooling, plain_backbone, without_cache
from embeddings.models.poolings import own_pooling_source
from embeddings.models.unpadded import UnpaddedMode, Unpadding, padded_length, unpadding_of


class Embedder(KeepsFrequencies):
    """Maps tokens to vectors by backbone, pooling, an optional layer norm, an optional head and normalisation.

    A new embedder pads texts and is in training mode with all its parts: Hugging Face loads a backbone in evaluation
    mode, which would silently disable dropout. `from_pretrained` returns it in evaluation mode.

    Args:
        backbone: A Hugging Face encoder or decoder, adapted by peft or not.
        tokenizer: Its tokenizer, padding on the right.
        pooling: Maps the states of a text's tokens to one vector.
        norm: A layer norm of the pooled vector, (H), before truncation, or None.
        head: A linear layer from the hidden size to the embedding width, D, or None for D = H.
        normalize: Whether vectors have unit length.
        text: Maximum lengths, prompts and special tokens of the texts.
        trained_widths: Widths that vectors may be truncated to, the widest first; empty if there are none.
        similarity: How vectors are compared.
    """

    # Methods other than `forward` that use the weights.
    entries: tuple[str, ...] = ()

    _LIMITED_BY = "the positions that the backbone has"
    _SHORTEN = "lower it"

    def __init__(
        self,
        backbone: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        pooling: Pooling,
        *,
        norm: nn.LayerNorm | None = None,
        head: nn.Linear | None = None,
        normalize: bool = True,
        text: TextSettings | None = None,
        trained_widths: Sequence[int] = (),
        similarity: Similarity = "cosine",
    ) -> None:
        super().__init__()
        self.hidden_size = int(plain_backbone(backbone).config.hidden_size)
        sizes = {"pooling.hidden_size": pooling.hidden_size}
        sizes |= {} if norm is None else {"norm.normalized_shape": norm.normalized_shape[-1]}
        sizes |= {} if head is None else {"head.in_features": head.in_features}
        for name, size in sizes.items():
            if size != self.hidden_size:
                rule = f"must be as wide as the backbone's {self.hidden_size}"
                raise OptionError(name, size, rule, "build it with that size")
        use_half_precision(backbone)
        self.backbone = backbone
        self.capture = capture_of(backbone, pooling)
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.norm = norm
        self.head = head
        self.normalize = normalize
        self.text = TextSettings() if text is None else text
        self.trained_widths = tuple(trained_widths)
        self.similarity: Similarity = similarity
        # The model that LoRA adapts, if its files contain the same weights.
        self.frozen_base: FrozenBase | None = None
        self.embedding_dim = self.hidden_size if head is None else head.out_features
        self.unpadding: Unpadding | None = None
        # Both are found by a search in the backbone.
        self._options, self._num_positions = without_cache(backbone), num_positions(backbone)
        self.train()

    def unpad(self, mode: UnpaddedMode = "auto") -> None:
        """Choose whether a `TokenBatch` is padded, by `BackboneConfig.unpadded`; an `OptionError` if not supported."""
        if self.unpadding is None and mode is not True and not torch.cuda.is_available():
            return
        if self.capture is None:
            self.unpadding = unpadding_of(self.backbone, mode)
            return
        # The capture's function must wrap the one that processes texts without padding.
        self.capture.detach()
        try:
            self.unpadding = unpadding_of(self.backbone, mode)
        finally:
            self.capture.attach()

    def ignored_dropout(self, device: torch.device) -> float:
        """The attention dropout that training on a GPU in half precision leaves out; 0 if there is none."""
        return 0.0 if self.unpadding is None else self.unpadding.ignored_dropout(self.backbone, device)

    def forward(self, tokens: PaddedTokens | TokenBatch) -> Tensor:
        """One vector per text.

        Args:
            tokens: N texts padded on the right, or a `TokenBatch`, which is padded or not as `unpad` chose.

        Returns:
            Vectors, (N, D) float32, of unit length if `normalize`. Sums and norms are in float32, under autocast too.
        """
        vector_ND = self._pooled(tokens)
        for layer in (self.norm, self.head):
            if layer is not None:
                # A published layer may be in half precision.
                vector_ND = layer(vector_ND.to(next(layer.parameters(), vector_ND).dtype))
        vector_ND = vector_ND.to(torch.promote_types(vector_ND.dtype, torch.float32))
        result: Tensor = F.normalize(vector_ND, dim=-1) if self.normalize else vector_ND
        return result

    def _pooled(self, tokens: PaddedTokens | TokenBatch) -> Tensor:
        """The pooled states, (N, H)."""
        if isinstance(tokens, TokenBatch):
            if self.unpadding is not None and self.unpadding.applies_to(self.backbone, tokens):
                return self._pooled_unpadded(self.unpadding, tokens)
            tokens = self._padded(tokens, self.backbone, self.longest_text)
        attention_NL = tokens.attention_mask_NL
        with nullcontext() if self.capture is None else self.capture.open() as captured:
            inputs = {"input_ids": tokens.input_ids_NL, "attention_mask": attention_NL.long()}
            output = self.backbone(**inputs, **self._options)
        attention = () if captured is None else (attention_NL, captured())
        return self.pooling(output.last_hidden_state, tokens.pooling_mask_NL, *attention)  # type: ignore[no-any-return]

    def _padded(
        self, tokens: TokenBatch, backbone: nn.Module, longest: int | None, num_prefix: int = 0
    ) -> PaddedTokens:
        on_gpu = tokens.device.type == "cuda" and len(tokens) > 0
        length = padded_length(backbone, tokens, longest, num_prefix) if on_gpu else None
        return tokens.padded(pad_token_id=self.pad_token_id, length=length)

    def _pooled_unpadded(self, unpadding: Unpadding, tokens: TokenBatch) -> Tensor:
        with nullcontext() if self.capture is None else self.capture.open() as captured:
            state_TH, places = unpadding.states(self.backbone, tokens)
        attention = () if captured is None else (captured(),)
        return self.pooling.of_unpadded(state_TH, tokens.pooling_mask_T, places, *attention)

    @property
    def pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @property
    def longest_text(self) -> int | None:
        """Maximum number of tokens in a text; None if positions set no limit."""
        return self._num_positions

    def check_lengths(self, text: TextSettings, owner: str = "data.text") -> None:
        """Check that the backbone has positions for these maximum lengths, which are options of `owner`."""
        limit = self.longest_text
        for name in LENGTHS:
            if limit is not None and getattr(text, name) > limit:
                rule = f"must be <= {limit}, {self._LIMITED_BY}"
                raise OptionError(f"{owner}.{name}", getattr(text, name), rule, self._SHORTEN)

    @property
    def compares_lengths(self) -> bool:
        """Whether the scores of vectors depend on their lengths: inner products of vectors that have any length."""
        return self.similarity == "dot" and not self.normalize

    def require_directions(self, option: str, value: object, use: str) -> None:
        """Raise an `OptionError` about `option` if scores depend on vectors' lengths, which `use` does not support."""
        if self.compares_lengths:
            rule = f"compares vectors by their inner products, of any length; {use} needs cosines"
            raise OptionError(option, value, rule, "use a model of unit vectors or of similarity cosine")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load a sentence-transformers directory, in evaluation mode, without running code from it.

        Args:
            name: As in `BackboneConfig`.
            revision: Commit, tag or branch of a Hub id.
            device: Device of the model, the CPU if None.
            dtype: Dtype of the backbone's weights, the checkpoint's if None.
        """
        folder = resolve_model(os.fspath(name), revision)
        backbone = load_model(folder, "auto" if dtype is None else dtype)
        embedder = cls._of_directory(folder, backbone, load_tokenizer(folder, backbone))
        if device is not None:
            embedder.to(device)
        embedder.unpad()
        return embedder.eval()

    @classmethod
    def from_config(cls, config: BackboneConfig) -> Self:
        """The model of the config's directory, its backbone loaded with the config's options, in training mode."""
        backbone, tokenizer = load_backbone(config)
        folder = resolve_model(config.name, config.revision)
        embedder = cls._of_directory(folder, backbone, tokenizer, config.dropout)
        embedder.unpad(config.unpadded)
        return embedder

    @classmethod
    def _of_directory(
        cls, folder: Path, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dropout: float | None = None
    ) -> Self:
        """The embedder around a loaded backbone; `dropout` is for a contextual model's other backbone."""
        return cls.of_parts(folder, backbone, tokenizer, read_model_directory(folder, backbone, tokenizer))

    @classmethod
    def of_parts(
        cls, folder: Path, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, parts: ModelParts
    ) -> Self:
        """The embedder with a directory's parts; an `InputError` if they do not fit together."""
        names = ("norm", "head", "normalize", "text", "trained_widths", "similarity")
        options = {name: getattr(parts, name) for name in names}
        try:
            return cls(backbone, tokenizer, parts.pooling, **options)
        except OptionError as error:
            fix = "take a complete copy of the model"
            raise InputError(str(folder), f"its parts do not fit: {error}", fix) from error

    def check_saving(self) -> None:
        """Check that `save_pretrained` can write this model; a run calls it before its first step."""
        own_pooling_source(self.pooling)
        fix = "write what differs as a pooling; see docs/extending.md"
        # FSDP2 makes a class of its own in torch.
        kind = next(each for each in type(self).__mro__ if not each.__module__.startswith("torch."))
        is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        if not is_ours and "save_pretrained" not in vars(kind):
            rule = "cannot be written into a model directory: it does not define save_pretrained"
            raise OptionError("embedder", kind.__name__, rule, fix)
        head: Any = self.head
        if not isinstance(head, nn.Linear | None):
            rule = "cannot be written into a model directory: the head must be a torch.nn.Linear"
            raise OptionError("head", type(head).__name__, rule, fix)

    def save_pretrained(self, folder: str | os.PathLike[str], card: bool = True) -> None:
        """Write a sentence-transformers directory, atomically; adapters are merged into the written weights.

        Args:
            folder: The directory. An existing model is replaced; a card that was written by hand is kept.
            card: Whether to write a card, which describes only the model's use.
        """
        self.check_saving()
        target = Path(folder).expanduser()
        with replaced_folder(target) as new:
            write_model_directory(new, self.backbone, self.tokenizer, self._parts())
            if card:
                write_model_card(new, self, location=target)

    def _parts(self) -> ModelParts:
        names = ("pooling", "head", "normalize", "text", "trained_widths", "norm", "similarity")
        return ModelParts(**{name: getattr(self, name) for name in names})


def capture_of(backbone: nn.Module, pooling: Pooling) -> AttentionCapture | None:
    """The capture of the attention that a pooling needs, if any; an `OptionError` if the attention is unsuitable."""
    if not pooling.captured_layers:
        return None
    plain = plain_backbone(backbone)
    if getattr(pooling, "needs_both_ways", False) and plain.device.type != "meta" and is_causal(plain):
        rule = "weighs early tokens more under a causal mask, whatever their content"
        fix = "set bidirectional: true on the backbone, or by_visible_queries: true on the pooling"
        raise OptionError("pooling.axis", "key", rule, fix)
    try:
        return AttentionCapture(plain, pooling.captured_layers)
    except ValueError as error:
        layers = list(pooling.captured_layers)
        raise OptionError("pooling.layers", layers, str(error), "-1 is the last layer") from error
