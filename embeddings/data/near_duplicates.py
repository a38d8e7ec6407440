"""Duplicates and near-duplicates among many texts: candidate pairs by MinHash keys, then an exact comparison."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.io import text_hash
from embeddings.common.jobs import progress_bar
from embeddings.common.random import mix_bits, numpy_generator

Shingle = Literal["word", "character"]
SHINGLE_SIZES: dict[Shingle, int] = {"word": 3, "character": 5}
LEAST_THRESHOLD = 0.5
# Probability that a pair exactly at the threshold shares no key; more similar pairs are missed less often.
MISS_FRACTION = 2.5e-4

_WORD = re.compile(r"\w+")
_Uint64s = npt.NDArray[np.uint64]
_Int64s = npt.NDArray[np.int64]


class NearDuplicates:
    """Detects near-copies among items that consist of one or more texts (parts).

    Two items are near-copies if, in every part, their sets of shingles (3 consecutive words, or 5 consecutive
    characters) have a Jaccard similarity of at least `threshold`.

    Args:
        threshold: Minimum Jaccard similarity of near-copies, from 0.5 (lower values need too many keys) to 1.
        num_parts: Number of texts per item.
        shingle: Words, or characters for languages without spaces. Words are case-sensitive and ignore punctuation.

    Source: Broder 1997, "On the resemblance and containment of documents"; bands of MinHash values as in Leskovec,
        Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4. Differs: a band spans all parts.
    """

    def __init__(self, threshold: float, num_parts: int = 1, shingle: Shingle = "word") -> None:
        if not LEAST_THRESHOLD <= threshold <= 1:
            rule = f"must lie between {LEAST_THRESHOLD} and 1"
            raise OptionError("near_duplicates", threshold, rule, "0.8 is usual; leave it out to keep near-copies")
        self.threshold, self.num_parts, self.shingle = threshold, num_parts, shingle
        self._size = SHINGLE_SIZES[shingle]
        # MinHash values per part in a key: more values give fewer false candidates, but need more keys.
        self._depth = 3 if num_parts == 1 else 2
        shares_key = threshold ** (self._depth * num_parts)
        self.num_keys = 1 if shares_key == 1 else math.ceil(math.log(MISS_FRACTION) / math.log1p(-shares_key))
        draws = numpy_generator(0, "minhash").integers(0, 2**63, size=(self.num_keys, self._depth), dtype=np.uint64)
        self._salts = draws * np.uint64(2) + np.uint64(1)

    def keys(self, items: Sequence[Sequence[str]]) -> npt.NDArray[np.uint32]:
        """The keys of n items, (n, num_keys) uint32, to be compared by column."""
        key_NK = np.zeros((len(items), self.num_keys), dtype=np.uint64)
        if not items:
            return key_NK.astype(np.uint32)
        for part in range(self.num_parts):
            values, borders = self._shingles([item[part] for item in items])
            for band, salts in enumerate(self._salts):
                for salt in salts:
                    # `borders` alternates between segments and the gaps between them. `reduceat` needs one more value,
                    # because the last segment may end at the end of the array.
                    minimum_N = np.minimum.reduceat(np.append(values * salt, salt), borders)[::2]
                    key_NK[:, band] = mix_bits(key_NK[:, band] + minimum_N)
        return (key_NK >> np.uint64(32)).astype(np.uint32)

    def sets(self, item: Sequence[str]) -> tuple[_Uint64s, ...]:
        return tuple(np.unique(self._shingles([part])[0]) for part in item)

    def alike(self, first: Sequence[_Uint64s], second: Sequence[_Uint64s]) -> bool:
        return all(
            # The upper bound from the sizes of the sets comes first, because it is cheap.
            min(len(one), len(other)) / max(len(one), len(other)) >= self.threshold
            and jaccard(one, other) >= self.threshold
            for one, other in zip(first, second, strict=True)
        )

    def _shingles(self, texts: Sequence[str]) -> tuple[_Uint64s, _Int64s]:
        """Hashes of the shingles of all texts in one array, and the start and end of each text in it, (2n,)."""
        units = [self._units(text) for text in texts]
        stops = np.cumsum([len(unit) for unit in units], dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
        all_units = np.concatenate(units)
        hashes = np.zeros(len(all_units) - self._size + 1, dtype=np.uint64)
        for offset in range(self._size):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + all_units[offset : offset + len(hashes)]
        return mix_bits(hashes), np.stack([starts, stops - self._size + 1], axis=1).ravel()

    def _units(self, text: str) -> _Uint64s:
        """The words or characters of a text as numbers, padded to one shingle; a text without words is one unit."""
        if self.shingle == "character":
            unit = np.frombuffer(" ".join(text.split()).encode("utf-32-le"), dtype="<u4").astype(np.uint64)
        else:
            unit = np.array([_unit_hash(word) for word in _WORD.findall(text)], dtype=np.uint64)
        if not len(unit):
            unit = np.array([_unit_hash(text)], dtype=np.uint64)
        return np.pad(unit, (0, max(0, self._size - len(unit))))


def jaccard(first: _Uint64s, second: _Uint64s) -> float:
    """Jaccard similarity of two sorted sets that are not both empty."""
    small, large = (first, second) if len(first) <= len(second) else (second, first)
    positions = np.minimum(np.searchsorted(large, small), len(large) - 1)
    shared = int(np.count_nonzero(large[positions] == small))
    return shared / (len(first) + len(second) - shared)


def mark_copies(
    key_columns: Iterable[npt.NDArray[Any]], num_rows: int, are_alike: Callable[[int, int], bool]
) -> npt.NDArray[np.bool_]:
    """For each row, whether it is a copy of an earlier row that is not a copy itself.

    Only rows that share a key in some column of `key_columns`, (num_rows,) uint32 each, are compared.
    """
    assert num_rows < 2**32
    row_E, group_E = _shared_keys(key_columns, num_rows)
    is_copy = np.zeros(num_rows, dtype=np.bool_)
    # The retained rows of each group so far, in the slice of the group (entries are sorted by group).
    retained_E = np.empty_like(row_E)
    end_G = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(group_E))])[:-1]
    start_G = end_G.copy()
    order_E = np.argsort(row_E, kind="stable")
    borders = np.flatnonzero(np.diff(row_E[order_E], prepend=np.int64(-1), append=np.int64(-1)))
    for number in progress_bar(None, "comparing texts", "text", iterable=range(len(borders) - 1)):
        entries = order_E[borders[number] : borders[number + 1]]
        row, groups = int(row_E[entries[0]]), group_E[entries]
        retained = [retained_E[start:end] for start, end in zip(start_G[groups], end_G[groups], strict=True)]
        if any(are_alike(int(other), row) for other in np.unique(np.concatenate(retained))):
            is_copy[row] = True
        else:
            retained_E[end_G[groups]] = row
            end_G[groups] += 1
    return is_copy


def _shared_keys(
    key_columns: Iterable[npt.NDArray[Any]], num_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and group (shared key) of each key that two or more rows share, sorted by group, then row."""
    rows, groups, num_groups = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    row_numbers = np.arange(num_rows, dtype=np.uint64)
    for column in key_columns:
        packed = column.astype(np.uint64) << np.uint64(32)
        packed |= row_numbers
        packed.sort()
        equals_previous = np.zeros(num_rows + 1, dtype=np.bool_)
        equals_previous[1:-1] = packed[1:] ^ packed[:-1] < np.uint64(2**32)
        is_shared = equals_previous[:-1] | equals_previous[1:]
        rows.append((packed[is_shared] & np.uint64(2**32 - 1)).astype(np.int64))
        groups.append(num_groups + np.cumsum(~equals_previous[:-1][is_shared]) - 1)
        num_groups += int((~equals_previous[:-1] & is_shared).sum())
    return np.concatenate(rows), np.concatenate(groups)


@lru_cache(maxsize=1 << 17)
def _unit_hash(text: str) -> int:
    return text_hash(text) % 2**64
