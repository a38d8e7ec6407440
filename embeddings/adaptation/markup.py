"""Documents as plain text in blocks under a trail of headings: Markdown, HTML, text, source code."""

import ast
import posixpath
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, count, repeat
from typing import Any, Literal, NamedTuple

import yaml
from lxml import etree
from markdown_it import MarkdownIt

# `prose` is cut at sentences, `lines` (code, lists, tables) at line ends; a `heading` is only a title.
Kind = Literal["prose", "lines", "heading"]
# The text of a link and its target as it is written.
Link = tuple[str, str]


class Block(NamedTuple):
    """A part of a document's text: its range, its kind, the headings above it, its links."""

    start: int
    end: int
    kind: Kind
    trail: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()


class Document(NamedTuple):
    """A document's plain text and its blocks in order; `separator` joins a trail."""

    text: str
    blocks: Sequence[Block]
    separator: str = " > "


class Builder:
    """A document made of converted blocks, with a blank line between them."""

    def __init__(self, title: str = "") -> None:
        self._parts: list[str] = []
        self._length = 0
        self._blocks: list[Block] = []
        self._headings: list[tuple[int, str]] = [(0, title)] if title else []

    def heading(self, level: int, text: str) -> None:
        """Begin a section of a level from 1; it ends those of the same and deeper levels."""
        text = " ".join(text.split())
        if not text:
            return
        while self._headings and self._headings[-1][0] >= level:
            self._headings.pop()
        # A page often repeats its title as its first heading.
        if self._headings[-1:] != [(0, text)]:
            self._headings.append((level, text))
        self.add("heading", text)

    def add(self, kind: Kind, text: str, links: Iterable[Link] = ()) -> None:
        """Add a block, unless it is blank."""
        text = text.rstrip() if kind == "lines" else text.strip()
        text = text.lstrip("\n")
        if not text.strip():
            return
        trail = tuple(heading for _, heading in self._headings)
        self._blocks.append(Block(self._length, self._length + len(text), kind, trail, tuple(links)))
        self._parts.append(text)
        self._length += len(text) + 2

    def document(self) -> Document:
        return Document("\n\n".join(self._parts), self._blocks)


