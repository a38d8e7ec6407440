"""The command `prepare docstrings`: a retrieval corpus from installed packages.

Copies are removed, hard negatives are chosen by namespace, and some packages are held out for evaluation.
"""

import gc
import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, OptionError, require_minimum
from embeddings.common.io import check_manifest, file_hash, link_or_copy, text_hash, write_json_lines, write_text
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.random import numpy_generator
from embeddings.data.documented_functions import (
    HELD_OUT_PACKAGES,
    TRAINING_PACKAGES,
    DocumentedFunction,
    SourceFile,
    documented_functions,
    find_sources,
    is_available,
    package_versions,
    sources_digest,
)
from embeddings.data.near_duplicates import NearDuplicates
from embeddings.data.records import Negative

NEAR_DUPLICATE_JACCARD = 0.7
BOILERPLATE_FUNCTIONS = 3

_IGNORED_WORDS = frozenset({"a", "an", "the", "this", "that", "of", "given", "specified"})


def deduplicate(functions: Iterable[DocumentedFunction]) -> list[DocumentedFunction]:
    """Remove functions with the same name, first sentence or nearly the same code as an earlier one.

    A first sentence of more than `BOILERPLATE_FUNCTIONS` functions removes all of them.
    """
    by_name: dict[str, DocumentedFunction] = {}
    for function in functions:
        by_name.setdefault(function.id, function)
    by_code: dict[str, DocumentedFunction] = {}
    for function in by_name.values():
        by_code.setdefault("".join(_code(function).split()), function)
    distinct = list(by_code.values())
    is_copy_N = NearDuplicates(NEAR_DUPLICATE_JACCARD).copies([_code(function) for function in distinct])
    by_query: dict[str, list[DocumentedFunction]] = {}
    for function in compress(distinct, ~is_copy_N):
        by_query.setdefault(normalised_query(function.query), []).append(function)
    return [group[0] for group in by_query.values() if len(group) <= BOILERPLATE_FUNCTIONS]


def normalised_query(query: str) -> str:
    """The words of a sentence in lower case, without punctuation, articles and final "s"."""
    words = re.findall(r"[a-z0-9]+", query.lower())
    return " ".join(word.rstrip("s") or word for word in words if word not in _IGNORED_WORDS)


def _code(function: DocumentedFunction) -> str:
    """Signature and body, without the qualified name, which differs between copies."""
    return function.document.partition("\n")[2]


_TRIES = 8

Key = Callable[[DocumentedFunction], str]


def namespace_negatives(functions: Sequence[DocumentedFunction], seed: int) -> list[tuple[Negative, ...]]:
    """One negative of each granularity for each function, hardest first.

    Level 1 is another function of the same class (or module top level), 2 of the same module, 3 of the same package,
    4 of another package. A level is omitted if `_TRIES` random draws find no function of it.
    """
    keys: tuple[Key, ...] = (lambda f: f.id.rpartition(".")[0], lambda f: f.module, lambda f: f.package, lambda f: "")
    groups: list[dict[str, list[int]]] = [defaultdict(list) for _ in keys]
    for key, members in zip(keys, groups, strict=True):
        for row, function in enumerate(functions):
            members[key(function)].append(row)
    draw_NLT = numpy_generator(seed, "namespace").random((len(functions), len(keys), _TRIES))

    def negatives_of(function: DocumentedFunction, draw_LT: npt.NDArray[np.float64]) -> Iterator[Negative]:
        for level, (key, members) in enumerate(zip(keys, groups, strict=True)):
            group = members[key(function)]
            for draw in draw_LT[level]:
                other = functions[group[int(draw * len(group))]]
                is_harder = level > 0 and keys[level - 1](other) == keys[level - 1](function)
                if other.id != function.id and not is_harder:
                    yield Negative(other.document, level + 1)
                    break

    return [tuple(negatives_of(function, draw_LT)) for function, draw_LT in zip(functions, draw_NLT, strict=True)]


