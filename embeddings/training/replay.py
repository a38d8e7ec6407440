"""Random states captured and played again, so that a recomputed mini-batch drops what it dropped the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The random states of the processor and of one device at one moment."""

    device: torch.device
    processor_state: Tensor
    device_state: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        """The states now.

        Args:
            device: The device that computes beside the processor, or the processor itself.
        """
        device_state = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), device_state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Go back to these states, and on leaving to the ones before."""
        before = RandomState.capture(self.device)
        self._restore()
        try:
            yield
        finally:
            before._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self.processor_state)
        if self.device_state is not None:
            torch.get_device_module(self.device).set_rng_state(self.device_state, self.device)
