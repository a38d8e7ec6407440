import gzip
import json
from pathlib import Path

import pytest

from embeddings.common import OptionError
from embeddings.data.docstrings import prepare
from embeddings.data.docstrings.corpus import DocstringSplit, EvaluationSet
from embeddings.data.docstrings.extract import DocumentedFunction
from embeddings.data.docstrings.prepare import KIND, check_output, finished_manifest, write_corpus

TRAIN, TEST, OTHER = (
    DocumentedFunction(f"p.m.{name}", "p", "p.m", f"Query of {name} — é", f"p.m.{name}\ndef {name}(): ...")
    for name in ("train", "test", "other")
)
SPLIT = DocstringSplit(
    [TRAIN], EvaluationSet([OTHER], [OTHER]), EvaluationSet([TEST, OTHER], [TEST]), EvaluationSet([OTHER], [OTHER])
)
PARTS = ("validation", "in_domain", "held_out")
FIELDS = {"kind": KIND, "seed": 0}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_files_hold_training_records_and_three_folders_in_beirs_layout(tmp_path: Path) -> None:
    write_corpus(tmp_path / "out", SPLIT, FIELDS)
    files = contents(tmp_path / "out")
    names = {f"eval/{part}/{file}" for part in PARTS for file in ("corpus.jsonl", "queries.jsonl", "qrels.tsv")}
    names |= {"train.jsonl.gz", "manifest.json"}
    assert set(files) == names
    assert json.loads(gzip.decompress(files["train.jsonl.gz"])) == {
        "id": "p.m.train",
        "query": TRAIN.query,
        "positive": TRAIN.document,
        "negatives": [],
        "package": "p",
        "module": "p.m",
    }
    corpus = [json.loads(line) for line in files["eval/in_domain/corpus.jsonl"].splitlines()]
    assert [(row["_id"], row["title"], row["text"]) for row in corpus] == [
        ("p.m.test", "", TEST.document),
        ("p.m.other", "", OTHER.document),
    ]
    assert json.loads(files["eval/in_domain/queries.jsonl"]) == {"_id": "p.m.test", "text": TEST.query}
    assert files["eval/in_domain/qrels.tsv"].decode() == "query-id\tcorpus-id\tscore\np.m.test\tp.m.test\t1\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_writing_twice_gives_the_same_bytes_and_replaces_the_earlier_corpus(tmp_path: Path) -> None:
    write_corpus(tmp_path / "out", SPLIT, FIELDS)
    first = contents(tmp_path / "out")
    (tmp_path / "out" / "left_over").write_text("x")
    write_corpus(tmp_path / "out", SPLIT, FIELDS)
    assert contents(tmp_path / "out") == first
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_job_that_ends_early_leaves_the_earlier_corpus_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "out", SPLIT, FIELDS)
    before = contents(tmp_path)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_manifest", fail)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "out", SPLIT._replace(train=[TEST]), FIELDS)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "new", SPLIT, FIELDS)
    assert contents(tmp_path) == before


def test_a_finished_corpus_is_known_by_its_inputs_and_intact_files(tmp_path: Path) -> None:
    assert finished_manifest(tmp_path / "out", FIELDS) is None
    write_corpus(tmp_path / "out", SPLIT, {**FIELDS, "counts": {"train": 1}})
    manifest = finished_manifest(tmp_path / "out", FIELDS)
    assert manifest is not None
    assert manifest["counts"] == {"train": 1}
    assert finished_manifest(tmp_path / "out", {**FIELDS, "seed": 1}) is None
    with open(tmp_path / "out" / "eval" / "held_out" / "corpus.jsonl", "a") as file:
        file.write("{}\n")
    assert finished_manifest(tmp_path / "out", FIELDS) is None


@pytest.mark.parametrize("kind", ["file", "folder with files", "broken manifest", "another manifest"])
def test_an_output_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        text = {"folder with files": "mine", "broken manifest": "{", "another manifest": '{"kind": "vectors"}'}[kind]
        (output / ("notes.txt" if kind == "folder with files" else "manifest.json")).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(OptionError, match="output must be"):
        check_output(output)
    assert contents(tmp_path) == before


def test_an_absent_an_empty_and_an_earlier_output_are_accepted(tmp_path: Path) -> None:
    check_output(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
    write_corpus(tmp_path / "out", SPLIT, FIELDS)
    check_output(tmp_path / "out")
