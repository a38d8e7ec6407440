"""Models of a config, filled with the tensors of a published checkpoint."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from embeddings.interop.released.checkpoint import ReleasedWeights
from embeddings.interop.released.key_map import KeyMap, KeyReport
from embeddings.models.backbone import quiet_transformers
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel


class Imported(NamedTuple):
    """A published checkpoint as a model of this library.

    Attributes:
        family: What kind of checkpoint it was.
        model: The model, which can be saved as a directory.
        report: What became of its tensors.
        used_as: The published model whose card decides more than the files do (see `usage`), or None.
        assumed: Numbers that no file states, and what was taken for them (see `Assumed`).
    """

    family: str
    model: Embedder | LanguageModel
    report: KeyReport
    used_as: str | None = None
    assumed: Mapping[str, float] = MappingProxyType({})


def empty_model(config: PretrainedConfig, auto_class: Any = AutoModel) -> PreTrainedModel:
    """The model of a config without any numbers: names and shapes alone.

    Args:
        config: What it is made of.
        auto_class: What chooses the model's class: `AutoModel`, or one that puts a head on it.
    """
    with torch.device("meta"), quiet_transformers():
        model = auto_class.from_config(config)
    assert isinstance(model, PreTrainedModel)
    return model


def filled_model(empty: PreTrainedModel, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model that an empty one stands for, in evaluation mode and in the dtype of its first tensor.

    Args:
        empty: What `empty_model` gave.
        state: A tensor for each of its names.
    """
    kind: Any = type(empty)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    with quiet_transformers():
        # What no checkpoint holds (tables of rotation) is computed on the way.
        model = kind.from_pretrained(None, config=empty.config, state_dict=state, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def take_parts(
    key_map: KeyMap, weights: ReleasedWeights, parts: Mapping[str, nn.Module]
) -> tuple[dict[str, dict[str, Tensor]], KeyReport]:
    """The tensors of a model in parts, each part's under its own names.

    Args:
        key_map: Where they lie; our names begin with the part's.
        weights: The checkpoint's.
        parts: Modules by name, empty ones or not.

    Raises:
        InputError: If the checkpoint does not fit; see `KeyMap.take`.
    """
    expected = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in _tensors(module)}
    taken, report = key_map.take(weights, expected)
    states: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name, tensor in taken.items():
        part, _, inner = name.partition(".")
        states[part][inner] = tensor
    return states, report


def names_in(model: PreTrainedModel, published: Iterable[str]) -> dict[str, list[str]]:
    """Each published tensor that transformers itself read into a model, and the model's own name of it.

    A checkpoint with a head has the backbone's name in front of its tensors, which the backbone alone has not.
    """
    own, prefix = model.state_dict().keys(), f"{model.base_model_prefix}."
    return {name: [name if name in own else name.removeprefix(prefix)] for name in published}


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.state_dict().items())
