"""Optional libraries, loaded on use."""

import importlib
from types import ModuleType

from embeddings.common.errors import MissingExtraError


def require(library: str, extra: str) -> ModuleType:
    """The module `library`, imported now.

    Raises:
        MissingExtraError: If it is not installed; the message names the extra to install.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name is not None and library.split(".")[0] == error.name.split(".")[0]:
            raise MissingExtraError(library, extra) from error
        raise
