"""Texts in pieces, wrapped over lines of even columns."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from embeddings.figures.glyphs import LINE_BREAK, width


class Part(NamedTuple):
    """A stretch of text that is drawn alike.

    Attributes:
        text: Its characters as they are drawn.
        owner: Which piece it belongs to; None between pieces.
        stays_whole: Whether it is neither broken over lines nor joined to its neighbours, as a special token is.
    """

    text: str
    owner: int | None
    stays_whole: bool = False


class Run(NamedTuple):
    """Characters of one part on one line.

    Attributes:
        line: From 0.
        column: Of its first character, from 0.
        text: The characters.
        num_columns: How wide they are.
        owner: As its part's.
    """

    line: int
    column: int
    text: str
    num_columns: int
    owner: int | None


class _Letter(NamedTuple):
    text: str
    num_columns: int
    part: int


def wrapped(parts: Sequence[Part], num_columns: int) -> list[Run]:
    """The parts on lines of at most `num_columns`: words stay whole where they fit a line.

    A line ends before a word, before or after an ideograph, or after a line break of the text. Spaces at the ends of
    lines are dropped.
    """
    placed: list[tuple[int, int, _Letter]] = []
    line = column = 0
    for word in _words(parts):
        wide = sum(letter.num_columns for letter in word)
        is_space = word[0].text == " "
        if column and column + wide > num_columns:
            line, column = line + 1, 0
        if is_space and column == 0:
            continue
        for letter in word:
            if column + letter.num_columns > num_columns and column:
                line, column = line + 1, 0
            placed.append((line, column, letter))
            column += letter.num_columns
        if word[-1].text == LINE_BREAK:
            line, column = line + 1, 0
    return list(_runs(placed, parts))


def _words(parts: Sequence[Part]) -> Iterator[list[_Letter]]:
    """Letters that stay on one line where they can; a space is a word of its own."""
    word: list[_Letter] = []
    for index, part in enumerate(parts):
        if part.stays_whole:
            if word:
                yield word
            yield [_Letter(part.text, sum(map(width, part.text)), index)]
            word = []
            continue
        for character in part.text:
            letter = _Letter(character, width(character), index)
            if word and _may_part(word[-1], letter):
                yield word
                word = []
            word.append(letter)
    if word:
        yield word


def _may_part(before: _Letter, after: _Letter) -> bool:
    """Whether a line may end between two letters; a mark stays on its ideograph."""
    if before.text in (" ", LINE_BREAK) or after.text in (" ", LINE_BREAK):
        return True
    return after.num_columns > 0 and 2 in (before.num_columns, after.num_columns)


def _runs(placed: Sequence[tuple[int, int, _Letter]], parts: Sequence[Part]) -> Iterator[Run]:
    start = 0
    for end in range(1, len(placed) + 1):
        line, column, first = placed[start]
        if end < len(placed) and (placed[end][0], placed[end][2].part) == (line, first.part):
            continue
        letters = [letter for _, _, letter in placed[start:end]]
        text = "".join(letter.text for letter in letters)
        yield Run(line, column, text, sum(letter.num_columns for letter in letters), parts[first.part].owner)
        start = end
