"""A transformer's repeated layers: found, and compiled one by one."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from embeddings.common import OptionError
from embeddings.models.experts import Experts
from embeddings.models.lora import plain_backbone

# Dropout of torch's own generator: with and without a graph a layer draws the same, which GradCache relies on.
_COMPILER: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
# Graphs of one kind of layer: with and without gradients, padding, dropout, a second text. torch gives up after 8.
_MOST_GRAPHS = 64


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules: a transformer's layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers(child)


def compile_layers(backbone: nn.Module) -> None:
    """Have each layer compiled by torch.compile when it first runs, for any number and length of texts.

    The modules stay as they are, and the names of their weights; layers of one kind share their graphs. Left out are
    layers with experts, in which the sizes follow from the routing, and those whose attention a pooling reads.

    Args:
        backbone: A Hugging Face model with all that is put into its layers: adapters, experts, a pooling's tap.

    Raises:
        OptionError: If no layer is left, or the attention is eager: where there is a graph the compiler puts another in
            its place, whose dropout GradCache could not replay.
    """
    model = plain_backbone(backbone)
    if model.config._attn_implementation == "eager":
        rule = "does not go with eager attention, which the compiler would replace by one of other dropout"
        raise OptionError("model.backbone.compile", True, rule, "set attn_implementation to sdpa")
    suitable = [layer for layer in layers(backbone) if not any(map(_is_eager, layer.modules()))]
    if not suitable:
        rule = "compiles no layer of this model: each has experts, or the pooling reads its attention"
        raise OptionError("model.backbone.compile", True, rule, "leave it out")
    from torch._dynamo import config  # the compiler takes seconds to load

    config.recompile_limit = max(_MOST_GRAPHS, config.recompile_limit)
    for layer in suitable:
        layer.compile(dynamic=True, **_COMPILER)


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of a module is compiled."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def _is_eager(part: nn.Module) -> bool:
    return isinstance(part, Experts) or hasattr(part, "embeddings_tap")
