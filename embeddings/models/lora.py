"""Low-rank adapters by peft: the backbone's weights are frozen, and small added matrices are trained."""

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

from embeddings.common import OptionError, require_minimum
from embeddings.common.io import write_text
from embeddings.models.pooling import plain_backbone

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class LoraSettings:
    """Options of the adapters of a backbone.

    Args:
        rank: Rank of the update of each matrix. NV-Embed uses 16 (Table 11).
        alpha: The update is scaled by alpha / rank. NV-Embed uses 32.
        dropout: Fraction of an adapter's inputs dropped in training. NV-Embed uses 0.1.
        target_modules: Names of the linear layers to adapt, or "all-linear". The paper does not name them.
        keep_zeros: Do not change weights that are zero, so that a pruned model stays sparse in training and after
            merging: W + M * (alpha / rank) B A with M = 1 where W is not zero. The full update of each matrix is then
            stored for the backward pass. NV-Embed, Appendix A, does not state how merged weights stay zero.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.1
    target_modules: str | Sequence[str] = "all-linear"
    keep_zeros: bool = False

    def __post_init__(self) -> None:
        require_minimum("lora.rank", self.rank, 1, "NV-Embed uses 16")
        require_minimum("lora.alpha", self.alpha, 1, "NV-Embed uses 32")
        if not 0.0 <= self.dropout < 1.0:
            raise OptionError("lora.dropout", self.dropout, "must be in [0, 1)", "NV-Embed uses 0.1")


def add_lora(backbone: PreTrainedModel, settings: LoraSettings) -> "PeftModel":
    """Add trainable adapters to a backbone and freeze its weights; pooling and head are still trained in full."""
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
    elif not any(map(is_four_bit, backbone.parameters())):
        config._register_custom_module({nn.Linear: _lean_linear()})
    try:
        with warnings.catch_warnings():
            # peft uses the old name of a property that transformers 5.23 renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return get_peft_model(backbone, config)
    except ValueError as error:
        linear = {name.split(".")[-1] for name, layer in backbone.named_modules() if isinstance(layer, nn.Linear)}
        rule = "does not match any layer of the backbone"
        raise OptionError("lora.target_modules", targets, rule, f"choose from {', '.join(sorted(linear))}") from error


@cache
def _lean_linear() -> type[nn.Module]:
    """peft's LoRA layer with fewer passes over memory; in a function because importing peft takes a second.

    W x + B (s A x) in place of W x + s (B A x): the product with s = alpha / rank has `rank` columns. Under autocast
    the input is not first cast to float32, the adapter's own precision, from which autocast would cast it back.
    """
    from peft.tuners.lora import Linear

    class LeanLinear(Linear):
        """A linear layer with the output W x + B (s A x)."""

        def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
            result: Tensor = self.base_layer(x, *arguments, **options)
            if self.disable_adapters or self.merged:
                return result
            for name in self.active_adapters:
                down, up = self.lora_A[name], self.lora_B[name]
                own: Any = down.weight.dtype
                given = x if torch.is_autocast_enabled(x.device.type) else x.to(own)
                update = up(down(self.lora_dropout[name](given)) * self.scaling[name])
                result = (result + update).to(result.dtype)
            return result

    return LeanLinear


@cache
def _zero_keeping_linear() -> type[nn.Module]:
    """peft's LoRA layer with `LoraSettings.keep_zeros`; in a function because importing peft takes a second."""
    from peft.tuners.lora import Linear

    class ZeroKeepingLinear(Linear):
        """A linear layer with the weight W + M * s B A, M = 1 where W is not zero."""

        def get_delta_weight(self, adapter: str) -> Tensor:
            delta: Tensor = super().get_delta_weight(adapter)
            return delta * (self.get_base_layer().weight != 0)

        def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
            result: Tensor = self.base_layer(x, *arguments, **options)
            if not (self.disable_adapters or self.merged):
                for name in self.active_adapters:
                    dropped = self.lora_dropout[name](x.to(result.dtype))
                    result = result + F.linear(dropped, self.get_delta_weight(name).to(result.dtype))
            return result

    return ZeroKeepingLinear


@torch.no_grad()
def merged_state_dict(backbone: nn.Module) -> dict[str, Tensor]:
    """The weights of the backbone with its adapters merged in float32; the backbone itself does not change.

    Merging in place and undoing it would leave rounding errors in the weights of a run that continues.
    """
    plain = plain_backbone(backbone)
    if plain is backbone:
        return plain.state_dict()
    from peft.tuners.lora import LoraLayer

    dequantised = four_bit_weights(plain)
    quantisation_state = tuple(f"{name}." for name in dequantised)
    weights = {
        name: tensor
        for name, tensor in plain.state_dict().items()
        if ".lora_" not in name and not name.startswith(quantisation_state)
    }
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in (weights | dequantised).items()}
    for name, layer in plain.named_modules():
        if isinstance(layer, LoraLayer):
            weight = merged[f"{name}.weight"].float()
            for adapter in layer.active_adapters:
                # peft declares the method in subclasses only.
                weight = weight + layer.get_delta_weight(adapter).float()  # type: ignore[attr-defined]
            merged[f"{name}.weight"] = weight.to(merged[f"{name}.weight"].dtype)
    return merged


def four_bit_weights(module: nn.Module) -> dict[str, Tensor]:
    """The 4-bit weights of a module by name, dequantised to bfloat16."""
    quantised = {name: weight for name, weight in module.named_parameters() if is_four_bit(weight)}
    if not quantised:
        return {}
    from peft.utils.integrations import dequantize_bnb_weight

    return {name: dequantize_bnb_weight(weight).to(torch.bfloat16) for name, weight in quantised.items()}


def is_four_bit(weight: Any) -> bool:
    return type(weight).__name__ == "Params4bit"


def frozen_weights(module: nn.Module) -> set[str]:
    """The names of all weights in a module that LoRA freezes."""
    return {
        f"{prefix}.{name}"
        for prefix, part in module.named_modules()
        if hasattr(part, "peft_config") and not isinstance(part, PreTrainedModel)
        for name, parameter in part.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and ".lora_" not in name
    }


_CARD = """# LoRA matrices of {directory}

They give the states of its backbone with its config, whose attention may differ from that of the base model's own.

```python
from transformers import AutoConfig, AutoModel
from peft import PeftModel

config = AutoConfig.from_pretrained({directory!r})
base = AutoModel.from_pretrained({base!r}, config=config{revision})
model = PeftModel.from_pretrained(base, {adapter!r})
```

Weights of the pooling, of a norm and of a head are in the folders `1_Pooling`, `N_LayerNorm` and `N_Dense` there.
"""


def save_adapters(backbone: nn.Module, folder: Path, base: str, revision: str | None, directory: Path) -> None:
    """Write the LoRA matrices unmerged in peft's layout, with a card on loading them."""
    from peft import get_peft_model_state_dict

    adapted: Any = backbone
    config, where = adapted.peft_config["default"], {"base_model_name_or_path": base, "revision": revision}
    config = replace(config, **where, inference_mode=True)
    folder.mkdir()
    config.save_pretrained(str(folder))
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    places = {"directory": str(directory), "adapter": str(directory / folder.name), "base": base}
    where_revision = "" if revision is None else f", revision={revision!r}"
    write_text(folder / "README.md", _CARD.format(**places, revision=where_revision))
