"""Copies among functions: one question asked twice, one code under two names, and code that is almost the same."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from embeddings.data.docstrings.extract import DocumentedFunction
from embeddings.data.near_duplicates import NearDuplicates, mark_copies

NEAR_DUPLICATE_JACCARD = 0.7
BOILERPLATE_FUNCTIONS = 3

_UNSAID = frozenset({"a", "an", "the", "this", "that", "of", "given", "specified"})


@dataclass(frozen=True, slots=True)
class Removed:
    """How many functions each rule took out.

    Attributes:
        same_name: Another definition of the same qualified name (setters, branches of an `if`).
        same_code: Code equal to an earlier function's.
        near_duplicate: Code whose runs of 3 words overlap an earlier function's to `NEAR_DUPLICATE_JACCARD` or more.
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
    """For each text, whether an earlier one that is not itself a near-duplicate has nearly the same shingles."""
    rule = NearDuplicates(NEAR_DUPLICATE_JACCARD)
    items = [(text,) for text in texts]

    @lru_cache(maxsize=4096)
    def sets(index: int) -> Sequence[npt.NDArray[np.uint64]]:
        return rule.sets(items[index])

    is_copy: list[bool] = mark_copies(
        rule.keys(items).T, len(items), lambda earlier, later: rule.alike(sets(earlier), sets(later))
    ).tolist()
    return is_copy


def _code(function: DocumentedFunction) -> str:
    """Signature and body: the qualified name on the first line would tell copies apart."""
    return function.document.partition("\n")[2]
