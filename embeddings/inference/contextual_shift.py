"""How the vectors of some documents move as a contextual model reads them in one context after another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.inference.context import Context
from embeddings.inference.encoder import Encoder
from embeddings.inference.search import unit_rows

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ContextualShift:
    """The vectors of N documents in C contexts.

    Attributes:
        vector_CND: Unit vectors in each context, (C, N, D) float32.
        alone_ND: The same without a context, (N, D).
    """

    vector_CND: Vectors
    alone_ND: Vectors

    @property
    def own_cosine_NP(self) -> Vectors:
        """Each document's cosines between any two of its contexts, (N, C (C - 1) / 2)."""
        first, second = np.triu_indices(len(self.vector_CND), k=1)
        found: Vectors = np.einsum("pnd,pnd->np", self.vector_CND[first], self.vector_CND[second])
        return found

    @property
    def alone_cosine_N(self) -> Vectors:
        """Each document's mean cosine of its vectors in contexts with the one without, (N,)."""
        found: Vectors = np.einsum("cnd,nd->cn", self.vector_CND, self.alone_ND).mean(axis=0)
        return found

    @property
    def other_cosine_N(self) -> Vectors:
        """Each document's cosine with the nearest other document in the same context, mean over contexts, (N,)."""
        cosine_CNN = np.einsum("cnd,cmd->cnm", self.vector_CND, self.vector_CND)
        places = np.arange(cosine_CNN.shape[1])
        cosine_CNN[:, places, places] = -np.inf
        found: Vectors = cosine_CNN.max(axis=2).mean(axis=0)
        return found

    @property
    def stays_nearest(self) -> float:
        """The share of vectors that are nearer to one of their own document than to any of another, in other contexts.

        The paper says of its figure that a document's vectors stay closer to each other than to other documents'.
        """
        num_contexts, num_documents, width = self.vector_CND.shape
        vector_VD = self.vector_CND.reshape(-1, width)
        context_V, document_V = np.divmod(np.arange(num_contexts * num_documents), num_documents)
        cosine_VV = vector_VD @ vector_VD.T
        cosine_VV[context_V[:, None] == context_V] = -np.inf
        return float((document_V[cosine_VV.argmax(axis=1)] == document_V).mean())


def contextual_shift(encoder: Encoder, texts: Sequence[str], contexts: Sequence[Context]) -> ContextualShift:
    """Encode some documents in each of some contexts, and without one.

    Args:
        encoder: A contextual model.
        texts: Two documents or more, no two alike.
        contexts: Two contexts or more (see `choose_context`).

    Raises:
        OptionError: If there are fewer documents or contexts, or the model takes no context, or none as large.
    """
    for name, given in (("documents", texts), ("contexts", contexts)):
        if len(given) < 2:
            raise OptionError(name, len(given), "must be two or more, to be compared", "give more")
    vectors = [unit_rows(encoder.encode(texts, None, context, role="document")) for context in (*contexts, None)]
    return ContextualShift(np.stack(vectors[:-1]), vectors[-1])
