"""Which functions train and which ones test."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from embeddings.common.errors import OptionError
from embeddings.common.randomness import numpy_generator
from embeddings.data.docstrings.extract import DocumentedFunction


class SplitSizes(NamedTuple):
    """Most functions of each evaluation set.

    Attributes:
        in_domain_documents: Functions of the training packages that are taken out of training, to be searched.
        in_domain_queries: How many of them are also asked for.
        held_out_documents: Functions of the held-out packages, to be searched.
        held_out_queries: How many of them are also asked for.
    """

    in_domain_documents: int
    in_domain_queries: int
    held_out_documents: int
    held_out_queries: int


class EvaluationSet(NamedTuple):
    """Functions to search, and those among them whose first sentences are the queries; both sorted by id."""

    documents: list[DocumentedFunction]
    queries: list[DocumentedFunction]


class DocstringSplit(NamedTuple):
    """Functions to train on, sorted by id, and two sets that share none with them."""

    train: list[DocumentedFunction]
    in_domain: EvaluationSet
    held_out: EvaluationSet


def split_functions(
    functions: Sequence[DocumentedFunction], held_out_packages: Collection[str], sizes: SplitSizes, seed: int
) -> DocstringSplit:
    """Cut functions without copies among them into a training set and two evaluation sets.

    Determinism: the split depends on the functions (not on their order), the sizes and the seed.

    Args:
        functions: What `deduplicate` left.
        held_out_packages: Packages that are never trained on.
        sizes: Sizes of the evaluation sets; a held-out set smaller than its size is taken whole.
        seed: Seed of the draws.

    Raises:
        OptionError: If a set would be empty, or taking the in-domain documents out would leave nothing to train on.
    """
    ordered = sorted(functions)
    held_out = [function for function in ordered if function.package in held_out_packages]
    trainable = [function for function in ordered if function.package not in held_out_packages]
    if not held_out:
        raise OptionError(
            "held_out_packages", sorted(held_out_packages), "must have documented functions", "name larger packages"
        )
    if len(trainable) <= sizes.in_domain_documents:
        raise OptionError(
            "num_in_domain_documents",
            sizes.in_domain_documents,
            f"must leave functions to train on, and packages has {len(trainable)} documented ones",
            "lower it, or add packages",
        )
    in_domain = _draw(trainable, sizes.in_domain_documents, seed, "in_domain")
    taken = {function.id for function in in_domain}
    return DocstringSplit(
        [function for function in trainable if function.id not in taken],
        EvaluationSet(in_domain, _draw(in_domain, sizes.in_domain_queries, seed, "in_domain_queries")),
        _evaluation_set(held_out, sizes, seed),
    )


def _evaluation_set(held_out: list[DocumentedFunction], sizes: SplitSizes, seed: int) -> EvaluationSet:
    documents = _draw(held_out, sizes.held_out_documents, seed, "held_out")
    return EvaluationSet(documents, _draw(documents, sizes.held_out_queries, seed, "held_out_queries"))


def _draw(functions: list[DocumentedFunction], most: int, seed: int, stream: str) -> list[DocumentedFunction]:
    if len(functions) <= most:
        return functions
    rows = numpy_generator(seed, stream).choice(len(functions), size=most, replace=False)
    return [functions[row] for row in sorted(rows.tolist())]
