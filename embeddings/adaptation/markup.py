"""Documents as plain text in blocks under a trail of headings: Markdown, HTML, reStructuredText, plain text."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html.parser import HTMLParser
from typing import Literal, NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

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


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def read_text(text: str) -> Document:
    """Plain text: its paragraphs, which blank lines separate."""
    return Document(text, [Block(start, end, "prose") for start, end in _paragraphs(text)])


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for gap in [*re.finditer(r"\n\s*\n\s*", text), None]:
        part = text[start : len(text) if gap is None else gap.start()]
        if part.strip():
            first = start + len(part) - len(part.lstrip())
            yield first, start + len(part.rstrip())
        start = len(text) if gap is None else gap.end()


@cache
def _markdown_parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table")


_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)


def read_markdown(text: str) -> Document:
    """CommonMark with tables, without its markup; a `title` in YAML at the start is the first heading."""
    front = _FRONT_MATTER.match(text)
    title = ""
    if front is not None:
        text = text[front.end() :]
        try:
            fields = yaml.safe_load(front[1])
        except (yaml.YAMLError, ValueError, RecursionError):
            fields = None
        title = str(fields.get("title") or "") if isinstance(fields, dict) else ""
    builder = Builder(" ".join(title.split()))
    converter = _Markdown(builder)
    for token in _markdown_parser().parse(text):
        converter.take(token)
    return builder.document()


class _Markdown:
    """Adds the blocks of markdown-it's tokens; a list or table, with all it contains, is one block of lines."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        # The next marker of each open list.
        self._lists: list[str] = []
        self._lines: list[str] = []
        self._links: list[Link] = []
        self._cells: list[str] | None = None
        self._level, self._marker = 0, ""

    def take(self, token: Token) -> None:
        kind = token.type
        if kind == "heading_open":
            self._level = int(token.tag[1:])
        elif kind == "heading_close":
            self._level = 0
        elif kind == "inline":
            self._inline(token)
        elif kind in ("fence", "code_block"):
            self._add("lines", token.content)
        elif kind == "html_block":
            self._add_html(token.content)
        elif kind in ("bullet_list_open", "ordered_list_open"):
            self._lists.append("- " if kind[0] == "b" else f"{token.attrs.get('start', 1)}. ")
        elif kind == "list_item_open":
            self._marker = self._lists[-1]
            if self._marker != "- ":
                self._lists[-1] = f"{int(self._marker[:-2]) + 1}. "
        elif kind in ("bullet_list_close", "ordered_list_close"):
            self._lists.pop()
            self._end_lines()
        elif kind == "tr_open":
            self._cells = []
        elif kind == "tr_close":
            self._lines.append(" | ".join(self._cells or ()))
            self._cells = None
        elif kind == "table_close":
            self._end_lines()

    def _inline(self, token: Token) -> None:
        links: list[Link] = []
        text = _plain_inline(token.children or (), links)
        if self._cells is not None:
            self._cells.append(text)
            self._links += links
        elif self._level and not self._lists:
            self._builder.heading(self._level, text)
        else:
            self._add("prose", text, links)

    def _add(self, kind: Kind, text: str, links: Sequence[Link] = ()) -> None:
        if not self._lists:
            self._builder.add(kind, text, links)
        elif text.strip():
            indent = "  " * (len(self._lists) - 1)
            marked = f"{self._marker}{text.strip()}" if self._marker else textwrap.indent(text.rstrip(), "  ")
            self._lines.append(textwrap.indent(marked, indent))
            self._links += links
            self._marker = ""

    def _add_html(self, html: str) -> None:
        if not self._lists:
            add_html(html, self._builder)
            return
        document = read_html(html)
        for block in document.blocks:
            self._add("prose", document.text[block.start : block.end], block.links)

    def _end_lines(self) -> None:
        if not self._lists:
            self._builder.add("lines", "\n".join(self._lines), self._links)
            self._lines, self._links = [], []


def _plain_inline(tokens: Iterable[Token], links: list[Link]) -> str:
    """The text of inline tokens; their links are added to `links`."""
    parts: list[str] = []
    first, target = 0, ""
    for token in tokens:
        if token.type == "link_open":
            first, target = len(parts), str(token.attrs.get("href", ""))
        elif token.type == "link_close":
            links.append(("".join(parts[first:]).strip(), target))
        elif token.type == "image":
            parts.append(_plain_inline(token.children or (), []))
        elif token.type == "softbreak":
            parts.append(" ")
        elif token.type == "hardbreak":
            parts.append("\n")
        elif token.type != "html_inline":
            parts.append(token.content)
    return "".join(parts)


_SKIPPED_TAGS = word_set(
    "script style noscript template svg math nav footer aside button select textarea iframe object"
)
_SKIPPED_ROLES = frozenset(("navigation", "search", "banner", "contentinfo", "complementary", "menu"))
_BLOCK_TAGS = word_set(
    "p div section article main header body html address blockquote figure figcaption fieldset details summary dl dt dd"
    " hr li ul ol table thead tbody tfoot tr td th caption pre h1 h2 h3 h4 h5 h6 title"
)
_VOID_TAGS = word_set("area base br col embed hr img input link meta source track wbr")
_HEADING = re.compile(r"h[1-6]$")
# The texts of links from a heading to itself.
_PERMALINKS = ("", "#", "¶", "§", "🔗")


