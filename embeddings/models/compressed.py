"""Compressed weights on disk: matrices of 8-bit numbers with their scales, and the zeros of each matrix.

The layout is that of compressed-tensors: `NAME.weight` in a type of 8 bits, `NAME.weight_scale` beside it, and
`quantization_config` in config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from embeddings.common import InputError
from embeddings.common.errors import shown
from embeddings.models.model_files import read_json, read_tensors, weight_files

QUANTIZATION = "quantization_config"
METHOD = "compressed-tensors"
# How that library calls matrices of whole and of floating-point numbers that are stored as they are.
FORMATS = {"int": "int-quantized", "float": "float-quantized"}
SCALE = "_scale"
_MATRIX = re.compile(r"(?:^|\.)(\d+)\.(.+)\.weight$")


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """What a model's config.json says of its quantised weights; None where they are not quantised."""
    fields = read_json(folder / "config.json").get(QUANTIZATION)
    return fields if isinstance(fields, dict) else None


def check_readable(folder: Path, fields: Mapping[str, Any]) -> None:
    """Refuse quantised weights of another method, or of fewer bits that are packed."""
    method, form = fields.get("quant_method"), fields.get("format")
    if method != METHOD or form not in FORMATS.values():
        what = f"is quantised by {shown(method)} in the format {shown(form)}"
        hint = f"give one in {' or '.join(FORMATS.values())} of {METHOD}, or the model before its quantisation"
        raise InputError(str(folder), what, hint)


def dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with each quantised weight multiplied out in float32, rounded once to its scale's dtype; no scales.

    A scale, (O, G), counts for I / G neighbouring inputs of an output.
    """
    found = {}
    for name, tensor in tensors.items():
        scale_OG = tensors.get(f"{name}{SCALE}")
        if scale_OG is not None:
            each_OI = scale_OG.float().repeat_interleave(tensor.shape[1] // scale_OG.shape[1], dim=1)
            found[name] = (tensor.float() * each_OI).to(scale_OG.dtype)
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in tensors):
            found[name] = tensor
    return found


def dequantised_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder with quantised ones multiplied out, by their names in the files."""
    tensors = chain.from_iterable(map(read_tensors, weight_files(folder)))
    # Copies: a file is closed once all of it is read.
    return dequantised({name: tensor.clone() for name, tensor in tensors})


@dataclass(frozen=True)
class MatrixZeros:
    """The zeros of one matrix, such as `attention.self.query`, of one layer, counted from 0."""

    layer: int
    name: str
    num_zeros: int
    num_weights: int

    @property
    def fraction(self) -> float:
        """Share of zeros."""
        return self.num_zeros / self.num_weights


def zeros_by_matrix(folder: Path) -> list[MatrixZeros]:
    """The zeros of each matrix in the layers of a model directory's backbone, by layer and name, read one at a time."""
    found = []
    for name, tensor in chain.from_iterable(read_tensors(file, _MATRIX.search) for file in weight_files(folder)):
        place = _MATRIX.search(name)
        if place is not None and tensor.dim() == 2:
            num_zeros = tensor.numel() - int(tensor.float().count_nonzero())
            found.append(MatrixZeros(int(place[1]), place[2], num_zeros, tensor.numel()))
    return sorted(found, key=lambda one: (one.layer, one.name))
