"""Griffe extension for the Python reference: every section of a docstring becomes a separate paragraph."""

import re
from typing import Any

from griffe import Extension, Object

# Sections of griffe's format, which need an empty line before them, and our own, which become a paragraph with a title.
KNOWN = r"Args|Attributes|Raises|Returns|Yields"
OWN = r"[A-Z][a-z]+/precision|Conversions|Determinism|Differs|Distributed|Guarantees|Length|Precision|Related|Source"


def spaced(text: str) -> str:
    """The docstring with an empty line before each section."""
    text = re.sub(rf"\n(?=(?:{KNOWN}):\n)", "\n\n", text)
    return re.sub(rf"(?:^|\n)({OWN}):(?=\s)", r"\n\n**\1:**", text).lstrip()


class Sections(Extension):
    """Adds empty lines before sections, before griffe parses a docstring."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of a loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = spaced(obj.docstring.value)
