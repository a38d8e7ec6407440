"""How often weights are cast."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Counts the casts of each parameter of a module to bfloat16, by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names = {parameter.data_ptr(): name for name, parameter in module.named_parameters()}
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16
        if is_cast and args[0].data_ptr() in self.names:
            self.count[self.names[args[0].data_ptr()]] += 1
        return function(*args, **(kwargs or {}))
