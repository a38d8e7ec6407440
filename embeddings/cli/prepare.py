"""`prepare`: a training corpus from what the machine already has."""

from pathlib import Path
from typing import Literal


def prepare(corpus: Literal["docstrings"], output: Path = Path("data/docstrings"), force: bool = False) -> None:
    """Build a training corpus: `docstrings` makes query-document pairs of the installed packages' functions.

    Args:
        corpus: Which corpus.
        output: The folder to write; a finished one with the same inputs is kept.
        force: Whether to build it again all the same.
    """
    from embeddings.data.docstrings import prepare_docstrings

    assert corpus == "docstrings"
    prepare_docstrings(output, force=force)
