"""reStructuredText, read by docutils, also with Sphinx' directives and roles, which docutils does not know."""

import re
from typing import Any

from docutils import core, nodes
from docutils.parsers import rst
from docutils.parsers.rst import directives, roles
from docutils.utils import unescape
from docutils.writers import html4css1

from embeddings.adaptation.markup import Document, read_html, word_set

_LEFT_OUT = word_set(
    "toctree image figure include literalinclude index contents autosummary automodule autoclass autofunction raw role"
    " currentmodule module meta tabularcolumns only plot graphviz default-role sectionauthor"
)
_CODE = word_set("code code-block sourcecode highlight literal parsed-literal math testcode doctest ipython")
_OF_DOCUTILS = word_set("csv-table list-table replace table unicode")
_LEFT_OUT_NODES = (nodes.comment, nodes.docinfo, nodes.footnote_reference)
_SETTINGS = {
    # Of an error the source remains, in its message.
    "report_level": 3,
    "halt_level": 6,
    "warning_stream": False,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "doctitle_xform": False,
    "_disable_config": True,
}
_find_directive, _find_role = directives.directive, roles.role


class _AnyOptions(dict[str, Any]):
    """Options of any name."""

    def __bool__(self) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        return str


class _Directive(rst.Directive):
    """A directive of any name: its argument and its content are text, except those of code."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True
    option_spec = _AnyOptions()

    def run(self) -> list[nodes.Node]:
        if self.name in _LEFT_OUT:
            return []
        if self.name in _CODE:
            code = "\n".join(self.content)
            return [nodes.literal_block(code, code)] if code.strip() else []
        container = nodes.container()
        if self.arguments:
            inline, _ = self.state.inline_text(self.arguments[0], self.lineno)
            container += nodes.paragraph("", "", *inline)
        self.state.nested_parse(self.content, self.content_offset, container, match_titles=True)
        return list(container.children)


def _directive(name: str, *arguments: Any) -> Any:
    if name not in _OF_DOCUTILS:
        return _Directive, []
    found: Any
    found, messages = _find_directive(name, *arguments)
    # Sphinx adds options, without which docutils would leave out the whole table.
    return type(name, (found,), {"option_spec": _AnyOptions(found.option_spec or {})}), messages


def _role(name: str, *arguments: Any) -> Any:
    found, messages = _find_role(name, *arguments)
    return (_text_of_role, []) if found is None else (found, messages)


def _text_of_role(name: str, rawtext: str, text: str, *_: Any, **__: Any) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Of `title <target>` the title, of `~a.b` the last part."""
    text = unescape(text)
    text = re.sub(r"\s*<[^<>]*>$", "", text) or text
    return [nodes.Text(text.rpartition(".")[2] if text.startswith("~") else text.removeprefix("!"))], []


def read_rst(text: str) -> Document:
    """reStructuredText without its markup; what docutils cannot resolve remains as text."""
    # Meanwhile docutils finds a directive or role of any name.
    lookups: Any = (_directive, _role)
    directives.directive, roles.role = lookups
    try:
        document = core.publish_doctree(text, settings_overrides=_SETTINGS)
    finally:
        directives.directive, roles.role = _find_directive, _find_role
    # Messages that the writer would append.
    document.transform_messages = []
    replaced: list[tuple[nodes.Element, list[Any]]] = [
        *((node, [nodes.Text(node.astext().strip("`_|*"))]) for node in document.findall(nodes.problematic)),
        *((node, list(node.findall(nodes.literal_block))) for node in document.findall(nodes.system_message)),
        *((node, []) for kind in _LEFT_OUT_NODES for node in document.findall(kind)),
    ]
    for node, others in replaced:
        node.parent.replace(node, others)
    writer = html4css1.Writer()
    core.publish_from_doctree(document, writer=writer, settings_overrides=_SETTINGS)
    return read_html(writer.parts["body"])