def read_html(html: str) -> Document:
    """A page's text without menus, scripts and forms: of `<main>` alone, if it has one.

    `<title>` is the first heading of a page without `<h1>`.
    """
    builder = Builder()
    add_html(html, builder)
    return builder.document()


def add_html(html: str, builder: Builder) -> None:
    """Add the blocks of a page."""
    page = _Page(builder, html)
    page.feed(html)
    page.close()
    page.end()


class _Page(HTMLParser):
    """Adds the blocks of a page; a list or table is one block of lines. End tags may be missing."""

    def __init__(self, builder: Builder, html: str) -> None:
        super().__init__(convert_charrefs=True)
        start = html.lower()
        self._builder = builder
        self._needs_title = "<h1" not in start
        self._waits_for_main = "<main" in start or bool(re.search(r"role=[\"']?main\b", start))
        # The tag of the main part and the tag that is skipped, each with the number of it that are open.
        self._main, self._main_depth = "", 0
        self._skipped, self._skipped_depth = "", 0
        self._parts: list[str] = []
        self._links: list[Link] = []
        self._link: tuple[int, str] | None = None
        self._block = ""
        self._lines: list[str] = []
        self._line_links: list[Link] = []
        self._cells: list[str] = []
        self._nesting, self._marker = 0, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._skipped_depth += tag == self._skipped
            return
        values = {name: value or "" for name, value in attrs}
        if self._waits_for_main and (tag == "main" or values.get("role") == "main"):
            self._waits_for_main, self._main, self._main_depth = False, tag, 1
        elif tag == self._main:
            self._main_depth += 1
        if tag == "title":
            self._flush(tag)
        elif self._is_skipped(tag, values) and tag not in _VOID_TAGS:
            self._flush("")
            self._skipped, self._skipped_depth = tag, 1
        elif tag == "br":
            self._parts.append("\n")
        elif tag == "img":
            self._parts.append(values.get("alt", ""))
        elif tag == "a":
            self._link = (len(self._parts), values.get("href", ""))
        elif tag in _BLOCK_TAGS:
            self._begin(tag)

    def _is_skipped(self, tag: str, values: dict[str, str]) -> bool:
        is_hidden = "hidden" in values or values.get("aria-hidden") == "true"
        return tag in _SKIPPED_TAGS or values.get("role") in _SKIPPED_ROLES or is_hidden

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._skipped_depth -= tag == self._skipped
            if not self._skipped_depth:
                self._skipped = ""
            return
        if tag == self._main:
            self._main_depth -= 1
            if not self._main_depth:
                self.end()
                self._main, self._waits_for_main = "", True
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
            if tag == "tr":
                self._end_row()
            elif tag in ("ul", "ol", "table"):
                self._nesting = max(0, self._nesting - 1)
                if not self._nesting:
                    self._end_lines()

    def handle_data(self, data: str) -> None:
        if self._skipped or (self._waits_for_main and self._block != "title"):
            return
        self._parts.append(data if self._block == "pre" else re.sub(r"\s+", " ", data))

    def _begin(self, tag: str) -> None:
        self._flush(tag)
        if _HEADING.match(tag):
            self._end_lines()
        elif tag in ("ul", "ol", "table"):
            self._nesting += 1
        elif tag == "li":
            self._marker = "- "
        elif tag == "tr":
            self._end_row()

    def _flush(self, next_block: str) -> None:
        """End the block of text that is open."""
        block, text = self._block, "".join(self._parts)
        links = self._links
        self._block, self._parts, self._links, self._link = next_block, [], [], None
        if block != "pre":
            text = "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()
        if not text.strip():
            return
        if block == "title":
            if self._needs_title:
                self._builder.heading(1, text)
        elif _HEADING.match(block):
            self._builder.heading(int(block[1]), text)
        elif block in ("td", "th") and self._nesting:
            self._cells.append(" ".join(text.split()))
        elif self._nesting:
            self._lines.append("  " * (self._nesting - 1) + (self._marker or "  ") + text)
            self._marker = ""
        else:
            self._builder.add("lines" if block == "pre" else "prose", text, links)
            links = []
        self._line_links += links

    def _end_row(self) -> None:
        if self._cells:
            self._lines.append(" | ".join(self._cells))
            self._cells = []

    def _end_lines(self) -> None:
        self._end_row()
        self._builder.add("lines", "\n".join(self._lines), self._line_links)
        self._nesting, self._lines, self._line_links = 0, [], []

    def end(self) -> None:
        """Add what is still open."""
        self._flush("")
        self._end_lines()


