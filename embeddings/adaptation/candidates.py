"""Queries that passages offer by themselves: sentences, headings, questions, link texts and docstrings, and filters."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from embeddings.adaptation.documents import CODE_SUFFIXES
from embeddings.adaptation.markup import word_set
from embeddings.adaptation.sentences import is_question, letter_share, num_words, plain, sentences, without
from embeddings.common.errors import InputError, shown
from embeddings.common.progress import progress_bar
from embeddings.common.text import canonical
from embeddings.data.documented_functions import first_sentence
from embeddings.data.readers import open_reader, rows_of
from embeddings.inference.bm25 import BM25, word_tokens
from embeddings.inference.vector_folder import identifier_field, text_field

_FIELDS = ("_id", "id", "title", "text", "file", "document", "position", "links")
# Between the headings of a title.
TRAIL = " > "


class Passage(NamedTuple):
    """A passage of a document.

    `title` is the trail of its headings. `document` groups the passages that stay on one side of a split. `links` are
    the texts of links in the passage and the files that they lead to, perhaps with `#heading`.
    """

    id: str
    title: str
    text: str
    document: str
    file: str
    links: Sequence[tuple[str, str]] = ()

    def candidate(self, query: str, kind: str, text: str | None = None, heading: str = "") -> "Candidate":
        """A query for this passage, whose text without the query is `text`; with a `heading` it has no title."""
        title, text = "" if heading else self.title, self.text if text is None else text
        return Candidate(query, kind, title, text, self.id, self.document, heading)


def read_passages(path: Path, purpose: str = "reading") -> Iterator[Passage]:
    """The passages of a file with `text` and optionally `_id`, `title`, `document`, `file` and `links`.

    `purpose` begins the title of the progress bar. Without `document` it is the file, and without both the passage
    itself, as in a corpus of an evaluation folder. An `InputError` names file and row of an invalid row, and, at the
    end, a repeated id.
    """
    reader = open_reader(path, _FIELDS, ("text",))
    hashes = array("q")
    for number, (where, fields) in enumerate(rows_of(f"{purpose} {path}", [reader])):
        names = [name for name in ("_id", "id") if fields.get(name) is not None]
        identifier = identifier_field(where, fields, names[0]) if names else str(number)
        file, document = (_optional(where, fields, name) for name in ("file", "document"))
        links = _links(where, fields.get("links"))
        text, title = text_field(where, fields, "text"), _optional(where, fields, "title")
        hashes.append(hash(identifier))
        yield Passage(identifier, title, text, document or file or identifier, file, links)
    hash_N = np.sort(np.frombuffer(hashes, np.int64))
    repeated = hash_N[1:][hash_N[1:] == hash_N[:-1]]
    if len(repeated):
        rows = np.flatnonzero(np.frombuffer(hashes, np.int64) == repeated[0])
        what = f"rows {rows[0] + 1} and {rows[1] + 1} have the same id"
        raise InputError(str(path), what, "make the ids unique")


def _optional(where: str, fields: Mapping[str, Any], name: str) -> str:
    if fields.get(name) is None:
        return ""
    return identifier_field(where, fields, name) if name == "document" else text_field(where, fields, name)


def _links(where: str, value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in pairs
    ):
        raise InputError(where, f"links is {shown(value)}", "write a list of [text, file] pairs")
    return [(text, target) for text, target in pairs]


class Candidate(NamedTuple):
    """A query for a passage, and the passage's title and text without the query; `heading` is left out of the title."""

    query: str
    kind: str
    title: str
    text: str
    passage: str
    document: str
    heading: str = ""

    @property
    def positive(self) -> str:
        return f"{self.title} {self.text}".strip()


class Rule(NamedTuple):
    """The bounds of a kind of query: its words, and the share of its words' weight that the positive contains."""

    least_words: int
    most_words: int
    least_share: float
    most_share: float


KINDS = {
    "sentence": Rule(6, 60, 0.2, 0.8),
    "question": Rule(4, 40, 0.1, 0.9),
    "heading": Rule(2, 20, 0.3, 1.0),
    "anchor": Rule(2, 20, 0.3, 1.0),
    "docstring": Rule(4, 60, 0.1, 0.9),
    # Written by a language model.
    "model": Rule(3, 32, 0.1, 0.9),
}
# A query repeats a title or sentence of which it contains, or that contains, this share of the words' weight.
_REPEATS = 0.7
# What a sentence may begin with besides a letter or number.
_OPENING = "\"'“‘«„¿¡「『《"
# The least words of a positive, and the least share of letters of a query that is prose.
LEAST_REST, _LEAST_LETTERS = 15, 0.8
# Competitors that may score more than the passage for a query.
MAX_RANK = 20
# Queries that are ranked at once.
_BLOCK = 512


