"""Upcycling a dense encoder's MLPs into experts, their back ends, and metrics of their routing."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.jina_embeddings_v3.configuration_jina_embeddings_v3 import JinaEmbeddingsV3Config
from transformers.models.nomic_bert.configuration_nomic_bert import NomicBertConfig

from embeddings.common import OptionError
from embeddings.common.distributed import count_values, full_shape
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.lora import plain_backbone
from embeddings.models.moe.experts import (
    Backend,
    Experts,
    ExpertWeights,
    Routing,
    check_routing,
    grouped_experts,
    grouped_mlps,
    loop_experts,
    sorted_experts,
)
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel, RotaryMoeOutput


@dataclass(frozen=True)
class Upcycling:
    """The MLPs that become experts, their number, and how the dense weights are used.

    Args:
        mode: `preserving` keeps the dense biases (the first in each expert, the second shared) and divides a token's
            weights by their sum, so that the initial output equals the dense model's. `release` follows the released
            model: no dense biases, weights not renormalised, one shared output bias initialised with zeros. NomicBert's
            gated MLPs have no biases; their shared output bias is initialised with zeros in both modes.
        num_experts: Experts in each sparse layer, X. The paper: 8.
        top_k: Experts per token, K. The paper: 2, and 1 in its monolingual study.
        first: Index of the first sparse layer, from 0. The paper: the second layer, 1.
        every: Distance between sparse layers. The paper: 2, every other layer.
        noise: Half the width of the uniform factor on the router's input in training; 0 for none.

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
        for name, minimum, usual in (("first", 0, 1), ("every", 1, 2)):
            if getattr(self, name) < minimum:
                fix = f"the paper's model has {usual}"
                raise OptionError(f"upcycling.{name}", getattr(self, name), f"must be >= {minimum}", fix)
        try:
            check_routing(self.num_experts, self.top_k, self.noise)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            rule = rest.partition(", got")[0]
            fix = "the paper has 8 experts, top 2"
            raise OptionError(f"upcycling.{name}", getattr(self, name), rule, fix) from error

    def layers(self, num_layers: int) -> list[int]:
        """The indices of a model's sparse layers, in order; an `OptionError` if there are none."""
        chosen = list(range(self.first, num_layers, self.every))
        if not chosen:
            rule = f"must be < {num_layers}, the model's number of layers"
            raise OptionError("upcycling.first", self.first, rule, "lower it")
        return chosen


def upcycle(dense: PreTrainedModel, settings: Upcycling) -> RotaryMoeModel:
    """Replace chosen MLPs of a dense rotary encoder by experts; dtype, attention and training mode stay the same.

    Each expert is a copy of the layer's MLP, gated (NomicBert, §7.1) or not; experts become different in training
    because the router sends them different tokens. The router is drawn from N(0, 0.02) by torch's random state.

    Args:
        dense: A rotary encoder without head (see `embeddings.models.rotary`), or a NomicBert. It shares weights with
            the result and should not be used afterwards.

    Raises:
        OptionError: If the model has another architecture or experts already, or no layer is chosen.
    """
    gated = type(dense.config) is NomicBertConfig
    if not (gated or type(dense.config) is JinaEmbeddingsV3Config) or not hasattr(dense, "layers"):
        is_sparse = isinstance(dense, RotaryMoeModel)
        rule = "needs a dense backbone, and this one has experts" if is_sparse else "needs rotary positions"
        fix = "take NomicBert, or convert XLM-R or BERT with `convert`"
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
    # Buffers are not in the state dict, and the new model's are on the meta device.
    for name, buffer in dense.named_buffers():
        owner, _, attribute = name.rpartition(".")
        setattr(sparse.get_submodule(owner), attribute, buffer)
    sparse.train(dense.training)
    if any(getattr(module, "gradient_checkpointing", False) for module in dense.modules()):
        enable_checkpointing(sparse)
    return sparse


