"""Compiles the layers of a backbone by torch.compile: each layer is a region, for any number and length of texts."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from embeddings.common import OptionError
from embeddings.common.io import CACHE_VARIABLE
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.models.bidirectional import layers
from embeddings.models.pooling import plain_backbone

CompileMode = bool | Literal["auto"]
# Rows of a run, and texts of a command, from which compiling saves more time than its 14 to 28 s. On an H200 it trains
# 692,000 tokens of a 137M encoder a second, not 443,000, and encodes 2.38 million of a 110M encoder, not 2.16 million.
COMPILED_ROWS = 200_000
COMPILED_TEXTS = 3_000_000

# Dropout from torch's generator: with and without gradients a layer draws the same mask, which GradCache relies on.
_COMPILER: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
# Graphs per type of layer: with and without gradients, padding, dropout, a second text. torch's limit is 8.
_MAX_GRAPHS = 64
_CODE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# The attribute of a backbone whose config says `compile: auto`.
_IS_AUTOMATIC = "embeddings_compile_auto"


def set_compilation(backbone: nn.Module, mode: CompileMode) -> None:
    """Compile a backbone's layers if `mode` is true; `auto` leaves it to `compile_automatic`."""
    if mode is True:
        compile_layers(backbone)
    vars(plain_backbone(backbone))[_IS_AUTOMATIC] = mode == "auto"


def compile_layers(backbone: nn.Module) -> None:
    """Compile each layer, except those that a pooling reads, with torch.compile when it first runs, for any sizes.

    Adapters, experts and captures must be in the backbone already.
    """
    if obstacle := _obstacle(backbone):
        raise OptionError("model.backbone.compile", True, *obstacle)
    _compile(_regions(backbone), falls_back=False)


def compile_automatic(module: nn.Module) -> None:
    """Compile the layers of each backbone in a module whose config says `auto`, for a CUDA GPU.

    One line says why a backbone is not compiled. If the compiler fails, the layers run without it.
    """
    for part in module.modules():
        if vars(part).get(_IS_AUTOMATIC, False) and not is_compiled(part):
            compile_if_possible(part)


def compile_if_possible(backbone: nn.Module) -> None:
    """As `compile_layers`, but one line says why a backbone is not compiled."""
    obstacle = _obstacle(backbone)
    if importlib.util.find_spec("triton") is None:
        obstacle = ("needs triton, which is not installed", "")
    if obstacle is None:
        _compile(_regions(backbone), falls_back=True)
    else:
        logger.info("backbone.compile: auto is off, because true %s", obstacle[0])


def is_compiled(module: nn.Module) -> bool:
    return any(part._compiled_call_impl is not None for part in module.modules())


def check_compiler(module: nn.Module, device: torch.device) -> None:
    """Refuse compiled layers on a CPU without a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and is_compiled(module) and shutil.which(compiler) is None:
        rule = f"needs {compiler} on a CPU"
        raise OptionError("model.backbone.compile", True, rule, "install it, or leave it out")


def compilation_line(module: nn.Module) -> str | None:
    """How long the compiler took for a module's layers so far, in one line; None for layers that are not compiled."""
    if not is_compiled(module):
        return None
    from torch._dynamo.utils import calculate_time_spent, counters

    num_graphs, seconds = counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"]
    graphs, folder = f"{num_graphs} graph{'s' * (num_graphs != 1)}", os.environ.get(_CODE_VARIABLE)
    return f"compiled the layers into {graphs} in {seconds:.0f} s; {folder} keeps their code"


def _obstacle(backbone: nn.Module) -> tuple[str, str] | None:
    """Why no layer of a backbone can be compiled, and how to mend it."""
    # The compiler replaces eager attention by one whose dropout GradCache cannot replay.
    if plain_backbone(backbone).config._attn_implementation == "eager":
        rule = "does not support eager attention, which the compiler would replace by one with different dropout"
        return rule, "set attn_implementation to sdpa"
    if not _regions(backbone):
        return "cannot compile any layer of this model: the pooling reads the attention of each", "leave it out"
    return None


def _regions(backbone: nn.Module) -> list[nn.Module]:
    captured = [part for part in backbone.modules() if hasattr(part, "embeddings_capture")]
    return [layer for layer in layers(backbone) if not any(part in captured for part in layer.modules())]


def _compile(regions: list[nn.Module], falls_back: bool) -> None:
    from torch._dynamo import config  # importing the compiler takes seconds

    # Not in the working folder: the files contain code.
    folder = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "embeddings"
    os.environ.setdefault(_CODE_VARIABLE, os.path.abspath(Path(folder) / "compiled"))
    config.recompile_limit = max(_MAX_GRAPHS, config.recompile_limit)
    for region in regions:
        region.compile(dynamic=True, **_COMPILER)
        if falls_back:
            region._compiled_call_impl = _WithFallback(region, regions)


class _WithFallback:
    """Calls a compiled layer; when the compiler fails, all layers run without it from then on."""

    def __init__(self, region: nn.Module, regions: list[nn.Module]) -> None:
        assert region._compiled_call_impl is not None
        self.region, self.regions = region, regions
        self.compiled: Callable[..., Any] = region._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self.compiled(*args, **kwargs)
        except TorchDynamoException as error:
            for region in self.regions:
                region._compiled_call_impl = None
            reason = " ".join(str(error).strip().splitlines()[:2])
            logger.warning("the layers are not compiled: %s", one_line(reason, 160))
            return self.region._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
