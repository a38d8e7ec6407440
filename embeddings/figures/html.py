"""Markup in which whatever is not markup already is text: nothing that comes from a file can become an element."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

_WITHOUT_CONTENT = ("img", "meta")


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str) -> Html:
    """An element.

    Args:
        tag: Its name.
        content: What it holds; what is not `Html` is escaped.
        attributes: Its attributes; an underscore at a name's end is left out (`class_`).
    """
    given = "".join(f' {name.rstrip("_")}="{_escaped(value)}"' for name, value in attributes.items())
    return Html(f"<{tag}{given}>" if tag in _WITHOUT_CONTENT else f"<{tag}{given}>{joined(content)}</{tag}>")


def joined(content: Iterable[str]) -> Html:
    """Pieces one after another; what is not `Html` is escaped."""
    return Html("".join(piece if isinstance(piece, Html) else _escaped(piece) for piece in content))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table with a head; cells that begin with a digit or sign are set as numbers."""
    heads = element("tr", *(element("th", cell) for cell in head))
    body = (element("tr", *(_cell(cell) for cell in row)) for row in rows)
    return element("table", element("thead", heads), element("tbody", *body))


def definitions(rows: Iterable[tuple[str, str]]) -> Html:
    """Names and what each is."""
    return element("dl", *(joined([element("dt", name), element("dd", value)]) for name, value in rows))


def png_image(content: bytes, description: str) -> Html:
    """A picture inside the page itself."""
    return element("img", src=f"data:image/png;base64,{b64encode(content).decode()}", alt=description)


def _cell(cell: str) -> Html:
    is_number = cell.lstrip("-+").replace(",", "").split(" ")[0].rstrip("%").replace(".", "", 1).isdecimal()
    return element("td", cell, **({"class_": "number"} if is_number else {}))


def _escaped(text: str) -> str:
    # Half a character of a damaged file cannot be written.
    return escape(text.encode("utf-8", "replace").decode())
