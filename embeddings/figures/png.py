"""A picture becomes a file."""

from pathlib import Path
from typing import Any

from embeddings.common import InputError
from embeddings.common.errors import require
from embeddings.common.io import atomic_path

DOTS_PER_INCH = 120


def pyplot() -> Any:
    """matplotlib's pyplot, drawing without a screen.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    require("matplotlib", "quickstart").use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_output(output: Path, kind: str = "a PNG file") -> None:
    """Check that a picture can be drawn and can lie there, before anything costs time.

    Args:
        output: The file.
        kind: What it is to be, for the message.

    Raises:
        InputError: If there is a folder, or the way there leads through a file.
        MissingExtraError: If matplotlib is not installed.
    """
    pyplot()
    if output.is_dir():
        raise InputError(f"--output {output}", "is a directory", f"name {kind}")
    for place in output.absolute().parents:
        if place.exists():
            if not place.is_dir():
                raise InputError(f"--output {output}", f"leads through {place}, which is no folder", "name a new file")
            return


def write_png(figure: Any, output: Path) -> None:
    """Write a figure as a PNG, whole or not at all, and let it go; a file that lies there is replaced."""
    try:
        with atomic_path(output) as temporary:
            figure.savefig(temporary, dpi=DOTS_PER_INCH, format="png")
    finally:
        pyplot().close(figure)
