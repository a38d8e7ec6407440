"""GPTQ: the weights of a matrix as numbers of 8 bits with scales, each rounding made up for by the later weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from embeddings.compression.pruning import inverse_factor, sweep
from embeddings.models.model_files import FORMATS, METHOD

NumberName = Literal["int8", "fp8_e4m3", "fp8_e5m2"]


@dataclass(frozen=True)
class NumberFormat:
    """Numbers of 8 bits: dtype, what the largest weight of a scale becomes, and kind in compressed-tensors."""

    dtype: torch.dtype
    largest: float
    kind: Literal["int", "float"]

    def codes(self, value: Tensor) -> Tensor:
        """The numbers nearest to values in units of their scale, clipped to the largest; halves to even."""
        cut = value.clamp(-self.largest, self.largest)
        return (cut.round() if self.kind == "int" else cut).to(self.dtype)


FORMAT_OF: Mapping[NumberName, NumberFormat] = {
    "int8": NumberFormat(torch.int8, 127.0, "int"),
    "fp8_e4m3": NumberFormat(torch.float8_e4m3fn, 448.0, "float"),
    "fp8_e5m2": NumberFormat(torch.float8_e5m2, 57344.0, "float"),
}


class QuantisedMatrix(NamedTuple):
    """A matrix in 8 bits, (O, I), and its scales, (O, G): each for I / G neighbouring inputs of an output."""

    code_OI: Tensor
    scale_OG: Tensor

    def values(self) -> Tensor:
        """The weights, (O, I) in the dtype of the scales (float32 for those of fewer bits)."""
        dtype = torch.promote_types(self.scale_OG.dtype, torch.float32)
        each_OI = self.scale_OG.to(dtype).repeat_interleave(self.code_OI.shape[1] // self.scale_OG.shape[1], dim=1)
        return self.code_OI.to(dtype) * each_OI


def quantise_by_gptq(
    weight_OI: Tensor,
    gram_II: Tensor,
    number: NumberFormat,
    group_size: int | None = None,
    damping: float = 0.01,
    block_size: int = 128,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantisedMatrix:
    """A matrix rounded to 8 bits input by input, the later weights changed to make up for each rounding.

    ŵ_j = s · round(w_j / s), with the scale s = max |w| / largest of an output, or of its `group_size` inputs as they
    are when the first of them is reached. With H = Σ x xᵀ + λI and H⁻¹ = UᵀU the weights k > j then become
    w_k - (w_j - ŵ_j) U_jk / U_jj (see `sweep`). Scales are symmetric, so zero is a number of every format. A weight
    that is zero at the start stays exactly zero: what earlier roundings moved to it is an error that later weights make
    up for.

    Args:
        weight_OI: Weights, (O, I) float.
        gram_II: Gram matrix of the inputs, (I, I) float.
        number: The format.
        group_size: Inputs that share a scale, a divisor of I; None for one scale an output.
        damping: λ as a share of the mean of H's diagonal, > 0.
        block_size: Inputs whose updates are applied to the rest at once.
        scale_dtype: Dtype of the scales, which the numbers allow for.

    Shape/precision: in the dtype of the weights, which is float32 in `compress`.
    Raises:
        NumericError: If the Gram matrix is not finite.
    Source: Frantar et al. 2023 (GPTQ), arXiv:2210.17323, Algorithm 1. Differs: inputs keep their order; symmetric
        scales; zeros stay.
    """
    num_inputs = weight_OI.shape[1]
    size = group_size or num_inputs
    if group_size is not None and size % block_size and block_size % size:
        # A group must not begin inside a block and end behind it, where weights are not up to date.
        block_size = size
    pruned_IO = (weight_OI == 0).T
    codes: list[Tensor] = []
    scales: list[Tensor] = []

    def choose(column: int, weight_IO: Tensor) -> Tensor:
        """The column rounded; the scale of a group is chosen at its first column."""
        if column % size == 0:
            largest_O = weight_IO[column : column + size].abs().amax(dim=0)
            scale_O = (largest_O / number.largest).to(scale_dtype)
            scales.append(torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O)))
        scale_O = scales[-1].to(weight_IO.dtype)
        kept_O = weight_IO[column].masked_fill(pruned_IO[column], 0)
        codes.append(number.codes(kept_O / scale_O))
        return codes[-1].to(weight_IO.dtype) * scale_O

    sweep(weight_OI, inverse_factor(gram_II.to(weight_OI.dtype), damping), choose, block_size)
    return QuantisedMatrix(torch.stack(codes, dim=1), torch.stack(scales, dim=1))


def quantization_config(number: NumberFormat, group_size: int | None, ignored: list[str]) -> dict[str, Any]:
    """What config.json says of a model quantised so, in compressed-tensors' words; `ignored` layers keep weights."""
    weights: dict[str, Any] = {"num_bits": 8, "type": number.kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel" if group_size is None else "group", "group_size": group_size}
    form = FORMATS[number.kind]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        # Without its own format a group of weights alone would be taken for packed numbers.
        "config_groups": {"group_0": {**group, "format": form}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        # To transformers: multiply the weights out on loading, in place of products in 8 bits.
        "dequantize": True,
    }
