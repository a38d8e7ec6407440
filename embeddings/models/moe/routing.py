"""The experts of a model during a run: the back end that computes them, what the routing adds up to, its metrics."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from embeddings.common import OptionError
from embeddings.models.lora import plain_backbone
from embeddings.models.moe.experts import (
    Backend,
    Experts,
    ExpertWeights,
    Routing,
    grouped_experts,
    grouped_mlps,
    loop_experts,
    sorted_experts,
)
from embeddings.models.moe.rotary_moe import RotaryMoeModel, RotaryMoeOutput

COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP = "expert_counts", "expert_probabilities", "router_squared_logsumexp"


def has_experts(backbone: nn.Module) -> bool:
    """Whether a backbone, adapted by peft or not, has sparse layers."""
    return isinstance(plain_backbone(backbone), RotaryMoeModel)


def moe_layers(backbone: nn.Module) -> list[int]:
    """The indices of a backbone's sparse layers, from 0."""
    return list(plain_backbone(backbone).config.moe_layers) if has_experts(backbone) else []


@contextmanager
def read_routing(backbone: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Inside, the function given has the sums of the forward passes so far, by the names in `RotaryMoeOutput`.

    They are outputs of the backbone like its states and part of the same graph: a layer that runs again for the
    backward pass adds nothing. A dense backbone has none.
    """
    found: dict[str, Tensor] = {}

    def add(_: nn.Module, __: Any, output: Any) -> None:
        assert isinstance(output, RotaryMoeOutput)
        for name in (COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP):
            value = getattr(output, name)
            found[name] = found[name] + value if name in found else value

    if not has_experts(backbone):
        yield dict
        return
    hook = plain_backbone(backbone).register_forward_hook(add)
    try:
        yield lambda: dict(found)
    finally:
        hook.remove()


class LoadMetrics(NamedTuple):
    """How evenly the tokens of Y sparse layers are spread over X experts."""

    entropy_Y: Tensor  # entropy of the experts' shares over its largest value, (Y,) float64, 0 to 1; 1 for an even load
    highest_Y: Tensor  # tokens of the busiest expert over an even share, (Y,) float32, from 1 to X
    idle_Y: Tensor  # experts that were given no token, (Y,) int64


def load_metrics(count_YX: Tensor) -> LoadMetrics:
    highest_Y = count_YX.amax(dim=1) * count_YX.shape[1] / count_YX.sum(dim=1).clamp(min=1)
    return LoadMetrics(relative_entropy(count_YX), highest_Y, (count_YX == 0).sum(dim=1))


def routing_metrics(count_YX: Tensor, probability_YX: Tensor, layers: list[int]) -> dict[str, float]:
    """The metrics of one step by the names they are logged under, from tokens and sums of probabilities by expert."""
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
    """The entropy of each row's shares over log X, (Y,) float64; 1 where there is one expert."""
    share_YX = amount_YX.double() / amount_YX.sum(dim=1, keepdim=True).clamp(min=1e-12)
    most = math.log(amount_YX.shape[1])
    entropy_Y = torch.special.entr(share_YX).sum(dim=1)
    return entropy_Y / most if most else torch.ones_like(entropy_Y)


BackendName = Literal["grouped_mm", "loop", "megablocks"]


def set_expert_backend(model: nn.Module, name: BackendName) -> None:
    """Have the experts of all sparse layers of a model computed by one back end.

    Args:
        model: A model with sparse layers, or without any.
        name: `grouped_mm`, torch's grouped product over tokens sorted by expert; `loop`, one expert after another, the
            reference; `megablocks`, the same order as `grouped_mm` with that library's product, only bfloat16 on CUDA.
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

    It has been tried against a stand-in of that product only: releases of megablocks pin a torch that is too old here.
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
            rule, fix = "computes only in bfloat16", "train with precision bf16-mixed or bf16-true, or use grouped_mm"
            raise OptionError("expert_backend", f"megablocks in {token_TH.dtype}", rule, fix)
        return sorted_experts(token_TH, routing, weights, partial(grouped_mlps, product=self._product))

    def _product(self, row_PI: Tensor, matrix_XIO: Tensor, end_X: Tensor) -> Tensor:
        # The library takes the experts' numbers of rows, on the CPU, and matrices as they lie in memory.
        size_X = end_X.diff(prepend=end_X.new_zeros(1)).to("cpu", torch.int64)
        lies_transposed = not matrix_XIO.is_contiguous()
        matrix = matrix_XIO.transpose(1, 2) if lies_transposed else matrix_XIO
        product_PO: Tensor = self._gmm(row_PI, matrix, size_X, trans_b=lies_transposed)
        return product_PO
