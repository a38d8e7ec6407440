import ast
import textwrap

import pytest

from embeddings.data.docstrings.extract import MAX_DOCUMENT_CHARACTERS, DocumentedFunction, documented_functions

QUERY = "Add two numbers with care"


def extract(source: str | bytes) -> list[DocumentedFunction]:
    content = textwrap.dedent(source).encode() if isinstance(source, str) else source
    return list(documented_functions(content, "pkg", "pkg.mod"))


def test_a_function_becomes_its_first_sentence_and_its_code_without_the_docstring() -> None:
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
    assert extract(source) == [
        DocumentedFunction(
            id="pkg.mod.add",
            package="pkg",
            module="pkg.mod",
            query=QUERY,
            document="pkg.mod.add\ndef add(x, y=1):\n    # Python adds them.\n    return x + y",
        )
    ]


def test_methods_carry_their_classes_and_inner_functions_are_part_of_the_outer_one() -> None:
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
    assert [function.id for function in found] == [
        "pkg.mod.Outer.Inner.add",
        "pkg.mod.guarded",
        "pkg.mod.otherwise",
    ]
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
def test_the_docstring_is_cut_out_wherever_it_stands(definition: str) -> None:
    (function,) = extract(definition.encode())
    code = function.document.partition("\n")[2]
    assert function.query == QUERY
    assert "two" not in code
    assert code.startswith("def add(")
    assert code.endswith("return 1")


def test_code_without_docstring_parses_to_the_same_tree_as_the_original_without_it() -> None:
    lines = [
        *("def add(x,", '        text="""a', 'b""") -> int:', f'    """{QUERY}.', "", '    More."""', "    if x:"),
        *("        return 1", "", "    return 2"),
    ]
    source = "\n".join(lines)
    (function,) = extract(source)
    expected = ast.parse(source)
    definition = expected.body[0]
    assert isinstance(definition, ast.FunctionDef)
    del definition.body[0]
    assert ast.dump(ast.parse(function.document.partition("\n")[2])) == ast.dump(expected)


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
def test_functions_without_a_usable_sentence_or_without_code_are_left_out(body: str) -> None:
    assert extract(body.encode()) == []


def test_the_declared_encoding_is_obeyed_and_broken_text_is_passed_over() -> None:
    text = f'# -*- coding: latin-1 -*-\ndef add(x="é"):\n    """{QUERY} é."""; return "é"'
    (function,) = extract(text.encode("latin-1"))
    assert function.document == 'pkg.mod.add\ndef add(x="é"):\n    return "é"'
    assert extract(text.replace("latin-1", "utf-8").encode("latin-1")) == []
    assert extract(b"# -*- coding: nonsense -*-\n") == []


def test_other_peoples_warnings_stay_silent_and_long_code_is_cut() -> None:
    source = f'def add():\n    """{QUERY}."""\n    x = "\\d"\n' + "    x += 1\n" * 1000
    (function,) = extract(source)
    assert MAX_DOCUMENT_CHARACTERS - 20 < len(function.document) <= MAX_DOCUMENT_CHARACTERS
