"""The docstring corpus: duplicates, negatives, split, files, and interrupted jobs."""

import gc
import gzip
import json
import logging
import random
import sys
from importlib.metadata import distributions

import pytest

from embeddings.common import OptionError, own_folder
from embeddings.data import docstrings
from embeddings.data.docstrings import (
    BOILERPLATE_FUNCTIONS,
    deduplicate,
    namespace_negatives,
    normalised_query,
    prepare_docstring_test,
    prepare_docstrings,
    split_functions,
)
from embeddings.data.documented_functions import (
    HELD_OUT_PACKAGES,
    TRAINING_PACKAGES,
    DocumentedFunction,
    is_available,
)
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused

PARTS = ("validation", "in_domain", "held_out")
VERBS = ("read", "write", "pad", "cut", "merge", "rank", "scale", "draw", "count", "split")
NOUNS = ("graph", "tensor", "file", "page", "matrix", "string", "socket", "image", "token", "vector")


def module(package, count):
    generator = random.Random(package)
    names = generator.sample([(verb, noun) for verb in VERBS for noun in NOUNS], count)
    body = "    return {}\n"
    return "\n".join(
        f'def {verb}_{noun}(x):\n    """{verb.title()} the {noun} of {package}."""\n'
        + body.format(" + ".join(f"{noun}{generator.randrange(999)}(x)" for _ in range(12)))
        for verb, noun in names
    )


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two training packages and one held-out package; `alpha_x` contains a copy of a held-out function."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name, count in (("alpha_x", 20), ("beta_x", 20), ("gamma_x", 10)):
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (folder / "code.py").write_text(module(name, count))
    copied = module("gamma_x", 10).split("\ndef ")[0].replace("of gamma_x", "that was copied here")
    (tmp_path / "site" / "alpha_x" / "copied.py").write_text(copied)
    return tmp_path


def prepared(output, packages=("alpha_x", "beta_x"), held_out_packages=("gamma_x",), **changes):
    sizes = {"validation_documents": 6, "validation_queries": 2, "held_out_queries": 5}
    sizes |= {"in_domain_documents": 8, "in_domain_queries": 4, **changes.pop("sizes", {})}
    return prepare_docstrings(output, packages, held_out_packages, sizes=sizes, **changes)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_document_or_copy_of_one_is_on_both_sides(packages):
    corpus = prepared(packages / "out")
    evaluation = {"validation": (6, 2), "in_domain": (8, 4), "held_out": (10, 5)}
    documents = {f"{name}_documents": count for name, (count, _) in evaluation.items()}
    queries = {f"{name}_queries": count for name, (_, count) in evaluation.items()}
    assert corpus.counts == {"train": 26} | documents | queries
    train = [json.loads(line) for line in gzip.decompress((corpus.folder / "train.jsonl.gz").read_bytes()).splitlines()]
    parts = [{row["id"] for row in train}]
    for name in ("validation", "in_domain", "held_out"):
        lines = (corpus.folder / "eval" / name / "corpus.jsonl").read_text().splitlines()
        parts.append({json.loads(line)["_id"] for line in lines})
    assert [len(part) for part in parts] == [26, 6, 8, 10]
    assert len(set.union(*parts)) == 50
    assert {name.split(".")[0] for name in parts[3]} == {"gamma_x"}
    assert not any("copied" in name for part in parts for name in part)
    assert not {"alpha_x", "beta_x", "gamma_x"} & set(sys.modules)
    assert gc.isenabled()


def test_max_rows_uses_every_kth_row_with_the_same_negatives(packages):
    def rows(folder):
        return gzip.decompress((folder / "train.jsonl.gz").read_bytes()).splitlines()

    whole = prepared(packages / "whole")
    for maximum, step in ((25, 2), (12, 3), (1, 26)):
        few = prepared(packages / "few", max_rows=maximum)
        assert not few.reused
        assert few.counts["train"] <= maximum
        assert rows(few.folder) == rows(whole.folder)[::step]
        assert few.counts == {**whole.counts, "train": len(rows(few.folder))}
        same = {name: content for name, content in files(few.folder).items() if name.startswith("eval")}
        assert same == {name: content for name, content in files(whole.folder).items() if name.startswith("eval")}
    assert prepared(packages / "few", max_rows=1).reused


