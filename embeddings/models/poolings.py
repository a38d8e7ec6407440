"""The poolings by their names in configs and model directories, and poolings of a user's own.

A new pooling of the library changes two files: its own and this one. A user's pooling has the import path of its class
as its name. A model directory contains a shorter `poolings.py` with the model's pooling only (see `directory`).
"""

import ast
import importlib
import inspect
import json
import os
import sys
from pathlib import Path

from embeddings.common import OptionError

from .anchor_token import AnchorTokenPooling
from .latent_attention import LatentAttentionPooling, SelfAttentionPooling
from .pooling import ClsPooling, LastTokenPooling, MeanPooling, Pooling, WeightedMeanPooling

POOLINGS: dict[str, type[Pooling]] = {
    "mean": MeanPooling,
    "cls": ClsPooling,
    "last_token": LastTokenPooling,
    "weighted_mean": WeightedMeanPooling,
    "latent_attention": LatentAttentionPooling,
    "self_attention": SelfAttentionPooling,
    "anchor_token": AnchorTokenPooling,
}
# The file of a user's pooling in a model directory.
OWN_FILE = "own_pooling"


def pooling_name(pooling: Pooling) -> str:
    """The name of a pooling in the table, or else the import path of its class."""
    kind = type(pooling)
    return next((name for name, other in POOLINGS.items() if kind is other), f"{kind.__module__}.{kind.__qualname__}")


def pooling_class(name: str) -> type[Pooling]:
    """The pooling of a name; a `ValueError` for one that is unknown or not imported, unless its package is trusted."""
    if name in POOLINGS:
        return POOLINGS[name]
    module, _, kind = name.rpartition(".")
    package = module.partition(".")[0]
    trusted = [entry.strip() for entry in os.environ.get("EMBED_IMPORTS", "").split(",")]
    if module not in sys.modules and any(entry and name.startswith(f"{entry}.") for entry in trusted):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"the pooling {name} cannot be imported ({error})") from error
    found = getattr(sys.modules.get(module), kind, None)
    if not (isinstance(found, type) and issubclass(found, Pooling)):
        hint = f"; for your own pooling, set EMBED_IMPORTS={package} and run where it is importable" if package else ""
        raise ValueError(f"{name} is not a known pooling{hint}")
    return found


def own_pooling_source(pooling: Pooling) -> str | None:
    """The code of a user's pooling for a model directory, or None for a pooling of the library.

    The code is the whole file of the class, which may import torch, transformers, the standard library and this
    library's poolings. Imports of the latter become relative.
    """
    kind = type(pooling)
    if kind in POOLINGS.values():
        return None
    try:
        path = Path(inspect.getfile(kind))
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, TypeError):
        raise _not_portable(kind, "its class is not in a file") from None
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise _not_portable(kind, f"its class must be at the top level of an imported file, not in {path.name}")
    try:
        json.dumps(pooling.arguments())
    except (AttributeError, TypeError) as error:
        rule = f"each argument must be stored as an attribute of the same name, of a JSON type ({error})"
        raise _not_portable(kind, rule) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if isinstance(node, ast.ImportFrom) and module.startswith("embeddings.models"):
                for alias in node.names:
                    if not hasattr(sys.modules[Pooling.__module__], alias.name):
                        raise _not_portable(kind, f"{path.name} imports {alias.name}, which is not in pooling.py")
                node.module, node.level = "pooling", 1
            elif module.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "transformers"}:
                raise _not_portable(kind, f"{path.name} imports {module}")
    return ast.unparse(tree)


def _not_portable(kind: type[Pooling], reason: str) -> OptionError:
    rule = f"cannot be written into a model directory: {reason}"
    fix = "put it into a file of its own that imports only torch, transformers and poolings from embeddings.models"
    return OptionError("pooling", kind.__name__, rule, fix)
