"""How a GPU multiplies float32 matrices and takes its memory, named in the config so that the run's record has both."""

import os
from typing import Literal, get_args

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from embeddings.common import OptionError

Float32Products = Literal["highest", "high"]
# What torch reads when a process first takes memory of a GPU; the first one counts.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class DeviceSettings(Callback):
    """Sets the precision of float32 products for the run, and how torch takes a GPU's memory. A CPU is as it was.

    Args:
        float32_products: `highest` for float32; `high` lets a GPU round the factors to TF32, 10 bits of mantissa in the
            place of 23. Losses and routers state float32, and have less with `high`. What autocast computes in bfloat16
            stays as it is.
        expandable_segments: Whether a segment of memory grows where it lies, so that mini-batches of many sizes leave
            fewer holes. Settings in the environment come first. Without effect once the process has used the GPU, as it
            has where a backbone is loaded in 4 bits.
    """

    def __init__(self, float32_products: Float32Products = "highest", expandable_segments: bool = False) -> None:
        if float32_products not in get_args(Float32Products):
            rule = "must be highest or high"
            raise OptionError("float32_products", float32_products, rule, "leave it out for float32")
        self.float32_products = float32_products
        self.expandable_segments = expandable_segments
        self._before = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.float32_products)
        if self.expandable_segments:
            name = next((name for name in _ALLOCATOR if os.environ.get(name)), _ALLOCATOR[0])
            given = os.environ.get(name, "")
            if "expandable_segments" not in given:
                os.environ[name] = ",".join([*filter(None, [given]), "expandable_segments:True"])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        torch.set_float32_matmul_precision(self._before)
