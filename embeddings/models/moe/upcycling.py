"""From a dense encoder to one with experts: chosen MLPs are copied into experts behind a new router."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.jina_embeddings_v3.configuration_jina_embeddings_v3 import JinaEmbeddingsV3Config
from transformers.models.nomic_bert.configuration_nomic_bert import NomicBertConfig

from embeddings.common import OptionError
from embeddings.common.distributed import count_values, full_shape
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.moe.experts import Experts, check_routing
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel


@dataclass(frozen=True)
class Upcycling:
    """Which MLPs become experts, how many, and what is kept of the dense ones.

    Args:
        mode: `preserving` keeps the dense biases (the first with each expert, the second shared) and divides a token's
            weights by their sum, so the model's output is the dense one's at the start. `release` is the released
            model's way: biases dropped, weights as they come, one shared output bias that starts at zero. NomicBert's
            gated MLPs have no biases; the shared output bias starts at zero in both.
        num_experts: Experts of each sparse layer, X. The paper: 8.
        top_k: Experts a token, K. The paper: 2, and 1 in its monolingual study.
        first: Index of the first sparse layer, from 0. The paper: the second layer, 1.
        every: Sparse layers come every so many. The paper: 2, every other.
        noise: Half the width of the factor that states are multiplied by for the router, in training; 0 for none.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §4.3; Komatsuzaki 2023, arXiv:2212.05055, for the method.
    """

    mode: Literal["preserving", "release"] = "preserving"
    num_experts: int = 8
    top_k: int = 2
    first: int = 1
    every: int = 2
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("preserving", "release"):
            raise OptionError("upcycling.mode", self.mode, "must be preserving or release", "leave it out")
        for name, least, usual in (("first", 0, 1), ("every", 1, 2)):
            if getattr(self, name) < least:
                fix = f"the paper's model has {usual}"
                raise OptionError(f"upcycling.{name}", getattr(self, name), f"must be >= {least}", fix)
        try:
            check_routing(self.num_experts, self.top_k, self.noise)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            rule = rest.partition(", got")[0]
            fix = "the paper has 8 experts, top 2"
            raise OptionError(f"upcycling.{name}", getattr(self, name), rule, fix) from error

    def layers(self, num_layers: int) -> list[int]:
        """The sparse layers of a model, in order; an `OptionError` if there is none."""
        chosen = list(range(self.first, num_layers, self.every))
        if not chosen:
            rule = f"leaves no layer to make sparse: the model has {num_layers}, counted from 0"
            raise OptionError("upcycling.first", self.first, rule, "lower it")
        return chosen


def upcycle(dense: PreTrainedModel, settings: Upcycling) -> RotaryMoeModel:
    """A dense rotary encoder with experts in place of chosen MLPs, of the same dtype, attention and mode.

    Each expert is a copy of the layer's MLP, gated (NomicBert, §7.1) or not, so they differ only once the router has
    told them apart in training. The router is drawn from N(0, 0.02) by torch's random state.

    Args:
        dense: A rotary encoder without head (see `embeddings.models.rotary`), or a NomicBert. It shares weights with
            the result and should not be used afterwards.

    Raises:
        OptionError: If the model is another architecture or sparse already, or no layer is chosen.
    """
    gated = type(dense.config) is NomicBertConfig
    if not (gated or type(dense.config) is JinaEmbeddingsV3Config) or not hasattr(dense, "layers"):
        is_sparse = isinstance(dense, RotaryMoeModel)
        rule = "needs a dense backbone, and this one has experts" if is_sparse else "needs rotary positions"
        fix = "take NomicBert, or what `convert` makes of XLM-R or BERT"
        raise OptionError("upcycling", f"a {dense.config.model_type} backbone", rule, fix)
    layers, preserving = settings.layers(dense.config.num_hidden_layers), settings.mode == "preserving"
    fields = dense.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype"):
        fields.pop(name, None)
    config = RotaryMoeConfig(
        **fields,
        moe_layers=layers,
        num_experts=settings.num_experts,
        experts_per_token=settings.top_k,
        renormalize_experts=preserving,
        expert_bias=preserving and not gated,
        router_noise=settings.noise,
        gated_mlp=gated,
    )
    with torch.device("meta"):
        options: dict[str, Any] = {"attn_implementation": dense.config._attn_implementation, "dtype": dense.dtype}
        sparse = AutoModel.from_config(config, **options)  # type: ignore[no-untyped-call]
    assert isinstance(sparse, RotaryMoeModel)
    state = {name: value for name, value in dense.state_dict().items() if not name.startswith("pooler.")}
    for layer in layers:
        prefix = f"layers.{layer}.mlp."
        mlp = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
        state |= {f"layers.{layer}.mlp.{name}": value for name, value in _experts_of(mlp, settings).items()}
    sparse.load_state_dict(state, assign=True)
    # No state dict holds the buffers; the new model's are on the meta device.
    for name, buffer in dense.named_buffers():
        owner, _, own_name = name.rpartition(".")
        setattr(sparse.get_submodule(owner), own_name, buffer)
    sparse.train(dense.training)
    if any(getattr(module, "gradient_checkpointing", False) for module in dense.modules()):
        enable_checkpointing(sparse)
    return sparse


class ParameterCounts(NamedTuple):
    """All parameters of a model, and those that one token passes: of each sparse layer the share of its K experts."""

    total: int
    active: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Total and active parameters of a model, on all ranks together; without experts both are the same.

    The paper's model has 475M and 305M.
    """
    total = count_values(model.parameters())
    idle = 0
    for layer in model.modules():
        experts, router = getattr(layer, "experts", None), getattr(layer, "router", None)
        if isinstance(experts, Experts) and router is not None:
            stacked = [full_shape(weight) for weight in (experts.w1, experts.w2, experts.bias1) if weight is not None]
            idle += (stacked[0][0] - router.top_k) * sum(shape[1:].numel() for shape in stacked)
    return ParameterCounts(total, total - idle)


def _experts_of(mlp: dict[str, Tensor], settings: Upcycling) -> dict[str, Tensor]:
    """The weights of a sparse MLP whose experts are copies of a dense one, of a gated one its two first matrices."""

    def copies(weight: Tensor) -> Tensor:
        return weight.expand(settings.num_experts, *weight.shape).clone()

    gated = "gate_proj.weight" in mlp
    first = torch.cat([mlp["gate_proj.weight"], mlp["up_proj.weight"]]) if gated else mlp["fc1.weight"]
    second = mlp["down_proj.weight" if gated else "fc2.weight"]
    router_XH = first.new_empty(settings.num_experts, first.shape[1]).normal_(std=0.02)
    made = {"router.weight": router_XH, "experts.w1": copies(first), "experts.w2": copies(second.T)}
    if gated or settings.mode == "release":
        return made | {"experts.bias2": second.new_zeros(len(second))}
    return made | {"experts.bias1": copies(mlp["fc1.bias"]), "experts.bias2": mlp["fc2.bias"]}
