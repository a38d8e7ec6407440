"""Fields of a row of an evaluation set that must hold something."""

from collections.abc import Mapping
from typing import Any

from embeddings.common.errors import InputError
from embeddings.data.records import kind_of
from embeddings.inference.corpus import text_field


def filled_text(where: str, fields: Mapping[str, Any], name: str, fix: str = "give it a text, or drop the row") -> str:
    """The text in a field of a row.

    Args:
        where: File and row, for messages.
        fields: The row.
        name: The field.
        fix: The way out where it is empty.

    Raises:
        InputError: If the field is missing, no text, empty, or white space alone.
    """
    value = text_field(where, fields, name)
    if not value.strip():
        raise InputError(where, f"field {name!r} is empty", fix)
    return value


def filled_texts(where: str, fields: Mapping[str, Any], name: str) -> list[str]:
    """The texts in a list of one or more, which a field of a row holds.

    Raises:
        InputError: If the field is missing, no list, empty, or holds something else than texts with something in them.
    """
    return [filled_text(where, {place: value}, place) for place, value in _items(where, fields, name)]


def finite_numbers(where: str, fields: Mapping[str, Any], name: str) -> list[float]:
    """The numbers in a list of one or more, which a field of a row holds.

    Raises:
        InputError: If the field is missing, no list, empty, or holds something else than finite numbers.
    """
    numbers = []
    for place, value in _items(where, fields, name):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            shown = value if isinstance(value, float) else kind_of(value)
            raise InputError(where, f"{place} is {shown}, expected a finite number", "give it a number")
        numbers.append(float(value))
    return numbers


def _items(where: str, fields: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    if name not in fields:
        text_field(where, fields, name)
    value = fields[name]
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else kind_of(value)
        raise InputError(where, f"field {name!r} is {found}, expected a list", "write it as a list, even of one")
    return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
