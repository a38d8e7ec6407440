"""Partial whitening of a corpus' vectors, as one more linear layer of the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from embeddings.common import InputError
from embeddings.common.io import check_manifest
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.inference import Encoder, VectorFolder, unit_rows
from embeddings.inference.encoder import embedder_sha256
from embeddings.interop.golden import add_golden
from embeddings.models import Embedder, load_embedder
from embeddings.models.contextual import ContextualEmbedder
from embeddings.models.model_card import plain, shown_name, stated_licence, table, write_model_card
from embeddings.models.model_files import resolve_model

# The covariance of fewer vectors is too uncertain.
MIN_DOCUMENTS = 512
# What is added to each eigenvalue, as a share of their mean.
SHRINKAGE = 0.1
# Whitening in full would have the exponent -1/2.
_EXPONENT = -0.25

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Whitening:
    """A symmetric matrix by which unit vectors are multiplied before they are normalised again, (D, D) float64.

    matrix = (S + 0.1 m I)^(-1/4), with S the covariance of the corpus' unit vectors and m the mean of its eigenvalues.
    Directions in which the corpus varies little count more. The covariance is about the mean, but no mean is subtracted
    from vectors: they are multiplied only.
    """

    matrix_DD: npt.NDArray[np.float64]
    num_documents: int

    @classmethod
    def of(cls, tiles: Iterable[Vectors]) -> Self | None:
        """The whitening of a corpus, from its unit vectors in one pass; None for fewer than 512.

        Shape/precision: sums in float64; a tile, and two matrices of (D, D) float64, are in memory.
        """
        count, sum_D, square_DD = 0, np.zeros(1), np.zeros((1, 1))
        for tile_TD in tiles:
            wide_TD = unit_rows(tile_TD).astype(np.float64)
            count += len(wide_TD)
            sum_D = sum_D + wide_TD.sum(axis=0)
            square_DD = square_DD + wide_TD.T @ wide_TD
        if count < MIN_DOCUMENTS:
            return None
        mean_D = sum_D / count
        value_D, basis_DD = np.linalg.eigh(square_DD / count - np.outer(mean_D, mean_D))
        mean = float(value_D.mean())
        if mean <= 0:
            # All vectors are equal.
            return None
        # Rounding may leave an eigenvalue of 0 slightly negative.
        scale_D = (np.maximum(value_D, 0.0) + SHRINKAGE * mean) ** _EXPONENT
        return cls((basis_DD * scale_D) @ basis_DD.T, count)

    def __call__(self, vector_ND: Vectors) -> Vectors:
        """The whitened vectors at unit length, (N, D) float32."""
        return unit_rows(unit_rows(vector_ND) @ self.matrix_DD.astype(np.float32))


def write_whitened(
    model: str | PathLike[str], vectors: VectorFolder | str | PathLike[str], output: str | PathLike[str]
) -> Whitening:
    """Write a model directory whose vectors are whitened for a corpus, by a `Dense` layer before `Normalize`.

    The layer has no bias and no activation; a head that the model has is multiplied by the matrix. The widths that the
    model was trained for are left out: a truncated vector is no longer one of them.

    Args:
        model: A model directory or Hub id.
        vectors: The corpus as this model encoded it (`encode_corpus`), at least 512 documents in float32.
        output: The directory to write; an existing one is replaced once the new one is complete.

    Raises:
        InputError: If the vectors are another model's, or too few.
        OptionError: If the model compares vectors by inner products of any length.
    """
    require_replaceable(output)
    folder = vectors if isinstance(vectors, VectorFolder) else VectorFolder.open(vectors)
    folder.require_format("float32", use="whitening")
    source = resolve_model(fspath(model))
    embedder = load_embedder(source)
    if isinstance(embedder, ContextualEmbedder):
        raise InputError(str(model), "is a contextual model, whose vectors cannot be whitened", "give a plain model")
    embedder.require_directions("model", str(model), "whitening")
    check_manifest(folder.path, {"model_sha256": embedder_sha256(Encoder(embedder)), "role": "document"})
    found = Whitening.of(folder.tiles())
    if found is None:
        what = f"has {folder.num_documents} vectors, whitening needs {MIN_DOCUMENTS} that are not all equal"
        raise InputError(str(folder.path), what, "use the model as it is")
    whiten(embedder, found)
    location = Path(output).expanduser()
    rows: dict[str, object] = {"model": shown_name(fspath(model)), "corpus": f"{found.num_documents:,} documents"}
    section = table(("", ""), [(name, plain(value)) for name, value in rows.items()])
    text = (
        "The last layer multiplies vectors by (S + 0.1 m I)^(-1/4), with S the covariance of a corpus' vectors and m "
        f"the mean of its eigenvalues.\n\n{section}"
    )
    with replaced_folder(location) as new:
        embedder.save_pretrained(new, card=False)
        add_golden(new)
        sections = {"Partial whitening": text}
        licence = stated_licence(source)
        write_model_card(new, embedder, licence=licence, location=location, base=fspath(model), sections=sections)
    return found


@torch.no_grad()
def whiten(embedder: Embedder, whitening: Whitening) -> None:
    """Add the layer to a model, whose vectors then have unit length."""
    matrix_DD = torch.from_numpy(whitening.matrix_DD)
    old = embedder.head
    if old is None:
        weight_DH, bias_D = matrix_DD, None
    else:
        weight_DH = matrix_DD @ old.weight.double()
        bias_D = None if old.bias is None else matrix_DD @ old.bias.double()
    head = nn.Linear(weight_DH.shape[1], len(weight_DH), bias=bias_D is not None)
    head.weight.copy_(weight_DH)
    if bias_D is not None:
        head.bias.copy_(bias_D)
    embedder.head, embedder.normalize, embedder.trained_widths = head, True, ()
