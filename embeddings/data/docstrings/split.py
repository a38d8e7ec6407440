"""Which functions train and which ones test."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from embeddings.common.errors import OptionError
from embeddings.common.randomness import numpy_generator
from embeddings.data.docstrings.extract import DocumentedFunction


class SplitSizes(NamedTuple):
    """Most functions of each evaluation set.

    Attributes:
        validation_documents: Functions of the training packages that are taken out of training, to be searched while
            training, by which the best checkpoint is chosen.
        validation_queries: How many of them are also asked for.
        in_domain_documents: More of them, to be searched when training is over.
        in_domain_queries: How many of them are also asked for.
        held_out_documents: Functions of the held-out packages, to be searched.
        held_out_queries: How many of them are also asked for.
    """

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
    """Cut functions without copies among them into a training set and three evaluation sets.

    Determinism: the split depends on the functions (not on their order), the sizes and the seed.

    Args:
        functions: What `deduplicate` left.
        held_out_packages: Packages that are never trained on.
        sizes: Sizes of the evaluation sets; a held-out set smaller than its size is taken whole.
        seed: Seed of the draws.

    Raises:
        OptionError: If a set would be empty, or taking the others out would leave nothing to train on.
    """
    ordered = sorted(functions)
    held_out = [function for function in ordered if function.package in held_out_packages]
    trainable = [function for function in ordered if function.package not in held_out_packages]
    if not held_out:
        raise OptionError(
            "held_out_packages", sorted(held_out_packages), "must have documented functions", "name larger packages"
        )
    num_taken = sizes.validation_documents + sizes.in_domain_documents
    if len(trainable) <= num_taken:
        raise OptionError(
            "num_validation_documents + num_in_domain_documents",
            num_taken,
            f"must leave functions to train on, and packages has {len(trainable)} documented ones",
            "lower it, or add packages",
        )
    in_domain = _evaluation_set(trainable, sizes.in_domain_documents, sizes.in_domain_queries, seed, "in_domain")
    trainable = _without(trainable, in_domain.documents)
    validation = _evaluation_set(trainable, sizes.validation_documents, sizes.validation_queries, seed, "validation")
    return DocstringSplit(
        _without(trainable, validation.documents),
        validation,
        in_domain,
        _evaluation_set(held_out, sizes.held_out_documents, sizes.held_out_queries, seed, "held_out"),
    )


def _evaluation_set(
    functions: list[DocumentedFunction], num_documents: int, num_queries: int, seed: int, stream: str
) -> EvaluationSet:
    documents = _draw(functions, num_documents, seed, stream)
    return EvaluationSet(documents, _draw(documents, num_queries, seed, f"{stream}_queries"))


def _without(functions: list[DocumentedFunction], taken: list[DocumentedFunction]) -> list[DocumentedFunction]:
    ids = {function.id for function in taken}
    return [function for function in functions if function.id not in ids]


def _draw(functions: list[DocumentedFunction], most: int, seed: int, stream: str) -> list[DocumentedFunction]:
    if len(functions) <= most:
        return functions
    rows = numpy_generator(seed, stream).choice(len(functions), size=most, replace=False)
    return [functions[row] for row in sorted(rows.tolist())]
