"""Near-duplicates among many texts: candidates by MinHash signatures, then an exact comparison."""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.io import text_hash
from embeddings.common.jobs import progress_bar
from embeddings.common.random import mix_bits, numpy_generator

Shingle = Literal["word", "character"]
SHINGLE_SIZES: dict[Shingle, int] = {"word": 3, "character": 5}
LEAST_THRESHOLD = 0.5
# Probability that a pair exactly at the threshold shares no key, or has signatures that differ too much.
MISS_FRACTION = 2.5e-4
# A key has this many bytes, each of one MinHash value.
KEY_BYTES = 4
# Rows of one key that later rows are compared with, and most similar rows of which the texts are compared.
MAX_PER_KEY, MAX_COMPARED = 32, 8
_SAVE_SECONDS = 30.0

_Uint64s = npt.NDArray[np.uint64]
_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
Sets = Sequence[_Uint64s]
# A prime as base of the hashes of words and shingles.
_BASE = 0x9E3779B97F4A7C15


class NearDuplicates:
    """Detects near-copies among items that consist of one or more texts (parts).

    Two items are near-copies if, in every part, their sets of shingles (3 consecutive words, or 5 consecutive
    characters) have a Jaccard similarity of at least `threshold`.

    Args:
        threshold: Minimum Jaccard similarity of near-copies, from 0.5 (lower values need too many keys) to 1.
        num_parts: Number of texts per item, 1 or 2.
        shingle: Words, or characters for languages without spaces. Words are case-sensitive and ignore punctuation.

    Source: Broder 1997, "On the resemblance and containment of documents"; bands of MinHash values as in Leskovec,
        Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4. Differs: a band spans all parts, and a value
        is stored as one byte.
    """

    def __init__(self, threshold: float, num_parts: int = 1, shingle: Shingle = "word") -> None:
        if not LEAST_THRESHOLD <= threshold <= 1:
            rule = f"must lie between {LEAST_THRESHOLD} and 1"
            raise OptionError("near_duplicates", threshold, rule, "0.8 is usual; leave it out to keep near-copies")
        self.threshold, self.num_parts, self.shingle = threshold, num_parts, shingle
        self._size = SHINGLE_SIZES[shingle]
        # At least 16 keys, because copies in texts of one pattern share few keys that the pattern does not share.
        shares_key = min(threshold, 0.8) ** KEY_BYTES
        self.num_keys = math.ceil(math.log(MISS_FRACTION) / math.log1p(-shares_key))
        self._num_values = self.num_keys * KEY_BYTES // num_parts
        self._least_equal = _low_quantile(self._num_values, threshold, MISS_FRACTION / 10)
        draws = numpy_generator(0, "minhash").integers(0, 2**63, size=self._num_values, dtype=np.uint64)
        self._salts = draws * np.uint64(2) + np.uint64(1)

    def signatures(self, items: Sequence[Sequence[str]]) -> npt.NDArray[np.uint8]:
        """A byte of each MinHash value of n items, (n, num_keys, KEY_BYTES) uint8."""
        minimum_NPV = np.empty((len(items), self.num_parts, self._num_values), np.uint64)
        for part in range(self.num_parts):
            hashes, start_N = self._shingles([item[part] for item in items])
            for value, salt in enumerate(self._salts):
                minimum_NPV[:, part, value] = np.minimum.reduceat(hashes * salt, start_N)
        byte_NPV = (mix_bits(minimum_NPV) >> np.uint64(56)).astype(np.uint8)
        # Each key has the same number of values of each part.
        byte_NPKv = byte_NPV.reshape(len(items), self.num_parts, self.num_keys, -1)
        return byte_NPKv.transpose(0, 2, 1, 3).reshape(len(items), self.num_keys, KEY_BYTES)

    def sets(self, item: Sequence[str]) -> Sets:
        """The set of shingles of each part of an item, as sorted hashes."""
        return tuple(np.unique(self._shingles([part])[0]) for part in item)

    def alike(self, item: Sets, others: Sequence[Sets]) -> _Bools:
        """Which other items are near-copies of an item, from their sets of shingles."""
        alike_N = np.ones(len(others), np.bool_)
        for part, own in enumerate(item):
            length_N = np.array([len(other[part]) for other in others])
            hashes = np.concatenate([other[part] for other in others])
            is_shared = own[np.minimum(np.searchsorted(own, hashes), len(own) - 1)] == hashes
            shared_N = np.add.reduceat(is_shared, np.cumsum(length_N) - length_N, dtype=np.int64)
            alike_N &= shared_N / (len(own) + length_N - shared_N) >= self.threshold
        return alike_N

    def mark_copies(
        self,
        signature_NKB: npt.NDArray[np.uint8],
        sets: Callable[[int], Sets],
        decided: Sequence[bool] | _Bools = (),
        save: Callable[[_Bools], None] | None = None,
    ) -> _Bools:
        """For each row, whether it is a near-copy of an earlier row that is not one itself.

        A row is compared with the first `MAX_PER_KEY` retained rows of each of its keys by signature, and with the
        `MAX_COMPARED` most similar of them by text, so the work grows linearly with the rows.

        Args:
            signature_NKB: The items' signatures.
            sets: The sets of shingles of a row.
            decided: The results of the first rows, if they are known.
            save: Called every 30 seconds with the results so far.
        """
        group_NK, size_G = _shared_keys(signature_NKB)
        # The retained rows of each group so far, in the slice of the group.
        size_G = np.minimum(size_G, MAX_PER_KEY)
        start_G, count_G = np.cumsum(size_G) - size_G, np.zeros_like(size_G)
        retained = np.empty(int(size_G.sum()), np.uint32)
        is_copy_N = np.zeros(len(group_NK), np.bool_)
        is_copy_N[: len(decided)] = decided
        saved = time.monotonic()
        for row in progress_bar(None, "comparing texts", "text", iterable=range(len(group_NK))):
            group_k = group_NK[row][group_NK[row] > 0]
            count_k, start_k = count_G[group_k], start_G[group_k]
            if row >= len(decided) and count_k.any():
                stop_k = start_k + count_k
                parts = [retained[start:stop] for start, stop in zip(start_k.tolist(), stop_k.tolist(), strict=True)]
                is_copy_N[row] = self._is_copy(row, np.unique(np.concatenate(parts)), signature_NKB, sets)
            if not is_copy_N[row]:
                has_room_k = count_k < size_G[group_k]
                retained[(start_k + count_k)[has_room_k]] = row
                count_G[group_k] += has_room_k
            if save is not None and time.monotonic() > saved + _SAVE_SECONDS:
                save(is_copy_N[: row + 1])
                saved = time.monotonic()
        return is_copy_N

    def _is_copy(
        self, row: int, other_C: _Int64s, signature_NKB: npt.NDArray[np.uint8], sets: Callable[[int], Sets]
    ) -> bool:
        is_equal_CKB = signature_NKB[other_C] == signature_NKB[row]
        shape = (len(other_C), self.num_keys, self.num_parts, -1)
        equal_CP = is_equal_CKB.reshape(shape).sum(axis=(1, 3))
        close_c = np.flatnonzero((equal_CP >= self._least_equal).all(axis=1))
        if not len(close_c):
            return False
        order_c = np.argsort(-equal_CP[close_c].sum(axis=1), kind="stable")[:MAX_COMPARED]
        return bool(self.alike(sets(row), [sets(int(other)) for other in other_C[close_c[order_c]]]).any())

    def _shingles(self, texts: Sequence[str]) -> tuple[_Uint64s, _Int64s]:
        """Hashes of the shingles of all texts in one array, and the start of each text in it, (n,)."""
        unit, count_N = self._units(texts)
        # Short texts are padded to one shingle; a text without words is one unit.
        length_N = np.maximum(count_N, self._size)
        stop_N = np.cumsum(length_N)
        padded = np.zeros(int(stop_N[-1]), np.uint64)
        padded[np.arange(len(unit)) + np.repeat(stop_N - length_N - (np.cumsum(count_N) - count_N), count_N)] = unit
        for row in np.flatnonzero(count_N == 0).tolist():
            padded[stop_N[row] - self._size] = text_hash(texts[row]) % 2**64
        hashes = np.zeros(len(padded) - self._size + 1, np.uint64)
        is_within = np.ones(len(hashes), np.bool_)
        for offset in range(self._size):
            hashes = hashes * np.uint64(_BASE) + padded[offset : offset + len(hashes)]
            if offset:
                is_within[stop_N[:-1] - offset] = False
        number_N = length_N - self._size + 1
        return mix_bits(hashes[is_within]), np.cumsum(number_N) - number_N

    def _units(self, texts: Sequence[str]) -> tuple[_Uint64s, _Int64s]:
        """The words or characters of all texts as numbers, and the number of them in each text, (n,)."""
        if self.shingle == "character":
            texts = [" ".join(text.split()) for text in texts]
            return _codes("".join(texts)).astype(np.uint64), np.array([len(text) for text in texts])
        letter_C = _letter_hashes()[_codes("\n".join([*texts, ""]))]
        is_letter_C = letter_C != 0
        start_W = np.flatnonzero(is_letter_C & ~np.concatenate([np.zeros(1, np.bool_), is_letter_C[:-1]]))
        end_N = np.cumsum([len(text) + 1 for text in texts])
        count_N = np.diff(np.searchsorted(start_W, end_N), prepend=0)
        if not len(start_W):
            return np.empty(0, np.uint64), count_N
        # The hash of a word is the sum of its letters' hashes times powers of the base, from the word's start.
        letter_C *= _powers(_BASE, len(letter_C))
        inverse_W = _powers(pow(_BASE, -1, 2**64), len(letter_C))[start_W]
        return np.add.reduceat(letter_C, start_W) * inverse_W, count_N


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


