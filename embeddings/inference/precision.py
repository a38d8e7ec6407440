"""Which number format a model encodes in: chosen by what the hardware multiplies natively."""

import platform
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from embeddings.common.errors import OptionError

Precision = Literal["auto", "float32", "bfloat16", "int8"]

_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
_CPU_INFO = Path("/proc/cpuinfo")
# x86 lists its matrix units under "flags", Arm under "Features".
_NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_INT8_PRODUCT_FLAGS = {"avx512_vnni", "avx_vnni", "amx_int8"}
_X86 = {"x86_64", "AMD64"}


def resolve_precision(precision: Precision, device: torch.device, weights: Collection[torch.dtype] = ()) -> torch.dtype:
    """The format of matrix products of a model on `device`.

    `auto` is bfloat16 where the hardware has products of that format and float32 elsewhere: an emulated bfloat16 is
    several times slower than float32. A model whose weights are all of one lower format runs in that one. float16 is no
    choice: a processor emulates it, a hundred times slower than float32, and some models overflow in it. int8 is never
    chosen by itself: it changes vectors and scores (see `Int8Products`).

    Args:
        precision: `auto`, `float32`, `bfloat16` or, on a processor, `int8`.
        device: Where the model runs.
        weights: Formats of the model's weights.

    Raises:
        OptionError: If the precision is none of these or not the weights', the weights are float16 on a processor, or
            int8 is asked of something else than an x86 processor.
    """
    if precision not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise OptionError("precision", precision, f"must be one of {known}", "leave it out to let the hardware decide")
    asked = _DTYPES[precision]
    if asked == torch.int8 and device.type != "cpu":
        raise OptionError("precision", precision, f"runs on a processor, not on {device.type}", "use bfloat16 there")
    if asked == torch.int8 and not (platform.machine() in _X86 and _has_onednn()):
        raise OptionError("precision", precision, "is for x86 processors and a torch with oneDNN", "use float32 here")
    if len(set(weights)) == 1 and not {torch.float32, torch.float64} & set(weights):
        (only,) = set(weights)
        name = str(only).removeprefix("torch.")
        if only == torch.float16 and device.type == "cpu":
            raise OptionError("model weights", name, "must not be float16 on a processor", "load them as float32")
        if asked not in (None, only):
            raise OptionError("precision", precision, f"must be that of the weights, {name}", "load them as float32")
        return only
    if asked is not None:
        return asked
    return torch.bfloat16 if has_native_bfloat16(device) else torch.float32


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 matrices in hardware; False where that cannot be found out."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and not _NATIVE_BF16_FLAGS.isdisjoint(_processor_flags())


def has_int8_products() -> bool:
    """Whether an x86 processor sums products of 8-bit numbers in 32 bits; False where that cannot be found out."""
    return not _INT8_PRODUCT_FLAGS.isdisjoint(_processor_flags())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@cache
def _processor_flags() -> frozenset[str]:
    if platform.system() != "Linux" or not _CPU_INFO.is_file():
        return frozenset()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPU_INFO.read_text(errors="replace"), re.MULTILINE)
    return frozenset() if flags is None else frozenset(flags.group(1).split())
