"""What a machine computes with, in words."""

import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CPU_INFO = Path("/proc/cpuinfo")


def processors() -> str:
    """Number and name of the processors."""
    name = platform.processor() or platform.machine()
    if _CPU_INFO.is_file():
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line for line in lines if line.startswith("model name")]
        if models:
            name = f"{len(models)} x {models[0].split(':')[1].strip()}"
    return name


def device_name(device: "torch.device") -> str:
    """The name of a GPU, or the processors."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processors()