def test_a_second_run_recognises_finished_output_and_says_so(packages, caplog):
    first = prepared(packages / "out")
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    with caplog.at_level(logging.INFO, logger="embeddings"):
        again = prepared(packages / "out")
    assert (first.reused, again.reused) == (False, True)
    assert again.counts == first.counts
    assert "already exists" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before
    # Order and repetition of packages have no effect.
    other = prepared(packages / "other", packages=["beta_x", "alpha_x", "beta_x"])
    assert files(other.folder) == files(first.folder)
    assert not prepared(packages / "out", seed=1).reused
    with open(packages / "site" / "alpha_x" / "code.py", "a") as file:
        file.write("\n# changed\n")
    assert not prepared(packages / "out", seed=1).reused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packages": ["no_such_x"]}, "packages must be the import names of installed packages"),
        ({"held_out_packages": ["no_such_x"]}, "packages must be the import names of installed packages"),
        ({"held_out_packages": []}, "held_out_packages must contain documented functions"),
        ({"packages": ["alpha_x", "gamma_x"]}, "packages must not contain a held-out package"),
        ({"max_rows": 0}, "max_rows must be >= 1, got 0"),
        ({"sizes": {"in_domain_documents": 40}}, r"sizes must leave some of the \d+ documented functions"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line_and_nothing_is_written(packages, changes, message):
    refused(OptionError, message, prepared, packages / "out", **changes)
    assert not (packages / "out").exists()


def test_the_default_packages_are_installed_and_never_on_both_sides():
    assert all(is_available(name) for name in HELD_OUT_PACKAGES)
    assert sum(is_available(name) for name in TRAINING_PACKAGES) >= 20
    assert not set(HELD_OUT_PACKAGES) & set(TRAINING_PACKAGES)


def test_the_files_are_training_records_and_three_folders_in_the_beir_layout(packages):
    corpus = prepared(packages / "out")
    written = files(corpus.folder)
    names = {f"eval/{part}/{file}" for part in PARTS for file in ("corpus.jsonl", "queries.jsonl", "qrels.tsv")}
    assert set(written) == names | {"train.jsonl.gz", "manifest.json"}
    train = [json.loads(line) for line in gzip.decompress(written["train.jsonl.gz"]).splitlines()]
    assert set(train[0]) == {"id", "query", "positive", "negatives", "package", "module"}
    documents = {}
    for line in written["eval/in_domain/corpus.jsonl"].splitlines():
        row = json.loads(line)
        documents[row["_id"]] = row["text"]
    queries = [json.loads(line) for line in written["eval/in_domain/queries.jsonl"].splitlines()]
    assert all(documents[row["_id"]].startswith(row["_id"]) for row in queries)
    judged = "".join(f"{row['_id']}\t{row['_id']}\t1\n" for row in queries)
    assert written["eval/in_domain/qrels.tsv"].decode() == "query-id\tcorpus-id\tscore\n" + judged


def test_an_interrupted_job_leaves_the_earlier_corpus_which_is_reused_only_if_intact(packages, monkeypatch):
    prepared(packages / "out")
    before = files(packages)
    for folder, seed in (("out", 1), ("new", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(own_folder, "record_all", interrupted_at(None))
            with pytest.raises(KeyboardInterrupt):
                prepared(packages / folder, seed=seed)
    assert files(packages) == before
    assert prepared(packages / "out").reused
    with open(packages / "out" / "eval" / "held_out" / "corpus.jsonl", "a") as file:
        file.write("{}\n")
    assert not prepared(packages / "out").reused


@pytest.mark.parametrize(("name", "content"), [("notes.txt", "mine"), ("manifest.json", '{"kind": "vectors"}')])
def test_an_output_with_other_content_is_refused_and_not_changed(packages, name, content):
    output = packages / "out"
    output.mkdir()
    (output / name).write_text(content)
    before = files(packages)
    refused(OptionError, "output must be", prepared, output)
    assert files(packages) == before


SIZES = {"validation_documents": 2, "validation_queries": 1, "in_domain_documents": 6, "in_domain_queries": 3}
SIZES |= {"held_out_documents": 5, "held_out_queries": 2}


def functions(package, count):
    return [DocumentedFunction(f"{package}.f{i:02}", package, package, f"query {i}", f"code {i}") for i in range(count)]


def test_the_parts_are_disjoint_sorted_and_of_the_requested_sizes_for_any_order():
    given = functions("a", 10) + functions("b", 10) + functions("held", 8)
    train, evaluation = split_functions(given, {"held"}, SIZES, seed=0)
    assert len(train) == 12
    validation, in_domain, held_out = (evaluation[name] for name in PARTS)
    assert [len(part) for part in (*validation, *in_domain, *held_out)] == [2, 1, 6, 3, 5, 2]
    assert sorted([*train, *validation.documents, *in_domain.documents]) == sorted(given[:20])
    assert set(held_out.documents) < set(given[20:])
    for part in (validation, in_domain, held_out):
        assert set(part.queries) < set(part.documents)
    for part in (train, *validation, *in_domain, *held_out):
        assert part == sorted(part)
    shuffled = random.Random(1).sample(given, len(given))
    assert split_functions(shuffled, {"held"}, SIZES, 0) == (train, evaluation)
    assert split_functions(given, {"held"}, SIZES, 1) != (train, evaluation)


FUNCTIONS = [
    DocumentedFunction(f"{module}.{name}", module[0], module, f"query of {name}", f"{module}.{name}")
    for module in ("p.one", "p.two", "q.one", "q.two")
    for name in ("f", "g", "A.x", "A.y", "B.x", "B.y")
]


def granularity(first, second):
    """The level from the names: 1 same class or top level, 2 same module, 3 same package, 4 another package."""
    if first.split(".")[0] != second.split(".")[0]:
        return 4
    if first.split(".")[:2] != second.split(".")[:2]:
        return 3
    return 1 if first.split(".")[:-1] == second.split(".")[:-1] else 2


def test_negatives_have_the_relation_of_their_level_hardest_first():
    checked = 0
    for own, negatives in zip(FUNCTIONS, namespace_negatives(FUNCTIONS, seed=0), strict=True):
        assert [negative.level for negative in negatives] == sorted(negative.level for negative in negatives)
        for negative in negatives:
            assert negative.text != own.document
            assert granularity(own.id, negative.text) == negative.level
            checked += 1
    assert checked > 3.5 * len(FUNCTIONS)


def coded(name, query, body):
    return DocumentedFunction(f"p.m.{name}", "p", "p.m", query, f"p.m.{name}\n{body}")


def words(seed, count=60):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(10_000)}" for _ in range(count))


def test_each_rule_removes_its_kind_of_duplicate():
    common = [coded(f"common{i}", "Plot the metric's values", words(100 + i)) for i in range(4)]
    assert len(common) > BOILERPLATE_FUNCTIONS
    first, second = coded("one", "Add all the numbers", words(1)), coded("two", "Sort all the names", words(2))
    near = words(1).split()
    near[30] = "other"
    functions = [
        first,
        second,
        first._replace(query="Set all the numbers", document="p.m.one\n" + words(3)),
        coded("copy", "Copy the first one", words(1).replace(" ", "\n  ")),
        coded("near", "Nearly the first one", " ".join(near)),
        coded("twin", "sorts all names.", words(4)),
        *common,
    ]
    assert deduplicate(functions) == [first, second]


def test_queries_are_equal_if_only_grammar_differs():
    assert normalised_query("Returns the sum of `values`.") == normalised_query("return sum of values")
    assert normalised_query("Add an edge") == normalised_query("Add the edge")
    assert normalised_query("Convert a string to bytes") != normalised_query("Convert bytes to a string")
    assert normalised_query("Pass s") != normalised_query("Pass")


PROSE = "It reads all the files of a folder and finds those that changed since the last run of the command."


def test_a_summary_searches_the_prose_of_its_packages_description(packages, monkeypatch):
    texts = {
        "b": ("Finds changed files, quickly", f"# b\n\n[![ok](http://x)](y) a badge with many words\n{PROSE}\n"),
        "a": (
            "Another tool for the files",
            f"Another tool for the files. {PROSE}\nSee https://x.org for more of this\n",
        ),
        "copy": ("another tool for the files", PROSE),
        "short": ("A tool", PROSE),
        "bare": ("A tool that has no description", "Only five words are here."),
    }
    for name, (summary, description) in texts.items():
        folder = packages / "site" / f"{name}-1.dist-info"
        folder.mkdir(parents=True)
        heading = f"Metadata-Version: 2.1\nName: {name.upper()}\nVersion: 1\nSummary: {summary}\n"
        (folder / "METADATA").write_text(f"{heading}\n{description} {description}", encoding="utf-8")
    (packages / "site" / "damaged-1.dist-info").mkdir()
    found = lambda: distributions(path=[str(packages / "site")])  # noqa: E731
    monkeypatch.setattr(docstrings, "distributions", found)
    folder = prepare_docstring_test(packages / "out", ["gamma_x"]) / "descriptions"
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "queries")
    }
    assert [(row["_id"], row["text"]) for row in rows["queries"]] == [
        ("a", "Another tool for the files"),
        ("b", "Finds changed files, quickly"),
    ]
    assert rows["corpus"][0]["text"].startswith(PROSE)
    assert rows["corpus"][1]["text"].startswith(PROSE)
    assert not any(word in row["text"] for row in rows["corpus"] for word in ("http", "badge", "Another tool", "# b"))
    assert (folder / "qrels.tsv").read_text() == "query-id\tcorpus-id\tscore\na\ta\t1\nb\tb\t1\n"


def test_a_small_test_set_searches_the_functions_of_its_packages(packages):
    folder = prepare_docstring_test(packages / "out", ["gamma_x"]) / "docstrings"
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "queries")
    }
    assert {row["package"] for row in rows["corpus"]} == {"gamma_x"}
    assert len(rows["corpus"]) == len(rows["queries"]) == 10
    for row in rows["queries"]:
        assert row["text"].endswith("of gamma_x")
        assert row["text"].split()[0].lower() in row["_id"]
    before = (folder / "corpus.jsonl").stat()
    prepare_docstring_test(packages / "out", ["gamma_x"])
    assert (folder / "corpus.jsonl").stat() == before
    prepare_docstring_test(packages / "out", ["gamma_x"], seed=1)
    assert (folder / "corpus.jsonl").stat() != before
    (packages / "mine").mkdir()
    (packages / "mine" / "notes.txt").write_text("mine")
    refused(OptionError, "must be new, empty", prepare_docstring_test, packages / "mine", ["gamma_x"])