@cache
def _letter_hashes() -> _Uint64s:
    r"""A random number for each character that `\w` matches, 0 for the others."""
    numbers = np.arange(1, 0x110001, dtype=np.uint64)
    is_letter = np.fromiter((chr(code).isalnum() for code in range(len(numbers))), np.bool_, len(numbers))
    is_letter[ord("_")] = True
    return mix_bits(numbers) * is_letter


def _powers(base: int, count: int) -> _Uint64s:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


def _low_quantile(number: int, probability: float, fraction: float) -> int:
    """The number of successes in independent trials that has a probability of at most `fraction` to be missed."""
    total = 0.0
    for count in range(number + 1):
        total += math.comb(number, count) * probability**count * (1 - probability) ** (number - count)
        if total > fraction:
            return count
    return number


def _shared_keys(signature_NKB: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint32], _Int64s]:
    """For each row and key the group of rows with this key, from 1, or 0 for a single row; the size of each group."""
    key_NK = signature_NKB.view(np.uint32)[:, :, 0]
    group_NK, sizes = np.zeros(key_NK.shape, np.uint32), [np.zeros(1, np.int64)]
    num_groups = 1
    for key in range(key_NK.shape[1]):
        _, value_N, count_V = np.unique(key_NK[:, key], return_inverse=True, return_counts=True)
        is_shared_V = count_V > 1
        group_V = np.where(is_shared_V, num_groups - 1 + np.cumsum(is_shared_V), 0)
        group_NK[:, key] = group_V[value_N]
        sizes.append(count_V[is_shared_V])
        num_groups += len(sizes[-1])
    return group_NK, np.concatenate(sizes)
