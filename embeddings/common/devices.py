"""Work that a device queues: what makes the host wait for it, and how small tensors reach it without a wait."""

import torch
from torch import Tensor


def queues_work(device: torch.device | str) -> bool:
    """Whether a device runs behind the host, so that reading a value from it waits for all that was queued before.

    False on a CPU, where asking for a value is cheap and often saves work.
    """
    return torch.device(device).type != "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory on `device`, by a copy from page-locked memory for which the host does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
