import random

import pytest

from embeddings.common import OptionError
from embeddings.data.docstrings.corpus import SplitSizes, split_functions
from embeddings.data.docstrings.extract import DocumentedFunction

SIZES = SplitSizes(
    validation_documents=2,
    validation_queries=1,
    in_domain_documents=6,
    in_domain_queries=3,
    held_out_documents=5,
    held_out_queries=2,
)


def functions(package: str, count: int) -> list[DocumentedFunction]:
    return [DocumentedFunction(f"{package}.f{i:02}", package, package, f"query {i}", f"code {i}") for i in range(count)]


def test_the_parts_are_disjoint_sorted_and_of_the_sizes_asked_for() -> None:
    given = functions("a", 10) + functions("b", 10) + functions("held", 8)
    split = split_functions(given, {"held"}, SIZES, seed=0)
    assert len(split.train) == 12
    assert [len(part) for part in (*split.validation, *split.in_domain, *split.held_out)] == [2, 1, 6, 3, 5, 2]
    assert sorted(split.train + split.validation.documents + split.in_domain.documents) == sorted(given[:20])
    assert set(split.held_out.documents) < set(given[20:])
    for evaluation in (split.validation, split.in_domain, split.held_out):
        assert set(evaluation.queries) < set(evaluation.documents)
    for part in (split.train, *split.validation, *split.in_domain, *split.held_out):
        assert part == sorted(part)


def test_the_split_depends_on_the_seed_and_not_on_the_order() -> None:
    given = functions("a", 30) + functions("held", 8)
    shuffled = random.Random(1).sample(given, len(given))
    assert split_functions(given, {"held"}, SIZES, 0) == split_functions(shuffled, {"held"}, SIZES, 0)
    assert split_functions(given, {"held"}, SIZES, 0) != split_functions(given, {"held"}, SIZES, 1)


def test_a_small_held_out_package_is_taken_whole() -> None:
    split = split_functions(functions("a", 9) + functions("held", 1), {"held"}, SIZES, 0)
    assert len(split.train) == 1
    assert split.held_out.documents == split.held_out.queries == functions("held", 1)


def test_empty_parts_are_refused() -> None:
    with pytest.raises(OptionError, match="held_out_packages must have documented functions"):
        split_functions(functions("a", 10), {"held"}, SIZES, 0)
    with pytest.raises(
        OptionError, match=r"num_validation_documents \+ num_in_domain_documents must leave functions to train on"
    ):
        split_functions(functions("a", 8) + functions("held", 1), {"held"}, SIZES, 0)
