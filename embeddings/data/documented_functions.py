"""Documented functions of installed packages: their source files, docstrings and first sentences."""

import ast
import difflib
import hashlib
import inspect
import io
import os
import pkgutil
import platform
import re
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from embeddings.common.errors import OptionError

MAX_DOCUMENT_CHARACTERS = 2000

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class DocumentedFunction(NamedTuple):
    """A function or method, its qualified name (`id`), the first sentence of its docstring, and its code."""

    id: str
    package: str
    module: str
    query: str
    document: str


def documented_functions(source: bytes, package: str, module: str) -> Iterator[DocumentedFunction]:
    """The functions and methods of a module whose docstring starts with a usable sentence, in source order.

    Nested functions, overloads and functions that do nothing are left out, and a file that Python cannot parse.
    """
    text = decoded(source)
    try:
        with warnings.catch_warnings():
            # Warnings about foreign files do not help the user.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    # The parser counts columns in UTF-8 bytes, and only \n, \r\n and \r end its lines, as in `bytes.splitlines`.
    lines = text.encode().splitlines(keepends=True)
    for scope, function in _functions(tree.body, ()):
        record = _record(function, scope, lines, package, module)
        if record is not None:
            yield record


def decoded(source: bytes) -> str:
    """A source file as text, in the encoding that its first lines declare; empty if it cannot be decoded."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return ""


def _functions(body: list[ast.stmt], scope: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _Function]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield scope, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, (*scope, node.name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _functions(node.body, scope)
            yield from _functions(getattr(node, "orelse", []), scope)


def _record(
    function: _Function, scope: tuple[str, ...], lines: list[bytes], package: str, module: str
) -> DocumentedFunction | None:
    docstring = ast.get_docstring(function, clean=False)
    query = None if docstring is None else first_sentence(docstring)
    if query is None or not _does_something(function.body[1:]) or _is_overload(function):
        return None
    name = ".".join((module, *scope, function.name))
    document = f"{name}\n{_code(function, lines)}"
    return DocumentedFunction(name, package, module, query, document[:MAX_DOCUMENT_CHARACTERS].rstrip())


def _does_something(body: list[ast.stmt]) -> bool:
    for node in body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.Raise) and "NotImplemented" in ast.dump(node):
            continue
        return True
    return False


def _is_overload(function: _Function) -> bool:
    names = (getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in function.decorator_list)
    return "overload" in names


def _code(function: _Function, lines: list[bytes]) -> str:
    """The code of a function from `def`, dedented, without docstring and blank lines."""
    statement = function.body[0]
    start, end = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
    head = [*lines[function.lineno - 1 : start], lines[start][: statement.col_offset]]
    tail = [lines[end][statement.end_col_offset :].lstrip(b" \t;"), *lines[end + 1 : function.end_lineno]]
    code = b"".join(head).decode() + b"".join(tail).decode()
    lines_with_code = [line.rstrip() for line in code.split("\n") if line.strip()]
    return textwrap.dedent("\n".join(lines_with_code))


STANDARD_LIBRARY = "stdlib"

# Tests, copies of other packages, and tools for developers of the package.
# fmt: off
SKIPPED_FOLDERS = frozenset((
    "test", "tests", "testing", "_testing", "_vendor", "_vendored", "vendor", "vendored", "extern", "externals",
    "_extern", "third_party", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "ensurepip",
    "pydoc_data", "benchmarks",
))
# Repetitive model files, compiler passes and build tools: 40 % of the bytes, with few functions worth searching for.
SKIPPED_MODULES = frozenset((
    "transformers.models", "torch._inductor", "torch._dynamo", "torch._functorch", "torch._higher_order_ops",
    "torch._export", "numpy.distutils", "numpy.f2py",
))
# fmt: on


# Packages that `pip install -e '.[quickstart,cpu]'` installs, directly or as dependencies.
# fmt: off
TRAINING_PACKAGES = (
    "stdlib", "PIL", "accelerate", "aiohttp", "anyio", "click", "dateutil", "datasets", "huggingface_hub", "jinja2",
    "joblib", "matplotlib", "mpmath", "narwhals", "numpy", "omegaconf", "packaging", "pandas", "peft", "psutil",
    "pyarrow", "pyparsing", "rich", "scipy", "sklearn", "sympy", "torch", "torchmetrics", "transformers", "typer",
)
# fmt: on
# Four different kinds of code (file systems, argument parsing, training loops, graphs) in every installation.
HELD_OUT_PACKAGES = ("fsspec", "jsonargparse", "lightning", "networkx")


class SourceFile(NamedTuple):
    """One source file; `package` is the name that the user gave."""

    package: str
    module: str
    path: Path


def is_available(package: str) -> bool:
    return bool(_roots(package))


def require_available(package: str) -> None:
    if not is_available(package):
        importable = {module.name for module in pkgutil.iter_modules() if not module.name.startswith("_")}
        near = difflib.get_close_matches(package, sorted({STANDARD_LIBRARY, *importable}), n=1)
        hint = f"did you mean {near[0]}?" if near else "install it with pip, or remove it from the list"
        raise OptionError("packages", package, "must be the import names of installed packages", hint)


def find_sources(package: str) -> list[SourceFile]:
    """The source files of an installed package, sorted by module, without tests and vendored packages."""
    require_available(package)
    prefix = "" if package == STANDARD_LIBRARY else package
    by_module = {file.module: file for root in _roots(package) for file in _walk(package, prefix, root)}
    return [by_module[module] for module in sorted(by_module)]


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package (of Python for the standard library), "" if it is unknown."""
    distributions, versions = packages_distributions(), dict[str, str]()
    for package in packages:
        names = distributions.get(package)
        versions[package] = version(names[0]) if names else ""
        if package == STANDARD_LIBRARY:
            versions[package] = platform.python_version()
    return versions