class EvaluationSet(NamedTuple):
    """Functions to search, and the subset whose first sentences are the queries; both sorted by id."""

    documents: list[DocumentedFunction]
    queries: list[DocumentedFunction]


def split_functions(
    functions: Sequence[DocumentedFunction], held_out_packages: Collection[str], sizes: Mapping[str, int], seed: int
) -> tuple[list[DocumentedFunction], dict[str, EvaluationSet]]:
    """Disjoint training functions and evaluation sets by name, sorted by id; the order of `functions` has no effect."""
    ordered = sorted(functions)
    held_out = [function for function in ordered if function.package in held_out_packages]
    trainable = [function for function in ordered if function.package not in held_out_packages]
    if not held_out:
        rule = "must contain documented functions"
        raise OptionError("held_out_packages", sorted(held_out_packages), rule, "name larger packages")
    num_evaluation = sizes["validation_documents"] + sizes["in_domain_documents"]
    if len(trainable) <= num_evaluation:
        rule = f"must leave some of the {len(trainable)} documented functions of packages"
        raise OptionError("sizes", num_evaluation, rule, "lower it, or add packages")

    evaluation = {}
    for name in ("in_domain", "validation", "held_out"):
        pool = held_out if name == "held_out" else trainable
        documents = _draw(pool, sizes[f"{name}_documents"], seed, name)
        evaluation[name] = EvaluationSet(documents, _draw(documents, sizes[f"{name}_queries"], seed, f"{name}_queries"))
        taken = {function.id for function in documents}
        trainable = [function for function in trainable if function.id not in taken]
    return trainable, evaluation


def _draw(functions: list[DocumentedFunction], max_size: int, seed: int, stream: str) -> list[DocumentedFunction]:
    if len(functions) <= max_size:
        return functions
    rows = numpy_generator(seed, stream).choice(len(functions), size=max_size, replace=False)
    return [functions[row] for row in sorted(rows.tolist())]


KIND, TEST_KIND = "docstring_corpus", "docstring_test"
TEST_DOCUMENTS, TEST_QUERIES = 500, 200
# Increase it whenever the same sources produce different records, so that an older output is not reused.
RECIPE = 2
# Functions of each evaluation set, and of these the ones used as queries.
SIZES = {
    "validation_documents": 400,
    "validation_queries": 150,
    "in_domain_documents": 1000,
    "in_domain_queries": 300,
    "held_out_documents": 2000,
    "held_out_queries": 400,
}


class DocstringCorpus(NamedTuple):
    """A complete corpus: its folder, its counts, and whether an earlier run with the same inputs wrote it."""

    folder: Path
    counts: dict[str, int]
    reused: bool


