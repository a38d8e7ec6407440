"""What a field of a row must hold is said in one line where it does not."""

import pytest

from embeddings.common import InputError
from embeddings.evaluation.fields import filled_text, filled_texts, finite_numbers


def test_what_is_there_is_returned():
    row = {"text": " a ", "texts": ["a", "b"], "marks": [1, 0.5, -2]}
    assert filled_text("f:1", row, "text") == " a "
    assert filled_texts("f:1", row, "texts") == ["a", "b"]
    assert finite_numbers("f:1", row, "marks") == [1.0, 0.5, -2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"f:1: field 'x' is null, expected a list; write it as a list"),
        ("a", r"field 'x' is text, expected a list"),
        ([], r"field 'x' is an empty list, expected a list"),
        (["a", " "], r"field 'x\[1\]' is empty; give it a text"),
        (["a", 3], r"field 'x\[1\]' is a number, expected text"),
    ],
)
def test_a_list_of_texts_is_checked_whole(value, message):
    with pytest.raises(InputError, match=message):
        filled_texts("f:1", {"x": value}, "x")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"field 'x' is a number, expected a list"),
        ([1, "2"], r"x\[1\] is text, expected a finite number"),
        ([True], r"x\[0\] is true or false, expected a finite number"),
        ([1, float("nan")], r"x\[1\] is nan, expected a finite number"),
        ([float("inf")], r"x\[0\] is inf, expected a finite number"),
    ],
)
def test_a_list_of_numbers_is_checked_whole(value, message):
    with pytest.raises(InputError, match=message):
        finite_numbers("f:1", {"x": value}, "x")


@pytest.mark.parametrize("reader", [filled_text, filled_texts, finite_numbers])
def test_a_missing_field_is_named_with_those_that_are_there(reader):
    with pytest.raises(InputError, match=r"f:1: field 'x' is missing \(found: y\)"):
        reader("f:1", {"y": 1}, "x")


def test_an_empty_text_has_the_way_out_that_its_caller_gives():
    with pytest.raises(InputError, match=r"field 'x' is empty; write the query"):
        filled_text("f:1", {"x": "\n"}, "x", "write the query")