def proposals(passage: Passage, is_common: Any, is_section_start: bool) -> Iterator[Candidate]:
    """The queries that a passage offers, before the filters.

    `is_common` says of a heading whether other sections have it too. A heading describes the first passage of its
    section only.
    """
    if is_code(passage):
        for query, text in docstrings(passage.text):
            yield passage.candidate(plain(query), "docstring", text)
        return
    headings = [*filter(None, map(str.strip, passage.title.split(TRAIL)))]
    if is_section_start and headings:
        *_, parent, heading = ["", *headings]
        if is_question(heading):
            yield passage.candidate(plain(heading), "question", heading=heading)
        else:
            is_vague = is_common(heading) or num_words(heading) < KINDS["heading"].least_words
            query = f"{parent} {heading}" if is_vague else heading
            yield passage.candidate(plain(query), "heading", heading=heading)
    parts = sentences(passage.text)
    for number, (start, stop, is_finished) in enumerate(parts):
        if is_finished and len(parts) > 1:
            query = passage.text[start:stop]
            is_last = number == len(parts) - 1
            kind = "question" if is_question(query) and not is_last else "sentence"
            yield passage.candidate(plain(query), kind, without(passage.text, start, stop))


_PROSE_SUFFIXES = word_set(".md .markdown .txt .rst .html .htm .pdf .docx .epub .tex .org")
_SYMBOLS = "{}()[];=<>_/*&|#@+\\"
_CODE_LINE = regex.compile(r"^[ \t]*(?:///?|/\*|\*/)|[;{}]$|\)[:,]?$|\*/$", regex.MULTILINE)
# A documentation comment, or a definition of Python.
_CODE_MARK = regex.compile(r"^[ \t]*(?:/\*\*|\*[ \t]+@\w|(?:async )?(?:def|class) \w[^\n]*:$)", regex.MULTILINE)


def is_code(passage: Passage) -> bool:
    """Whether a passage is source code, by the ending of its file or else by its characters."""
    suffix = PurePosixPath(passage.file.lower()).suffix
    if suffix in CODE_SUFFIXES or suffix in _PROSE_SUFFIXES:
        return suffix in CODE_SUFFIXES
    text = passage.text
    if sum(map(text.count, _SYMBOLS)) > 0.08 * sum(map(len, text.split())) or _CODE_MARK.search(text):
        return True
    num_lines = text.count("\n") + 1
    return num_lines > 1 and len(_CODE_LINE.findall(text)) > 0.3 * num_lines


# A triple-quoted string after the colon of a definition or at the start; `/** */`; consecutive lines of comments.
_QUOTED = regex.compile(r"(?:\A|(?<=:[ \t]*\n))[ \t]*[rRuU]?(\"\"\"|''')(?P<text>.*?)\1[ \t]*\n?", regex.DOTALL)
_STARRED = regex.compile(r"[ \t]*/\*\*(?P<text>.*?)\*/[ \t]*\n?", regex.DOTALL)
_COMMENTS = regex.compile(r"(?P<text>(?:^[ \t]*(?://[/!]?|#|--)(?:[ \t][^\n]*)?(?:\n|\Z))+)", regex.MULTILINE)
_COMMENT_MARK = regex.compile(r"^[ \t]*(?://[/!]?|#|--|\*)[ \t]?", regex.MULTILINE)
_ATTRIBUTES = regex.compile(r"(?:\s*(?:@|#\[)[^\n]*\n)*\s*")
_DEFINITION = regex.compile(
    r"(?:[\w:<>,*&()\[\]?]+[ \t]+)*?(?:func|fn|fun|def|class|function|struct|enum|trait|impl|interface|type|module|mod"
    r"|sub|proc|const|static|macro_rules!|union|namespace|procedure|create|template|typedef|record|object|export)\b"
    r"|[\w:<>,*&\[\]?. \t~]+\([^;]*?\)[^;\n]*\{",
    regex.IGNORECASE,
)


