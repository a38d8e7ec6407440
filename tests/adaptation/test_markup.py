"""The blocks of Markdown, HTML, reStructuredText, plain text and source code, with expectations written by hand."""

import pytest
from docutils.parsers.rst import directives

from embeddings.adaptation.markup import read_code, read_html, read_markdown, read_python, read_text
from embeddings.adaptation.restructured import read_rst


def parts(document):
    """The trail and the text of each block that is not a heading."""
    blocks = [block for block in document.blocks if block.kind != "heading"]
    return [(document.separator.join(block.trail), document.text[block.start : block.end]) for block in blocks]


def links(document):
    return [link for block in document.blocks for link in block.links]


MARKDOWN = """---
title: Handbook
---
Before *any* heading.

# Install

Run `pip install` and
read [the guide](guide.md#first "title"), ![a picture](x.png).
<!-- hidden -->

1. one
2. two
   - inner **item**

## On *Linux*

```bash
make
```

| name | size |
|---|---|
| a | [1](b.md) |

> quoted

Title
=====
<div align="center"><h2>From HTML</h2><p>Centred &amp; bold</p></div>
"""


def test_markdown_becomes_blocks_without_markup():
    document = read_markdown(MARKDOWN)
    assert parts(document) == [
        ("Handbook", "Before any heading."),
        ("Handbook > Install", "Run pip install and read the guide, a picture."),
        ("Handbook > Install", "1. one\n2. two\n  - inner item"),
        ("Handbook > Install > On Linux", "make"),
        ("Handbook > Install > On Linux", "name | size\na | 1"),
        ("Handbook > Install > On Linux", "quoted"),
        ("Handbook > Title > From HTML", "Centred & bold"),
    ]
    assert links(document) == [("the guide", "guide.md#first"), ("1", "b.md")]
    assert [block.kind for block in document.blocks if block.kind != "heading"][2:5] == ["lines"] * 3


def test_a_title_that_repeats_as_first_heading_is_one_heading():
    assert parts(read_markdown("---\ntitle: Guide\n---\n# Guide\n\ntext\n\n## Part\n\nmore")) == [
        ("Guide", "text"),
        ("Guide > Part", "more"),
    ]


def test_a_rule_at_the_start_is_no_front_matter():
    for prose in ("A first paragraph.", "A first paragraph: it is\nlong."):
        found = parts(read_markdown(f"---\n{prose}\n\nA second one.\n\n---\n\nThe end."))
        assert found == [("", " ".join(prose.split())), ("", "A second one."), ("", "The end.")]


def test_a_title_of_escaped_half_characters_can_be_written():
    (block,) = read_markdown('---\ntitle: "\\ud83d\\ude00 Guide \\ud83d"\n---\n\ntext').blocks
    assert block.trail == ("😀 Guide \ufffd",)


def test_damaged_front_matter_is_no_error():
    assert parts(read_markdown("---\ntitle: A: B\n---\n\ntext")) == [("", "text")]
    assert parts(read_markdown("---\n: [\n---\n\ntext")) == [("", "text")]


HTML = """<!doctype html><html><head><title>Site</title><style>p {}</style><script>var x = "<p>no</p>";</script></head>
<body><nav><a href="/">Home</a><nav>inner</nav></nav>
<h1>Soup<a class="headerlink" href="#soup">¶</a> <a href="#soup">#</a></h1>
<p>Boil <b>water</b>.<br>Add <a href="salt.html">salt</a>.
<p>Unclosed paragraph
<ul><li>one <li>two<ul><li>deep</ul></ul>
<table><tr><th>a<th>b</tr><tr><td>1</td><td>2</td></tr></table>
<pre>if x:
    y</pre>
<div hidden>secret</div><footer>© us</footer></body></html>"""


