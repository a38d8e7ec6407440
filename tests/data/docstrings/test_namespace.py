import pytest

from embeddings.data.docstrings.corpus import namespace_negatives
from embeddings.data.docstrings.extract import DocumentedFunction


def function(name: str, package: str, module: str) -> DocumentedFunction:
    return DocumentedFunction(f"{module}.{name}", package, module, f"query of {name}", f"{module}.{name}")


FUNCTIONS = [
    function(name, package, f"{package}.{module}")
    for package in ("p", "q")
    for module in ("one", "two")
    for name in ("f", "g", "A.x", "A.y", "B.x", "B.y")
]


def granularity(first: str, second: str) -> int:
    """The level by eye: 1 same class or top level, 2 same module, 3 same package, 4 another."""
    if first.split(".")[0] != second.split(".")[0]:
        return 4
    if first.split(".")[:2] != second.split(".")[:2]:
        return 3
    return 1 if first.split(".")[:-1] == second.split(".")[:-1] else 2


def test_each_level_holds_what_it_says_hardest_first() -> None:
    checked = 0
    for own, negatives in zip(FUNCTIONS, namespace_negatives(FUNCTIONS, seed=0), strict=True):
        assert [negative.level for negative in negatives] == sorted(negative.level for negative in negatives)
        for negative in negatives:
            assert negative.text != own.document
            assert granularity(own.id, negative.text) == negative.level
            checked += 1
    assert checked > 3.5 * len(FUNCTIONS)


def test_the_draws_follow_from_the_seed() -> None:
    assert namespace_negatives(FUNCTIONS, 1) == namespace_negatives(FUNCTIONS, 1)
    assert namespace_negatives(FUNCTIONS, 1) != namespace_negatives(FUNCTIONS, 2)


@pytest.mark.parametrize("count", [0, 1])
def test_a_function_without_neighbours_has_no_negatives(count: int) -> None:
    assert namespace_negatives(FUNCTIONS[:count], 0) == [()] * count
