"""Passages of documents: by their sections, within a number of tokens, cut at the ends of paragraphs and sentences."""

import math
import textwrap
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple, Self

import regex
from transformers import PreTrainedTokenizerBase

from embeddings.adaptation.markup import Block, Document, Link
from embeddings.adaptation.sentences import sentences
from embeddings.common import TextSettings
from embeddings.common.errors import OptionError
from embeddings.data.tokenize import TextTokenizer, copied_backend
from embeddings.models.backbone import model_without_weights, read_tokenizer
from embeddings.models.directory import read_text_settings
from embeddings.models.model_files import resolve_model

# Without an option, passages have at most so many tokens, also for models of longer texts.
DEFAULT_MAX_TOKENS = 256
LEAST_MAX_TOKENS = 32
# The share of a passage's tokens that its title may have, and below which neighbouring sections are merged.
_TITLE_SHARE, _SHORT_SHARE = 0.25, 0.15
# A passage is at least so long that a blank or unknown run of letters cannot hide in few tokens.
_LETTERS_PER_TOKEN = 16
# Longer texts are tokenised in parts, and so many parts at once.
_PART_LETTERS, _GROUP_PARTS = 20_000, 512
# What a cut costs, in passages: at a blank line, at the end of a sentence or line, elsewhere.
_BLANK_LINE, _FIRST_CHOICE, _SECOND_CHOICE, _WORD = 0.1, 0.3, 0.5, 1.0


class Passage(NamedTuple):
    """A part of a document: `text`, without common indentation, begins at `position` in the document's text."""

    title: str
    text: str
    position: int
    num_tokens: int
    links: tuple[Link, ...] = ()


class TokenCounter:
    """Counts tokens as a model sees documents: with its prompt and its special tokens.

    Args:
        tokenizer: A fast tokenizer.
        settings: The model's lengths, prompts and special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TextSettings) -> None:
        self.max_length = settings.document_max_length
        self._backend = copied_backend(tokenizer)
        self._unknown = tokenizer.unk_token_id
        # Letters within unknown tokens, of all texts whose tokens were found.
        self.num_unknown = 0
        self._prompt = settings.prompt(None, "document")
        counting = TextTokenizer(tokenizer, settings)
        self._num_reserved = counting.num_tokens("a") - len(self._backend.encode("a"))
        self.num_added = counting.num_tokens(self._prompt)
        words, gap = (len(self._backend.encode(text, add_special_tokens=False)) for text in ("a a", "a\n\na"))
        self.num_between_blocks = max(0, gap - words)

    @classmethod
    def of_model(cls, name: str) -> Self:
        """The counter of a model directory or Hub id, of which no weights are read."""
        folder = resolve_model(name)
        tokenizer = read_tokenizer(folder)
        settings = read_text_settings(folder, model_without_weights(folder), tokenizer)
        return cls(tokenizer, settings or TextSettings())

    def starts(self, texts: Sequence[str]) -> list["array[int]"]:
        """The position of each token in its text, without prompt and special tokens."""
        parts = [(number, *span) for number, text in enumerate(texts) for span in _parts(text)]
        starts = [array("i") for _ in texts]
        # Encodings take a hundred bytes a token.
        for group in (parts[row : row + _GROUP_PARTS] for row in range(0, len(parts), _GROUP_PARTS)):
            pieces = [texts[number][first:last] for number, first, last in group]
            encodings = self._backend.encode_batch(pieces, add_special_tokens=False)
            for (number, first, _), encoding in zip(group, encodings, strict=True):
                starts[number].extend(first + start for start, _ in encoding.offsets)
                tokens = zip(encoding.ids, encoding.offsets, strict=True)
                self.num_unknown += sum(end - start for token, (start, end) in tokens if token == self._unknown)
        return starts

    def lengths(self, texts: Sequence[str]) -> list[int]:
        encodings = self._backend.encode_batch_fast([self._prompt + text for text in texts])
        return [len(encoding) + self._num_reserved for encoding in encodings]


def _parts(text: str) -> Iterator[tuple[int, int]]:
    """Ranges of a text that are short enough to tokenise at once, cut before words."""
    start = 0
    while len(text) - start > _PART_LETTERS:
        space = max(text.rfind(" ", start, start + _PART_LETTERS), text.rfind("\n", start, start + _PART_LETTERS))
        end = space if space > start else start + _PART_LETTERS
        yield start, end
        start = end
    yield start, len(text)


class _Section(NamedTuple):
    """Consecutive blocks under one trail, and their heading, if it is a block."""

    trail: tuple[str, ...]
    blocks: list[Block]
    heading: Block | None = None
    is_merged: bool = False

    @property
    def with_heading(self) -> list[Block]:
        return self.blocks if self.heading is None else [self.heading, *self.blocks]


class _Unit(NamedTuple):
    """A part of a document that is not cut; `cost` is that of a cut before it."""

    start: int
    end: int
    num_tokens: int
    cost: float


class _Span(NamedTuple):
    """A range of a document's text, with the title and the blocks of its section."""

    document: int
    start: int
    end: int
    title: str
    blocks: Sequence[Block]