class ParameterCounts(NamedTuple):
    """The number of all parameters of a model, and of those active for one token: K experts in each sparse layer."""

    total: int
    active: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Total and active parameters of a model, over all ranks; equal without experts.

    The paper's model has 475M and 305M.
    """
    total = count_values(model.parameters())
    inactive = 0
    for layer in model.modules():
        experts, router = getattr(layer, "experts", None), getattr(layer, "router", None)
        if isinstance(experts, Experts) and router is not None:
            stacked = [full_shape(weight) for weight in (experts.w1, experts.w2, experts.bias1) if weight is not None]
            inactive += (stacked[0][0] - router.top_k) * sum(shape[1:].numel() for shape in stacked)
    return ParameterCounts(total, total - inactive)


def _experts_of(mlp: dict[str, Tensor], settings: Upcycling) -> dict[str, Tensor]:
    """The weights of a sparse MLP whose experts are copies of a dense or gated MLP."""

    def copies(weight: Tensor) -> Tensor:
        return weight.expand(settings.num_experts, *weight.shape).clone()

    gated = "gate_proj.weight" in mlp
    first = torch.cat([mlp["gate_proj.weight"], mlp["up_proj.weight"]]) if gated else mlp["fc1.weight"]
    second = mlp["down_proj.weight" if gated else "fc2.weight"]
    router_XH = first.new_empty(settings.num_experts, first.shape[1]).normal_(std=0.02)
    weights = {"router.weight": router_XH, "experts.w1": copies(first), "experts.w2": copies(second.T)}
    if gated or settings.mode == "release":
        return weights | {"experts.bias2": second.new_zeros(len(second))}
    return weights | {"experts.bias1": copies(mlp["fc1.bias"]), "experts.bias2": mlp["fc2.bias"]}


COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP = "expert_counts", "expert_probabilities", "router_squared_logsumexp"


def has_experts(backbone: nn.Module) -> bool:
    """Whether a backbone, adapted by peft or not, has sparse layers."""
    return isinstance(plain_backbone(backbone), RotaryMoeModel)


def moe_layers(backbone: nn.Module) -> list[int]:
    """The indices of a backbone's sparse layers, from 0."""
    return list(plain_backbone(backbone).config.moe_layers) if has_experts(backbone) else []


