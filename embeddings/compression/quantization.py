"""GPTQ: quantises the weights of a matrix to 8 bits with scales, and updates later weights to compensate."""

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
    """An 8-bit number format: dtype, the value of the largest weight of a scale, and the type in compressed-tensors."""

    dtype: torch.dtype
    largest: float
    kind: Literal["int", "float"]

    def codes(self, value: Tensor) -> Tensor:
        """Round values in units of their scale to the nearest number, half to even, clipped to the largest."""
        clipped = value.clamp(-self.largest, self.largest)
        return (clipped.round() if self.kind == "int" else clipped).to(self.dtype)


FORMAT_OF: Mapping[NumberName, NumberFormat] = {
    "int8": NumberFormat(torch.int8, 127.0, "int"),
    "fp8_e4m3": NumberFormat(torch.float8_e4m3fn, 448.0, "float"),
    "fp8_e5m2": NumberFormat(torch.float8_e5m2, 57344.0, "float"),
}


class QuantisedMatrix(NamedTuple):
    """The 8-bit codes of a matrix, (O, I), and scales, (O, G), each for I / G neighbouring inputs of an output."""

    code_OI: Tensor
    scale_OG: Tensor

    def values(self) -> Tensor:
        """The weights, (O, I), in float32 or the dtype of the scales if that is wider."""
        dtype = torch.promote_types(self.scale_OG.dtype, torch.float32)
        scale_OI = self.scale_OG.to(dtype).repeat_interleave(self.code_OI.shape[1] // self.scale_OG.shape[1], dim=1)
        return self.code_OI.to(dtype) * scale_OI


def quantise_by_gptq(
    weight_OI: Tensor,
    gram_II: Tensor,
    number: NumberFormat,
    group_size: int | None = None,
    damping: float = 0.01,
    block_size: int = 128,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantisedMatrix:
    """Round a matrix to 8 bits input by input, and update later weights to compensate each rounding error.

    ŵ_j = s · round(w_j / s), with the symmetric scale s = max |w| / largest over an output, or over a group of
    `group_size` inputs when its first input is reached (see `sweep`). A weight that is zero stays exactly zero.

    Args:
        weight_OI: Weights, (O, I) float.
        gram_II: Gram matrix of the inputs, (I, I) float.
        number: The format.
        group_size: Inputs that share a scale, a divisor of I; None for one scale per output.
        damping: λ as a fraction of the mean of H's diagonal, > 0.
        block_size: Inputs whose updates are applied to later inputs at once.
        scale_dtype: Dtype of the scales, which are rounded before the codes are chosen.

    Source: Frantar et al. 2023 (GPTQ), arXiv:2210.17323, Algorithm 1. Differs: inputs keep their order; symmetric
        scales; zeros stay.
    """
    num_inputs = weight_OI.shape[1]
    size = group_size or num_inputs
    if group_size is not None and size % block_size and block_size % size:
        # A group must not extend beyond the block in which it starts, because later weights are not current.
        block_size = size
    pruned_IO = (weight_OI == 0).T
    codes: list[Tensor] = []
    scales: list[Tensor] = []

    def choose(column: int, weight_IO: Tensor) -> Tensor:
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
    """The entry of config.json for a quantised model, as compressed-tensors defines it, with modules to ignore."""
    weights: dict[str, Any] = {"num_bits": 8, "type": number.kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel" if group_size is None else "group", "group_size": group_size}
    form = FORMATS[number.kind]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        # Without a format of its own, a group that quantises only weights would be read as packed numbers.
        "config_groups": {"group_0": {**group, "format": form}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        # Makes transformers dequantise the weights on loading, instead of computing products in 8 bits.
        "dequantize": True,
    }
