"""ZeRO on CPUs with gloo: DeepSpeed supports it, but Lightning's strategy rejects it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import CPUAccelerator

from embeddings.strategies import ZeroStrategy

_MODULE = "lightning.pytorch.strategies.deepspeed"


class CpuZero(ZeroStrategy):
    """For tests only: bypasses Lightning's checks for GPUs."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        with _without_gpus_and_compilers():
            super().setup_environment()


@contextmanager
def _without_gpus_and_compilers() -> Iterator[None]:
    with (
        patch(f"{_MODULE}.CUDAAccelerator", CPUAccelerator),
        patch(f"{_MODULE}._validate_device_index_selection", lambda devices: None),
        # DeepSpeed would compile its shared-memory all-reduce at first use, which takes minutes; gloo's is sufficient.
        patch("deepspeed.comm.torch.build_shm_op", lambda: None),
    ):
        yield
