"""Layer norms that keep the states of a backbone in bfloat16 under autocast on a GPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, but under autocast to bfloat16 on a GPU its input and output are bfloat16.

    The kernel computes mean, variance and result in float32, and rounds the result once. torch's autocast instead casts
    the input to float32 and returns float32: the sums of a residual layer are then float32 too, each linear layer casts
    its input, and the graph keeps twice the bytes. Elsewhere this is torch's layer norm: on a CPU, in float32, and in
    float16, whose range is too small for the states of some models.

    It has the name of torch's class, which a model's hash contains.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not _rounds(input.device.type):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = (None if each is None else each.to(torch.bfloat16) for each in (self.weight, self.bias))
            return F.layer_norm(input.to(torch.bfloat16), self.normalized_shape, weight, bias, self.eps)


def _rounds(device_type: str) -> bool:
    is_on = device_type == "cuda" and torch.is_autocast_enabled("cuda")
    return is_on and torch.get_autocast_dtype("cuda") == torch.bfloat16


def use_half_norms(backbone: nn.Module) -> None:
    """Give each of torch's layer norms in a backbone the forward above, in place."""
    for module in backbone.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = LayerNorm
