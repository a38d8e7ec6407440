"""Rules for all files of the repository."""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file of the library."""
    return {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "embeddings").rglob("*.py")}


def test_every_package_has_a_folder_of_tests():
    packages = [path.parent for path in (ROOT / "embeddings").glob("*/__init__.py")]
    assert len(packages) >= 14
    assert [package.name for package in packages if not list((ROOT / "tests" / package.name).glob("test_*.py"))] == []


def test_no_file_contains_an_absolute_path_of_a_machine():
    tops = [top for top in ROOT.iterdir() if top.name not in {".git", ".venv", ".cache", "checkpoints", "data"}]
    files = [p for top in tops for p in (top, *top.rglob("*")) if p.suffix in {".py", ".yaml", ".md", ".cfg"}]
    assert len(files) > 60
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|mnt|Users)/\w")
    assert [str(p) for p in files if p != Path(__file__) and pattern.search(p.read_text(encoding="utf-8"))] == []


def test_no_two_files_import_each_other():
    """Includes imports inside functions, but not those of a package's `__init__`."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in trees()}
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        if path.name != "__init__.py":
            modules: set[str] = set()
            for node in ast.walk(trees()[path]):
                if isinstance(node, ast.ImportFrom):
                    parts = [*name.split(".")[: -node.level if node.level else 0], *(node.module or "").split(".")]
                    module = ".".join(part for part in parts if part)
                    modules |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            graph[name] = modules & {*names.values()}
    assert sum(map(len, graph.values())) > 500
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


# Files that may import a library, at their top, inside a function, or by `require`.
CONFINED = {
    "deepspeed": {"strategies/sharded.py"},
    "faiss": {"mining/faiss_library.py"},
    "lightning": {
        *("callbacks/", "cli/", "modules/", "strategies/"),
        *("data/datamodule.py", "data/text_datamodule.py", "training/strategy.py"),
    },
    "matplotlib": {"figures/"},
    "mteb": {"evaluation/"},
    "openai": {"synthesis/client.py"},
    "sentence_transformers": {"interop/answers.py", "mining/mine.py"},
}
# Modules whose distribution has a different name.
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "faiss": "faiss-cpu",
    "Stemmer": "pystemmer",
    "markdown_it": "markdown-it-py",
    "charset_normalizer": "charset-normalizer",
    "docx": "python-docx",
    "sentence_transformers": "sentence-transformers",
}
# torch with CUDA installs triton; megablocks conflicts with our torch (see pyproject.toml).
NOT_REQUIRED = {"triton", "megablocks"}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, at its top, inside a function, or by `require` and similar calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in ("require", "import_module", "find_spec"):
                yield str(node.args[0].value)


def names(requirements: list[str]) -> set[str]:
    """The distribution names of requirements."""
    return {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in requirements}


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each file of the library imports, by its path in the package."""
    return {str(path.relative_to(ROOT / "embeddings")): set(imported(tree)) for path, tree in trees().items()}


@pytest.mark.parametrize("library", CONFINED)
def test_a_library_is_imported_only_in_its_files(library):
    files = {path for path, names in imports().items() if library in {name.partition(".")[0] for name in names}}
    places = {place for place in CONFINED[library] if any(name.startswith(place) for name in files)}
    assert places == CONFINED[library]
    assert {name for name in files if not name.startswith(tuple(places))} == set()


def test_imported_distributions_equal_the_requirements():
    assert len(imports()) > 100
    modules = {name.partition(".")[0] for names in imports().values() for name in names}
    modules -= {*sys.stdlib_module_names, "embeddings", *NOT_REQUIRED}
    distributions = {DISTRIBUTIONS.get(name, name).lower() for name in modules}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = names(project["dependencies"])
    extras = project["optional-dependencies"]
    optional = set().union(*(names(extra) for name, extra in extras.items() if name != "dev"))
    assert len(required) > 15
    assert required == distributions - optional
