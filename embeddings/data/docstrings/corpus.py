"""The functions of a docstring corpus: copies removed, hard negatives by namespace, the split for evaluation."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.common.random import numpy_generator
from embeddings.data.docstrings.extract import DocumentedFunction
from embeddings.data.near_duplicates import NearDuplicates, mark_copies
from embeddings.data.records import Negative

NEAR_DUPLICATE_JACCARD = 0.7
BOILERPLATE_FUNCTIONS = 3

_UNSAID = frozenset({"a", "an", "the", "this", "that", "of", "given", "specified"})


@dataclass(frozen=True, slots=True)
class Removed:
    """How many functions each rule of `deduplicate` took out."""

    same_name: int
    same_code: int
    near_duplicate: int
    boilerplate_query: int
    same_query: int


def deduplicate(functions: Iterable[DocumentedFunction]) -> tuple[list[DocumentedFunction], Removed]:
    """The functions of which no two have one name, one first sentence, or nearly one code; the earliest stays.

    A first sentence that more than `BOILERPLATE_FUNCTIONS` functions share takes them all out.
    """
    given = list(functions)
    by_name: dict[str, DocumentedFunction] = {}
    for function in given:
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
        same_name=len(given) - len(by_name),
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

    is_copy = mark_copies(rule.keys(items).T, len(items), lambda one, other: rule.alike(sets(one), sets(other)))
    return is_copy.tolist()  # type: ignore[no-any-return]


def _code(function: DocumentedFunction) -> str:
    """Signature and body: the qualified name on the first line would tell copies apart."""
    return function.document.partition("\n")[2]


_TRIES = 8

Key = Callable[[DocumentedFunction], str]


def namespace_negatives(functions: Sequence[DocumentedFunction], seed: int) -> list[tuple[Negative, ...]]:
    """For each function one negative of each granularity, hardest first.

    Level 1 is another function of the same class (or module's top level), 2 of the same module, 3 of the same package,
    4 of another package. A level that has no other function, or none found in a few draws, is left out.
    """
    keys: tuple[Key, ...] = (lambda f: f.id.rpartition(".")[0], lambda f: f.module, lambda f: f.package, lambda f: "")
    groups: list[dict[str, list[int]]] = [defaultdict(list) for _ in keys]
    for key, members in zip(keys, groups, strict=True):
        for row, function in enumerate(functions):
            members[key(function)].append(row)
    draw_NLT = numpy_generator(seed, "namespace").random((len(functions), len(keys), _TRIES))

    def of_one(own: DocumentedFunction, draw_LT: npt.NDArray[np.float64]) -> Iterator[Negative]:
        for level, (key, members) in enumerate(zip(keys, groups, strict=True)):
            group = members[key(own)]
            for draw in draw_LT[level]:
                other = functions[group[int(draw * len(group))]]
                nearer = level > 0 and keys[level - 1](other) == keys[level - 1](own)
                if other.id != own.id and not nearer:
                    yield Negative(other.document, level + 1)
                    break

    return [tuple(of_one(own, draw_LT)) for own, draw_LT in zip(functions, draw_NLT, strict=True)]


class SplitSizes(NamedTuple):
    """Maximum functions of each evaluation set, to search and, of them, to ask for; see `prepare_docstrings`."""

    validation_documents: int
    validation_queries: int
    in_domain_documents: int
    in_domain_queries: int
    held_out_documents: int
    held_out_queries: int


class EvaluationSet(NamedTuple):
    """Functions to search, and those among them whose first sentences are the queries; both sorted by id."""

    documents: list[DocumentedFunction]
    queries: list[DocumentedFunction]


class DocstringSplit(NamedTuple):
    """Functions to train on, sorted by id, and three sets that share none with them or each other."""

    train: list[DocumentedFunction]
    validation: EvaluationSet
    in_domain: EvaluationSet
    held_out: EvaluationSet


def split_functions(
    functions: Sequence[DocumentedFunction], held_out_packages: Collection[str], sizes: SplitSizes, seed: int
) -> DocstringSplit:
    """Cut functions without copies among them into a training set and three evaluation sets; order does not matter.

    `held_out_packages` are never trained on; a held-out set smaller than its size is taken whole.
    """
    ordered = sorted(functions)
    held_out = [function for function in ordered if function.package in held_out_packages]
    trainable = [function for function in ordered if function.package not in held_out_packages]
    if not held_out:
        rule = "must have documented functions"
        raise OptionError("held_out_packages", sorted(held_out_packages), rule, "name larger packages")
    num_taken = sizes.validation_documents + sizes.in_domain_documents
    if len(trainable) <= num_taken:
        rule = f"must leave functions to train on, and packages has {len(trainable)} documented ones"
        option = "num_validation_documents + num_in_domain_documents"
        raise OptionError(option, num_taken, rule, "lower it, or add packages")

    def evaluation_set(pool: list[DocumentedFunction], name: str, documents: int, queries: int) -> EvaluationSet:
        searched = _draw(pool, documents, seed, name)
        return EvaluationSet(searched, _draw(searched, queries, seed, f"{name}_queries"))

    in_domain = evaluation_set(trainable, "in_domain", sizes.in_domain_documents, sizes.in_domain_queries)
    trainable = _without(trainable, in_domain.documents)
    validation = evaluation_set(trainable, "validation", sizes.validation_documents, sizes.validation_queries)
    searched = evaluation_set(held_out, "held_out", sizes.held_out_documents, sizes.held_out_queries)
    return DocstringSplit(_without(trainable, validation.documents), validation, in_domain, searched)


def _without(functions: list[DocumentedFunction], taken: list[DocumentedFunction]) -> list[DocumentedFunction]:
    ids = {function.id for function in taken}
    return [function for function in functions if function.id not in ids]


def _draw(functions: list[DocumentedFunction], most: int, seed: int, stream: str) -> list[DocumentedFunction]:
    if len(functions) <= most:
        return functions
    rows = numpy_generator(seed, stream).choice(len(functions), size=most, replace=False)
    return [functions[row] for row in sorted(rows.tolist())]
