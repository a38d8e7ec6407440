"""What people judged of a source's queries: which documents are less relevant than the positives, and by how much."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.io import text_hash
from embeddings.mining.pair_index import BLOCK, KnownPositives, PairIndex, concatenated_ranges

Int8s = npt.NDArray[np.int8]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Judged and not relevant: the level of grade 0 and below.
IRRELEVANT_LEVEL = 3


class TextQrels(NamedTuple):
    """Judged pairs of a query and a document, by the hashes of their texts, each pair once.

    Attributes:
        query_hash_J: `text_hash` of the query, (J,) int64, ascending.
        document_hash_J: The same of the document, (J,) int64, ascending within a query.
        grade_J: How relevant the document is, 0 and below for not at all, (J,) float64.
    """

    query_hash_J: Int64s
    document_hash_J: Int64s
    grade_J: npt.NDArray[np.float64]

    @classmethod
    def of(cls, judged: Iterable[tuple[str, str, float]], where: str) -> Self:
        """Judgments as (query, document, grade); of a pair that is judged twice the higher grade counts.

        Args:
            judged: The judgments.
            where: Where they come from, for messages.

        Raises:
            InputError: If no document is relevant, or all have one grade.
        """
        found: dict[tuple[int, int], float] = {}
        for query, document, grade in judged:
            pair = (text_hash(query), text_hash(document))
            found[pair] = max(grade, found.get(pair, grade))
        grades = set(found.values())
        if not grades or max(grades) <= 0:
            raise InputError(where, "no document is relevant to any query", "give at least one row a score above 0")
        if len(grades) == 1:
            what = f"every judged document has the score {grades.pop():g}, so that none lies below the positives"
            raise InputError(where, what, "use --levels quantiles")
        rows = sorted((*pair, grade) for pair, grade in found.items())
        query_J, document_J, grade_J = zip(*rows, strict=True)
        return cls(np.array(query_J, np.int64), np.array(document_J, np.int64), np.array(grade_J, np.float64))

    def sha256(self) -> str:
        """A hash of all judgments, as 64 hex digits."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in self)).hexdigest()


class QueryQrels(NamedTuple):
    """What is judged of some queries, by the groups of `KnownPositives`.

    Attributes:
        is_judged_G: Whether any document of the corpus is judged for a group.
        positive_group_P, positive_row_P: Documents judged at least as relevant as the positives.
        lower_group_L, lower_row_L: Documents judged less relevant, by ascending group.
        lower_level_L: Their levels, 1 to 3.
    """

    is_judged_G: Mask
    positive_group_P: Int64s
    positive_row_P: Int64s
    lower_group_L: Int64s
    lower_row_L: Int64s
    lower_level_L: Int8s


class DocumentQrels:
    """Judgments of a source's queries, by the rows of its documents.

    The level of a document says how far below the positives it was judged: 1 for the next lower grade, 2 for a lower
    one that is relevant still, 3 for not relevant at all. A step is from one grade used anywhere to the next. Steps
    count from the lowest grade of the query's positives; a positive that nobody judged, or that was judged irrelevant,
    counts as one of the lowest relevant grade, so that nothing relevant becomes a negative. Documents judged as
    relevant as the positives are positives too.

    Raises `InputError` if none of the source's queries is judged; `where` names the judgments.
    """

    def __init__(self, judged: TextQrels, index: PairIndex, where: str) -> None:
        self._num_documents = index.num_documents
        self._scale = np.unique(judged.grade_J[judged.grade_J > 0])
        hash_D, row_D = _rows_of(np.unique(judged.document_hash_J), index)
        place_J = np.minimum(np.searchsorted(hash_D, judged.document_hash_J), max(0, len(hash_D) - 1))
        is_there_J = hash_D[place_J] == judged.document_hash_J if len(hash_D) else np.zeros(len(place_J), np.bool_)
        self._query_hash_J = judged.query_hash_J[is_there_J]
        self._row_J, self._grade_J = row_D[place_J[is_there_J]], judged.grade_J[is_there_J]
        if not any(
            np.isin(index.query_hashes[start : start + BLOCK], self._query_hash_J).any()
            for start in range(0, index.num_queries, BLOCK)
        ):
            fix = "write queries and documents of the records as the judgments' files do"
            raise InputError(where, "judges no document for any query of the source", fix)

    def of_queries(self, hash_Q: Int64s, known: KnownPositives) -> QueryQrels:
        """What is judged of the queries with these text hashes and known positives."""
        hash_G = np.zeros(int(known.group_Q.max()) + 1, np.int64)
        hash_G[known.group_Q] = hash_Q
        start_G = np.searchsorted(self._query_hash_J, hash_G, side="left")
        stop_G = np.searchsorted(self._query_hash_J, hash_G, side="right")
        place_j = concatenated_ranges(start_G, stop_G)
        group_j = np.repeat(np.arange(len(hash_G)), stop_G - start_G)
        row_j, grade_j = self._row_J[place_j], self._grade_J[place_j]
        key_P = known.group_P * self._num_documents + known.row_P
        is_known_j = np.isin(group_j * self._num_documents + row_j, key_P)
        least_G = np.full(len(hash_G), np.inf)
        np.minimum.at(least_G, group_j[is_known_j], grade_j[is_known_j])
        least_G = np.where(np.isinf(least_G), self._scale[0], np.maximum(least_G, self._scale[0]))
        is_lower_j = ~is_known_j & (grade_j < least_G[group_j])
        is_positive_j = ~is_known_j & ~is_lower_j
        steps_j = np.searchsorted(self._scale, least_G[group_j]) - np.searchsorted(self._scale, grade_j)
        level_j = np.where(grade_j <= 0, IRRELEVANT_LEVEL, np.minimum(steps_j, IRRELEVANT_LEVEL - 1)).astype(np.int8)
        positive, lower = ((group_j[is_own_j], row_j[is_own_j]) for is_own_j in (is_positive_j, is_lower_j))
        return QueryQrels(start_G < stop_G, *positive, *lower, level_j[is_lower_j])


def _rows_of(hash_n: Int64s, index: PairIndex) -> tuple[Int64s, Int64s]:
    """Which of some ascending hashes are documents', ascending, and the rows of these."""
    hashes, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, index.num_documents, BLOCK):
        hash_B = np.asarray(index.document_hashes[start : start + BLOCK])
        place_m = np.flatnonzero(np.isin(hash_B, hash_n))
        hashes.append(hash_B[place_m])
        rows.append(place_m + start)
    hash_D, row_D = np.concatenate(hashes), np.concatenate(rows)
    order_D = np.argsort(hash_D, kind="stable")
    return hash_D[order_D], row_D[order_D]
