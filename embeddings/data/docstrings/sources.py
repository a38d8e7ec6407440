"""Which source files an installed package has: found without importing any of them."""

import difflib
import functools
import os
import pkgutil
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from embeddings.common.errors import OptionError

STANDARD_LIBRARY = "stdlib"

# Tests, copies of other packages, and what only a developer of the package runs.
# fmt: off
SKIPPED_FOLDERS = frozenset((
    "test", "tests", "testing", "_testing", "_vendor", "_vendored", "vendor", "vendored", "extern", "externals",
    "_extern", "third_party", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "ensurepip",
    "pydoc_data", "benchmarks",
))
# fmt: on
# Hundreds of model files that repeat one another, the passes of a compiler, and build tools: two fifths of all the
# bytes, and few functions that anybody looks for.
# fmt: off
SKIPPED_MODULES = frozenset((
    "transformers.models", "torch._inductor", "torch._dynamo", "torch._functorch", "torch._higher_order_ops",
    "torch._export", "numpy.distutils", "numpy.f2py",
))
# fmt: on


class SourceFile(NamedTuple):
    """One source file of a package.

    Attributes:
        package: The name that the user wrote, such as `torch` or `stdlib`.
        module: Dotted name under which Python would import it.
        path: Where it lies.
        size: Its length in bytes.
    """

    package: str
    module: str
    path: Path
    size: int


def is_available(package: str) -> bool:
    """Whether this Python has the package, with source files."""
    return bool(_roots(package))


def require_available(package: str) -> None:
    """Check that this Python has the package, with source files.

    Raises:
        OptionError: If it has not.
    """
    if not is_available(package):
        near = difflib.get_close_matches(package, sorted({STANDARD_LIBRARY, *_importable()}), n=1)
        hint = f"did you mean {near[0]}?" if near else "pip install it, or take it out of the list"
        raise OptionError("packages", package, "must name installed packages as one imports them", hint)


def find_sources(package: str) -> list[SourceFile]:
    """The source files of an installed package, sorted by module, without its tests and the copies of others in it.

    Determinism: the list depends on the package alone, not on the order in which the file system answers.

    Args:
        package: Top-level name as one imports it (`sklearn`), or `stdlib` for Python's standard library.

    Raises:
        OptionError: If no such package is installed, or it has no source files.
    """
    require_available(package)
    prefix = "" if package == STANDARD_LIBRARY else package
    found = {file.module: file for root in _roots(package) for file in _walk(package, prefix, root)}
    return [found[module] for module in sorted(found)]


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package, Python's own for the standard library, and "" where none is recorded."""
    distributions = _distributions()
    versions = {}
    for package in sorted(packages):
        if package == STANDARD_LIBRARY:
            versions[package] = platform.python_version()
        else:
            names = distributions.get(package, [])
            versions[package] = version(names[0]) if names else ""
    return versions


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The distributions of each top-level module: a scan of every installed file list, so it is made once."""
    return packages_distributions()


def _roots(package: str) -> list[Path]:
    if package == STANDARD_LIBRARY:
        return [Path(sysconfig.get_path("stdlib"))]
    # A dotted name would make `find_spec` import the parent.
    if not package.isidentifier():
        return []
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return sorted(Path(folder) for folder in spec.submodule_search_locations)
    return [Path(spec.origin)] if spec.origin is not None and spec.origin.endswith(".py") else []


def _walk(package: str, prefix: str, root: Path) -> Iterator[SourceFile]:
    if root.is_file():
        yield SourceFile(package, prefix, root, root.stat().st_size)
        return
    for folder, subfolders, names in os.walk(root):
        parents = [part for part in (prefix, *Path(folder).relative_to(root).parts) if part]
        subfolders[:] = [
            name
            for name in subfolders
            if name.isidentifier() and name not in SKIPPED_FOLDERS and ".".join((*parents, name)) not in SKIPPED_MODULES
        ]
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension == ".py" and stem.isidentifier() and not _is_test(stem):
                module = ".".join(parents if stem == "__init__" else (*parents, stem))
                path = Path(folder, name)
                yield SourceFile(package, module, path, path.stat().st_size)


def _is_test(stem: str) -> bool:
    return stem.startswith("test_") or stem.endswith("_test") or stem in {"conftest", "test"}


def _importable() -> Iterator[str]:
    return (module.name for module in pkgutil.iter_modules() if not module.name.startswith("_"))
