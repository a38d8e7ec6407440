"""Vectors in two dimensions so that neighbours stay neighbours: t-SNE."""

from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError

MOST_POINTS = 5000
PERPLEXITY = 30.0


def check_neighbour_map(num_points: int, perplexity: float) -> None:
    """Check that so many vectors can be laid out with this perplexity.

    Raises:
        OptionError: If the perplexity is below 1, or there are not three times as many vectors, or more than 5,000.
    """
    if not perplexity >= 1:
        raise OptionError("perplexity", perplexity, "must be >= 1", "30 is usual")
    if num_points > MOST_POINTS:
        rule = f"is for at most {MOST_POINTS:,} rows, here {num_points:,}"
        raise OptionError("projection", "tsne", rule, "lower rows_per_cluster or num_clusters")
    # Each row's neighbourhood is its 3 x perplexity nearest ones.
    if num_points <= 3 * perplexity:
        rule = f"must be below a third of the {num_points} rows drawn"
        raise OptionError("perplexity", perplexity, rule, "lower it, or draw more rows")


def neighbour_map(vector_ND: npt.NDArray[np.floating[Any]], perplexity: float = PERPLEXITY) -> npt.NDArray[np.float64]:
    """Where t-SNE puts vectors, (N, 2) float64.

    Neighbours stay neighbours; how far apart two groups lie, and how wide one is, says nothing. It begins at the
    two principal axes, so that nothing is left to chance.

    Args:
        vector_ND: Vectors, (N, D), compared by Euclidean distance, which for unit vectors orders them as the cosine
            does.
        perplexity: About how many neighbours a vector has, below N / 3; 5 to 50 is usual.

    Determinism: equal for equal (vectors, perplexity) on one machine and number of threads.

    Raises:
        OptionError: As `check_neighbour_map`.

    Source: van der Maaten and Hinton 2008, "Visualizing Data using t-SNE"; scikit-learn's Barnes-Hut version.
    """
    from sklearn.manifold import TSNE

    check_neighbour_map(len(vector_ND), perplexity)
    layout = TSNE(n_components=2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=0)
    return np.asarray(layout.fit_transform(np.asarray(vector_ND, dtype=np.float32)), dtype=np.float64)
