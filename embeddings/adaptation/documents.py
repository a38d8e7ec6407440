"""A folder of documents as plain text: the files that are found, their encodings, and the reader of each kind."""

import codecs
import io
import json
import logging
import os
import posixpath
import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

import regex
from charset_normalizer import from_bytes

from embeddings.adaptation.markup import (
    Builder,
    Document,
    add_html,
    read_code,
    read_html,
    read_markdown,
    read_python,
    read_text,
    word_set,
    writable,
)
from embeddings.adaptation.restructured import read_rst
from embeddings.common.errors import InputError, MissingExtraError, require
from embeddings.common.io import CHECKSUM, MANIFEST, read_json_or_empty
from embeddings.common.text import one_line
from embeddings.data.readers import open_reader, rows_of
from embeddings.inference.vector_folder import COLUMNS

EXTRA = "documents"
MAX_FILE_BYTES = 32 * 2**20
CODE_SUFFIXES = word_set(
    ".bash .bat .c .cc .cfg .clj .cmake .cpp .cs .cu .cuh .cxx .dart .el .erl .ex .exs .f90 .go .gradle .groovy .h .hpp"
    " .hs .ini .java .jl .js .jsx .kt .kts .lisp .lua .m .mjs .ml .mm .nim .php .pl .pm .proto .ps1 .r .rb .rs .scala"
    " .scss .sh .sol .sql .swift .tcl .tf .toml .ts .tsx .v .vb .vhd .vue .yaml .yml .zig .zsh .py .pyi"
)
# Data, generated files and styles: text, but nothing to search for.
_UNREAD = word_set(".css .json .lock .log .map .svg .xml .xsd .xsl .xslt .geojson .pem .crt .po .pot")
_TABLES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_JUNK_FOLDERS = word_set("node_modules bower_components __pycache__ __MACOSX venv site-packages _build")
_OUTPUT, _MANIFEST_END = "output of this library", ".manifest.json"
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# The usual encodings besides UTF-8; the first of two equally likely ones is taken.
_ENCODINGS = [
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
_DECLARED = re.compile(rb"(?:charset|coding|encoding)\s*[=:]\s*[\"']?([A-Za-z][\w.-]+)")
# A directive of reStructuredText, also in the definition of a substitution.
_DIRECTIVE = re.compile(r"^\.\. (?:\|[^|\n]+\|\s+)?[\w:-]+::(?:\s|$)", re.MULTILINE)
_PROBE_BYTES = 8192
# People do not write code with a longer mean line.
_LONGEST_MEAN_LINE = 300
# Control characters that no text contains.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x9f]")

_NOWHERE = logging.NullHandler()


class LeftOut(NamedTuple):
    """A file, a folder or rows without text: the cause, by which they are counted, what exactly is wrong, how many."""

    file: str
    cause: str
    detail: str = ""
    number: int = 1

    def __str__(self) -> str:
        return f"{self.file}: {self.cause}{f' ({self.detail})' if self.detail else ''}"


class Read(NamedTuple):
    """A document of a file; `name` is the file, or for a row of a table its id."""

    file: str
    name: str
    document: Document


class FoundFile(NamedTuple):
    """A file by its path from the folder of documents."""

    name: str
    path: Path
    num_bytes: int


class _Unreadable(Exception):
    """Its arguments are the cause, and perhaps the detail, of a `LeftOut`."""


def find_files(root: Path, own: Collection[Path] = ()) -> tuple[list[FoundFile], list[LeftOut]]:
    """The files below a folder, or the one file, sorted by path, and what is hidden or generated.

    Files of `own`, the output itself, are not documents, nor are outputs of other commands.
    """
    if not root.exists():
        raise InputError(str(root), "does not exist", "give a folder of documents, or a file")
    if not root.is_dir():
        return [FoundFile(root.name, root, root.stat().st_size)], []
    found, left_out, own = [], list[LeftOut](), {path.resolve() for path in own}

    def leave_out(path: Path, cause: str, detail: str = "") -> None:
        left_out.append(LeftOut(_relative(path, root), cause, detail))

    def unlisted(error: OSError) -> None:
        leave_out(Path(str(error.filename)), "cannot be opened", error.strerror or "")

    for folder, subfolders, names in os.walk(root, onerror=unlisted):
        for name in [*subfolders]:
            is_link = os.path.islink(os.path.join(folder, name))
            is_output = not is_link and _is_manifest(Path(folder, name, MANIFEST))
            if is_link or is_output or name.startswith(".") or name in _JUNK_FOLDERS:
                subfolders.remove(name)
                cause = "link to a folder" if is_link else "folder of generated or hidden files"
                leave_out(Path(folder, name), _OUTPUT if is_output else cause)
        manifests = (name for name in names if name.endswith(_MANIFEST_END) and _is_manifest(Path(folder, name)))
        outputs = {name.removesuffix(_MANIFEST_END) for name in manifests}
        # `passages` writes NAME.log.jsonl for NAME.jsonl.
        outputs |= {name.removesuffix(".jsonl") + ".log.jsonl" for name in outputs}
        for path in (Path(folder, name) for name in names):
            try:
                if path.name.startswith("."):
                    leave_out(path, "hidden file")
                elif not path.is_file():
                    leave_out(path, "not a file", "a broken link, a pipe or a device")
                elif path.resolve() in own:
                    continue
                elif path.name in outputs:
                    leave_out(path, _OUTPUT)
                else:
                    found.append(FoundFile(_relative(path, root), path, path.stat().st_size))
            except OSError as error:
                unlisted(error)
    return sorted(found), sorted(left_out)


def _is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of an output of this library."""
    return os.path.isfile(path) and CHECKSUM in read_json_or_empty(path)


def _relative(path: Path, root: Path) -> str:
    # Names that are not UTF-8 cannot be written.
    return path.relative_to(root).as_posix().encode("utf-8", "replace").decode()


def read_file(file: FoundFile, columns: Mapping[str, str]) -> Iterator[Read | LeftOut]:
    """The documents of a file: one, or one for each row of a table; whatever cannot be read is reported instead."""
    suffix = Path(file.name.lower().removesuffix(".gz")).suffix
    try:
        if suffix in _TABLES:
            yield from _read_table(file, columns)
            return
        if suffix in _UNREAD:
            raise _Unreadable(f"kind of file that is not read ({suffix})")
        if file.num_bytes > MAX_FILE_BYTES:
            limit = f"larger than {MAX_FILE_BYTES >> 20} MiB"
            raise _Unreadable(limit, "split it, or write its texts as JSON lines")
        document = _read_document(file, suffix)
        if not any(block.kind != "heading" for block in document.blocks):
            raise _Unreadable("without text", "scanned pages?" if suffix == ".pdf" else "")
        yield Read(file.name, file.name, document)
    except _Unreadable as error:
        yield LeftOut(file.name, *error.args)
    except MissingExtraError as error:
        yield LeftOut(file.name, f"{suffix} needs an optional library", str(error))
    except InputError as error:
        yield LeftOut(file.name, "damaged", one_line(str(error)))
    except OSError as error:
        yield LeftOut(file.name, "cannot be opened", error.strerror or type(error).__name__)
    # The libraries raise errors of many kinds for damaged files.
    except Exception as error:
        yield LeftOut(file.name, "damaged", one_line(f"{type(error).__name__}: {error}", 160))


def _read_document(file: FoundFile, suffix: str) -> Document:
    with open(file.path, "rb") as opened:
        data = opened.read(_PROBE_BYTES)
        if suffix not in _BINARY_READERS:
            _check_text(data)
        data += opened.read()
    if suffix in _BINARY_READERS:
        return _BINARY_READERS[suffix](data)
    if not data.strip():
        raise _Unreadable("empty")
    text = decode(data)
    if suffix in (".md", ".markdown", ".mdx", ".mkd", ".qmd", ".rmd"):
        return read_markdown(text)
    if suffix in (".html", ".htm", ".xhtml"):
        return read_html(text)
    if suffix in (".rst", ".rest"):
        return read_rst(text)
    if suffix in (".py", ".pyi"):
        return read_python(text, file.name)
    if suffix == ".ipynb":
        return _read_notebook(text)
    if suffix not in CODE_SUFFIXES:
        # The documentation of Django, for example, is reStructuredText in `.txt`.
        if len(_DIRECTIVE.findall(text)) > 2:
            return read_rst(text)
        return read_markdown(text) if _is_markdown(text) else read_text(text)
    if len(text) > _LONGEST_MEAN_LINE * (text.count("\n") + 1):
        raise _Unreadable("minified or generated code")
    return read_code(text, file.name)


def _is_markdown(text: str) -> bool:
    """Whether a text whose name says nothing has Markdown's headings, and several or also links or blocks of code."""
    if len(re.findall(r"^#{2,4} \S", text, re.MULTILINE)) > 2:
        return True
    return (
        len(re.findall(r"^#{1,4} \S", text, re.MULTILINE)) > 1
        and re.search(r"\]\(|^```", text, re.MULTILINE) is not None
    )


def decode(data: bytes) -> str:
    r"""The text of a file in whatever encoding, with `\n` at its line ends; refuses a binary one."""
    text = _decoded(data)
    if len(_CONTROL.findall(text, 0, _PROBE_BYTES)) > 0.02 * min(len(text), _PROBE_BYTES):
        raise _Unreadable("binary")
    return writable(text).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes) -> str:
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    if (pairs := _check_text(data[:_PROBE_BYTES])) is not None:
        return data.decode(pairs, "replace")
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    # A damaged byte or two do not make another encoding of UTF-8.
    text = data.decode("utf-8", "replace")
    num_bad = text.count("\ufffd")
    if 3 * num_bad <= sum(letter > "\x7f" for letter in text) - num_bad:
        return text
    declared = _DECLARED.search(data[:2048])
    if declared is not None:
        try:
            return data.decode(declared[1].decode())
        except (LookupError, ValueError):
            pass
    found = list(from_bytes(data, cp_isolation=_ENCODINGS))
    if not found:
        raise _Unreadable("binary or of an unknown encoding")
    least = min(match.chaos for match in found)
    likely = [match for match in found if match.chaos <= least + 0.01]
    # Korean and Japanese bytes look like Thai ones, but not the other way round.
    likely.sort(key=lambda match: (match.encoding == "cp874", -match.coherence, _ENCODINGS.index(match.encoding)))
    return data.decode(likely[0].encoding, "replace")


