"""Which classes a config may name: those of this library and of the libraries it trains with, and no others."""

import os

from jsonargparse import set_parsing_settings

from embeddings.common import UserError

VARIABLE = "EMBED_IMPORTS"
ALLOWED = (
    "embeddings.callbacks",
    "embeddings.common.TextSettings",
    "embeddings.common.text",
    "embeddings.data",
    "embeddings.losses",
    "embeddings.models",
    "embeddings.modules",
    "embeddings.strategies",
    "embeddings.training",
    "lightning.fabric.plugins",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "torch.nn",
    "torch.optim",
)


def restrict_imports() -> None:
    """Have the parsers import what `ALLOWED` holds alone, and the packages that `$EMBED_IMPORTS` adds, comma-separated.

    A config is data that people hand on, and a class path in it is a call of whatever it names. What is checked is the
    path as it is written and the place where the object was defined, so no module of ours is a way to another's.

    Raises:
        UserError: If the variable holds no package.
    """
    try:
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*ALLOWED, *_added()],
            instantiate_subclass_spec_in_any=False,
        )
    except ValueError as error:
        rule = "is no list of packages as one imports them"
        raise UserError(f"{VARIABLE}={os.environ[VARIABLE]} {rule}; write my_package, or unset it") from error


def may_name(path: str) -> bool:
    """Whether a config may name the object of this path, as far as the path tells."""
    return any(path == allowed or path.startswith(f"{allowed}.") for allowed in (*ALLOWED, *_added()))


def _added() -> list[str]:
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
