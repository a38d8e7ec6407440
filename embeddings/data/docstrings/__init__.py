"""A corpus without a download: the documented functions of installed packages."""

from embeddings.data.docstrings.prepare import HELD_OUT_PACKAGES, TRAINING_PACKAGES, DocstringCorpus, prepare_docstrings

__all__ = ["HELD_OUT_PACKAGES", "TRAINING_PACKAGES", "DocstringCorpus", "prepare_docstrings"]