def writable(text: str) -> str:
    """The text without NUL, which ends texts in other programs, and without halves of a character, as UTF-16 has."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "")


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def read_text(text: str) -> Document:
    """Plain text: its paragraphs, which blank lines separate."""
    # A sequence of lines that are not blank.
    paragraphs = re.finditer(r"\S[^\n]*(?:\n[^\n]*\S[^\n]*)*", text)
    return Document(text, [Block(each.start(), each.start() + len(each[0].rstrip()), "prose") for each in paragraphs])


_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
# What shows that YAML with an error was meant as such.
_KEY = re.compile(r"[\w\"'-]*:")


def read_markdown(text: str) -> Document:
    """CommonMark with tables, without its markup; a `title` in YAML at the start is the first heading."""
    front, title = _FRONT_MATTER.match(text), ""
    if front is not None:
        try:
            fields = yaml.safe_load(front[1])
        except (yaml.YAMLError, ValueError, RecursionError):
            fields = {} if _KEY.match(front[1]) else None
        # Else the text is between two horizontal rules.
        if isinstance(fields, dict):
            text, title = text[front.end() :], writable(str(fields.get("title") or ""))
    builder = Builder(" ".join(title.split()))
    _Page(builder).add(_tree(_markdown_parser().render(text)))
    return builder.document()


@cache
def _markdown_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark").enable("table")
    # HTML in Markdown is closed at its end, so that it does not change what follows.
    parser.add_render_rule("html_block", lambda _, tokens, row, *__: _closed(tokens[row].content))
    parser.add_render_rule("html_inline", lambda _, tokens, row, *__: "<br>" * tokens[row].content.startswith("<br"))
    return parser


def _closed(html: str) -> str:
    return "".join(etree.tostring(child, encoding="unicode", method="html") for child in _tree(html).iterfind("body/*"))


def _tree(html: str) -> Any:
    """The tree of a page without comments; it has the missing end tags."""
    parser = etree.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    # The paragraph makes a tree of an empty page.
    tree = etree.fromstring(f"<p></p>{html}".encode("utf-8", "replace"), parser)
    # The parser leaves out the rest of a page that is nested more than some thousand times.
    if fatal := parser.error_log.filter_from_fatals():
        raise ValueError(fatal[0].message)
    return tree


_SKIPPED_TAGS = word_set(
    "script style noscript template svg math nav footer aside button select textarea iframe object title"
)
_SKIPPED_ROLES = frozenset(("navigation", "search", "banner", "contentinfo", "complementary", "menu"))
_BLOCK_TAGS = word_set(
    "p div section article main header body html address blockquote figure figcaption fieldset details summary dl dt dd"
    " hr li ul ol table thead tbody tfoot tr td th caption pre h1 h2 h3 h4 h5 h6 nav footer aside"
)
_HEADING = re.compile(r"h[1-6]$")
_MAIN = "//*[self::main or @role='main'][not(ancestor::main) and not(ancestor::*[@role='main'])]"
# The texts of links from a heading to itself.
_PERMALINKS = ("", "#", "¶", "§", "🔗")


def read_html(html: str) -> Document:
    """A page's text without menus, scripts and forms: of `<main>` alone, if it has one.

    `<title>` is the first heading if that part has no `<h1>`.
    """
    builder = Builder()
    add_html(html, builder)
    return builder.document()


def add_html(html: str, builder: Builder) -> None:
    page, tree = _Page(builder), _tree(html)
    parts = tree.xpath(_MAIN) or [tree]
    if not any(part.xpath(".//h1") for part in parts):
        builder.heading(1, "".join(tree.xpath("//title[not(ancestor::svg)]//text()")))
    for part in parts:
        page.add(part)


class _Page:
    """Adds the blocks of a page; a list or table, with all it contains, is one block of lines."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._block = ""
        self._parts: list[str] = []
        self._links: list[Link] = []
        self._link: tuple[int, str] | None = None
        # The markers of the items of each open list or table.
        self._lists: list[Iterator[str]] = []
        self._marker = ""
        self._lines: list[str] = []
        self._line_links: list[Link] = []
        self._cells: list[str] = []
        # The number of open lists and the texts of each open cell.
        self._open_cells: list[tuple[int, list[str]]] = []

    def add(self, part: Any) -> None:
        """Add a part of a page."""
        walk = etree.iterwalk(part, ("start", "end"))
        for event, node in walk:
            is_skipped = self._is_skipped(node)
            if event == "end":
                if not is_skipped:
                    self._end(node.tag)
                self._add_text("" if node is part else node.tail)
            elif is_skipped:
                if node.tag in _BLOCK_TAGS:
                    self._flush("")
                walk.skip_subtree()
            else:
                self._start(node)
                self._add_text(node.text)
        self._flush("")
        self._end_lines()

    @staticmethod
    def _is_skipped(node: Any) -> bool:
        is_hidden = node.get("hidden") is not None or node.get("aria-hidden") == "true"
        return node.tag in _SKIPPED_TAGS or node.get("role") in _SKIPPED_ROLES or is_hidden

    def _add_text(self, text: str | None) -> None:
        if text:
            self._parts.append(text if self._block == "pre" else re.sub(r"\s+", " ", text))

    def _start(self, node: Any) -> None:
        tag = node.tag
        if tag == "br":
            self._parts.append("\n")
        elif tag == "img":
            self._parts.append(node.get("alt", ""))
        elif tag == "a":
            self._link = (len(self._parts), node.get("href", ""))
        elif tag in _BLOCK_TAGS:
            self._flush(tag)
            if _HEADING.match(tag):
                self._end_lines()
            elif tag in ("ul", "ol", "table"):
                first = node.get("start", "")
                numbers = count(int(first) if first.isdecimal() else 1)
                self._lists.append(map("{}. ".format, numbers) if tag == "ol" else repeat("- "))
            elif tag == "li" and self._lists:
                self._marker = next(self._lists[-1])
            elif tag == "tr":
                self._end_row()
            elif tag in ("td", "th") and self._lists:
                self._open_cells.append((len(self._lists), []))

    def _end(self, tag: str) -> None:
        if tag == "a" and self._link is not None:
            first, target = self._link
            text = " ".join("".join(self._parts[first:]).split())
            self._link = None
            if target.startswith("#") and text in _PERMALINKS:
                del self._parts[first:]
            else:
                self._links.append((text, target))
        elif tag in _BLOCK_TAGS:
            self._flush("")
            if tag in ("td", "th") and self._open_cells:
                self._cells.append(" ".join(self._open_cells.pop()[1]))
            elif tag == "tr":
                self._end_row()
            elif tag in ("ul", "ol", "table") and self._lists:
                self._lists.pop()
                if not self._lists:
                    self._end_lines()

    def _flush(self, next_block: str) -> None:
        """End the block of text that is open."""
        block, text, links = self._block, "".join(self._parts), self._links
        self._block, self._parts, self._links, self._link = next_block, [], [], None
        if block != "pre":
            text = "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()
        if not text.strip():
            return
        if _HEADING.match(block):
            self._builder.heading(int(block[1]), text)
        elif not self._lists:
            self._builder.add("lines" if block == "pre" else "prose", text, links)
        else:
            self._line_links += links
            depth, texts = self._open_cells[-1] if self._open_cells else (0, [])
            if depth == len(self._lists) and block != "pre" and not self._marker:
                texts.append(" ".join(text.split()))
                return
            # The cells before a cell with lines of its own.
            self._end_row()
            is_first = self._marker or block == "caption"
            marked = f"{self._marker}{text.strip()}" if is_first else textwrap.indent(text.rstrip(), "  ")
            self._lines.append(textwrap.indent(marked, "  " * (len(self._lists) - 1)))
            self._marker = ""

    def _end_row(self) -> None:
        for _, texts in self._open_cells:
            self._cells.extend(texts)
            texts.clear()
        if self._cells:
            self._lines.append(" | ".join(self._cells))
            self._cells = []

    def _end_lines(self) -> None:
        self._end_row()
        self._builder.add("lines", "\n".join(self._lines), self._line_links)
        self._lists, self._lines, self._line_links, self._open_cells = [], [], [], []


