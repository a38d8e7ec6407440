import gc
import gzip
import json
import logging
import random
import sys
from pathlib import Path

import pytest

from embeddings.common import OptionError
from embeddings.data.docstrings import HELD_OUT_PACKAGES, TRAINING_PACKAGES, DocstringCorpus, prepare_docstrings
from embeddings.data.docstrings.extract import is_available

VERBS = ("read", "write", "pad", "cut", "merge", "rank", "scale", "draw", "count", "split")
NOUNS = ("graph", "tensor", "file", "page", "matrix", "string", "socket", "image", "token", "vector")


def module(package: str, count: int) -> str:
    generator = random.Random(package)
    names = generator.sample([(verb, noun) for verb in VERBS for noun in NOUNS], count)
    body = "    return {}\n"
    return "\n".join(
        f'def {verb}_{noun}(x):\n    """{verb.title()} the {noun} of {package}."""\n'
        + body.format(" + ".join(f"{noun}{generator.randrange(999)}(x)" for _ in range(12)))
        for verb, noun in names
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages to train on and one to hold out; `alpha_x` holds a copy of one of the held-out functions."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name, count in (("alpha_x", 20), ("beta_x", 20), ("gamma_x", 10)):
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (folder / "code.py").write_text(module(name, count))
    copied = module("gamma_x", 10).split("\ndef ")[0].replace("of gamma_x", "that was copied here")
    (tmp_path / "site" / "alpha_x" / "copied.py").write_text(copied)
    return tmp_path


def prepare(output: Path, **changes: object) -> DocstringCorpus:
    arguments = {
        "packages": ["alpha_x", "beta_x"],
        "held_out_packages": ["gamma_x"],
        "num_validation_documents": 6,
        "num_validation_queries": 2,
        "num_in_domain_documents": 8,
        "num_in_domain_queries": 4,
        "num_held_out_queries": 5,
    }
    return prepare_docstrings(output, **{**arguments, **changes})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_document_or_copy_of_one_is_on_both_sides(packages: Path) -> None:
    corpus = prepare(packages / "out")
    assert corpus.counts == {
        "train": 26,
        "validation_documents": 6,
        "validation_queries": 2,
        "in_domain_documents": 8,
        "in_domain_queries": 4,
        "held_out_documents": 10,
        "held_out_queries": 5,
    }
    train = [json.loads(line) for line in gzip.decompress((corpus.folder / "train.jsonl.gz").read_bytes()).splitlines()]
    parts = [{row["id"] for row in train}]
    for name in ("validation", "in_domain", "held_out"):
        lines = (corpus.folder / "eval" / name / "corpus.jsonl").read_text().splitlines()
        parts.append({json.loads(line)["_id"] for line in lines})
    assert [len(part) for part in parts] == [26, 6, 8, 10]
    assert len(set.union(*parts)) == 50
    assert {name.split(".")[0] for name in parts[3]} == {"gamma_x"}
    assert not any("copied" in name for part in parts for name in part)
    assert json.loads((corpus.folder / "manifest.json").read_text())["removed"]["same_code"] == 1
    assert not {"alpha_x", "beta_x", "gamma_x"} & set(sys.modules)
    assert gc.isenabled()


def test_the_same_inputs_give_the_same_bytes_and_another_seed_others(packages: Path) -> None:
    first, again, other = (prepare(packages / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert files(first.folder) == files(again.folder)
    assert files(first.folder)["train.jsonl.gz"] != files(other.folder)["train.jsonl.gz"]


def test_the_order_and_repetition_of_packages_change_nothing(packages: Path) -> None:
    first = prepare(packages / "a")
    again = prepare(packages / "b", packages=["beta_x", "alpha_x", "beta_x"])
    assert files(first.folder) == files(again.folder)


def test_a_second_run_recognises_finished_output_and_says_so(packages: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = prepare(packages / "out")
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    with caplog.at_level(logging.INFO, logger="embeddings"):
        again = prepare(packages / "out")
    assert (first.reused, again.reused) == (False, True)
    assert again.counts == first.counts
    assert "already made" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before
    assert not prepare(packages / "out", force=True).reused
    assert not prepare(packages / "out", seed=1).reused


def test_a_changed_source_makes_the_corpus_again(packages: Path) -> None:
    prepare(packages / "out")
    with open(packages / "site" / "alpha_x" / "code.py", "a") as file:
        file.write("\n# changed\n")
    assert not prepare(packages / "out").reused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packages": ["no_such_x"]}, "packages must name installed packages"),
        ({"packages": []}, "packages must name at least one package"),
        ({"held_out_packages": ["no_such_x"]}, "packages must name installed packages"),
        ({"held_out_packages": []}, "held_out_packages must have documented functions"),
        ({"packages": ["alpha_x", "gamma_x"]}, "packages must not hold a held-out package"),
        ({"num_held_out_queries": 0}, "num_held_out_queries must be >= 1, got 0"),
        ({"num_in_domain_documents": -1}, "num_in_domain_documents must be >= 1, got -1"),
        (
            {"num_in_domain_documents": 40},
            r"num_validation_documents \+ num_in_domain_documents must leave functions to train on",
        ),
    ],
)
def test_impossible_arguments_are_one_line_and_nothing_is_written(
    packages: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        prepare(packages / "out", **changes)
    assert "\n" not in str(raised.value)
    assert not (packages / "out").exists()


def test_the_default_packages_are_installed_and_never_on_both_sides() -> None:
    assert all(is_available(name) for name in HELD_OUT_PACKAGES)
    assert sum(is_available(name) for name in TRAINING_PACKAGES) >= 20
    assert not set(HELD_OUT_PACKAGES) & set(TRAINING_PACKAGES)
