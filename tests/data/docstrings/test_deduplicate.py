import random
import re
from dataclasses import astuple

import pytest

from embeddings.data.docstrings.corpus import (
    BOILERPLATE_FUNCTIONS,
    NEAR_DUPLICATE_JACCARD,
    Removed,
    deduplicate,
    near_duplicates,
    normalised_query,
)
from embeddings.data.docstrings.extract import DocumentedFunction


def function(name: str, query: str, body: str) -> DocumentedFunction:
    return DocumentedFunction(f"p.m.{name}", "p", "p.m", query, f"p.m.{name}\n{body}")


def words(seed: int, count: int = 60) -> str:
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(10_000)}" for _ in range(count))


def jaccard(first: str, second: str) -> float:
    grams = [
        {tuple(text[i : i + 3]) for i in range(len(text) - 3 + 1)}
        for text in (re.findall(r"\w+", first), re.findall(r"\w+", second))
    ]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def test_each_rule_takes_out_what_it_names() -> None:
    common = [function(f"common{i}", "Plot the metric's values", words(100 + i)) for i in range(4)]
    assert len(common) > BOILERPLATE_FUNCTIONS
    first, second = function("one", "Add all the numbers", words(1)), function("two", "Sort all the names", words(2))
    near = words(1).split()
    near[30] = "other"
    functions = [
        first,
        second,
        first._replace(query="Set all the numbers", document="p.m.one\n" + words(3)),
        function("copy", "Copy the first one", words(1).replace(" ", "\n  ")),
        function("near", "Nearly the first one", " ".join(near)),
        function("twin", "sorts all names.", words(4)),
        *common,
    ]
    kept, removed = deduplicate(functions)
    assert kept == [first, second]
    assert removed == Removed(same_name=1, same_code=1, near_duplicate=1, boilerplate_query=4, same_query=1)
    assert len(kept) + sum(astuple(removed)) == len(functions)


def test_nothing_and_one_function_pass_through() -> None:
    assert deduplicate([])[0] == []
    only = function("one", "Add all the numbers", "x")
    assert deduplicate([only])[0] == [only]


def test_the_earlier_of_two_copies_stays() -> None:
    first, second = function("one", "Add all the numbers", words(1)), function("two", "Sort all the names", words(1))
    assert deduplicate([first, second])[0] == [first]
    assert deduplicate([second, first])[0] == [second]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Returns the sum of `values`.", "return sum of values", True),
        ("Add an edge", "Add the edge", True),
        ("Convert a string to bytes", "Convert bytes to a string", False),
        ("Pass s", "Pass", False),
    ],
)
def test_queries_are_one_when_only_grammar_differs(first: str, second: str, same: bool) -> None:
    assert (normalised_query(first) == normalised_query(second)) == same


def test_near_duplicates_are_those_that_a_loop_over_all_pairs_finds() -> None:
    generator = random.Random(0)
    texts: list[str] = []
    for seed in range(40):
        base = words(seed).split()
        for changes in (0, 2, 3, 4, 6):
            changed = list(base)
            for position in generator.sample(range(len(base)), changes):
                changed[position] = f"new{generator.randrange(10_000)}"
            texts.append(" ".join(changed))
    expected: list[bool] = []
    for index, text in enumerate(texts):
        earlier = [other for other, copy in zip(texts[:index], expected, strict=True) if not copy]
        expected.append(any(jaccard(text, other) >= NEAR_DUPLICATE_JACCARD for other in earlier))
    assert near_duplicates(texts) == expected
    assert 40 < sum(expected) < 160


@pytest.mark.parametrize("text", ["", "one", "one two", "one two three", "one two three four"])
def test_short_texts_are_near_duplicates_of_themselves_alone(text: str) -> None:
    assert near_duplicates([text, "quite another text of six words", text]) == [False, False, True]
    assert near_duplicates([text]) == [False]