# The positions of the tokens of each block, by the block's start.
_Tokens = dict[int, "array[int]"]


class Splitter:
    """Cuts documents into passages.

    A passage lies in one section, whose trail of headings is its title; very short neighbouring sections share one.
    A section that is too long is cut into passages of similar length: between paragraphs, else before a sentence
    (or a line of code or of a list), and inside a sentence only if it alone is too long.

    Args:
        counter: Counts the tokens.
        max_tokens: Maximum number of tokens of title and text with prompt and special tokens; None for the model's
            maximum, and at most 256.
    """

    def __init__(self, counter: TokenCounter, max_tokens: int | None = None) -> None:
        if max_tokens is not None and not LEAST_MAX_TOKENS <= max_tokens <= counter.max_length:
            rule = f"must be from {LEAST_MAX_TOKENS} to {counter.max_length}, the model's maximum"
            raise OptionError("max_tokens", max_tokens, rule, "leave it out for the default")
        self.counter = counter
        self.max_tokens = max_tokens or min(counter.max_length, DEFAULT_MAX_TOKENS)
        self._num_free = self.max_tokens - counter.num_added
        self._max_title = int(_TITLE_SHARE * self._num_free)
        if self._num_free < LEAST_MAX_TOKENS // 2:
            rule = f"must leave room beside the {counter.num_added} tokens of the model's prompt"
            raise OptionError("max_tokens", self.max_tokens, rule, "raise it")

    def split(self, documents: Sequence[Document]) -> list[list[Passage]]:
        """The passages of each document; those without any letter or digit are left out."""
        blocks = [(document, block) for document in documents for block in document.blocks]
        starts = iter(self.counter.starts([document.text[block.start : block.end] for document, block in blocks]))
        tokens = [{block.start: next(starts) for block in document.blocks} for document in documents]
        sections = [
            (number, section)
            for number, document in enumerate(documents)
            for section in self._sections(document, tokens[number])
        ]
        spans = []
        for (number, section), (title, num_tokens) in zip(sections, self._titles(documents, sections), strict=True):
            document, of_block = documents[number], tokens[number]
            units = [unit for block in section.blocks for unit in self._units(document, block, of_block[block.start])]
            sizes, costs = [unit.num_tokens for unit in units], [unit.cost for unit in units]
            for first, last in pairwise(best_cuts(sizes, costs, self._num_free - num_tokens)):
                spans.append(_Span(number, units[first].start, units[last - 1].end, title, section.blocks))
        return self._finished(documents, spans)

    def _sections(self, document: Document, tokens: _Tokens) -> list[_Section]:
        sections: list[_Section] = []
        heading: Block | None = None
        for block in document.blocks:
            if block.kind == "heading":
                heading = block
                continue
            last = sections[-1] if sections else None
            if last is not None and last.trail == block.trail and _touch(document, last, block):
                last.blocks.append(block)
            else:
                is_own = heading is not None and heading.trail == block.trail
                sections.append(_Section(block.trail, [block], heading if is_own else None))
            heading = None
        merged: list[_Section] = []
        for section in sections:
            joined = self._joined(document, merged[-1], section, tokens) if merged else None
            if joined is not None:
                merged.pop()
            merged.append(joined or section)
        return merged

    def _joined(self, document: Document, first: _Section, second: _Section, tokens: _Tokens) -> _Section | None:
        """Two very short neighbouring sections as one under their parent; None if they are longer or no neighbours."""
        pairs = zip(first.trail, second.trail, strict=False)
        parent = tuple(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        blocks = [*first.with_heading, *second.with_heading]
        unmerged = [part.blocks for part in (first, second) if not part.is_merged]
        is_short = all(self._num_tokens(part, tokens) < _SHORT_SHARE * self.max_tokens for part in unmerged)
        is_sibling = len(second.trail) <= len(parent) + 1 and len(first.trail) <= len(parent) + (not first.is_merged)
        fits = is_short and self._num_tokens(blocks, tokens) < self._num_free / 2
        if fits and is_sibling and _touch(document, first, second.with_heading[0]):
            return _Section(parent, blocks, is_merged=True)
        return None

    def _num_tokens(self, blocks: Sequence[Block], tokens: _Tokens) -> int:
        return sum(len(tokens[block.start]) + self.counter.num_between_blocks for block in blocks)

    def _units(self, document: Document, block: Block, starts: Sequence[int]) -> Iterator[_Unit]:
        """A short block as a whole, a longer one by its sentences or lines, and words where these are too long."""
        added = self.counter.num_between_blocks
        num_tokens = _size(starts, 0, block.end - block.start) + added
        if num_tokens <= self._num_free // 3:
            yield _Unit(block.start, block.end, num_tokens, 0.0)
            return
        text = document.text[block.start : block.end]
        first: Rule = line_starts if block.kind == "lines" else sentence_starts
        second: Rule = sentence_starts if block.kind == "lines" else line_starts
        for start, end, cost in self._pieces(text, (0, len(text), 0.0), starts, [first, second]):
            yield _Unit(block.start + start, block.start + end, _size(starts, start, end) + added * (not start), cost)

    def _pieces(
        self, text: str, span: tuple[int, int, float], starts: Sequence[int], rules: "list[Rule]"
    ) -> Iterator[tuple[int, int, float]]:
        start, end, cost = span
        if rules:
            factor = _FIRST_CHOICE if len(rules) == 2 else _SECOND_CHOICE
            cuts = [(start + cut, min(factor, own)) for cut, own in rules[0](text[start:end])]
        else:
            cuts = [(cut, _WORD) for cut in _word_cuts(text, start, end, starts, self._num_free // 8)]
        for (first, own), (last, _) in pairwise([(start, cost), *cuts, (end, 0.0)]):
            if rules and _size(starts, first, last) > self._num_free - self._max_title - 1:
                yield from self._pieces(text, (first, last, own), starts, rules[1:])
            else:
                yield first, last, own

    def _finished(self, documents: Sequence[Document], spans: Sequence[_Span]) -> list[list[Passage]]:
        """The passages of ranges; a range that has too many tokens after all is halved."""
        passages: list[list[Passage]] = [[] for _ in documents]
        pending = list(spans)
        while pending:
            texts = [_text_of(documents[span.document].text, span.start, span.end) for span in pending]
            joined = [f"{span.title} {text}".strip() for span, text in zip(pending, texts, strict=True)]
            halves = []
            for span, text, length in zip(pending, texts, self.counter.lengths(joined), strict=True):
                whole = documents[span.document].text[span.start : span.end]
                start = span.start + len(whole) - len(whole.lstrip())
                if length > self.max_tokens and len(text) > 1:
                    cut = start + _middle(whole.strip())
                    halves += [span._replace(start=start, end=cut), span._replace(start=cut)]
                elif any(letter.isalnum() for letter in text):
                    links = tuple(link for block in span.blocks for link in block.links if link[0] in text)
                    passages[span.document].append(Passage(span.title, text, start, length, links))
            pending = halves
        return [sorted(group, key=lambda passage: passage.position) for group in passages]

    def _titles(
        self, documents: Sequence[Document], sections: Sequence[tuple[int, _Section]]
    ) -> Iterator[tuple[str, int]]:
        """The title of each section, its trail or the end of a long one, and the title's number of tokens."""
        trails = [(section.trail, documents[number].separator) for number, section in sections]
        titles = {(trail, separator): separator.join(trail) for trail, separator in dict.fromkeys(trails)}
        starts = dict(zip(titles, self.counter.starts(list(titles.values())), strict=True))
        for key in trails:
            (trail, separator), title, tokens = key, titles[key], starts[key]
            if len(tokens) > self._max_title:
                _, has_more, rest = title[tokens[-self._max_title] :].partition(separator)
                last = len(title) - len(trail[-1])
                own = bisect_left(tokens, last)
                end = tokens[own + self._max_title] if own + self._max_title < len(tokens) else len(title)
                title = rest if has_more else title[last:end].rstrip()
            yield title, min(len(tokens), self._max_title)


def _text_of(text: str, start: int, end: int) -> str:
    """A range of a text without the indentation that its lines share."""
    indentation = text[text.rfind("\n", 0, start) + 1 : start]
    return textwrap.dedent(text[start - len(indentation) * indentation.isspace() : end]).strip()


def _touch(document: Document, section: _Section, block: Block) -> bool:
    """Whether only white space lies between a section and a block."""
    return not document.text[section.blocks[-1].end : block.start].strip()


def best_cuts(sizes: Sequence[int], costs: Sequence[float], room: int) -> list[int]:
    """Where to cut a sequence of units into runs of at most `room` tokens: the first unit of each run, and the end.

    The number of runs, plus the squared share of the room that each leaves free, plus the cost of each cut, is the
    least possible. A unit that is larger than the room is a run of its own.
    """
    least, back = [0.0], [0]
    for end in range(1, len(sizes) + 1):
        size, best, best_first = sizes[end - 1], math.inf, end - 1
        for first in range(end - 1, -1, -1):
            free = (room - size) / room if size < room else 0.0
            cost = least[first] + free * free + (costs[first] if first else 0.0)
            if cost < best:
                best, best_first = cost, first
            size += sizes[first - 1]
            if size > room:
                break
        least.append(best + 1)
        back.append(best_first)
    cuts = [len(sizes)]
    while cuts[-1]:
        cuts.append(back[cuts[-1]])
    return cuts[::-1]


# A rule gives the places in a text where it can be cut, each with the cost of a cut there.
Rule = Callable[[str], list[tuple[int, float]]]
_SPACE = regex.compile(r"\s*")


def sentence_starts(text: str) -> list[tuple[int, float]]:
    """Where sentences begin after the first one, with the bullet, number or heading before them."""
    return [(_SPACE.match(text, each.stop).end(), math.inf) for each in sentences(text)[:-1]]


def line_starts(text: str) -> list[tuple[int, float]]:
    """Where lines begin after the first one; a cut at a blank line costs less."""
    ends = regex.finditer(r"\n\s*?(?=[^\n\S]*\S)", text)
    return [(match.end(), _BLANK_LINE if match[0].count("\n") > 1 else math.inf) for match in ends]


def _word_cuts(text: str, start: int, end: int, starts: Sequence[int], step: int) -> Iterator[int]:
    """Places some `step` tokens apart: before words where there are spaces, and never before a combining mark."""
    step, last, index = max(1, step), start, bisect_left(starts, start)
    while True:
        index = bisect_left(starts, last, index) + step
        limit = min(starts[index] if index < len(starts) else end, last + step * _LETTERS_PER_TOKEN)
        if limit >= end:
            return
        spaces = (place for place in range(limit, last + (limit - last) // 2, -1) if text[place - 1].isspace())
        cut = next(spaces, limit)
        while cut < end and (cut <= last or unicodedata.category(text[cut])[0] == "M"):
            cut += 1
        if cut >= end:
            return
        yield cut
        last = cut


def _middle(text: str) -> int:
    """The place nearest to the middle of a text without outer white space where a word begins, else a letter."""
    pattern = r"\s+" if regex.search(r"\s", text) else r"\X"
    places = (match.end() for match in regex.finditer(pattern, text) if match.end() < len(text))
    return min(places, key=lambda place: abs(2 * place - len(text)), default=len(text) // 2)


def _size(starts: Sequence[int], first: int, last: int) -> int:
    """The number of tokens that begin in a range, and at least some for its length."""
    return max(bisect_left(starts, last) - bisect_left(starts, first), (last - first) // _LETTERS_PER_TOKEN)
