"""The licence that a published model states of itself."""

import re
from pathlib import Path

_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", re.DOTALL)
_LICENCE = re.compile(r"""^license:[ \t]*["']?([A-Za-z0-9][A-Za-z0-9.+-]*)["']?[ \t]*$""", re.MULTILINE)


def stated_licence(folder: Path) -> str | None:
    """The `license` of the front matter of a folder's `README.md`, as the Hub names it; None where it states none.

    Nothing else of the file is read, and nothing of it is copied. Of several licences none is taken.

    Args:
        folder: Where the published files lie.
    """
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = _FRONT_MATTER.match(text.removeprefix("\ufeff"))
    found = _LICENCE.findall(front[1]) if front else []
    return str(found[0]).lower() if len(found) == 1 else None