def docstrings(code: str) -> Iterator[tuple[str, str]]:
    """The first sentence of each docstring or comment before a definition, and the code without that docstring."""
    for pattern in (_QUOTED, _STARRED, _COMMENTS):
        for match in pattern.finditer(code):
            rest = _ATTRIBUTES.match(code, match.end()).end()
            if pattern is not _QUOTED and not _DEFINITION.match(code, rest):
                continue
            text = match["text"] if pattern is _QUOTED else _COMMENT_MARK.sub("", match["text"])
            query = _first_sentence(text)
            if query:
                yield query, f"{code[: match.start()]}{code[match.end() :]}".strip("\n")


def _first_sentence(docstring: str) -> str:
    if docstring.isascii():
        return first_sentence(docstring) or ""
    parts = sentences(docstring)
    return docstring[parts[0].start : parts[0].stop] if parts else ""


class WordStatistics:
    """How rare words are in a sample of passages (ids and texts, at least one), and the sample's BM25 for queries."""

    def __init__(self, sample: Sequence[tuple[str, str]]) -> None:
        self._row = {identifier: row for row, (identifier, _) in enumerate(sample)}
        self._index = BM25((text for _, text in sample), word_tokens)
        self.idf = lru_cache(1 << 20)(self._index.idf)

    def share(self, query: Iterable[str], tokens: Iterable[str]) -> float:
        """The share of the weight of the query's distinct words that are among the tokens."""
        weights, known = {token: self.idf(token) for token in query}, set(tokens)
        total = sum(weights.values())
        return sum(weight for token, weight in weights.items() if token in known) / total if total else 0.0

    def score(self, query: Sequence[str], tokens: Sequence[str], k1: float = 1.5, b: float = 0.75) -> float:
        """The BM25 score of a text that need not be in the sample (see `BM25`)."""
        count, norm = Counter(tokens), k1 * (1 - b + b * len(tokens) / max(1.0, self._index.mean_length))
        return sum(self.idf(token) * count[token] / (count[token] + norm) for token in query if token in count)

    def ranks(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.int64]:
        """For each candidate the number of other passages with a higher score than its passage without the query."""
        rank_C = np.empty(len(candidates), np.int64)
        step = min(_BLOCK, max(1, (1 << 24) // len(self._row)))
        starts = range(0, len(candidates), step)
        for start in progress_bar(None, "searching passages", "block", iterable=starts):
            block = candidates[start : start + step]
            score_CN = self._index.scores([each.query for each in block])
            for row, (each, score_N) in enumerate(zip(block, score_CN, strict=True), start):
                own = self.score(word_tokens(each.query), word_tokens(each.positive))
                if each.passage in self._row:
                    score_N[self._row[each.passage]] = 0
                rank_C[row] = (score_N > own).sum()
        return rank_C

    def fault(self, candidate: Candidate, passage: Passage) -> str | None:
        """Why a candidate is no good query, or None; the round trip is left to `ranks`."""
        kind, rule, query = candidate.kind, KINDS[candidate.kind], candidate.query
        length = num_words(query)
        if length < rule.least_words:
            return "too short"
        if length > rule.most_words:
            return "too long"
        if letter_share(query) < _LEAST_LETTERS:
            return "little prose"
        if (kind == "sentence" and not (query[0].isalnum() or query[0] in _OPENING)) or (
            query[0].islower() and kind in ("sentence", "question") and not passage.text.islower()
        ):
            return "unfinished"
        if num_words(candidate.text) < LEAST_REST:
            return "little other text"
        tokens, rest = word_tokens(query), word_tokens(candidate.positive)
        if kind in ("heading", "anchor") or candidate.heading:
            first = next(iter(sentences(candidate.text)), None)
            opening = candidate.text[: first.stop if first else 200]
            if self.share(tokens, word_tokens(opening)) > _REPEATS:
                return "repeated by the first sentence"
        elif kind != "docstring":
            title = word_tokens(passage.title)
            if title and max(self.share(tokens, title), self.share(title, tokens)) > _REPEATS:
                return "repeats the title"
        share = self.share(tokens, rest)
        if share < rule.least_share:
            return "shares too little with the rest"
        return "copied from the rest" if share > rule.most_share else None


def key_of(query: str) -> str:
    """The form in which queries are equal."""
    return " ".join(canonical(query).casefold().split()).rstrip(" .!?。！？؟।")