def read_python(source: str, name: str) -> Document:
    """A Python module: its functions and methods, and what stands between them, under their qualified names.

    Imports are left out. A module that Python cannot parse is read as other code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return read_code(source, name)
    stem = posixpath.splitext(name)[0]
    parts = [part for part in stem.split("/") if part != "__init__"] or [stem]
    # The parser's lines end with \n alone after universal newlines.
    lines = source.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    blocks = []
    for part in _definitions(tree.body, (".".join(parts),), lines, 1):
        start, end = starts[part.start - 1], starts[part.end] - 1
        end = start + len(source[start:end].rstrip())
        if end > start:
            blocks.append(part._replace(start=start, end=end))
    return Document(source, blocks, ".")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Statements of at most so many lines directly above a definition belong to it.
_ATTACHED_LINES = 3


def _definitions(body: list[ast.stmt], trail: tuple[str, ...], lines: list[str], first: int) -> Iterator[Block]:
    """The functions in a body, and the statements between them, imports excepted, by first and last line."""
    run: list[int] = []
    for number, node in enumerate(body):
        start, end = max(first, _first_line(node, lines)), node.end_lineno or node.lineno
        first = end + 1
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_left_out = isinstance(node, ast.Import | ast.ImportFrom) or _is_list_of_names(node)
        is_module_docstring = is_docstring and len(trail) == 1
        if not (isinstance(node, _DEFINITIONS) or is_left_out or is_module_docstring):
            run = [run[0] if run else start, end]
            continue
        is_short = bool(run) and run[1] - run[0] < _ATTACHED_LINES
        if is_short and isinstance(node, _DEFINITIONS) and not any(line.strip() for line in lines[run[1] : start - 1]):
            start, run = run[0], []
        if run:
            yield Block(run[0], run[1], "lines", trail)
            run = []
        if isinstance(node, ast.ClassDef):
            yield from _class(node, (*trail, node.name), lines, start, end)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Block(start, end, "lines", (*trail, node.name))
        elif is_module_docstring:
            yield Block(start, end, "prose", trail)
    if run:
        yield Block(run[0], run[1], "lines", trail)


def _class(node: ast.ClassDef, trail: tuple[str, ...], lines: list[str], start: int, end: int) -> Iterator[Block]:
    """The lines of a class up to its first method, and its methods; alone, its first line belongs to a method."""
    place = next((place for place, child in enumerate(node.body) if isinstance(child, _DEFINITIONS)), None)
    if place is None:
        yield Block(start, end, "lines", trail)
        return
    first = _first_line(node.body[place], lines)
    parts = _definitions(node.body[place:], trail, lines, first)
    if place > 0:
        yield Block(start, first - 1, "lines", trail)
    else:
        yield next(parts)._replace(start=start)
    yield from parts


def _is_list_of_names(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    """The first line of a statement with its decorators, and the comment directly above."""
    decorators: list[Any] = getattr(node, "decorator_list", [])
    line: int = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    while line > 1 and lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


_COMMENT = re.compile(r"\s*(//|/\*|\*|#(?!\w)|#!|--|;|%|@|\"\"\"|<!--|\(\*)")
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LINES_WITH_HEADER = 4


def read_code(source: str, name: str) -> Document:
    """Code of any language: parts that begin without indentation after a blank line.

    The trail of a longer part is the file and its first line of code.
    """
    blocks, start = [], 0
    for gap in [*re.finditer(r"\n[ \t]*\n\s*", source), None]:
        # The next line is indented, or closes a bracket.
        if gap is not None and (source[gap.end() - 1] != "\n" or source.startswith((")", "]", "}"), gap.end())):
            continue
        end = len(source) if gap is None else gap.start()
        part = source[start:end]
        if part.strip():
            lines = [line for line in part.split("\n") if line.strip()]
            code = _BLOCK_COMMENT.sub("", part).split("\n")
            header = next((line.strip() for line in code if line.strip() and not _COMMENT.match(line)), "")
            header = header.rstrip("{(:= ")[:80]
            is_long = len(lines) >= _LINES_WITH_HEADER and bool(header)
            first = start + len(part) - len(part.lstrip("\n"))
            trail = (name, header) if is_long else (name,)
            blocks.append(Block(first, start + len(part.rstrip()), "lines", trail))
        start = end if gap is None else gap.end()
    return Document(source, blocks)
