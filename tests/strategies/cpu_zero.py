"""ZeRO on gloo and processors, which DeepSpeed can and Lightning's strategy refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import CPUAccelerator

from embeddings.strategies import ZeroStrategy

_MODULE = "lightning.pytorch.strategies.deepspeed"


class CpuZero(ZeroStrategy):
    """For tests alone: it takes the place of what Lightning asks of a GPU."""

    @property
    def root_device(self) -> torch.device:  # the device that gloo speaks for
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        with _gpus_and_compilers_not_needed():
            super().setup_environment()


@contextmanager
def _gpus_and_compilers_not_needed() -> Iterator[None]:
    with (
        patch(f"{_MODULE}.CUDAAccelerator", CPUAccelerator),
        patch(f"{_MODULE}._validate_device_index_selection", lambda devices: None),
        # DeepSpeed would compile its sums over shared memory at first use, which takes minutes; gloo's are as good.
        patch("deepspeed.comm.torch.build_shm_op", lambda: None),
    ):
        yield
