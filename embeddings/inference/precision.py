"""Which number format a model encodes in: chosen by what the hardware multiplies natively."""

import platform
import re
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from embeddings.common.errors import OptionError

Precision = Literal["auto", "float32", "bfloat16"]

_CPU_INFO = Path("/proc/cpuinfo")
# x86 lists its matrix units under "flags", Arm under "Features".
_NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """The format of matrix products on `device`.

    `auto` is bfloat16 where the hardware has products of that format and float32 elsewhere: an emulated bfloat16 is
    several times slower than float32. float16 has no fast product on a processor and overflows in some models, so it is
    no choice here.

    Args:
        precision: `auto`, `float32` or `bfloat16`.
        device: Where the model runs.

    Raises:
        OptionError: If the precision is none of these.
    """
    if precision == "float32":
        return torch.float32
    if precision == "bfloat16":
        return torch.bfloat16
    if precision == "auto":
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    raise OptionError(
        "precision", precision, "must be one of auto, float32, bfloat16", "leave it out to let the hardware decide"
    )


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 matrices in hardware; False where that cannot be found out."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _processor_has_native_bfloat16()


@cache
def _processor_has_native_bfloat16() -> bool:
    if platform.system() != "Linux" or not _CPU_INFO.is_file():
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPU_INFO.read_text(errors="replace"), re.MULTILINE)
    return flags is not None and not _NATIVE_BF16_FLAGS.isdisjoint(flags.group(1).split())
