"""A language model: a backbone and a head, pretrained or new, on packed documents."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from embeddings.common import OptionError
from embeddings.common.own_folder import replaced_folder
from embeddings.common.process import quiet_transformers
from embeddings.common.text import one_line
from embeddings.common.types import positions_in_document
from embeddings.models.backbone import (
    BackboneConfig,
    check_attention,
    highest_id,
    load_configured,
    load_tokenizer,
    read_config,
    read_tokenizer,
)
from embeddings.models.bidirectional import (
    make_bidirectional_config,
    relative_difference,
    require_bidirectional,
    tolerated_difference,
    trial_ids,
)
from embeddings.models.half_precision import KeepsFrequencies, use_half_precision
from embeddings.models.lora import LoraSettings, add_lora, merged_state_dict
from embeddings.models.model_files import resolve_model
from embeddings.models.moe.rotary_moe import RotaryMoeConfig
from embeddings.models.pooling import evaluating, first_position, learned_positions, plain_backbone, without_cache

HeadKind = Literal["masked", "causal"]
AUTO_CLASSES: dict[str, Any] = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
_OBJECTIVES = {"masked": "mlm", "causal": "mntp or causal"}
# The number of rows of an embedding matrix is a multiple of this.
VOCABULARY_STEP = 64


@dataclass(frozen=True)
class HeadSettings:
    """The origin of a language-model head and how it is computed.

    Args:
        new: Whether to initialise a missing head at random; a checkpoint without a head is an error otherwise.
        tile_logits: Maximum number of logits (predicted tokens x vocabulary) in memory at once, of four bytes each.
    """

    new: bool = False
    tile_logits: int = 2**27


@dataclass(frozen=True)
class FromScratch:
    """A model with random weights.

    Args:
        tokenizer: The model whose tokenizer is used: a directory, a Hub id, or `all-MiniLM-L6-v2`.
        model_type: transformers' name of the architecture: `mistral`, `llama`, `bert`, ….
        settings: Fields of its config that differ from transformers' defaults, such as `hidden_size`.
            Vocabulary size and the ids of special tokens follow from the tokenizer.
        bidirectional: Disable a decoder's causal mask.
        attn_implementation: "eager", "sdpa", …; None is transformers' choice.
    """

    tokenizer: str
    model_type: str = "mistral"
    settings: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    bidirectional: bool = False
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        check_attention(self.attn_implementation, "model.from_scratch")
        try:
            known = AutoConfig.for_model(self.model_type)
        except ValueError as error:
            rule = "is not an architecture of transformers"
            raise OptionError("model.from_scratch.model_type", self.model_type, rule, "try mistral") from error
        for name in self.settings:
            if not hasattr(known, name) or name == "vocab_size":
                rule = f"is not a setting of {self.model_type}"
                raise OptionError("model.from_scratch.settings", name, rule, "see the fields of its config")


def load_language_model(
    config: BackboneConfig | FromScratch, kind: HeadKind, new_head: bool = False, has_lora: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with a masked (encoder) or causal (decoder) head in evaluation mode, and the tokenizer."""
    auto_class = AUTO_CLASSES[kind]
    if isinstance(config, FromScratch):
        _check_kind(AutoConfig.for_model(config.model_type), kind)
        return new_model(config, auto_class)
    folder = resolve_model(config.name, config.revision)
    _check_kind(read_config(folder), kind)
    model = load_configured(folder, config, auto_class, new_head, has_lora)
    return model, load_tokenizer(folder, model)


