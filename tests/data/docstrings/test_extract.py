"""Documented functions, their first sentences, and source files of packages."""

import sys
import textwrap

import pytest

from embeddings.common import OptionError
from embeddings.data.documented_functions import (
    MAX_DOCUMENT_CHARACTERS,
    DocumentedFunction,
    documented_functions,
    find_sources,
    first_sentence,
    is_available,
    package_versions,
)
from tests.helpers.refusals import refused

QUERY = "Add two numbers with care"


def extract(source):
    content = textwrap.dedent(source).encode() if isinstance(source, str) else source
    return list(documented_functions(content, "pkg", "pkg.mod"))


def test_a_function_becomes_its_first_sentence_and_its_code_without_the_docstring():
    source = f'''
        @cache
        def add(x, y=1):
            """{QUERY}. Then more.

            Args:
                x: a number.
            """
            # Python adds them.

            return x + y
    '''
    document = "pkg.mod.add\ndef add(x, y=1):\n    # Python adds them.\n    return x + y"
    assert extract(source) == [DocumentedFunction("pkg.mod.add", "pkg", "pkg.mod", QUERY, document)]


def test_method_names_include_their_classes_and_nested_functions_belong_to_the_outer_one():
    source = f'''
        class Outer:
            class Inner:
                async def add(self):
                    """{QUERY}."""
                    def inner():
                        """{QUERY} inside."""
                        return 1
                    return inner()
        if True:
            def guarded():
                """{QUERY} under an if."""
                return 1
        else:
            def otherwise():
                """{QUERY} under an else."""
                return 1
    '''
    found = extract(source)
    assert [function.id for function in found] == ["pkg.mod.Outer.Inner.add", "pkg.mod.guarded", "pkg.mod.otherwise"]
    assert found[0].document.startswith("pkg.mod.Outer.Inner.add\nasync def add(self):\n    def inner():")


@pytest.mark.parametrize(
    "definition",
    [
        'def add(): "Add two numbers with care"; return 1',
        'def add():\n    "Add two numbers with care"; return 1',
        'def add():\r\n    """Add two numbers with care"""\r\n    return 1\r\n',
        'def add():\r    """Add two numbers with care"""\r    return 1\r',
        'def add():\n    """Add two numbers with care\x0c"""\n    return 1',
        'def add(\n    x="é" # é\n):\n    """Add two numbers with care"""  # é\n    return 1',
        'def add():\n\tr"""Add two numbers with care"""\n\treturn 1',
        'def add():\n    ("Add two "\n     "numbers with care")\n    return 1',
    ],
)
def test_the_docstring_is_removed_in_every_position(definition):
    (function,) = extract(definition.encode())
    code = function.document.partition("\n")[2]
    assert function.query == QUERY
    assert "two" not in code
    assert code.startswith("def add(")
    assert code.endswith("return 1")


@pytest.mark.parametrize(
    "body",
    [
        "def add():\n    return 1",
        'def add():\n    """Add two numbers with care."""',
        'def add():\n    """Add two numbers with care."""\n    ...',
        'def add():\n    """Add two numbers with care."""\n    raise NotImplementedError("later")',
        'def add():\n    """Too short."""\n    return 1',
        '@typing.overload\ndef add():\n    """Add two numbers with care."""\n    return 1',
        "def add(:",
        "x = '\x00'",
        "",
    ],
)
def test_functions_without_a_usable_sentence_or_without_code_are_left_out(body):
    assert extract(body.encode()) == []


