"""Vectors in two dimensions: their principal axes, and what of the variance these show."""

from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.floating[Any]]
_ORDINALS = ("first", "second")


class Plane(NamedTuple):
    """The two directions in which some vectors differ most.

    Attributes:
        mean_D: The vectors' mean, (D,).
        axis_2D: The directions, (2, D), unit rows.
        share_2: Their shares of the variance, (2,).
    """

    mean_D: npt.NDArray[np.float64]
    axis_2D: npt.NDArray[np.float64]
    share_2: npt.NDArray[np.float64]

    @classmethod
    def of(cls, vector_ND: Vectors) -> Self:
        """The plane of some vectors, (N, D).

        Determinism: of an axis and its opposite the one whose largest entry is positive.
        """
        mean_D = vector_ND.mean(axis=0, dtype=np.float64)
        _, spread_K, axis_KD = np.linalg.svd(vector_ND - mean_D, full_matrices=False)
        axis_2D, share_2 = np.zeros((2, len(mean_D))), np.zeros(2)
        found = min(2, len(axis_KD))
        axis_2D[:found] = axis_KD[:found]
        share_2[:found] = spread_K[:found] ** 2 / max(float((spread_K**2).sum()), 1e-300)
        largest_2 = axis_2D[np.arange(2), np.abs(axis_2D).argmax(axis=1)]
        return cls(mean_D, np.where(largest_2[:, None] < 0, -axis_2D, axis_2D), share_2)

    def points(self, vector_ND: Vectors) -> npt.NDArray[np.float64]:
        """Where vectors lie on it, (N, 2)."""
        found: npt.NDArray[np.float64] = (vector_ND - self.mean_D) @ self.axis_2D.T
        return found

    def name_axes(self, axis: Any) -> None:
        """Name the axes of a picture, alike in scale, with their shares of the variance."""
        for place, label in enumerate((axis.set_xlabel, axis.set_ylabel)):
            label(f"{_ORDINALS[place]} principal axis ({self.share_2[place]:.1%} of the variance)", size=9)
        axis.set_aspect("equal", adjustable="datalim")
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
