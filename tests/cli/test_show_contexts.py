"""Shifts between contexts through the command line; the picture is tested beside its code."""

import json
import sys

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.inference import Encoder, choose_context
from embeddings.models import MeanPooling
from tests.helpers.runs import WORDS
from tests.helpers.shown import kept_drawings, save_model
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_contextual().save_pretrained(folder / "contextual")
    save_model(folder / "mean", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    return folder


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "one": [f"{word} the {number}" for number, word in enumerate(WORDS)],
        "two": WORDS[:7],
        "alike": ["a", "a"],
    }
    for name, lines in texts.items():
        rows = (json.dumps({"_id": f"{name}{row}", "text": text}) for row, text in enumerate(lines))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "empty.jsonl").touch()
    return texts


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    return kept_drawings(monkeypatch, tmp_path, "draw_contextual_shift")


def show(models, name, *words):
    return main(["show", "contextual-shift", "--model", str(models / name), *words])


def test_a_picture_and_a_table_of_how_documents_move(models, corpora, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert show(models, "contextual", "--corpus", "one.jsonl", "--num-documents", "4", "--num-contexts", "3") == 0
    assert (tmp_path / "contextual-shift.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "contextual: 4 documents in 3 contexts"
    assert lines[1].startswith(
        f"A colour is a document of {tmp_path.name}/one.jsonl, a dot its vector behind 5 documents of a corpus."
    )
    rows = [line.split(maxsplit=5) for line in lines if " the " in line and ": " in line and line.startswith("  ")]
    assert len(rows) == 4
    for mean, least, alone, other, document_id, text in rows:
        assert -1 <= float(least) <= float(mean) <= 1
        assert all(-1 <= float(cosine) <= 1 for cosine in (alone, other))
        assert corpora["one"][int(document_id.strip(":").removeprefix("one"))] == text
    assert lines[-1] == "wrote contextual-shift.png"


def test_contexts_are_drawn_from_each_corpus_and_documents_from_the_first(models, corpora, tmp_path, drawing):
    words = ["--num-documents", "3", "--num-contexts", "2", "--context-size", "4", "--seed", "5"]
    assert show(models, "contextual", "--corpus", "[one.jsonl,two.jsonl]", *words) == 0
    shift, texts, names, title, *_ = drawing[0]
    folder = tmp_path.name
    assert names == [f"{folder}/one.jsonl"] * 2 + [f"{folder}/two.jsonl"] * 2
    assert title == "contextual: 3 documents in 4 contexts"
    assert set(texts) < set(corpora["one"])
    encoder = Encoder.from_pretrained(str(models / "contextual"), precision="float32")
    for place, (path, seed) in enumerate([("one", 6), ("one", 7), ("two", 6), ("two", 7)]):
        context = choose_context(encoder, f"{path}.jsonl", 4, seed)
        expected = encoder.encode(texts, None, context, role="document")
        np.testing.assert_allclose(shift.vector_CND[place], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("mean", ["--corpus", "one.jsonl"], "context must be left out: this model takes none"),
        ("nothing", ["--corpus", "one.jsonl"], "nothing: is no directory"),
        ("contextual", ["--corpus", "none.jsonl"], "none.jsonl: "),
        ("contextual", ["--corpus", "empty.jsonl"], "empty.jsonl: is empty"),
        ("contextual", ["--corpus", "alike.jsonl"], "corpus must hold two documents that differ"),
        ("contextual", ["--corpus", "[]"], "corpus must name from 1 to 6 corpora"),
        ("contextual", ["--corpus", "one.jsonl", "--num-documents", "1"], "num_documents must be from 2 to 20"),
        ("contextual", ["--corpus", "one.jsonl", "--num-documents", "21"], "num_documents must be from 2 to 20"),
        ("contextual", ["--corpus", "one.jsonl", "--num-contexts", "1"], "num_contexts must give two contexts or more"),
        (
            "contextual",
            ["--corpus", "one.jsonl", "--context-size", "6"],
            "context_size must be from 1 to the model's 5",
        ),
        ("contextual", ["--corpus", "one.jsonl", "--output", "."], "--output .: is a directory; name a PNG file"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_nothing_is_written(
    model, words, says, models, corpora, tmp_path, capsys, drawing
):
    before = sorted(tmp_path.rglob("*"))
    assert show(models, model, *words) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert (written.out, drawing, sorted(tmp_path.rglob("*"))) == ("", [], before)


def test_without_matplotlib_no_model_is_loaded(models, corpora, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("embeddings.inference.Encoder.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert show(models, "contextual", "--corpus", "one.jsonl") == 2
    assert "matplotlib is not installed; run: pip install" in capsys.readouterr().err
