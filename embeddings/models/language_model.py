"""A model that predicts tokens: a backbone and its language-model head, each callable without the other."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from embeddings.common import OptionError
from embeddings.models.backbone import (
    DTYPES,
    BackboneConfig,
    enable_checkpointing,
    load_model,
    load_tokenizer,
    quiet_transformers,
    read_config,
)
from embeddings.models.bidirectional import require_bidirectional
from embeddings.models.directory import replaced_folder
from embeddings.models.document_mask import document_inputs
from embeddings.models.from_scratch import FromScratch, new_model
from embeddings.models.hub import resolve_model
from embeddings.models.lora import LoraSettings, add_lora, merged_state_dict, plain_backbone, without_cache
from embeddings.models.rotary_moe import RotaryMoeConfig

HeadKind = Literal["masked", "causal"]
_MAPPINGS = {"masked": MODEL_FOR_MASKED_LM_MAPPING, "causal": MODEL_FOR_CAUSAL_LM_MAPPING}
_AUTO = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
_OBJECTIVES = {"masked": "mlm", "causal": "mntp or causal"}


@dataclass(frozen=True)
class HeadSettings:
    """Where a language-model head comes from and how it is computed.

    Args:
        new: Whether a head that the checkpoint lacks is made with random weights; it is refused otherwise.
        train_beside_lora: Whether the head is trained in full where the backbone has LoRA matrices. LLM2Vec's script
            leaves it trainable and does not keep it; without LoRA it is always trained.
        tile_logits: Most logits (predicted tokens x vocabulary) that exist at once, in numbers of four bytes.

    Raises:
        OptionError: If `tile_logits` is not positive.
    """

    new: bool = False
    train_beside_lora: bool = False
    tile_logits: int = 2**27

    def __post_init__(self) -> None:
        if self.tile_logits < 1:
            raise OptionError("model.head.tile_logits", self.tile_logits, "must be >= 1", "leave it out for 2**27")


def load_language_model(
    config: BackboneConfig | FromScratch, kind: HeadKind, new_head: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with a language-model head, in evaluation mode, and its tokenizer.

    Args:
        config: Which checkpoint, or which architecture with random weights.
        kind: Whose head: an encoder's (`masked`) or a decoder's (`causal`).
        new_head: Whether a head that the checkpoint lacks is left random.

    Raises:
        InputError: If the model cannot be had, a file of it is damaged, or weights are missing from it.
        OptionError: If the architecture has no such head, or its attention cannot be made bidirectional.
    """
    auto_class = _AUTO[kind]
    if isinstance(config, FromScratch):
        _check_kind(AutoConfig.for_model(config.model_type), kind)
        return new_model(config, auto_class)
    folder = resolve_model(config.name, config.revision)
    _check_kind(read_config(folder), kind)
    model = load_model(
        folder,
        DTYPES[config.dtype],
        config.attn_implementation,
        make_bidirectional=config.bidirectional,
        dropout=config.dropout,
        num_layers=config.num_layers,
        auto_class=auto_class,
        new_head=new_head,
    )
    tokenizer = load_tokenizer(folder, model)
    if config.bidirectional:
        require_bidirectional(_backbone(model))
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    return model, tokenizer


