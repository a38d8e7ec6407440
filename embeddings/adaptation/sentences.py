"""Sentences and lengths of texts in any script, by Unicode's properties."""

from itertools import takewhile
from typing import NamedTuple

import regex

# Unicode's characters with QUESTION MARK in their names that end a sentence. A Greek question mark is a semicolon.
QUESTION_MARKS = "?\u037e\u061f\u1367\u1945\u2047\u2049\u2cfa\u2cfb\u2e2e\u2e54\ua60f\ua6f7\ufe16\ufe56\uff1f\U00011143"

# The end of a sentence: terminators with the closing quotes and brackets after them.
_END = regex.compile(
    r"(?V1)(?:[\p{SB=AT}\p{SB=ST}]|(?<=\p{Greek}[\p{SB=CL}]?)[;\u037e])+[[\p{SB=CL}\p{M}]--[\p{Ps}\p{Pi}]]*"
)
_CLOSE = regex.compile(r"\p{SB=CL}")
_STRONG = regex.compile(r"\p{SB=ST}|;")
# The letter or terminator that decides whether a full stop ends a sentence (rule SB8 of UAX #29).
_DECIDING = regex.compile(r"[^\p{L}\p{SB=AT}\p{SB=ST}]*(.)")
_LOWER = regex.compile(r"\p{Ll}")
_CONTINUES = regex.compile(r"\s*\p{SB=SC}")
_LAST_WORD = regex.compile(r"[\p{L}\p{M}\p{N}.'’]*\Z")
# A single letter, letters with inner full stops (U.S), or a title without a vowel (Dr, Mrs).
_ABBREVIATION = regex.compile(r"\p{L}\p{M}*|.*\p{L}.*\..*|\p{Lu}[bcdfghjklmnpqrstvwxz]{1,2}")
_SHORT_WORD = regex.compile(r"\p{L}{1,4}")
_GREEK_QUESTION = regex.compile(r"\p{Greek}\W?;\W?\Z")
# What a block of text begins with: a bullet, a number or a quote mark of Markdown.
_MARKER = regex.compile(r"[ \t]*(?:(?:[-*+•‣◦]|\d{1,3}[.)]|>+)[ \t]+)*")
# A blank line, and the start of an item, heading, table row or fence, end a block.
_BLOCK_END = regex.compile(r"\n[ \t\r]*\n\s*|\n(?=[ \t]*(?:[-*+•‣◦][ \t]|\d{1,3}[.)][ \t]|\#{1,6}[ \t]|\||```|~~~|>))")
_FENCE = regex.compile(r"^[ \t]*(```+|~~~+)[^\n]*\n.*?(?:^[ \t]*\1[^\n]*$|\Z)", regex.DOTALL | regex.MULTILINE)
_TABLE_ROW = regex.compile(r"^[^\n|]*\S \| [^\n]*$", regex.MULTILINE)
_NO_PROSE = regex.compile(r"[ \t]*(?:\||\#{1,6}[ \t]|[=\-~^]{3,}\s*$)")

