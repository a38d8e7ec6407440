"""Copies among functions: one question asked twice, one code under two names, and code that is almost the same."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embeddings.common.randomness import numpy_generator
from embeddings.data.docstrings.extract import DocumentedFunction

SHINGLE_WORDS = 3
NEAR_DUPLICATE_JACCARD = 0.7
BOILERPLATE_FUNCTIONS = 3

# 20 bands of 3 find a pair of Jaccard similarity 0.7 with probability 0.9998, and one of 0.2 with 0.15.
_BANDS, _ROWS = 20, 3
_WORD = re.compile(r"\w+")
_UNSAID = frozenset({"a", "an", "the", "this", "that", "of", "given", "specified"})

_Uint64s = npt.NDArray[np.uint64]
_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Removed:
    """How many functions each rule took out.

    Attributes:
        same_name: Another definition of the same qualified name (setters, branches of an `if`).
        same_code: Code equal to an earlier function's.
        near_duplicate: Code whose word 3-grams overlap an earlier function's to `NEAR_DUPLICATE_JACCARD` or more.
        boilerplate_query: First sentence shared by more than `BOILERPLATE_FUNCTIONS` functions: all of them.
        same_query: First sentence shared with an earlier function.
    """

    same_name: int
    same_code: int
    near_duplicate: int
    boilerplate_query: int
    same_query: int


def deduplicate(functions: Iterable[DocumentedFunction]) -> tuple[list[DocumentedFunction], Removed]:
    """The functions of which no two have one name, one first sentence, or nearly one code; the earliest stays.

    What is left can be cut anywhere: no copy lies on both sides, and each sentence has one function that it describes.

    Determinism: the result depends on the order of `functions` alone.
    """
    by_name: dict[str, DocumentedFunction] = {}
    given = 0
    for function in functions:
        given += 1
        by_name.setdefault(function.id, function)
    by_code: dict[str, DocumentedFunction] = {}
    for function in by_name.values():
        by_code.setdefault("".join(_code(function).split()), function)
    distinct = list(by_code.values())
    is_copy = near_duplicates([_code(function) for function in distinct])
    originals = [function for function, copy in zip(distinct, is_copy, strict=True) if not copy]
    by_query: dict[str, list[DocumentedFunction]] = {}
    for function in originals:
        by_query.setdefault(normalised_query(function.query), []).append(function)
    groups = [group for group in by_query.values() if len(group) <= BOILERPLATE_FUNCTIONS]
    shared = sum(len(group) for group in groups)
    removed = Removed(
        same_name=given - len(by_name),
        same_code=len(by_name) - len(distinct),
        near_duplicate=len(distinct) - len(originals),
        boilerplate_query=len(originals) - shared,
        same_query=shared - len(groups),
    )
    return [group[0] for group in groups], removed


def normalised_query(query: str) -> str:
    """The words of a sentence without case, punctuation, articles and the endings that tell "returns" from "return"."""
    words = re.findall(r"[a-z0-9]+", query.lower())
    return " ".join(word.rstrip("s") or word for word in words if word not in _UNSAID)


def near_duplicates(texts: Sequence[str]) -> list[bool]:
    """For each text, whether an earlier one that is not itself a near-duplicate has nearly the same shingles.

    Candidates come from MinHash signatures in bands; each is then checked by the exact Jaccard similarity of the two
    sets of `SHINGLE_WORDS`-grams, so nothing is removed that should stay.

    Source: Broder 1997, "On the resemblance and containment of documents". Differs: none.
    """
    if not texts:
        return []
    values, starts, stops = _shingles(texts)
    kept_in: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]
    is_copy = []
    for index, signature in enumerate(_signatures(values, starts, stops)):
        keys = [band.tobytes() for band in signature.reshape(_BANDS, _ROWS)]
        candidates = sorted({other for kept, key in zip(kept_in, keys, strict=True) for other in kept.get(key, ())})
        own = set(values[starts[index] : stops[index]].tolist()) if candidates else set()
        is_copy.append(
            any(
                _jaccard(own, set(values[starts[other] : stops[other]].tolist())) >= NEAR_DUPLICATE_JACCARD
                for other in candidates
            )
        )
        if not is_copy[-1]:
            for kept, key in zip(kept_in, keys, strict=True):
                kept.setdefault(key, []).append(index)
    return is_copy


def _code(function: DocumentedFunction) -> str:
    """Signature and body: the qualified name on the first line would tell copies apart."""
    return function.document.partition("\n")[2]


def _shingles(texts: Sequence[str]) -> tuple[_Uint64s, _Int64s, _Int64s]:
    """Hashes of all texts' word n-grams in one row, and where each text's begin and end.

    A text of fewer words than one n-gram is filled up, so that each text has a shingle.
    """
    vocabulary: dict[str, int] = {}
    words: list[int] = []
    starts, stops = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
    for index, text in enumerate(texts):
        starts[index] = len(words)
        words += [vocabulary.setdefault(word, len(vocabulary) + 1) for word in _WORD.findall(text)]
        words += [0] * (SHINGLE_WORDS - (len(words) - int(starts[index])))
        stops[index] = len(words) - SHINGLE_WORDS + 1
    row = np.array(words, dtype=np.uint64)
    hashes = np.zeros(len(row) - SHINGLE_WORDS + 1, dtype=np.uint64)
    for offset in range(SHINGLE_WORDS):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + row[offset : offset + len(hashes)]
    return _mixed(hashes), starts, stops


def _mixed(values: _Uint64s) -> _Uint64s:
    """A bijection of 64-bit integers whose output bits each depend on all input bits (murmur3's finaliser)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _signatures(values: _Uint64s, starts: _Int64s, stops: _Int64s) -> _Uint64s:
    """Each text's smallest shingle under `_BANDS * _ROWS` orders: products with odd numbers of hashes already mixed."""
    salts = numpy_generator(0, "minhash").integers(0, 2**63, size=_BANDS * _ROWS, dtype=np.uint64) * 2 + 1
    # Segments [start, stop) and the gaps between them alternate; the last stop may be the end of the row, which
    # `reduceat` takes only when one value lies beyond it.
    borders = np.stack([starts, stops], axis=1).ravel()
    signatures = np.empty((len(starts), len(salts)), dtype=np.uint64)
    for column, salt in enumerate(salts):
        signatures[:, column] = np.minimum.reduceat(np.append(values * salt, salt), borders)[::2]
    return signatures


def _jaccard(first: set[int], second: set[int]) -> float:
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)