class LanguageModel(nn.Module):
    """A Hugging Face model with a language-model head, taken apart into states and logits.

    The head is whatever the model's own forward does with its backbone's states (transforms, biases, scales, caps):
    the same forward runs with the states put in the backbone's place. So logits can be computed of some states alone,
    for any architecture; a check at start-up compares with the whole forward.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        causal: Whether a token sees only those before it.
        lora: LoRA settings of the backbone, or None to train all weights.
        train_head: Whether the head is trained beside LoRA matrices.

    Raises:
        OptionError: If the head cannot be told from the backbone, or is the backbone's own embedding and is to be
            trained where the backbone is frozen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        causal: bool,
        lora: LoraSettings | None = None,
        train_head: bool = False,
    ) -> None:
        super().__init__()
        check_head(model)
        self.model, self.tokenizer, self.causal = model, tokenizer, causal
        self.vocab_size = int(model.config.vocab_size)
        if lora is not None:
            self._adapt(lora, train_head)
        self.train()

    @property
    def backbone(self) -> nn.Module:
        """What computes the states, adapted by peft or not."""
        backbone: nn.Module = _backbone(self.model)
        return backbone

    def forward(self, input_ids_NL: Tensor, document_NL: Tensor, separate_documents: bool, has_padding: bool) -> Tensor:
        """The last layer's states of packed rows.

        Args:
            input_ids_NL: Token ids, (N, L) int64.
            document_NL: Which document of its row a token is of, -1 for padding, (N, L) int64.
            separate_documents: Whether each document is read as if it were alone.
            has_padding: Whether any token is padding.

        Returns:
            States, (N, L, H), in the model's dtype.
        """
        plain = plain_backbone(self.backbone)
        inputs: dict[str, Any] = {}
        if separate_documents:
            inputs = dict(document_inputs(plain, document_NL, self.causal))
        elif has_padding:
            inputs = {"attention_mask": (document_NL >= 0).long()}
        inputs |= without_cache(plain)
        states_NLH: Tensor = self.backbone(input_ids=input_ids_NL, **inputs).last_hidden_state
        return states_NLH

    def head(self, state_PH: Tensor) -> Tensor:
        """Logits over the vocabulary of some states, (P, H) to (P, V)."""
        return head_logits(self.model, state_PH)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face directory, whole or not at all; adapters are merged into the written weights.

        It holds the head too: training can go on from it, and `BackboneConfig(name=folder)` takes the backbone alone.

        Raises:
            OptionError: If the path leads to a file.
        """
        prefix = self.model.base_model_prefix
        state = {name: value for name, value in self.model.state_dict().items() if not name.startswith(f"{prefix}.")}
        state |= {f"{prefix}.{name}": value for name, value in merged_state_dict(self.backbone).items()}
        plain = plain_backbone(self.backbone)
        with replaced_folder(Path(folder)) as new, quiet_transformers(), _in_place_of_backbone(self.model, plain):
            self.model.save_pretrained(new, state_dict=state)
            self.tokenizer.save_pretrained(new)

    def _adapt(self, lora: LoraSettings, train_head: bool) -> None:
        """Put LoRA matrices into the backbone, which freezes it, and freeze the head unless it is to be trained."""
        model: Any = self.model
        matrix = getattr(model.get_output_embeddings(), "weight", None)
        if train_head and matrix is model.get_input_embeddings().weight:
            rule = "cannot take effect: the head's matrix is the input embedding, which LoRA freezes"
            raise OptionError("model.head.train_beside_lora", True, rule, "set it to false")
        backbone = self.backbone
        assert isinstance(backbone, PreTrainedModel)
        inside = {id(weight) for weight in backbone.parameters()}
        head = [weight for weight in self.model.parameters() if id(weight) not in inside]
        self.model._modules[self.model.base_model_prefix] = add_lora(backbone, lora)
        for weight in head:
            weight.requires_grad_(train_head)


def head_logits(model: PreTrainedModel, state_PH: Tensor) -> Tensor:
    """What the model's forward makes of states in place of its backbone's own, (P, H) to (P, V)."""
    with _in_place_of_backbone(model, _Given(state_PH[None])):
        no_ids_1P = torch.zeros(1, len(state_PH), dtype=torch.int64, device=state_PH.device)
        logits_1PV: Tensor = model(input_ids=no_ids_1P).logits
    return logits_1PV[0]


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Check on a tiny text that the head applied to the backbone's states gives the model's own logits.

    Raises:
        OptionError: If it does not, or the model has no backbone of its own.
    """
    fix = "use an architecture whose head reads the last layer's states"
    name = type(model).__name__
    if model.base_model_prefix not in model._modules:
        raise OptionError("model.backbone", name, "has no backbone apart from its head", fix)
    ids_NL = (torch.arange(16, device=model.device).view(2, 8) * 3) % (int(model.config.vocab_size) - 4) + 3
    was_training = model.training
    model.train(False)
    try:
        whole_NLV = model(input_ids=ids_NL).logits
        states_NLH = _backbone(model)(input_ids=ids_NL).last_hidden_state
        parts_PV = head_logits(model, states_NLH.flatten(0, 1))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise OptionError("model.backbone", name, "has a head that cannot be computed alone", fix) from error
    finally:
        model.train(was_training)
    exact = model.dtype in (torch.float32, torch.float64)
    tolerance = 1e-4 if exact else 0.05
    if not torch.allclose(whole_NLV.flatten(0, 1), parts_PV, rtol=tolerance, atol=tolerance):
        raise OptionError("model.backbone", name, "has a head that reads more than the last states", fix)


class _Given(nn.Module):
    """Stands where a backbone stands and returns states that are known already."""

    def __init__(self, state_1PH: Tensor) -> None:
        super().__init__()
        self._state_1PH = state_1PH

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        """The states, with every field that a head's forward may look for."""
        return MoeModelOutputWithPast(last_hidden_state=self._state_1PH)


@contextmanager
def _in_place_of_backbone(model: PreTrainedModel, module: nn.Module) -> Iterator[None]:
    prefix = model.base_model_prefix
    backbone = model._modules[prefix]
    model._modules[prefix] = module
    try:
        yield
    finally:
        model._modules[prefix] = backbone


def _backbone(model: PreTrainedModel) -> Any:
    return model._modules[model.base_model_prefix]


def _check_kind(config: PretrainedConfig, kind: HeadKind) -> None:
    """Check that an architecture has the head that an objective needs; one that has both is an encoder."""
    masked, causal = (type(config) in _MAPPINGS[name] for name in ("masked", "causal"))
    if masked if kind == "masked" else causal and not masked:
        return
    what, fix = f"takes {_OBJECTIVES['masked' if masked else 'causal']}", "change it"
    if not masked and not causal:
        what, fix = "has no language-model head", "give a model that has one"
        if isinstance(config, RotaryMoeConfig):
            fix = "give the dense model that it was made of, and upcycle what comes out"
    raise OptionError("model.objective", _OBJECTIVES[kind], f"does not fit: {config.model_type} {what}", fix)
