"""The layers between pooling and unit length, as sentence-transformers' own modules: a layer norm, a linear head."""

from pathlib import Path

import torch
from torch import nn

from embeddings.common import InputError, OptionError
from embeddings.models.model_files import load_weights, read_json, save_weights, write_json

# That library's module has no field for another.
_EPSILON = 1e-5


def write_norm(folder: Path, norm: nn.LayerNorm) -> None:
    """Write a layer norm as a new folder; one without weights is written with ones and zeros.

    Raises:
        OptionError: If its epsilon is none that the module can have.
    """
    if norm.eps != _EPSILON:
        rule = f"must be {_EPSILON}, the only one that a model directory can carry"
        raise OptionError("norm.eps", norm.eps, rule, "build the norm with that")
    folder.mkdir()
    write_json(folder / "config.json", {"dimension": norm.normalized_shape[0]})
    written = nn.LayerNorm(norm.normalized_shape)
    written.load_state_dict(norm.state_dict(), strict=False)
    save_weights(written, folder / "model.safetensors", prefix="norm.")


def read_norm(folder: Path) -> nn.LayerNorm:
    """The layer norm of a folder; one whose weights are ones and zeros has none, so that no training moves them.

    Raises:
        InputError: If a file is missing or damaged.
    """
    width = read_json(folder / "config.json").get("dimension")
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        what = f"has dimension {width!r:.40}, expected a whole number >= 1"
        raise InputError(str(folder / "config.json"), what, "export the model again")
    norm = nn.LayerNorm(width)
    load_weights(norm, folder / "model.safetensors", prefix="norm.")
    is_plain = torch.equal(norm.weight, torch.ones_like(norm.weight)) and not bool(norm.bias.any())
    return nn.LayerNorm(width, elementwise_affine=False) if is_plain else norm


def write_head(folder: Path, head: nn.Linear) -> None:
    """Write a linear head as a new folder."""
    folder.mkdir()
    identity = "torch.nn.modules.linear.Identity"
    shape = {"in_features": head.in_features, "out_features": head.out_features, "bias": head.bias is not None}
    write_json(folder / "config.json", {**shape, "activation_function": identity})
    save_weights(head, folder / "model.safetensors", prefix="linear.")


def read_head(folder: Path) -> nn.Linear:
    """The linear head of a folder.

    Raises:
        InputError: If a file is missing or damaged, or it is more than a linear head.
    """
    config = read_json(folder / "config.json")
    if not str(config.get("activation_function", "")).endswith("Identity") or config.get("use_residual"):
        what = "is more than a linear head"
        raise InputError(str(folder / "config.json"), what, "use a model with a linear head")
    try:
        head = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    except (KeyError, TypeError) as error:
        what = f"describes no head ({error})"
        raise InputError(str(folder / "config.json"), what, "export the model again") from error
    load_weights(head, folder / "model.safetensors", prefix="linear.")
    return head