def _check_text(start: bytes) -> str | None:
    """Refuse a binary file by its first bytes; of UTF-16 without a mark the encoding is returned."""
    if b"\0" not in start or start.startswith(tuple(_MARKS)):
        return None
    # Of Western text every second byte is zero.
    num_zeros = [start[side::2].count(0) / max(1, len(start) // 2) for side in (0, 1)]
    if max(num_zeros) < 0.4 or min(num_zeros) > 0.05:
        raise _Unreadable("binary")
    return "utf-16-be" if num_zeros[0] > num_zeros[1] else "utf-16-le"


def _read_table(file: FoundFile, columns: Mapping[str, str]) -> Iterator[Read | LeftOut]:
    """A document for each row; an unreadable row ends the file, and one without text is left out."""
    id_column, title_column, text_column = (columns.get(name, name) for name in COLUMNS)
    row, num_without = 0, 0
    # The columns of all rows: rows of JSON may lack what others have.
    seen = dict[str, None]()
    try:
        names = (id_column, "id", title_column, text_column)
        reader = open_reader(file.path, names, (text_column,), _recoded_table(file))
        # The bar moves that of all files.
        for where, fields in rows_of("reading", [reader]):
            row += 1
            seen |= dict.fromkeys(fields)
            text, title = (_cell(fields.get(name)) for name in (text_column, title_column))
            if not text.strip():
                num_without += 1
                continue
            own = next((fields[each] for each in (id_column, "id") if fields.get(each) is not None), None)
            name = _cell(own).strip() or f"{file.name}#{where.rpartition(':')[2]}"
            document = read_text(text)
            trail = (" ".join(title.split()),) if title.strip() else ()
            yield Read(file.name, name, document._replace(blocks=[b._replace(trail=trail) for b in document.blocks]))
    except InputError as error:
        rest = "rows from here on are left out" if row else "it has no readable row"
        yield LeftOut(file.name, "damaged", f"{one_line(str(error))}; {rest}")
    present = f"found: {one_line(', '.join(map(str, seen)), 100)}"
    if row and text_column not in seen:
        raise _Unreadable(f"without a column {text_column!r}", f"{present}; name it with --columns '{{text: COLUMN}}'")
    for column in columns.values() if row else ():
        if column not in seen:
            yield LeftOut(file.name, f"without a column {column!r}", f"its rows are read; {present}")
    if num_without:
        yield LeftOut(file.name, "rows without text", f"{num_without} of {row} rows", num_without)


def _recoded_table(file: FoundFile) -> bytes | None:
    """In UTF-8 a CSV table of another encoding, such as the Windows-1252 and UTF-16 of spreadsheets; else None."""
    if file.path.suffix.lower() not in (".csv", ".tsv") or file.num_bytes > MAX_FILE_BYTES:
        return None
    data = file.path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError:
        return decode(data).encode()
    return None


def _cell(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        # In Parquet integers become floats beside null.
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text = value if isinstance(value, str) else ""
    return writable(text).replace("\r\n", "\n")


def _read_notebook(text: str) -> Document:
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```\n{source}\n```" if cell["cell_type"] == "code" else source)
    return read_markdown("\n\n".join(parts))


def _read_pdf(data: bytes) -> Document:
    """The paragraphs of a PDF under the titles of its outline, without lines that pages repeat at top or bottom."""
    # Warnings about a file would be printed without its name.
    logging.getLogger("pypdf").addHandler(_NOWHERE)
    reader = require("pypdf", EXTRA).PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise _Unreadable("encrypted")
    pages = [[line.strip() for line in writable(page.extract_text()).split("\n")] for page in reader.pages]
    pages = [[line for line in page if line] for page in pages]
    repeated = Counter(edge for page in pages for edge in {_without_digits(line) for line in (*page[:2], *page[-2:])})
    least = max(3, len(pages) / 2)
    lines = list[str]()
    for page in pages:
        last = len(page) - 2
        for number, line in enumerate(page):
            is_edge = number < 2 or number >= last
            if not (is_edge and repeated[_without_digits(line)] >= least):
                lines.append(line)
    levels = {_without_number(title): level for title, level in _outline(reader.outline)}
    builder, start = Builder(), 0
    for number, line in enumerate([*lines, ""]):
        level = levels.get(_without_number(line))
        if level is None and number < len(lines):
            continue
        for paragraph in _joined_lines(lines[start:number]):
            builder.add("prose", paragraph)
        builder.heading(level or 1, line)
        start = number + 1
    return builder.document()


def _outline(entries: Sequence[Any], level: int = 1) -> Iterator[tuple[str, int]]:
    for entry in entries:
        if isinstance(entry, list):
            yield from _outline(entry, level + 1)
        elif entry.title:
            yield entry.title, level


def _without_number(title: str) -> str:
    return re.sub(r"^[\d.]+\s+", "", " ".join(title.split())).casefold()


def _without_digits(line: str) -> str:
    return re.sub(r"\d+", "0", line)


def _joined_lines(lines: Sequence[str]) -> Iterator[str]:
    """Paragraphs of lines that were broken to a width: a short line that ends a sentence ends a paragraph."""
    usual = statistics.median(map(len, lines)) if lines else 0
    paragraph = ""
    # The dots before page numbers in a table of contents say nothing.
    for line in (re.sub(r"(\s*\.){4,}", " …", line) for line in lines):
        if re.search(r"\w-$", paragraph) and line[:1].islower():
            paragraph = paragraph[:-1] + line
        else:
            paragraph = f"{paragraph} {line}".strip()
        if regex.search(r"[\p{STerm}:][\p{Pe}\p{Pf}\"']*$", line) and len(line) < 0.8 * usual:
            yield paragraph
            paragraph = ""
    if paragraph:
        yield paragraph


def _read_docx(data: bytes) -> Document:
    builder, items = Builder(), list[str]()
    for part in require("docx", EXTRA).Document(io.BytesIO(data)).iter_inner_content():
        is_table = hasattr(part, "rows")
        style = "" if is_table or part.style is None else part.style.name or ""
        if style.startswith("List") and part.text.strip():
            items.append(f"- {part.text.strip()}")
            continue
        builder.add("lines", "\n".join(items))
        items = []
        if is_table:
            # A cell that spans columns is there once for each of them.
            rows = [" | ".join(" ".join(cell.text.split()) for cell in dict.fromkeys(row.cells)) for row in part.rows]
            builder.add("lines", "\n".join(rows))
            continue
        level = re.match(r"Heading (\d)$", style)
        if level is not None or style == "Title":
            builder.heading(int(level[1]) + 1 if level else 1, part.text)
        else:
            builder.add("prose", part.text)
    builder.add("lines", "\n".join(items))
    return builder.document()


def _read_epub(data: bytes) -> Document:
    builder = Builder()
    with zipfile.ZipFile(io.BytesIO(data)) as book:
        container = ElementTree.fromstring(book.read("META-INF/container.xml"))
        package = next(node.attrib["full-path"] for node in container.iter() if node.tag.endswith("}rootfile"))
        listing = ElementTree.fromstring(book.read(package))
        places = {node.attrib["id"]: node.attrib["href"] for node in listing.iter() if node.tag.endswith("}item")}
        chapters = [node.attrib["idref"] for node in listing.iter() if node.tag.endswith("}itemref")]
        for chapter in chapters:
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(places[chapter])))
            if book.getinfo(name).file_size > MAX_FILE_BYTES:
                raise _Unreadable(f"larger than {MAX_FILE_BYTES >> 20} MiB", name)
            add_html(decode(book.read(name)), builder)
    return builder.document()


_BINARY_READERS: Mapping[str, Callable[[bytes], Document]] = {
    ".pdf": _read_pdf,
    ".docx": _read_docx,
    ".epub": _read_epub,
}
