"""Summaries and descriptions of installed packages: a small search of English prose that every machine has."""

import re
from importlib.metadata import distributions
from typing import NamedTuple

MAX_CHARACTERS = 2000
_MIN_SUMMARY_WORDS, _MIN_LINE_WORDS, _MIN_WORDS = 4, 5, 30
_WORD = re.compile(r"[^\W\d_]{2,}")
# Badges, links, HTML, directives and tables.
_MARKUP = re.compile(r"\]\(|https?:|^[<|.]")


class PackageDescription(NamedTuple):
    """A package, the one line that summarises it, and the prose of its description without that line."""

    name: str
    summary: str
    description: str


def package_descriptions() -> list[PackageDescription]:
    """The installed packages with a summary and a description of their own, by name.

    Headings, links and other lines of markup are left out, and so are packages with another one's summary.
    """
    found: dict[str, PackageDescription] = {}
    for distribution in distributions():
        metadata = distribution.metadata
        # A damaged installation has no metadata.
        name, summary = str(metadata["Name"] or "").lower(), " ".join(str(metadata["Summary"] or "").split())
        lines = str(metadata.get_payload() or metadata["Description"] or "").splitlines()  # type: ignore[attr-defined]
        prose = " ".join(" ".join(line.split()) for line in lines if _is_prose(line.strip()))
        description = prose.replace(summary.rstrip("."), "").lstrip(" .")[:MAX_CHARACTERS]
        if len(summary.split()) >= _MIN_SUMMARY_WORDS and len(_WORD.findall(description)) >= _MIN_WORDS:
            found.setdefault(name, PackageDescription(name, summary, description))
    by_summary: dict[str, PackageDescription] = {}
    for each in sorted(found.values()):
        by_summary.setdefault(each.summary.lower(), each)
    return list(by_summary.values())


def _is_prose(line: str) -> bool:
    return len(_WORD.findall(line)) >= _MIN_LINE_WORDS and _MARKUP.search(line) is None