def test_the_declared_encoding_is_used_invalid_text_skipped_and_long_code_truncated():
    text = f'# -*- coding: latin-1 -*-\ndef add(x="é"):\n    """{QUERY} é."""; return "é"'
    (function,) = extract(text.encode("latin-1"))
    assert function.document == 'pkg.mod.add\ndef add(x="é"):\n    return "é"'
    assert extract(text.replace("latin-1", "utf-8").encode("latin-1")) == []
    assert extract(b"# -*- coding: nonsense -*-\n") == []
    # Warnings about the parsed code are suppressed.
    (function,) = extract(f'def add():\n    """{QUERY}."""\n    x = "\\d"\n' + "    x += 1\n" * 1000)
    assert MAX_DOCUMENT_CHARACTERS - 20 < len(function.document) <= MAX_DOCUMENT_CHARACTERS


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Pad sequences to one length. More follows.", "Pad sequences to one length"),
        ("\n    Pad sequences\n    to one length.\n\n    Args:\n        x: y.\n", "Pad sequences to one length"),
        ("Cut text, e.g. at stops, into parts. Then stop.", "Cut text, e.g. at stops, into parts"),
        ("Read the file setup.cfg from disk. Then stop.", "Read the file setup.cfg from disk"),
        ("Find the roots of x. Consider also y here.", "Find the roots of x"),
        ("Compute what A. Turing wrote down once. Then stop.", "Compute what A. Turing wrote down once"),
        ("Is this graph a tree? True if it is.", "Is this graph a tree"),
        ("Return a :class:`~torch.Tensor` of :func:`numpy.ones` values.", "Return a Tensor of numpy.ones values"),
        ("Draw :meth:`a line <Axes.plot>` in ``red`` and `blue`.", "Draw a line in red and blue"),
        ("Make *all* of the **words** plain again.", "Make all of the words plain again"),
        ("Fit the `line <https://x.org/y>`_ as in [1]_ by hand.", "Fit the line as in by hand"),
        ("Fit the [line](https://x.org/y) once more.", "Fit the line once more"),
        ("Multiply a*b and c*d for us.", "Multiply a*b and c*d for us"),
        ("mean(x, axis=None) -> float\n\nAverage of all the values.", "Average of all the values"),
        ("mean(x,\n\nAverage of all the values.", "Average of all the values"),
        ("Gather the tensors\n:param x: what to gather", None),
        ("Gather all of the tensors\n:param x: what to gather", "Gather all of the tensors"),
        ("Gather all of the tensors\nx: what to gather from them", "Gather all of the tensors"),
        ("Gather all of the tensors\nThis is collective, and slow.", "Gather all of the tensors"),
        (
            "Gather every one of the tensors that lie on the ranks of\nPyTorch so that all have them.",
            "Gather every one of the tensors that lie on the ranks of PyTorch so that all have them",
        ),
        ("Load the state of\n:class:`Optimizer` from disk.", "Load the state of Optimizer from disk"),
        ("+\nFold the long headers at spaces.", "Fold the long headers at spaces"),
        # Sentences without information are not used.
        ("", None),
        ("Args:\n    x: the value that is squared here", None),
        (":param x: the value that is squared here", None),
        (">>> pad(x) and then some more words", None),
        ("See the base class for details.", None),
        ("Deprecated since version two of this.", None),
        ("Initialize self.  See help(type(self)) for accurate signature.", None),
        ("This method must be overridden by subclasses.", None),
        ("One of the following things:", None),
        ("x = a + b * (c - d) / e ** f", None),
        ("返回 所有 张量 的 平均 值", None),
    ],
)
def test_the_first_sentence_is_found_and_cleaned(docstring, sentence):
    assert first_sentence(docstring) == sentence


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (
        *("zoo_x/__init__.py", "zoo_x/b.py", "zoo_x/a.py", "zoo_x/sub/c.py", "zoo_x/notes.txt", "zoo_x/two-part.py"),
        *("zoo_x/tests/t.py", "zoo_x/sub/test_c.py", "zoo_x/conftest.py", "zoo_x/_vendor/six.py", "zoo_x/not-mod/d.py"),
        "single_x.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")
    return tmp_path


def test_sources_are_sorted_without_tests_vendored_packages_and_invalid_module_names(package):
    files = find_sources("zoo_x")
    assert [file.module for file in files] == ["zoo_x", "zoo_x.a", "zoo_x.b", "zoo_x.sub.c"]
    names = ("__init__.py", "a.py", "b.py", "sub/c.py")
    assert [file.path for file in files] == [package / "zoo_x" / name for name in names]
    assert {file.package for file in files} == {"zoo_x"}
    assert "zoo_x" not in sys.modules
    assert [file.module for file in find_sources("single_x")] == ["single_x"]
    versions = package_versions(["zoo_x", "stdlib", "sklearn"])
    assert versions["stdlib"].count(".") == 2
    assert versions["sklearn"][0].isdigit()
    assert versions["zoo_x"] == ""


def test_the_standard_library_is_a_package_without_installed_ones():
    modules = {file.module for file in find_sources("stdlib")}
    assert {"json.decoder", "heapq", "asyncio.queues"} <= modules
    assert not any(module.split(".")[0] in {"numpy", "torch", "site", "test"} - {"site"} for module in modules)


@pytest.mark.parametrize("name", ["no_such_package_x", "", "json.decoder", "../etc", "sys", "zoo x"])
def test_a_package_that_has_no_sources_is_refused_by_name(name):
    assert not is_available(name)
    assert repr(name) in refused(OptionError, "packages must be the import names of", find_sources, name)