def test_html_becomes_blocks_without_menus_and_scripts():
    document = read_html(HTML)
    assert parts(document) == [
        ("Soup", "Boil water.\nAdd salt."),
        ("Soup", "Unclosed paragraph"),
        ("Soup", "- one\n- two\n  - deep"),
        ("Soup", "a | b\n1 | 2"),
        ("Soup", "if x:\n    y"),
    ]
    assert links(document) == [("salt", "salt.html")]


def test_a_page_with_a_main_part_is_that_part():
    html = '<title>T</title><div>menu</div><div role="main"><div>text</div>more</div><div>after</div>'
    assert parts(read_html(html)) == [("T", "text"), ("T", "more")]


RST = """\
=======
Library
=======

.. _label:

Use :func:`~pkg.mod.run` or ``plain`` with `a link <https://x.org>`_.

.. note:: Careful
   with *this*.

.. toctree::
   :maxdepth: 2

   intro

Usage
-----

Example::

    run(1)

- first
- second, see |name|

.. code-block:: python
   :linenos:

   x = 1

====  ====
a     b
====  ====
1     2
====  ====

.. a comment
   of two lines

...and so on.
"""


def test_rst_becomes_blocks_without_markup():
    assert parts(read_rst(RST)) == [
        ("Library", "Use run or plain with a link."),
        ("Library", "Careful with this."),
        ("Library > Usage", "Example:"),
        ("Library > Usage", "run(1)"),
        ("Library > Usage", "- first\n- second, see name"),
        ("Library > Usage", "x = 1"),
        ("Library > Usage", "a | b\n1 | 2"),
        ("Library > Usage", "...and so on."),
    ]


RST_WITH_LISTS = """\
:tocdepth: 2

1. Install it::

      pip install it

   .. versionadded:: 2.0
2. Name\\ s of :class:`the title <pkg.mod>`, see [1]_ and missing_.

.. list-table:: Removed
   :anything: of Sphinx

   * - old
     - new
   * - a
     - b

.. csv-table::

   "not closed

.. py:function:: run(x)
   :no-index:

   Runs ``x``.

.. [1] A footnote.
.. include:: {path}
.. csv-table::
   :file: {path}
"""


def test_rst_keeps_lists_and_tables_whole_and_reads_no_other_file(tmp_path):
    (tmp_path / "secret.txt").write_text("secret,values")
    document = read_rst(RST_WITH_LISTS.format(path=tmp_path / "secret.txt"))
    assert parts(document) == [
        (
            "",
            "1. Install it:\n\n  pip install it\n  2.0\n2. Names of the title, see and missing.",
        ),
        ("", "Removed\nold | new\na | b"),
        ("", '.. csv-table::\n\n   "not closed'),
        ("", "run(x)"),
        ("", "Runs x."),
        ("", "[1] | A footnote."),
        ("", f".. csv-table::\n   :file: {tmp_path / 'secret.txt'}"),
    ]
    assert directives.directive.__module__ == "docutils.parsers.rst.directives"


def test_text_becomes_its_paragraphs_unchanged():
    document = read_text("  one\ntwo  \n\n \t\nthree\n\n")
    assert parts(document) == [("", "one\ntwo"), ("", "three")]
    assert read_text(" \n\n").blocks == []


PYTHON = '''"""The module."""

import os
from typing import Any

__all__ = ["run"]

LIMIT = 3


# Above the function.
@cache
def run(x):
    """Runs."""
    return x


class Empty(Base):
    def one(self): ...


class Shape:
    """A shape."""

    sides: int

    def area(self):
        return 0

    name = "x"


FIRST = 1
SECOND = 2
THIRD = 3
FOURTH = 4
'''