_SPACE, _WORD = regex.compile(r"\s*"), regex.compile(r"[\w\p{M}]+")
# Scripts without spaces: Chinese and Japanese, some two characters a word, and those of South-East Asia, some four.
_HAN = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}]")
_THAI = regex.compile(r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_SPACED_WORD = regex.compile(r"[^\W\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}][\w\p{M}'’-]*")
_PUNCTUATION = regex.compile(r"[\p{SB=AT}\p{SB=ST}\p{SB=SC}\"'“”‘’«»「」『』\s]+")
_NO_LETTER = regex.compile(r"[^\p{L}\p{M}]+")
_MARKUP = (
    (regex.compile(r"!\[([^\[\]]*)\]\([^()\s]*\)"), r"\1"),
    (regex.compile(r"\[([^\[\]]+)\]\([^()\s]*(?:\s+\"[^\"]*\")?\)"), r"\1"),
    (regex.compile(r"\[\^[\w-]+\]|</?[A-Za-z][^<>]{0,200}>"), ""),
    (regex.compile(r"`{1,3}([^`\n]+)`{1,3}|\{@\w+\s+([^{}]+)\}"), r"\1\2"),
    (regex.compile(r"(?<![\w*])(\*{1,3}|_{2})(?=\S)([^*\n]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    # One of two marks, if a sentence ends between them.
    (regex.compile(r"\*{2,3}"), ""),
)


class Sentence(NamedTuple):
    """A part of a text: its first and last position, and whether a terminator ends it."""

    start: int
    stop: int
    is_finished: bool


def sentences(text: str) -> list[Sentence]:
    """The sentences of a text, in order, without the space, bullets and numbers between them.

    Terminators are those of Unicode in every script. A full stop ends a sentence as in UAX #29, rules SB6 to SB8: not
    before a lower-case letter, unless the text has no upper case at all. Differs: this holds for all terminators; a
    single letter, letters with inner full stops and titles such as Dr are abbreviations; a terminator of ASCII, or a
    quote or bracket after a terminator, needs white space after it; a line end is a space, and a blank line, list item
    or heading ends a sentence, which is then unfinished. Headings, tables and fenced code contain no sentences.
    """
    found: list[Sentence] = []
    # Fenced code and rows of tables become blank lines.
    for pattern in (_FENCE, _TABLE_ROW):
        text = pattern.sub(lambda match: "\n" * len(match[0]), text)
    has_upper = any(map(str.isupper, text))
    edges = [0, *(edge for match in _BLOCK_END.finditer(text) for edge in match.span()), len(text)]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if _NO_PROSE.match(text, start, stop):
            continue
        start = _MARKER.match(text, start, stop).end()
        for match in _END.finditer(text, start, stop):
            if _ends_sentence(text, start, match, stop, has_upper):
                found.append(Sentence(start, match.end(), True))
                start = _SPACE.match(text, match.end(), stop).end()
        rest = text[start:stop].rstrip()
        if rest:
            found.append(Sentence(start, start + len(rest), False))
    return [each for each in found if _WORD.search(text, each.start, each.stop)]


def _ends_sentence(text: str, start: int, match: "regex.Match[str]", stop: int, has_upper: bool) -> bool:
    """Whether terminators end the sentence that begins at `start`; `stop` is the end of their block."""
    begin, end = match.span()
    after = text[end : end + 1] if end < stop else ""
    if not after:
        return True
    if _CONTINUES.match(text, end, stop):
        return False
    if not after.isspace() and (text[begin].isascii() or _CLOSE.match(text, end - 1)):
        return False
    deciding = _DECIDING.match(text, end, stop)
    if has_upper and deciding is not None and _LOWER.match(deciding[1]):
        return False
    if _STRONG.search(text, begin, end):
        return True
    before = text[max(start, begin - 40) : begin]
    if not before or before[-1:].isspace():
        return bool(before.strip())
    word = _LAST_WORD.search(before)[0]
    if _ABBREVIATION.fullmatch(word) or (word.isdigit() and begin - len(word) == start):
        return False
    return not (text[end:stop].lstrip()[:1].isnumeric() and _SHORT_WORD.fullmatch(word))


def without(text: str, start: int, stop: int) -> str:
    """The text without a part, and without a bullet that would be left alone."""
    before, after = text[:start], text[stop:]
    line = before.rpartition("\n")[2]
    if _MARKER.fullmatch(line) and (not after.strip() or after.lstrip(" \t")[:1] == "\n"):
        before = before[: len(before) - len(line)]
    gap = max((before[len(before.rstrip()) :], after[: len(after) - len(after.lstrip())]), key=len)
    return f"{before.rstrip()}{gap}{after.lstrip()}".strip()


def plain(text: str) -> str:
    """A sentence on one line, without the markup of Markdown and HTML."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    # One quote of two, if a sentence ends between them.
    return " ".join((text if text.count('"') % 2 == 0 else text.replace('"', "")).split())


def is_question(sentence: str) -> bool:
    """Whether a sentence ends with the question mark of any script."""
    end = sentence[-12:]
    closing = takewhile(lambda letter: not letter.isalnum(), reversed(end))
    return any(letter in QUESTION_MARKS for letter in closing) or _GREEK_QUESTION.search(end) is not None


def num_words(text: str) -> float:
    """The number of words; in scripts without spaces half of the characters, in those of South-East Asia a quarter."""
    if text.isascii():
        return len(text.split())
    return len(_SPACED_WORD.findall(text)) + len(_HAN.findall(text)) / 2 + len(_THAI.findall(text)) / 4


def letter_share(text: str) -> float:
    """The share of letters and their marks in a text without white space and usual punctuation."""
    characters = _PUNCTUATION.sub("", text)
    return len(_NO_LETTER.sub("", characters)) / max(1, len(characters))
