"""Near-duplicates among many texts: candidates by MinHash signatures, then an exact comparison."""

import math
import time
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.io import text_hash
from embeddings.common.progress import progress_bar
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
# Keys of the rows that are compared at once, texts that are hashed at once, and hashes of shingles that are cached.
_BATCH_KEYS, _BATCH_TEXTS, _CACHED_HASHES = 2048, 512, 1 << 23
# Hashes of shingles that are compared at once, and the bits of each; the other bits are the text's number in a batch.
_COMPARED_HASHES, _HASH_BITS = 1 << 20, 52
_SAVE_SECONDS = 30.0

_Uint64s = npt.NDArray[np.uint64]
_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
# The texts of each of several items.
Items = Sequence[Sequence[str]]
# A prime as base of the hashes of words and shingles.
_BASE = 0x9E3779B97F4A7C15


class NearDuplicates:
    """Detects near-copies among items that consist of one or more texts (parts).

    Two items are near-copies if, in every part, their sets of shingles (3 consecutive words, or 5 consecutive
    characters, for languages without spaces) have a Jaccard similarity of at least `threshold`, from 0.5 (lower values
    need too many keys) to 1. An item has 1 or 2 parts. Words are case-sensitive and ignore punctuation.

    Source: Broder 1997, "On the resemblance and containment of documents"; bands of MinHash values as in Leskovec,
        Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4. Differs: a band spans all parts, and a value
        is stored as one byte.
    """

    def __init__(self, threshold: float, num_parts: int = 1, shingle: Shingle = "word") -> None:
        from scipy.special import bdtr  # slow to import

        if not LEAST_THRESHOLD <= threshold <= 1:
            rule = f"must lie between {LEAST_THRESHOLD} and 1"
            raise OptionError("near_duplicates", threshold, rule, "0.8 is usual; leave it out to keep near-copies")
        self.threshold, self.num_parts, self.shingle = threshold, num_parts, shingle
        self._size = SHINGLE_SIZES[shingle]
        # At least 16 keys, because copies in texts of one pattern share few keys that the pattern does not share.
        shares_key = min(threshold, 0.8) ** KEY_BYTES
        self.num_keys = math.ceil(math.log(MISS_FRACTION) / math.log1p(-shares_key))
        self._num_values = self.num_keys * KEY_BYTES // num_parts
        # Fewer equal values than this are less probable than a tenth of the misses.
        counts = np.arange(self._num_values + 1)
        self._least_equal = int(np.argmax(bdtr(counts, self._num_values, threshold) > MISS_FRACTION / 10))
        draws = numpy_generator(0, "minhash").integers(0, 2**63, size=self._num_values, dtype=np.uint64)
        self._salts = draws * np.uint64(2) + np.uint64(1)

    def signatures(self, items: Items) -> npt.NDArray[np.uint8]:
        """A byte of each MinHash value of n items, at least one, (n, num_keys, KEY_BYTES) uint8."""
        blocks = (items[start : start + _BATCH_TEXTS] for start in range(0, len(items), _BATCH_TEXTS))
        return np.concatenate([self._block_signatures(block) for block in blocks])

    def _block_signatures(self, items: Items) -> npt.NDArray[np.uint8]:
        minimum_NPV = np.empty((len(items), self.num_parts, self._num_values), np.uint64)
        for part in range(self.num_parts):
            hashes, start_N = self._shingles([item[part] for item in items])
            for value, salt in enumerate(self._salts):
                minimum_NPV[:, part, value] = np.minimum.reduceat(hashes * salt, start_N)
        byte_NPV = (mix_bits(minimum_NPV) >> np.uint64(56)).astype(np.uint8)
        # Each key has the same number of values of each part.
        byte_NPKv = byte_NPV.reshape(len(items), self.num_parts, self.num_keys, -1)
        return byte_NPKv.transpose(0, 2, 1, 3).reshape(len(items), self.num_keys, KEY_BYTES)

    def sets(self, texts: Sequence[str]) -> tuple[_Uint64s, _Int64s]:
        """The sets of shingles of up to 4,096 texts as sorted hashes, in one array, and the size of each, (n,)."""
        hashes, start_N = self._shingles(texts)
        owner = np.repeat(np.arange(len(texts)), np.diff(start_N, append=len(hashes)))
        key = np.sort(_numbered(owner, hashes >> np.uint64(64 - _HASH_BITS)))
        key = key[np.concatenate([np.ones(1, np.bool_), key[1:] != key[:-1]])]
        size_N = np.bincount((key >> np.uint64(_HASH_BITS)).astype(np.int64), minlength=len(texts))
        return key & np.uint64((1 << _HASH_BITS) - 1), size_N

    def copies(self, texts: Sequence[str]) -> _Bools:
        """For each text, whether it is a near-copy of an earlier one that is not one itself (see `mark_copies`)."""
        items = [(text,) for text in texts]
        if not items:
            return np.zeros(0, np.bool_)
        return self.mark_copies(self.signatures(items), lambda rows: [items[row] for row in rows])

    def mark_copies(
        self,
        signature_NKB: npt.NDArray[np.uint8],
        items: Callable[[Sequence[int]], Items],
        decided: Sequence[bool] | _Bools = (),
        save: Callable[[_Bools], None] | None = None,
    ) -> _Bools:
        """For each row, whether it is a near-copy of an earlier row that is not one itself.

        A row is compared with the first `MAX_PER_KEY` retained rows of each of its keys by signature, and with the
        `MAX_COMPARED` most similar of them by text, so the work grows linearly with the rows. `items` returns those of
        some rows; `decided` are the known results of the first rows; `save` receives the results every 30 seconds.
        """
        num_rows, step = len(signature_NKB), max(1, _BATCH_KEYS // self.num_keys)
        retained, sets = _RetainedRows(signature_NKB), _CachedSets(self, items, num_rows)
        is_copy_N = np.zeros(num_rows, np.bool_)
        is_copy_N[: len(decided)] = decided
        saved = time.monotonic()
        with progress_bar(num_rows, "comparing texts", "text", initial=len(decided)) as bar:
            for start in range(0, num_rows, step):
                row_B = np.arange(start, min(start + step, num_rows))
                if row_B[-1] >= len(decided):
                    is_copy_N[row_B] = False
                    self._mark_batch(row_B, is_copy_N, signature_NKB, retained, sets)
                retained.add(row_B[~is_copy_N[row_B]])
                if save is not None and time.monotonic() > saved + _SAVE_SECONDS:
                    save(is_copy_N[: row_B[-1] + 1])
                    saved = time.monotonic()
                bar.move(int(row_B[-1]) + 1)
        return is_copy_N

    def _mark_batch(
        self,
        row_B: _Int64s,
        is_copy_N: _Bools,
        signature_NKB: npt.NDArray[np.uint8],
        retained: "_RetainedRows",
        sets: "_CachedSets",
    ) -> None:
        row_C, other_C = retained.candidates(row_B)
        equal_PC = self._num_equal(signature_NKB.take(row_C, axis=0), signature_NKB.take(other_C, axis=0))
        close_c = np.flatnonzero((equal_PC >= self._least_equal).all(axis=0))
        # For each row the most similar first; equally similar ones in their order.
        close_c = close_c[np.lexsort((other_C[close_c], -equal_PC[:, close_c].sum(axis=0), row_C[close_c]))]
        row_c, other_c = row_C[close_c], other_C[close_c]
        # A row is compared when it is known which similar rows of the batch are retained.
        first, is_open_B = row_B[0], np.zeros(len(row_B), np.bool_)
        is_open_B[row_c - first] = True
        while len(row_c):
            is_blocked_c = (other_c >= first) & is_open_B[np.maximum(other_c - first, 0)]
            is_ready_B = is_open_B.copy()
            is_ready_B[row_c[is_blocked_c] - first] = False
            is_ready_c = is_ready_B[row_c - first]
            is_compared_c = is_ready_c & ~is_copy_N[other_c]
            row_d, other_d = row_c[is_compared_c], other_c[is_compared_c]
            is_first_d = np.arange(len(row_d)) - np.searchsorted(row_d, row_d) < MAX_COMPARED
            row_d, other_d = row_d[is_first_d], other_d[is_first_d]
            is_copy_N[row_d[self._are_alike(row_d, other_d, sets)]] = True
            is_open_B &= ~is_ready_B
            row_c, other_c = row_c[~is_ready_c], other_c[~is_ready_c]

    def _num_equal(self, first_CKB: npt.NDArray[np.uint8], second_CKB: npt.NDArray[np.uint8]) -> _Int64s:
        """The number of equal values of each part in pairs of signatures, (num_parts, C)."""
        # Four bytes are added as one number: none exceeds 255, because there are fewer keys.
        is_equal_CK = (first_CKB == second_CKB).view(np.uint32)[:, :, 0]
        equal_C = np.einsum("ck->c", is_equal_CK)
        equal_BC = equal_C[:, None].view(np.uint8).T.astype(np.int64, order="C")
        equal_PC: _Int64s = equal_BC.reshape(self.num_parts, KEY_BYTES // self.num_parts, -1).sum(axis=1)
        return equal_PC

    def _are_alike(self, row_C: _Int64s, other_C: _Int64s, sets: "_CachedSets") -> _Bools:
        """Which pairs of rows are near-copies by their sets of shingles; rows are in ascending order."""
        sets.load(np.concatenate([row_C, other_C]))
        is_alike_C = np.ones(len(row_C), np.bool_)
        # Long texts are compared a few at a time.
        stop_C = np.cumsum(sets.size_NP[other_C].sum(axis=1))
        for pair_c in np.split(np.arange(len(row_C)), np.flatnonzero(np.diff(stop_C // _COMPARED_HASHES)) + 1):
            row_c, other_c = row_C[pair_c], other_C[pair_c]
            is_new_c = np.diff(row_c, prepend=-1) > 0
            row_n, number_c = row_c[is_new_c], np.cumsum(is_new_c) - 1
            for part in range(self.num_parts):
                own, other = sets.hashes(row_n, part), sets.hashes(other_c, part)
                own_n, other_size_c = sets.size_NP[row_n, part], sets.size_NP[other_c, part]
                own_key = _numbered(np.repeat(np.arange(len(row_n)), own_n), own)
                key = _numbered(np.repeat(number_c, other_size_c), other)
                is_shared = own_key[np.minimum(np.searchsorted(own_key, key), len(own_key) - 1)] == key
                start_c = np.cumsum(other_size_c) - other_size_c
                shared_c = np.add.reduceat(is_shared, start_c, dtype=np.int64) if len(pair_c) else start_c
                union_c = own_n[number_c] + other_size_c - shared_c
                is_alike_C[pair_c] &= shared_c / union_c >= self.threshold
        return is_alike_C

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
    r"""A random number for each character that `\w` matches or that is a mark, such as a vowel sign; else 0."""
    numbers = np.arange(1, 0x110001, dtype=np.uint64)
    characters = map(chr, range(len(numbers)))
    letters = (each.isalnum() or unicodedata.category(each)[0] == "M" for each in characters)
    is_letter = np.fromiter(letters, np.bool_, len(numbers))
    is_letter[ord("_")] = True
    return mix_bits(numbers) * is_letter


def _powers(base: int, count: int) -> _Uint64s:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


class _RetainedRows:
    """The first retained rows of each key that several rows have."""

    def __init__(self, signature_NKB: npt.NDArray[np.uint8]) -> None:
        self._group_NK, size_G = _shared_keys(signature_NKB)
        # The rows of each group are in the slice of the group.
        self._size_G = np.minimum(size_G, MAX_PER_KEY)
        self._start_G, self._count_G = np.cumsum(self._size_G) - self._size_G, np.zeros_like(self._size_G)
        self._rows = np.empty(int(self._size_G.sum()), np.uint32)

    def candidates(self, row_B: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Pairs of consecutive rows and earlier rows, retained or among them, that share a key, in order."""
        group_BK = self._group_NK[row_B]
        count_BK = self._count_G[group_BK]
        other = self._rows[concatenated_ranges(self._start_G[group_BK].ravel(), count_BK.ravel())]
        pairs = np.repeat(row_B, count_BK.sum(axis=1)) << 32 | other
        row, group = self._with_room(row_B)
        first = np.searchsorted(group, group)
        num_earlier = np.arange(len(group)) - first
        earlier = row[concatenated_ranges(first, num_earlier)]
        pairs = np.sort(np.concatenate([pairs, np.repeat(row, num_earlier) << 32 | earlier]))
        pairs = pairs[np.flatnonzero(np.diff(pairs, prepend=-1))]
        return pairs >> 32, pairs & 0xFFFFFFFF

    def add(self, row_n: _Int64s) -> None:
        """Add rows to their groups where they have room."""
        row, group = self._with_room(row_n)
        place = self._count_G[group] + np.arange(len(group)) - np.searchsorted(group, group)
        has_room = place < self._size_G[group]
        self._rows[(self._start_G[group] + place)[has_room]] = row[has_room]
        np.add.at(self._count_G, group[has_room], 1)

    def _with_room(self, row_n: _Int64s) -> tuple[_Int64s, _Int64s]:
        """The rows with a key whose group has room, and this group, sorted by group and row."""
        group_nK = self._group_NK[row_n]
        number, key = np.nonzero(self._count_G[group_nK] < self._size_G[group_nK])
        group = group_nK[number, key].astype(np.int64)
        order = np.argsort(group, kind="stable")
        return row_n[number[order]], group[order]


class _CachedSets:
    """The sets of shingles of the rows that were compared since the cache was full."""

    def __init__(self, rule: NearDuplicates, items: Callable[[Sequence[int]], Items], num_rows: int) -> None:
        self._rule, self._items = rule, items
        self._hashes, self._num_hashes = np.empty(_CACHED_HASHES, np.uint64), 0
        self._start_NP = np.full((num_rows, rule.num_parts), -1)
        self.size_NP = np.zeros((num_rows, rule.num_parts), np.int32)

    def load(self, row_n: _Int64s) -> None:
        """Cache the sets of rows, at least until the next call."""
        if self._num_hashes >= _CACHED_HASHES:
            self._start_NP[:] = -1
            self._num_hashes = 0
        missing = np.unique(row_n[self._start_NP[row_n, 0] < 0])
        for start in range(0, len(missing), _BATCH_TEXTS):
            block = missing[start : start + _BATCH_TEXTS]
            for part, texts in enumerate(zip(*self._items(block.tolist()), strict=True)):
                hashes, size_n = self._rule.sets(texts)
                stop = self._num_hashes + len(hashes)
                if stop > len(self._hashes):
                    self._hashes = np.concatenate([self._hashes, np.empty(stop, np.uint64)])
                self._hashes[self._num_hashes : stop] = hashes
                self._start_NP[block, part] = self._num_hashes + np.cumsum(size_n) - size_n
                self.size_NP[block, part] = size_n
                self._num_hashes = stop

    def hashes(self, row_n: _Int64s, part: int) -> _Uint64s:
        """The sets of a part of rows, in one array."""
        return self._hashes[concatenated_ranges(self._start_NP[row_n, part], self.size_NP[row_n, part])]


def concatenated_ranges(start_R: _Int64s, length_R: npt.NDArray[np.signedinteger[Any]]) -> _Int64s:
    """The numbers of several ranges, in one array."""
    before_R = np.cumsum(length_R) - length_R
    ranges: _Int64s = np.repeat(start_R - before_R, length_R) + np.arange(int(length_R.sum()))
    return ranges


def _numbered(number: _Int64s, hashes: _Uint64s) -> _Uint64s:
    """Hashes with the number of their text in the highest bits."""
    return number.astype(np.uint64) << np.uint64(_HASH_BITS) | hashes


def _shared_keys(signature_NKB: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint32], _Int64s]:
    """For each row and key the group of rows with this key, from 1, or 0 for a single row; the size of each group."""
    key_NK = signature_NKB.view(np.uint32)[:, :, 0]
    group_NK, sizes = np.zeros(key_NK.shape, np.uint32), [np.zeros(1, np.int64)]
    num_groups = 1
    for key in progress_bar(None, "finding equal keys", "key", iterable=range(key_NK.shape[1])):
        _, value_N, count_V = np.unique(key_NK[:, key], return_inverse=True, return_counts=True)
        is_shared_V = count_V > 1
        group_V = np.where(is_shared_V, num_groups - 1 + np.cumsum(is_shared_V), 0)
        group_NK[:, key] = group_V[value_N]
        sizes.append(count_V[is_shared_V])
        num_groups += len(sizes[-1])
    return group_NK, np.concatenate(sizes)