def test_python_becomes_its_definitions_under_qualified_names():
    assert parts(read_python(PYTHON, "pkg/shapes.py")) == [
        ("pkg.shapes", '"""The module."""'),
        ("pkg.shapes.run", 'LIMIT = 3\n\n\n# Above the function.\n@cache\ndef run(x):\n    """Runs."""\n    return x'),
        ("pkg.shapes.Empty.one", "class Empty(Base):\n    def one(self): ..."),
        ("pkg.shapes.Shape", 'class Shape:\n    """A shape."""\n\n    sides: int'),
        ("pkg.shapes.Shape.area", "    def area(self):\n        return 0"),
        ("pkg.shapes.Shape", '    name = "x"'),
        ("pkg.shapes", "FIRST = 1\nSECOND = 2\nTHIRD = 3\nFOURTH = 4"),
    ]
    assert parts(read_python("def f(): pass", "pkg/__init__.py")) == [("pkg.f", "def f(): pass")]


def test_python_that_does_not_parse_is_read_as_code():
    assert parts(read_python("print 'old'\n\nx = = 1", "a.py")) == [("a.py", "print 'old'"), ("a.py", "x = = 1")]


CODE = """/* Licence
   of the file */
#include <a.h>

/* Adds
   numbers. */
int add(int a, int b) {
    int c;

    return a + b;

}

static int zero;
"""


def test_code_becomes_parts_without_indentation_under_their_first_line():
    assert parts(read_code(CODE, "src/add.c")) == [
        ("src/add.c", "/* Licence\n   of the file */\n#include <a.h>"),
        ("src/add.c > int add(int a, int b)", CODE.partition("\n\n")[2].partition("\n\nstatic")[0]),
        ("src/add.c", "static int zero;"),
    ]


def test_a_page_that_is_nested_too_deeply_is_damaged_and_others_are_whole():
    assert parts(read_html(f"{'<div>' * 500}deep{'</div>' * 500}<p>after")) == [("", "deep"), ("", "after")]
    with pytest.raises(ValueError, match="Excessive depth"):
        read_html(f"<p>before</p>{'<div>' * 5000}deep{'</div>' * 5000}<p>after")
    # What one block of HTML leaves open does not swallow the rest of the Markdown.
    assert parts(read_markdown("Use <select> here.\n\n<div><svg><main hidden>\n\nAfter<br>it.")) == [
        ("", "Use here."),
        ("", "After\nit."),
    ]


def test_cells_and_numbers_of_pages_keep_their_places():
    html = "<table><tr><td></td><td>b</td></tr></table><ol start=5><li>five<li>six<ul><li>inner</ul></ol>"
    assert parts(read_html(html)) == [("", " | b"), ("", "5. five\n6. six\n  - inner")]
    assert parts(read_markdown("|   | b |\n|---|---|\n| c |   |")) == [("", " | b\nc |")]
    mixed = "<table><tr><td>key<td><p>one<p>two</td><td>last</tr><tr><td><div>a</div><td><div>b</div></tr></table>"
    assert parts(read_html(mixed)) == [("", "key | one two | last\na | b")]
    nested = "<table><tr><td>key<td>some<ul><li>one<li>two</ul>more<td>last</tr><tr><td>a<td>b</table>"
    assert parts(read_html(nested)) == [("", "key | some\n  - one\n  - two\nmore | last\na | b")]
    code = "<table><tr><td>key<td><pre>x\n  y</pre><td>last</table>"
    assert parts(read_html(code)) == [("", "key\n  x\n    y\n | last")]
    stray = "<table><tr><td><li>one</li></td><td>last</td></tr></table><ul><li>two</ul>"
    assert parts(read_html(stray)) == [("", "- one\n | last"), ("", "- two")]
    layout = "<table><tr><td><h2>Head</h2>text<td>more<td>rest</table><p>after"
    assert parts(read_html(layout)) == [("Head", text) for text in ("text", "more", "rest", "after")]
    inner = "<table><tr><td><table><tr><td><h2>Head</h2>text<td>more</table>rest<td>last</table><ul><li>one</ul>"
    assert parts(read_html(inner)) == [("Head", text) for text in ("text", "more", "rest", "last", "- one")]