class LanguageModel(KeepsFrequencies):
    """A Hugging Face model with a language-model head, split into states and logits.

    The head is everything that the model's forward does with its backbone's states (transforms, biases, scales, caps).
    It runs with given states instead of the backbone, to compute the logits of selected tokens only. A check at
    start-up compares these logits with the full forward's.

    Args:
        causal: Whether a token sees only earlier ones.
        lora: LoRA settings of the backbone, which also freeze the head, or None to train all weights.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, causal: bool, lora: LoraSettings | None = None
    ) -> None:
        super().__init__()
        check_head(model)
        self.model, self.tokenizer, self.causal = model, tokenizer, causal
        self.vocab_size = int(model.config.vocab_size)
        use_half_precision(self.backbone)
        if lora is not None:
            backbone = model.base_model
            assert isinstance(backbone, PreTrainedModel)
            in_backbone = {id(weight) for weight in backbone.parameters()}
            for weight in model.parameters():
                if id(weight) not in in_backbone:
                    weight.requires_grad_(False)
            model._modules[model.base_model_prefix] = add_lora(backbone, lora)
        self.train()

    @property
    def backbone(self) -> nn.Module:
        backbone: nn.Module = self.model.base_model
        return backbone

    def forward(self, input_ids_NL: Tensor, document_NL: Tensor, separate_documents: bool, has_padding: bool) -> Tensor:
        """The last layer's states of packed rows, (N, L, H); `document_NL` are indices of documents, -1 for padding."""
        plain = plain_backbone(self.backbone)
        inputs = {"attention_mask": (document_NL >= 0).long()} if has_padding else {}
        if separate_documents:
            inputs = document_inputs(plain, document_NL, self.causal)
        states_NLH: Tensor = self.backbone(input_ids=input_ids_NL, **inputs, **without_cache(plain)).last_hidden_state
        return states_NLH

    def head(self, state_PH: Tensor) -> Tensor:
        """The logits of P states over the vocabulary, (P, H) to (P, V)."""
        return head_logits(self.model, state_PH)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory with the head, atomically, with adapters merged into the weights.

        Training can continue from it; `BackboneConfig(name=folder)` loads only the backbone.
        """
        prefix = self.model.base_model_prefix
        state = {name: value for name, value in self.model.state_dict().items() if not name.startswith(f"{prefix}.")}
        state |= {f"{prefix}.{name}": value for name, value in merged_state_dict(self.backbone).items()}
        plain = plain_backbone(self.backbone)
        with replaced_folder(Path(folder)) as new, quiet_transformers(), _backbone_replaced(self.model, plain):
            self.model.save_pretrained(new, state_dict=state)
            self.tokenizer.save_pretrained(new)


def head_logits(model: PreTrainedModel, state_PH: Tensor) -> Tensor:
    with _backbone_replaced(model, _GivenStates(state_PH[None])):
        unused_ids_1P = torch.zeros(1, len(state_PH), dtype=torch.int64, device=state_PH.device)
        logits_1PV: Tensor = model(input_ids=unused_ids_1P).logits
    return logits_1PV[0]


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Check on a tiny text that `head_logits` of the backbone's states are the model's logits."""
    fix = "use an architecture whose head uses only the last layer's states"
    name = type(model).__name__
    if model.base_model_prefix not in model._modules:
        raise OptionError("model.backbone", name, "has no backbone separate from its head", fix)
    if model.device.type == "meta":  # the model of `plan`, which has no weights
        return
    ids_NL = trial_ids(model, 2, 8)
    try:
        with evaluating(model):
            expected_NLV = model(input_ids=ids_NL).logits
            states_NLH = model.base_model(input_ids=ids_NL).last_hidden_state
            logits_PV = head_logits(model, states_NLH.flatten(0, 1))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise OptionError("model.backbone", name, "has a head that cannot be computed separately", fix) from error
    if not relative_difference(logits_PV.float(), expected_NLV.flatten(0, 1).float()) <= tolerated_difference(model):
        raise OptionError("model.backbone", name, "has a head that uses more than the last states", fix)


class _GivenStates(nn.Module):
    """Replaces a backbone and returns given states, in an output with every field that a head may use."""

    def __init__(self, state_1PH: Tensor) -> None:
        super().__init__()
        self._state_1PH = state_1PH

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._state_1PH)


@contextmanager
def _backbone_replaced(model: PreTrainedModel, module: nn.Module) -> Iterator[None]:
    prefix = model.base_model_prefix
    backbone = model._modules[prefix]
    model._modules[prefix] = module
    try:
        yield
    finally:
        model._modules[prefix] = backbone