def prepare_docstrings(
    output: str | os.PathLike[str],
    packages: Sequence[str] | None = None,
    held_out_packages: Sequence[str] = HELD_OUT_PACKAGES,
    seed: int = 0,
    sizes: Mapping[str, int] = SIZES,
    max_rows: int | None = None,
) -> DocstringCorpus:
    """Write pairs of the first docstring sentence and the code of a function, from installed packages.

    The document is the qualified name, the signature and the body without the docstring. `train.jsonl.gz` contains
    training records. `eval/validation` and `eval/in_domain` search functions of the training packages that are not
    in the training records; `eval/held_out` searches other packages. No two functions are near-copies or have the same
    first sentence. The same package files, arguments and seed produce the same bytes. No package is imported.

    Args:
        output: Folder to write: new, empty, or an earlier docstring corpus.
        packages: Import names of the packages to train on, and `stdlib` for the standard library. Default: the
            installed ones of `TRAINING_PACKAGES`.
        held_out_packages: Packages used only for evaluation.
        seed: Seed of the random choices.
        sizes: Functions of each evaluation set and queries among them; those that are not given are those of `SIZES`.
        max_rows: Maximum training pairs, or None for all. Every k-th pair is used, with the smallest k that fits.
    """
    folder = Path(os.path.abspath(output))
    require_replaceable(folder, {"kind": KIND})
    sizes = {**SIZES, **sizes}
    require_minimum("max_rows", max_rows, 1, "leave it out for all pairs", optional=True)
    held_out = sorted(set(held_out_packages))
    training = _training_packages(packages, held_out)
    # Held-out functions come first, because of two copies the first one is retained.
    sources = [source for package in (*held_out, *training) for source in find_sources(package)]
    versions = package_versions([*held_out, *training])
    # The inputs that determine the corpus, for the manifest.
    inputs: dict[str, Any] = {
        "kind": KIND,
        "recipe": RECIPE,
        "seed": seed,
        "sizes": sizes,
        "held_out_packages": {name: versions[name] for name in held_out},
        "packages": {name: versions[name] for name in training},
        "max_rows": max_rows,
        "input_sha256": sources_digest(sources),
    }
    if (manifest := finished_manifest(folder, inputs)) is not None:
        logger.info("%s already exists for these packages and arguments", output)
        return DocstringCorpus(folder, manifest["counts"], reused=True)
    train, evaluation = split_functions(deduplicate(_read(sources)), held_out, sizes, seed)
    step = -(-len(train) // max_rows) if max_rows else 1
    counts = {"train": len(train[::step])}
    for name, part in evaluation.items():
        counts |= {f"{name}_documents": len(part.documents), f"{name}_queries": len(part.queries)}
    with replaced_folder(folder, {**inputs, "counts": counts}) as new:
        _write_train(new / "train.jsonl.gz", train, seed, step)
        for name, part in evaluation.items():
            _write_evaluation(new / "eval" / name, part)
    return DocstringCorpus(folder, counts, reused=False)


_MAX_CHARACTERS, _MIN_SUMMARY_WORDS, _MIN_LINE_WORDS, _MIN_WORDS = 2000, 4, 5, 30
_WORD = re.compile(r"[^\W\d_]{2,}")
# Badges, links, HTML, directives and tables.
_MARKUP = re.compile(r"\]\(|https?:|^[<|.]")


class PackageDescription(NamedTuple):
    """A package, the one line that summarises it, and the prose of its description without that line."""

    name: str
    summary: str
    description: str


def package_descriptions() -> list[PackageDescription]:
    """The installed packages with a summary and a description of their own, by name.

    Headings, links and other lines of markup are left out, and so are packages with another one's summary.
    """
    found: dict[str, PackageDescription] = {}
    for distribution in distributions():
        # A damaged installation has no metadata.
        if not (metadata := distribution.metadata):
            continue
        name, summary = str(metadata["Name"] or "").lower(), " ".join(str(metadata["Summary"] or "").split())
        lines = str(metadata.get_payload() or metadata["Description"] or "").splitlines()  # type: ignore[attr-defined]
        prose = " ".join(" ".join(line.split()) for line in lines if _is_prose(line.strip()))
        description = prose.replace(summary.rstrip("."), "").lstrip(" .")[:_MAX_CHARACTERS]
        if len(summary.split()) >= _MIN_SUMMARY_WORDS and len(_WORD.findall(description)) >= _MIN_WORDS:
            found.setdefault(name, PackageDescription(name, summary, description))
    by_summary: dict[str, PackageDescription] = {}
    for each in sorted(found.values()):
        by_summary.setdefault(each.summary.lower(), each)
    return list(by_summary.values())


def _is_prose(line: str) -> bool:
    return len(_WORD.findall(line)) >= _MIN_LINE_WORDS and _MARKUP.search(line) is None


def prepare_docstring_test(
    output: str | os.PathLike[str], packages: Sequence[str] = HELD_OUT_PACKAGES, seed: int = 0
) -> Path:
    """Write two small retrieval folders of packages that every machine has.

    In `docstrings`, 200 first sentences search 500 functions. In `descriptions`, the summaries of installed packages
    search their descriptions. A finished folder is reused. `output` must be new, empty, or written by this function.
    """
    folder, described = Path(os.path.abspath(output)), package_descriptions()
    require_replaceable(folder, {"kind": TEST_KIND})
    sources = [source for package in sorted(packages) for source in find_sources(package)]
    inputs = {"kind": TEST_KIND, "recipe": RECIPE, "seed": seed, "input_sha256": sources_digest(sources)}
    inputs |= {"descriptions": text_hash(json.dumps(described))}
    if finished_manifest(folder, inputs) is None:
        documents = _draw(sorted(deduplicate(_read(sources))), TEST_DOCUMENTS, seed, "test")
        queries = _draw(documents, TEST_QUERIES, seed, "test_queries")
        with replaced_folder(folder, inputs) as new:
            _write_evaluation(new / "docstrings", EvaluationSet(documents, queries))
            searched = ({"_id": each.name, "title": "", "text": each.description} for each in described)
            asked = ({"_id": each.name, "text": each.summary} for each in described)
            judged = ((each.name, each.name, 1.0) for each in described)
            write_retrieval_folder(new / "descriptions", searched, asked, judged)
    return folder


def _training_packages(packages: Sequence[str] | None, held_out: list[str]) -> list[str]:
    if packages is None:
        return sorted(name for name in TRAINING_PACKAGES if name not in held_out and is_available(name))
    both = sorted(set(packages) & set(held_out))
    if both:
        raise OptionError("packages", both, "must not contain a held-out package", "remove it from one of the lists")
    return sorted(set(packages))


def _read(sources: Sequence[SourceFile]) -> list[DocumentedFunction]:
    functions: list[DocumentedFunction] = []
    # Syntax trees have no reference cycles, and the search for cycles takes half of the time of parsing.
    gc.disable()
    try:
        with progress_bar(len(sources), "reading functions", "file") as bar:
            for source in sources:
                functions.extend(documented_functions(source.path.read_bytes(), source.package, source.module))
                bar.update()
    finally:
        gc.enable()
    return functions


def finished_manifest(output: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of `output` if it has these inputs and all its files are unchanged, else None."""
    try:
        manifest = check_manifest(output, inputs)
    except InputError:
        return None
    files = {output / name: digest for name, digest in manifest["files"].items()}
    intact = all(path.is_file() and file_hash(path) == digest for path, digest in files.items())
    return manifest if intact else None


def _write_train(path: Path, functions: Sequence[DocumentedFunction], seed: int, step: int) -> None:
    # No name and no time in the header, so that the same records produce the same bytes.
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 1, file, mtime=0) as zipped:
        pairs = zip(functions, namespace_negatives(functions, seed), strict=True)
        for function, negatives in islice(pairs, 0, None, step):
            record = {
                "id": function.id,
                "query": function.query,
                "positive": function.document,
                "negatives": [negative._asdict() for negative in negatives],
                "package": function.package,
                "module": function.module,
            }
            zipped.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _write_evaluation(folder: Path, evaluation: EvaluationSet) -> None:
    """A query has the id of its only relevant function."""
    documents = (
        {"_id": f.id, "title": "", "text": f.document, "package": f.package, "module": f.module}
        for f in evaluation.documents
    )
    queries = ({"_id": function.id, "text": function.query} for function in evaluation.queries)
    write_retrieval_folder(folder, documents, queries, ((each.id, each.id, 1.0) for each in evaluation.queries))


def write_retrieval_folder(
    folder: Path,
    corpus: Path | Iterable[Mapping[str, str]],
    queries: Iterable[Mapping[str, str]],
    qrels: Iterable[tuple[str, str, float]],
) -> None:
    """Write a folder in the BEIR layout; `corpus` are documents or a file of them, `qrels` query, document, grade."""
    write_json_lines(folder / "queries.jsonl", queries)
    if isinstance(corpus, Path):
        link_or_copy(corpus, folder / "corpus.jsonl")
    else:
        write_json_lines(folder / "corpus.jsonl", corpus)
    rows = (f"{query}\t{document}\t{grade:g}\n" for query, document, grade in qrels)
    write_text(folder / "qrels.tsv", "".join(["query-id\tcorpus-id\tscore\n", *rows]))
