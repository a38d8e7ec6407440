"""The files that a contextual model's directory has beside a plain one's: first stage, context layers, residual."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from embeddings.common import InputError
from embeddings.models.first_stage import FirstStage
from embeddings.models.lora import merged_state_dict, plain_backbone
from embeddings.models.model_files import load_weights, read_json, save_weights, write_json
from embeddings.models.portable_contextual import (
    CONTEXT_FOLDER,
    CONTEXT_SETTINGS,
    CONTEXT_WEIGHTS,
    RESIDUAL_FOLDER,
    code_to_root,
    context_layers,
    context_settings,
    residual_settings,
)
from embeddings.models.second_stage import ContextSlots, ResidualProjection, SoftPrompt

# What travels beside `directory.PORTABLE_FILES`.
CONTEXTUAL_FILES = ("portable_contextual.py", "first_stage.py", "position_free.py", "second_stage.py")
_OPTIONS = ("num_context", "num_soft_prompts", "context_dropout")


@dataclass(frozen=True)
class ContextForm:
    """What the released models of one method do in two ways; the defaults are the paper's and the released training's.

    Args:
        adds_pooled: Whether the residual projection adds the pooled states to what it makes of them. cde-small-v1 has
            the projection alone.
        has_positions: Whether context vectors have the positions 0 to J - 1, as all other tokens have theirs, and
            windows hold for them too: cde-small-v2. Their order matters then.
        pools_prompt: Whether the first stage pools the prompt of a context document too, whatever the second does:
            cde-small-v2.
    """

    adds_pooled: bool = True
    has_positions: bool = False
    pools_prompt: bool = False


@dataclass(frozen=True)
class ContextParts:
    """What a contextual model has beside a plain one."""

    first_stage: FirstStage
    slots: ContextSlots
    soft_prompt: SoftPrompt
    residual: ResidualProjection | None
    has_positions: bool = False


def is_contextual(folder: Path) -> bool:
    """Whether a model directory is a contextual model's."""
    return (folder / CONTEXT_FOLDER / CONTEXT_SETTINGS).is_file()


def write_context(folder: Path, modules: list[tuple[str, str]], parts: ContextParts) -> list[tuple[str, str]]:
    """Write the files of a contextual model into a directory that is being made.

    Args:
        folder: The directory.
        modules: Class and folder of each module so far: token states, then pooling.
        parts: What to write; adapters are merged into the written weights.

    Returns:
        The modules with a contextual one for the first, and the residual projection after the pooling.
    """
    target = folder / CONTEXT_FOLDER
    backbone = parts.first_stage.backbone
    plain_backbone(backbone).save_pretrained(target, state_dict=merged_state_dict(backbone))
    code_to_root(target)
    layers = context_layers(parts.first_stage, parts.slots, parts.soft_prompt)
    settings = context_settings(parts.first_stage, parts.slots, parts.soft_prompt, parts.has_positions)
    write_json(target / CONTEXT_SETTINGS, settings)
    save_weights(layers, target / CONTEXT_WEIGHTS)
    written = [("portable_contextual.ContextualTransformer", ""), *modules[1:]]
    if parts.residual is not None:
        (folder / RESIDUAL_FOLDER).mkdir()
        write_json(folder / RESIDUAL_FOLDER / "config.json", residual_settings(parts.residual))
        save_weights(parts.residual, folder / RESIDUAL_FOLDER / "model.safetensors")
        written.append(("portable_contextual.ResidualHead", RESIDUAL_FOLDER))
    return written


def read_context_options(folder: Path) -> dict[str, Any]:
    """The arguments of `ContextualEmbedder` that a directory keeps.

    Raises:
        InputError: If the directory is no contextual model's, or its settings are damaged.
    """
    if not is_contextual(folder):
        raise InputError(str(folder), "is no contextual model", "load it with embeddings.models.load_embedder")
    path = folder / CONTEXT_FOLDER / CONTEXT_SETTINGS
    settings = read_json(path)
    missing = [name for name in _OPTIONS if not isinstance(settings.get(name), int | float)]
    if missing:
        raise InputError(str(path), f"does not say {missing[0]}", "export the model again")
    # Directories of before documents had a limit do not say one.
    max_length = settings.get("context_max_length")
    if max_length is not None and (not isinstance(max_length, int) or isinstance(max_length, bool)):
        raise InputError(str(path), f"has context_max_length {max_length!r}, no number", "export the model again")
    modules = read_json(folder / "modules.json", list)
    has_residual = any("ResidualHead" in str(entry) for entry in modules)
    options = {name: settings[name] for name in _OPTIONS}
    residual = read_json(folder / RESIDUAL_FOLDER / "config.json") if has_residual else {}
    # Directories of before there were two forms do not say which.
    form = ContextForm(
        adds_pooled=residual.get("adds_pooled", True) is not False,
        has_positions=settings.get("has_positions", False) is True,
        pools_prompt=settings.get("pools_prompt", False) is True,
    )
    return {**options, "context_max_length": max_length, "residual_projection": has_residual, "form": form}


def load_context_weights(folder: Path, parts: ContextParts) -> None:
    """Load the weights of the context layers and the residual projection; the first stage's backbone has its own.

    Raises:
        InputError: If a file is missing or damaged, or does not fit the settings.
    """
    layers: nn.Module = context_layers(parts.first_stage, parts.slots, parts.soft_prompt)
    load_weights(layers, folder / CONTEXT_FOLDER / CONTEXT_WEIGHTS)
    if parts.residual is not None:
        load_weights(parts.residual, folder / RESIDUAL_FOLDER / "model.safetensors")