@contextmanager
def read_routing(backbone: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Add up the routing sums of the forward passes within this context.

    The yielded function returns the sums so far by their names in `RotaryMoeOutput`; none for a dense backbone. They
    are outputs in the backbone's graph, so that layers recomputed in the backward pass do not count twice.
    """
    sums: dict[str, Tensor] = {}

    def add(_: nn.Module, __: Any, output: Any) -> None:
        assert isinstance(output, RotaryMoeOutput)
        for name in (COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP):
            value = getattr(output, name)
            sums[name] = sums[name] + value if name in sums else value

    if not has_experts(backbone):
        yield dict
        return
    hook = plain_backbone(backbone).register_forward_hook(add)
    try:
        yield lambda: dict(sums)
    finally:
        hook.remove()


class LoadMetrics(NamedTuple):
    """The balance of the load of X experts in Y sparse layers."""

    entropy_Y: Tensor  # entropy of the experts' shares over its maximum, (Y,) float64, 0 to 1; 1 for an even load
    highest_Y: Tensor  # tokens of the most loaded expert over an even share, (Y,) float32, from 1 to X
    idle_Y: Tensor  # number of experts without tokens, (Y,) int64


def load_metrics(count_YX: Tensor) -> LoadMetrics:
    highest_Y = count_YX.amax(dim=1) * count_YX.shape[1] / count_YX.sum(dim=1).clamp(min=1)
    return LoadMetrics(relative_entropy(count_YX), highest_Y, (count_YX == 0).sum(dim=1))


def routing_metrics(count_YX: Tensor, probability_YX: Tensor, layers: list[int]) -> dict[str, float]:
    """The metrics of one step by their logged names, from token counts and probability sums by expert."""
    load = load_metrics(count_YX)
    by_name = {
        "load_entropy": load.entropy_Y,
        "probability_entropy": relative_entropy(probability_YX),
        "highest_load": load.highest_Y,
        "idle_experts": load.idle_Y,
    }
    values = {
        f"routing/{name}_layer_{layer}": float(value)
        for name, value_Y in by_name.items()
        for layer, value in zip(layers, value_Y.tolist(), strict=True)
    }
    totals = {"load_entropy": load.entropy_Y.mean(), "idle_experts": load.idle_Y.sum()}
    return values | {f"routing/{name}": float(value) for name, value in totals.items()}


def relative_entropy(amount_YX: Tensor) -> Tensor:
    """The entropy of each row's shares over log X, (Y,) float64; 1 for a single expert."""
    share_YX = amount_YX.double() / amount_YX.sum(dim=1, keepdim=True).clamp(min=1e-12)
    maximum = math.log(amount_YX.shape[1])
    entropy_Y = torch.special.entr(share_YX).sum(dim=1)
    return entropy_Y / maximum if maximum else torch.ones_like(entropy_Y)


BackendName = Literal["grouped_mm", "loop", "megablocks"]


def set_expert_backend(model: nn.Module, name: BackendName) -> None:
    """Set the back end of the experts in all sparse layers of a model.

    Args:
        model: A model with or without sparse layers.
        name: `grouped_mm`, torch's grouped product over tokens sorted by expert; `loop`, a loop over experts, the
            reference; `megablocks`, the grouped product of that library, only for bfloat16 on CUDA.
    """
    if name not in get_args(BackendName):
        rule = "must be grouped_mm, loop or megablocks"
        raise OptionError("expert_backend", name, rule, "leave it out for grouped_mm")
    known: dict[str, Backend] = {"grouped_mm": grouped_experts, "loop": loop_experts}
    backend = known[name] if name in known else MegablocksExperts()
    for module in model.modules():
        if isinstance(module, Experts):
            module.backend = backend


_MEGABLOCKS_PIN = "its newest release, 0.10.0, requires torch<2.7.1, and this library torch>=2.11"


class MegablocksExperts:
    """The experts' sum with the grouped product of megablocks (its `gg` extra, CUTLASS), bfloat16 on CUDA.

    Tested only with a replacement of that product: releases of megablocks need an older torch.
    """

    def __init__(self) -> None:
        try:
            util = importlib.import_module("megablocks.grouped_gemm_util")
        except ModuleNotFoundError as error:
            rule = f"must be grouped_mm or loop here ({error}: {_MEGABLOCKS_PIN})"
            raise OptionError("expert_backend", "megablocks", rule, "leave it out for grouped_mm") from error
        if not util.grouped_gemm_is_available():
            raise OptionError("expert_backend", "megablocks", "lacks its grouped product", "install grouped_gemm too")
        self._gmm: Any = util.ops.gmm

    def __call__(self, token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        """The weighted sum over each token's experts, (T, H) float32."""
        if token_TH.dtype != torch.bfloat16:
            rule, fix = "supports only bfloat16", "train with precision bf16-mixed or bf16-true, or use grouped_mm"
            raise OptionError("expert_backend", f"megablocks in {token_TH.dtype}", rule, fix)
        return sorted_experts(token_TH, routing, weights, partial(grouped_mlps, product=self._product))

    def _product(self, row_PI: Tensor, matrix_XIO: Tensor, end_X: Tensor) -> Tensor:
        # megablocks needs each expert's number of rows on the CPU, and contiguous matrices.
        size_X = end_X.diff(prepend=end_X.new_zeros(1)).to("cpu", torch.int64)
        is_transposed = not matrix_XIO.is_contiguous()
        matrix = matrix_XIO.transpose(1, 2) if is_transposed else matrix_XIO
        product_PO: Tensor = self._gmm(row_PI, matrix, size_X, trans_b=is_transposed)
        return product_PO
