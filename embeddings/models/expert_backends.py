"""Which back end computes the experts of a model: a choice of the run, never saved with the model."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embeddings.common import OptionError
from embeddings.common.errors import require
from embeddings.models.experts import (
    Backend,
    Experts,
    ExpertWeights,
    grouped_experts,
    grouped_mlps,
    loop_experts,
    sorted_experts,
)
from embeddings.models.moe_router import Routing

BackendName = Literal["grouped_mm", "loop", "megablocks"]


def set_expert_backend(model: nn.Module, name: BackendName) -> None:
    """Have the experts of all sparse layers of a model computed by one back end.

    Args:
        model: A model with sparse layers, or without any.
        name: `grouped_mm`, torch's grouped product over tokens sorted by expert; `loop`, one expert after another, the
            reference; `megablocks`, the same order as `grouped_mm` with that library's product, bfloat16 on CUDA alone.

    Raises:
        OptionError: If there is no such back end.
        MissingExtraError: If megablocks is asked for and not installed.
    """
    backend = _backend(name)
    for module in model.modules():
        if isinstance(module, Experts):
            module.backend = backend


def _backend(name: str) -> Backend:
    if name == "grouped_mm":
        return grouped_experts
    if name == "loop":
        return loop_experts
    if name == "megablocks":
        return MegablocksExperts()
    raise OptionError("expert_backend", name, "must be grouped_mm, loop or megablocks", "leave it out for grouped_mm")


class MegablocksExperts:
    """The experts' sum with the grouped product of megablocks (its `gg` extra, CUTLASS), bfloat16 on CUDA.

    It has been tried against a stand-in of that product only, never against megablocks itself: its releases pin a
    torch older than this library's oldest.

    Raises:
        MissingExtraError: If megablocks is not installed.
        OptionError: If it was built without its grouped product.
    """

    def __init__(self) -> None:
        util = require("megablocks.grouped_gemm_util", "megablocks")
        if not util.grouped_gemm_is_available():
            raise OptionError("expert_backend", "megablocks", "lacks its grouped product", "install grouped_gemm too")
        self._gmm: Any = util.ops.gmm

    def __call__(self, token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        """The weighted sum over each token's experts, (T, H) float32.

        Raises:
            OptionError: If the states are not bfloat16.
        """
        if token_TH.dtype != torch.bfloat16:
            rule, fix = "computes in bfloat16 alone", "train with precision bf16-mixed or bf16-true, or use grouped_mm"
            raise OptionError("expert_backend", f"megablocks in {token_TH.dtype}", rule, fix)
        return sorted_experts(token_TH, routing, weights, partial(grouped_mlps, product=self._product))

    def _product(self, row_PI: Tensor, matrix_XIO: Tensor, end_X: Tensor) -> Tensor:
        # The library takes the experts' numbers of rows, on the processor, and matrices as they lie in memory.
        size_X = end_X.diff(prepend=end_X.new_zeros(1)).to("cpu", torch.int64)
        lies_transposed = not matrix_XIO.is_contiguous()
        matrix = matrix_XIO.transpose(1, 2) if lies_transposed else matrix_XIO
        product_PO: Tensor = self._gmm(row_PI, matrix, size_X, trans_b=lies_transposed)
        return product_PO
