"""The pages of the documentation and what stands in them: links, headings, blocks of code, commands."""

import functools
import importlib.util
import re
import shlex
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


# The module that MkDocs calls; it lies beside the pages, not in a package.
_spec: Any = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
hooks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)
FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ROOT_FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*(ROOT / name for name in ROOT_FILES), *sorted((ROOT / "docs").rglob("*.md"))]
MARK = 'bash title="Not run here: '


class Block(NamedTuple):
    """A block of code: its page, what stands behind the fence, its text."""

    page: Path
    info: str
    text: str

    @property
    def language(self) -> str:
        """The language, empty where none is named."""
        return self.info.partition(" ")[0]

    @property
    def is_marked(self) -> bool:
        """Whether its title says that it was not run."""
        return self.info.startswith(MARK)


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text("utf-8"))


def blocks(page: Path) -> list[Block]:
    """The blocks of code of a page."""
    found = FENCE.findall(page.read_text("utf-8"))
    return [Block(page, info.strip(), text) for _, info, text in found]


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown makes it."""
    plain = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, those of generated sections among them."""
    text = FENCE.sub("", hooks.with_tables(page.read_text("utf-8")))
    return {slug(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}


def shell_lines_of(block: Block) -> list[list[str]]:
    """The words of each line of a shell block, lines that are continued joined, without comments."""
    if block.language != "bash":
        return []
    joined = re.sub(r"\\\n\s*", " ", block.text)
    lines = [re.sub(r"^\w+=\$\((.*)\)$", r"\1", line.strip()) for line in joined.splitlines()]
    return [words for line in lines if line and (words := shlex.split(line, comments=True))]


def without_variables(words: list[str]) -> list[str]:
    """A line without the variables that it sets at its beginning."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def command_of(words: list[str]) -> list[str] | None:
    """What follows `python main.py` or `embeddings` on a line, without variables; None for another program."""
    words = without_variables(words)
    if words[:2] == ["python", "main.py"]:
        return words[2:]
    return words[1:] if words[:1] == ["embeddings"] else None


def commands() -> list[tuple[str, list[str]]]:
    """Every command of the library that a block or a line of prose has, with the name of its page.

    In prose a command may be a pattern: with an ellipsis it is left out.
    """
    found = []
    for page in PAGES:
        for block in blocks(page):
            found += [(name_of(page), words) for line in shell_lines_of(block) if (words := command_of(line))]
        for code in re.findall(r"`((?:python main\.py|embeddings) [^`…]+)`", prose(page)):
            words = command_of(shlex.split(code))
            if words and words[0] != "COMMAND":
                found.append((name_of(page), words))
    return found
