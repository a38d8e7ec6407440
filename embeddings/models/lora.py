"""Low-rank adapters by peft: the backbone's own weights stay, small matrices beside them learn."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from embeddings.common import OptionError
from embeddings.models.context_layers import plain_model

if TYPE_CHECKING:
    from peft import PeftModel

# Defined there, since code that travels cannot import this file.
plain_backbone = plain_model


@dataclass(frozen=True)
class LoraSettings:
    """How a backbone is adapted.

    Args:
        rank: Rank of the update of each matrix. NV-Embed uses 16 (Table 11).
        alpha: Scale of the update is alpha / rank. NV-Embed uses 32.
        dropout: Fraction of an adapter's inputs dropped in training. NV-Embed uses 0.1.
        target_modules: Names of the linear layers to adapt, or "all-linear". The paper names none.
        keep_zeros: Keep weights at zero that are zero, so that a pruned model stays sparse in training and once merged:
            W + M * (alpha / rank) B A with M = 1 where W is not zero. An update is then as large as its matrix and kept
            for the backward pass; dropout adds a second product. NV-Embed, Appendix A, retrains so; how its merged
            weights stay zero it does not say.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.1
    target_modules: str | Sequence[str] = "all-linear"
    keep_zeros: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise OptionError("lora.rank", self.rank, "must be >= 1", "NV-Embed uses 16")
        if self.alpha < 1:
            raise OptionError("lora.alpha", self.alpha, "must be >= 1", "NV-Embed uses 32")
        if not 0.0 <= self.dropout < 1.0:
            raise OptionError("lora.dropout", self.dropout, "must be in [0, 1)", "NV-Embed uses 0.1")


def add_lora(backbone: PreTrainedModel, settings: LoraSettings) -> "PeftModel":
    """The backbone with trainable adapters, all its own weights frozen; a pooling or head beside it trains in full.

    Raises:
        OptionError: If no layer has a name among the target modules.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    if settings.keep_zeros:
        config._register_custom_module({nn.Linear: _zero_keeping_linear()})
    try:
        with warnings.catch_warnings():
            # peft reads the old name of a property that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return get_peft_model(backbone, config)
    except ValueError as error:
        linear = {name.split(".")[-1] for name, layer in backbone.named_modules() if isinstance(layer, nn.Linear)}
        rule = "names no layer of the backbone"
        raise OptionError("lora.target_modules", targets, rule, f"choose of {', '.join(sorted(linear))}") from error


@cache
def _zero_keeping_linear() -> type[nn.Module]:
    """peft's LoRA layer with `LoraSettings.keep_zeros`; a function, since peft takes a second to load."""
    from peft.tuners.lora import Linear

    class ZeroKeepingLinear(Linear):
        """A linear layer with the weight W + M * s B A, M = 1 where W is not zero."""

        def get_delta_weight(self, adapter: str) -> Tensor:
            """The update of the weight, zero where the weight is, (out, in)."""
            delta: Tensor = super().get_delta_weight(adapter)
            return delta * (self.get_base_layer().weight != 0)

        def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
            """The layer's output, (…, out)."""
            if self.disable_adapters or self.merged:
                return self.base_layer(x, *arguments, **options)  # type: ignore[no-any-return]
            base: Any = self.get_base_layer()
            updates = [self.get_delta_weight(name) for name in self.active_adapters]
            dropouts = [self.lora_dropout[name] for name in self.active_adapters]
            if not self.training or all(isinstance(dropout, nn.Identity) for dropout in dropouts):
                # One product in place of two.
                weight: Tensor = sum(updates, base.weight)
                return F.linear(x, weight.to(x.dtype), base.bias)
            result: Tensor = base(x, *arguments, **options)
            for dropout, update in zip(dropouts, updates, strict=True):
                result = result + F.linear(dropout(x.to(result.dtype)), update.to(result.dtype))
            return result

    return ZeroKeepingLinear


def merge_lora(backbone: nn.Module) -> PreTrainedModel:
    """The plain backbone with its adapters added into its weights, in place; a plain backbone comes back as it is."""
    merged = backbone if isinstance(backbone, PreTrainedModel) else backbone.merge_and_unload()  # type: ignore[operator]
    assert isinstance(merged, PreTrainedModel)
    return merged


@torch.no_grad()
def merged_state_dict(backbone: nn.Module) -> dict[str, Tensor]:
    """The weights the backbone would have with its adapters merged; the backbone itself stays as it is.

    Merging in place and undoing it would leave rounding errors in the weights of a run that continues.

    Precision: updates are added in float32 and rounded once to the weight's dtype, bfloat16 for weights of 4 bits.
    """
    plain = plain_backbone(backbone)
    if plain is backbone:
        return plain.state_dict()
    from peft.tuners.lora import LoraLayer

    small = four_bit_weights(plain)
    left_out = tuple(f"{name}." for name in small)
    own = {
        name: tensor
        for name, tensor in plain.state_dict().items()
        if ".lora_" not in name and not name.startswith(left_out)
    }
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in (own | small).items()}
    for name, layer in plain.named_modules():
        if isinstance(layer, LoraLayer):
            weight = merged[f"{name}.weight"].float()
            for adapter in layer.active_adapters:
                # peft types the method on each kind of layer, not on their base.
                weight = weight + layer.get_delta_weight(adapter).float()  # type: ignore[attr-defined]
            merged[f"{name}.weight"] = weight.to(merged[f"{name}.weight"].dtype)
    return merged


def four_bit_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module that are kept in 4 bits, by their names, in bfloat16."""
    small = {name: weight for name, weight in module.named_parameters() if is_four_bit(weight)}
    if not small:
        return {}
    from peft.utils.integrations import dequantize_bnb_weight

    return {name: dequantize_bnb_weight(weight).to(torch.bfloat16) for name, weight in small.items()}


def is_four_bit(weight: Any) -> bool:
    """Whether a weight is kept in 4 bits by bitsandbytes."""
    return type(weight).__name__ == "Params4bit"


def without_cache(backbone: nn.Module) -> dict[str, bool]:
    """What a forward pass is given so that a decoder keeps no keys and values of its layers; nothing for an encoder."""
    return {"use_cache": False} if getattr(plain_backbone(backbone).config, "use_cache", False) else {}


def frozen_weights(module: nn.Module) -> set[str]:
    """The names of all weights in a module that lie under LoRA matrices and are not trained."""
    return {
        f"{prefix}.{name}"
        for prefix, part in module.named_modules()
        if hasattr(part, "peft_config") and not isinstance(part, PreTrainedModel)
        for name, parameter in part.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and ".lora_" not in name
    }


def save_adapters(backbone: nn.Module, folder: Path, base: str, revision: str | None) -> None:
    """Write the LoRA matrices unmerged in peft's layout, for `PeftModel.from_pretrained(base, folder)`."""
    from peft import get_peft_model_state_dict

    adapted: Any = backbone
    config, where = adapted.peft_config["default"], {"base_model_name_or_path": base, "revision": revision}
    config = replace(config, **where, inference_mode=True)
    folder.mkdir()
    config.save_pretrained(str(folder))
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