def sources_digest(files: Iterable[SourceFile]) -> str:
    """SHA-256 of the names and contents of source files."""
    digest = hashlib.sha256()
    for file in files:
        content = file.path.read_bytes()
        digest.update(f"{file.package}\0{file.module}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _roots(package: str) -> list[Path]:
    if package == STANDARD_LIBRARY:
        return [Path(sysconfig.get_path("stdlib"))]
    # With a dotted name, `find_spec` would import the parent.
    if not package.isidentifier():
        return []
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return sorted(Path(folder) for folder in spec.submodule_search_locations)
    return [Path(spec.origin)] if spec.origin is not None and spec.origin.endswith(".py") else []


def _walk(package: str, prefix: str, root: Path) -> Iterator[SourceFile]:
    if root.is_file():
        yield SourceFile(package, prefix, root)
        return
    for folder, subfolders, names in os.walk(root):
        parents = [part for part in (prefix, *Path(folder).relative_to(root).parts) if part]
        candidates = (name for name in subfolders if name.isidentifier() and name not in SKIPPED_FOLDERS)
        subfolders[:] = [name for name in candidates if ".".join((*parents, name)) not in SKIPPED_MODULES]
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension == ".py" and stem.isidentifier() and not _is_test(stem):
                module = ".".join(parents if stem == "__init__" else (*parents, stem))
                yield SourceFile(package, module, Path(folder, name))


def _is_test(stem: str) -> bool:
    return stem.startswith("test_") or stem.endswith("_test") or stem in {"conftest", "test"}


MIN_WORDS = 4
MAX_WORDS = 60

# fmt: off
_ABBREVIATIONS = frozenset((
    "e.g", "i.e", "etc", "vs", "cf", "resp", "approx", "incl", "excl", "fig", "figs", "eq", "eqs", "eqn", "sec",
    "ref", "refs", "no", "nos", "vol", "pp", "al", "ca", "dr", "mr", "mrs", "st", "w.r.t", "wrt", "s.t", "a.k.a",
    "viz", "ch", "def", "thm", "prop",
))
# fmt: on
_SENTENCE_END = re.compile(r"[.!?](?=[\s\"')\]]|$)")
_SECTION = re.compile(
    r"^\s*(:(?!\w+:`)[\w ,.*]+:.*|@\w+\b.*|>>>.*|\.\. .*|```.*|\$ .*|[-*+] .*|\d+[.)] .*|[-=~^]{3,}"
    r"|(args?|arguments?|params?|parameters?|returns?|raises?|yields?|examples?|usage|notes?|warnings?|attributes?"
    r"|keyword args?|see also|references?|shape|inputs?|outputs?|todo)\s*:{0,2})\s*$",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"^[\w.]+\s*\([^)]*\)?\s*((->|--|=>|:).*)?$|^[\w.]+\(.*\)\s*((->|--|=>).*)?$")
_ARGUMENT = re.compile(r"\s*\*{0,2}\w+\s*(\([^)]*\))?: ")
_CAPITALISED = re.compile(r"\s*[A-Z][a-z]+ [a-z]")
_MIN_WRAPPED_LENGTH = 50
_BOILERPLATE = re.compile(
    r"^\W*(see |refer to|(an )?alias\b|deprecat|inherit|overrid|same as|similar to|equivalent to (calling|the)"
    r"|todo|fixme|xxx|hack|internal\b|private\b|for internal|not implemented|placeholder|dummy|magic method"
    r"|initiali[sz]es? (self|internal|the (object|class|instance))|constructor\b|implementation of (the )?abstract"
    r"|this (method|function|class) (is|has been|(should|must|will|can|may) be) (deprecated|overrid|implemented|called)"
    r"|(must|should|can) be (overrid|implement)|do not |don't |copied from|adapted from|copyright|licen[sc]e"
    r"|(new|added|changed) in |in-?place version of|return self\b|returns? (a )?(string )?repr"
    r"|test(s|ing)? (that|if|whether|for) )",
    re.IGNORECASE,
)
_MARKUP = (
    (re.compile(r"!?\[([^\]]+)\]\((?:[^()\s]+)\)"), r"\1"),
    (re.compile(r":[\w:.+-]+:`~?!?([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":[\w:.+-]+:`~([^`]+)`"), lambda match: match[1].rsplit(".", 1)[-1]),
    (re.compile(r":[\w:.+-]+:`!?([^`]+)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"\s*\[[\w-]+\]_"), ""),
    (re.compile(r"\|([A-Za-z]\w*)\|"), r"\1"),
    (re.compile(r"\s*\(?\bhttps?://\S+"), ""),
    (re.compile(r"^\W*(?=[A-Za-z])"), ""),
)


def first_sentence(docstring: str) -> str | None:
    """The first sentence of a docstring without markup and final punctuation, or None if it is not informative.

    A line that repeats the signature is skipped. Sections, lists, examples and blank lines also end the sentence.
    """
    sentence = _up_to_sentence_end(_plain(_first_paragraph(docstring))).rstrip(" .!;,").strip()
    return sentence if _is_informative(sentence) else None


def _first_paragraph(docstring: str) -> str:
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.strip():
            if lines:
                break
            continue
        if _SECTION.match(line):
            break
        if not lines and _SIGNATURE.match(line.strip()) and "(" in line:
            continue
        if lines and _starts_new_paragraph(lines, line):
            break
        lines.append(line.strip())
    return " ".join(lines)


def _starts_new_paragraph(lines: list[str], line: str) -> bool:
    """Whether a line describes an argument, or follows a single line that was too short to have been wrapped."""
    unwrapped = len(lines) == 1 and len(lines[0]) <= _MIN_WRAPPED_LENGTH and lines[0][-1].isalnum()
    return _ARGUMENT.match(line) is not None or (unwrapped and _CAPITALISED.match(line) is not None)


def _plain(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _up_to_sentence_end(text: str) -> str:
    for match in _SENTENCE_END.finditer(text):
        before, after = text[: match.start()], text[match.end() :].lstrip("\"')] ")
        words = before.split()
        last = words[-1].lstrip("(\"'[") if words else ""
        if not after:
            return text
        is_initial = len(last) == 1 and last.isupper() and after[0].isupper()
        if last.lower() in _ABBREVIATIONS or is_initial:
            continue
        if match[0] == "." and after[0].islower():
            continue
        return before
    return text


def _is_informative(sentence: str) -> bool:
    words = re.findall(r"[^\W\d_]{2,}", sentence)
    if not MIN_WORDS <= len(sentence.split()) <= MAX_WORDS or len(words) < MIN_WORDS:
        return False
    prose = sum((character.isalpha() and character.isascii()) or character == " " for character in sentence)
    return prose >= 0.75 * len(sentence) and not sentence.endswith(":") and not _BOILERPLATE.match(sentence)
