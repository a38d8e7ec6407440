"""Letters that can be drawn: fonts with even letters, and a box in the place of what no installed font has."""

from dataclasses import dataclass
from functools import cache
from unicodedata import category, east_asian_width

from embeddings.figures.png import pyplot

MISSING = "□"
LINE_BREAK = "↵"
# Comes with matplotlib; then whichever of these a machine has, for what it lacks.
_FIRST = "DejaVu Sans Mono"
_OTHERS = (
    "DejaVu Sans",
    "Noto Sans Mono CJK SC",
    "Noto Sans Mono CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "IPAGothic",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "MS Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Unifont",
)


@dataclass(frozen=True)
class Fonts:
    """The fonts of a machine that texts are drawn in.

    Attributes:
        names: Families, each for what those before it lack.
        known: Code points that one of them has.
    """

    names: tuple[str, ...]
    known: frozenset[int]

    @property
    def of_headings(self) -> list[str]:
        """The families, one whose letters are as wide as they need be first."""
        return [*self.names[1:2], *self.names]


@cache
def installed_fonts() -> Fonts:
    """The fonts that there are; matplotlib warns of none of them."""
    pyplot()
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    paths: dict[str, str] = {}
    for entry in fontManager.ttflist:
        if entry.style == "normal" and str(entry.weight) in ("400", "normal", "regular", "book"):
            paths.setdefault(entry.name, entry.fname)
    names = tuple(name for name in (_FIRST, *_OTHERS) if name in paths)
    known = frozenset(code for name in names for code in FT2Font(paths[name]).get_charmap())
    return Fonts(names, known)


def drawable(text: str, known: frozenset[int]) -> str:
    """The text, one character for each that it has: white space as spaces, a box for what has no glyph."""
    return "".join(_drawn(letter, known) for letter in text)


def width(letter: str) -> int:
    """How many columns a drawn character takes: none for a mark on the one before, two for an ideograph."""
    if category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(letter) in ("W", "F") else 1


def shortened(text: str, num_columns: int) -> str:
    """The beginning of a drawn text on one line of at most so many columns, an ellipsis where more follows."""
    line, columns, kept = " ".join(text.split()), 0, 0
    for place, letter in enumerate(line):
        columns += width(letter)
        if columns > num_columns:
            return f"{line[:kept]}…"
        if columns < num_columns:
            kept = place + 1
    return line or "…"


def _drawn(letter: str, known: frozenset[int]) -> str:
    if letter == "\n":
        return LINE_BREAK
    if letter.isspace():
        return " "
    if ord(letter) in known or category(letter) == "Cf":
        return letter
    return MISSING