_ADORNMENT = re.compile(r"([=\-`:'\"~^_*+#<>.!$%&,/;?@\\|])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"\.\.\s+(?:\|[^|]+\|\s+)?([\w:.+-]+?)::\s*(.*)$")
_DROPPED_DIRECTIVES = word_set(
    "toctree image figure include literalinclude index contents autosummary automodule autoclass autofunction raw role"
    " currentmodule module highlight meta tabularcolumns only plot graphviz default-role sectionauthor"
)
_CODE_DIRECTIVES = word_set("code code-block sourcecode literal parsed-literal math testcode doctest ipython")
_LIST_ITEM = re.compile(r"([-*+•]|\(?(?:\d+|#|[a-zA-Z])[.)]|:[^:\n]+:)\s")
_ROLES = (
    (re.compile(r":[\w:.+-]+:`([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":[\w:.+-]+:`~(?:[^`]*\.)?([^`]+)`"), r"\1"),
    (re.compile(r":[\w:.+-]+:`!?([^`]+)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}"), r"\1"),
    (re.compile(r"``(.+?)``"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*\n]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"\s?\[[#\w-]+\]_"), ""),
    (re.compile(r"(?<!\w)\|([A-Za-z][\w ]*)\|(?!\w)"), r"\1"),
)


def read_rst(text: str) -> Document:
    """reStructuredText, also with Sphinx' directives and roles, without its markup."""
    builder = Builder()
    _add_rst(text.expandtabs(8).split("\n"), builder, [])
    return builder.document()


def _add_rst(lines: list[str], builder: Builder, adornments: list[tuple[str, bool]]) -> None:
    """Add the blocks of some lines; the order in which adornments of headings are met gives their levels."""
    row, is_literal = 0, False
    while row < len(lines):
        line = lines[row]
        if not line.strip():
            row += 1
            continue
        has_overline = bool(_ADORNMENT.match(line)) and row + 2 < len(lines) and _is_title(lines[row + 1 : row + 3])
        title = lines[row + 1 : row + 3] if has_overline else lines[row : row + 2]
        if has_overline or _is_title(title):
            adornment = (title[1].strip()[0], has_overline)
            adornments += [] if adornment in adornments else [adornment]
            builder.heading(adornments.index(adornment) + 1, _plain_rst(title[0]))
            row += 2 + has_overline
            continue
        if line[0].isspace():
            body, row = _indented(lines, row)
            if is_literal:
                builder.add("lines", "\n".join(body))
            else:
                _add_rst(body, builder, adornments)
            is_literal = False
            continue
        is_literal = False
        if re.match(r"\.\.(\s|$)", line):
            body, row = _indented(lines, row + 1)
            _add_directive(line, body, builder, adornments)
            continue
        end = row
        while end < len(lines) and lines[end].strip() and not (end > row and lines[end].startswith(".. ")):
            end += 1
        is_literal = lines[end - 1].rstrip().endswith("::")
        _add_paragraph(lines[row:end], builder)
        row = end


def _is_title(pair: Sequence[str]) -> bool:
    """Whether the second line underlines the first one."""
    if len(pair) < 2 or not pair[0].strip() or not _ADORNMENT.match(pair[1]) or _ADORNMENT.match(pair[0]):
        return False
    return len(pair[1].strip()) >= min(len(pair[0].strip()), 4) and "  " not in pair[1].strip()


def _indented(lines: list[str], row: int) -> tuple[list[str], int]:
    """The indented or blank lines from a row on, without their indentation, and the row after them."""
    end = row
    while end < len(lines) and (not lines[end].strip() or lines[end][0].isspace()):
        end += 1
    return textwrap.dedent("\n".join(lines[row:end])).rstrip().split("\n"), end


def _add_directive(line: str, body: list[str], builder: Builder, adornments: list[tuple[str, bool]]) -> None:
    directive = _DIRECTIVE.match(line)
    if directive is None or directive[1] in _DROPPED_DIRECTIVES:
        return
    while body and re.match(r":[\w-]+:", body[0]):
        del body[0]
    if directive[1] in _CODE_DIRECTIVES:
        builder.add("lines", "\n".join(body))
        return
    _add_rst([directive[2], *body], builder, adornments)


def _add_paragraph(lines: list[str], builder: Builder) -> None:
    text = "\n".join(lines)
    is_table = any(re.match(r"(=+( +=+)+|[+][-=+]+[+])\s*$", line) for line in lines)
    if is_table:
        rows = [line.strip() for line in lines if not re.match(r"[\s=+-]+$", line)]
        builder.add("lines", _plain_rst("\n".join(rows)))
    elif _LIST_ITEM.match(text) or text.startswith((">>>", "|")):
        builder.add("lines", _plain_rst(text) if not text.startswith(">>>") else text)
    elif text.strip() != "::":
        builder.add("prose", re.sub(r"(\S?)\s*::$", _before_literal, _plain_rst(" ".join(text.split()))))


def _before_literal(match: re.Match[str]) -> str:
    """The end of a paragraph before a literal block: a colon, or nothing if `::` stands apart."""
    return match[1] if match[0][len(match[1]) :].startswith(" ") else f"{match[1]}:"


def _plain_rst(text: str) -> str:
    for pattern, replacement in _ROLES:
        text = pattern.sub(replacement, text)
    return text