def _check_kind(config: PretrainedConfig, kind: HeadKind) -> None:
    """Check that an architecture has the head that an objective needs; one with both heads counts as an encoder."""
    masked, causal = (type(config) in AUTO_CLASSES[name]._model_mapping for name in ("masked", "causal"))
    if masked if kind == "masked" else causal and not masked:
        return
    what, fix = f"needs {_OBJECTIVES['masked' if masked else 'causal']}", "change it"
    if not masked and not causal:
        what, fix = "has no language-model head", "give a model that has one"
        if isinstance(config, RotaryMoeConfig):
            fix = "train the dense model that it was upcycled from, and upcycle the result"
    raise OptionError("model.objective", _OBJECTIVES[kind], f"does not fit: {config.model_type} {what}", fix)


def new_model(scratch: FromScratch, auto_class: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with weights in float32 drawn from torch's random state, in evaluation mode, and the tokenizer."""
    tokenizer = read_tokenizer(resolve_model(scratch.tokenizer))
    options = {} if scratch.attn_implementation is None else {"attn_implementation": scratch.attn_implementation}
    try:
        config = AutoConfig.for_model(scratch.model_type, **(dict(scratch.settings) | _tokenizer_fields(tokenizer)))
        if scratch.bidirectional:
            make_bidirectional_config(config)
        model = auto_class.from_config(config, **options)
    except (StrictDataclassError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        reason = one_line(str(error), 200)
        raise OptionError("model.from_scratch.settings", scratch.settings, "cannot build a model", reason) from error
    if scratch.bidirectional:
        backbone: Any = model.base_model
        require_bidirectional(backbone)
    model.train(False)
    return model, tokenizer


def _tokenizer_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    bos = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    eos = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    rows = -(-(highest_id(tokenizer) + 1) // VOCABULARY_STEP) * VOCABULARY_STEP
    # The embedding of a config's pad token is never trained, so the end-of-sequence token must not be the pad token.
    return {"vocab_size": rows, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None if pad == eos else pad}


def document_inputs(model: PreTrainedModel, document_NL: Tensor, causal: bool) -> dict[str, Tensor]:
    """Mask and positions with which the tokens of a packed row attend only within their document.

    Padding sees padding, so that no row of the mask is empty.
    """
    sees_NLL = document_NL[:, :, None] == document_NL[:, None, :]
    if causal:
        sees_NLL = sees_NLL.tril()
    table = learned_positions(model)
    position_NL = positions_in_document(document_NL) + (0 if table is None else first_position(table))
    mask_N1LL = sees_NLL[:, None]
    if model.config._attn_implementation == "eager":
        lowest = torch.finfo(model.dtype).min
        mask_N1LL = torch.zeros_like(mask_N1LL, dtype=model.dtype).masked_fill(~mask_N1LL, lowest)
    return {"attention_mask": mask_N1LL, "position_ids": position_NL}


def window(config: PretrainedConfig) -> int | None:
    """The attention window in tokens of a config's sliding layers; None if every layer sees all tokens."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    size = getattr(config, "sliding_window", None)
    return None if size is None else int(size)


@torch.no_grad()
def check_separation(model: PreTrainedModel, causal: bool) -> None:
    """Check by three tiny forward passes that each document of a packed row has the same states as alone."""
    name = f"{type(model).__name__} with {model.config._attn_implementation} attention"
    option, fix = "model.separate_documents", "set it to false, or use sdpa or eager attention"
    # Other implementations do not accept a mask of token pairs.
    if model.config._attn_implementation not in ("eager", "sdpa"):
        raise OptionError(option, name, "cannot take effect", fix)
    if model.device.type == "meta":
        return
    ids_NL = trial_ids(model, 1, 12)
    document_NL = torch.tensor([[0] * 5 + [1] * 7], device=model.device)
    inputs = document_inputs(model, document_NL, causal)
    try:
        with evaluating(model):
            packed_LH = model(input_ids=ids_NL, **inputs).last_hidden_state[0].float()
            separate = [model(input_ids=part).last_hidden_state[0].float() for part in (ids_NL[:, :5], ids_NL[:, 5:])]
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(option, name, "cannot take effect", fix) from error
    difference = relative_difference(packed_LH, torch.cat(separate))
    if not difference <= tolerated_difference(model):
        raise OptionError(option, name, f"does not separate documents (states differ by {difference:.1e})", fix)
