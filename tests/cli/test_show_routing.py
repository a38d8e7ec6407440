"""Routing through the command line; the pictures are tested beside their code."""

import json
import sys

import pytest

from embeddings.cli.main import main
from embeddings.models import MeanPooling
from tests.helpers.shown import kept_drawings, save_model
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe

TEXTS = ["the quick brown fox, one length", "dog"]
HEADER = "step,train/loss,routing/load_entropy,routing/idle_experts\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model directories: one with experts, one without, one that reads a context."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "sparse", tiny_moe(num_layers=4), wordpiece_tokenizer(), MeanPooling(32))
    save_model(folder / "dense", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    tiny_contextual().save_pretrained(folder / "contextual")
    return folder


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    return kept_drawings(monkeypatch, tmp_path, "draw_expert_loads", "draw_routing_curves")


def show(models, name, *words):
    return main(["show", "routing", "--model", str(models / name), *words])


def write_run(folder, rows="50,,0.9,1.0\n"):
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEADER + rows)
    return folder


def test_a_picture_and_a_table_of_where_the_tokens_go(models, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "routing.png").write_bytes(b"old")
    assert show(models, "sparse", *TEXTS) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["routing.png"]
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "sparse: where the tokens of 2 texts go"
    assert lines[1].startswith("12 tokens, prompts and special tokens among them, each to 2 of 4 experts.")
    assert lines[3].split() == ["layer", "entropy", "busiest/even", "idle", "0", "1", "2", "3"]
    assert len({len(line) for line in lines[3:6]}) == 1
    rows = [line.split() for line in lines[4:6]]
    assert [row[0] for row in rows] == ["1", "3"]
    for _, entropy, highest, idle, *shares in rows:
        assert 0 <= float(entropy) <= 1
        shares = [float(share.removesuffix("%")) for share in shares]
        assert sum(shares) == pytest.approx(100, abs=0.2)
        assert max(shares) / 25 == pytest.approx(float(highest), abs=0.01)
        assert shares.count(0) == int(idle)
    assert lines[-1] == "wrote routing.png"


def test_texts_may_be_those_of_a_file_and_a_prompt_is_counted(models, drawing, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, TEXTS[0]]))
    assert show(models, "sparse", *TEXTS, "--role", "query") == 0
    assert show(models, "sparse", "--input", "texts.jsonl", "--prompt-name", "query", "--output", "other.png") == 0
    assert show(models, "sparse", "--input", "texts.jsonl") == 0
    by_role, by_name, plain = (drawn[0].count_YX for drawn in drawing)
    assert by_role.tolist() == by_name.tolist() != plain.tolist()
    assert drawing[0][0].num_tokens > drawing[2][0].num_tokens == 12
    assert [drawn[3].name for drawn in drawing] == ["routing.png", "other.png", "routing.png"]
    assert drawing[1][1] == drawing[0][1] == "sparse: where the tokens of 2 texts go"


def test_runs_are_drawn_in_one_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    one, two = (write_run(tmp_path / name / "version_0") for name in ("balanced", "free"))
    output = tmp_path / "pictures" / "runs.png"
    assert main(["show", "routing", "--runs", f"[{one},{two}]", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert output.read_bytes().startswith(b"\x89PNG")


def test_one_run_or_several_may_be_given(tmp_path, drawing):
    for name in ("one", "two"):
        write_run(tmp_path / name)
    assert main(["show", "routing", "--runs", "one"]) == 0
    assert main(["show", "routing", "--runs=[one, two]"]) == 0
    assert [[str(run) for run in runs] for runs, _ in drawing] == [["one"], ["one", "two"]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "model or runs must be given, got 'neither'; give exactly one: --model DIR TEXT, or --runs RUN"),
        (["a text"], "model or runs must be given, got 'neither'"),
        (["--model", "sparse", "--runs", "run", "a text"], "model or runs must be given, got 'both'"),
        (["--model", "sparse"], "TEXT or input must be given, got 'neither'; give texts, or --input FILE"),
        (["--model", "sparse", "--input", "a.jsonl", "a text"], "TEXT or input must be given, got 'both'"),
        (["--model", "sparse", ""], "TEXT must not be empty, got ''"),
        (["--model", "sparse", "a text", " \n"], "TEXT must not be empty"),
        (["--model", "sparse", "--input", "none.jsonl"], "none.jsonl: "),
        (["--model", "sparse", "--input", "empty.jsonl"], "empty.jsonl: is empty"),
        (["--model", "sparse", "--input", "blank.jsonl"], "--input blank.jsonl: holds no text"),
        (["--model", "sparse", "a text", "--prompt-name", "qury"], "must name a prompt of the model (query)"),
        (["--model", "sparse", "a text", "--role", "both"], "role"),
        (["--model", "sparse", "a text", "--output", "."], "--output .: is a directory; name a PNG file"),
        (["--model", "dense", "a text"], "the model: is dense: it has no experts to send tokens to"),
        (["--model", "contextual", "a text"], "the model: is contextual"),
        (["--model", "nothing", "a text"], "nothing: is no directory"),
        (["--runs", "run", "a text"], "TEXT has no effect on runs, got ['a text']"),
        (["--runs", "run", "--role", "query"], "role has no effect on runs, got 'query'"),
        (["--runs", "run", "--prompt-name", "query"], "prompt_name has no effect on runs"),
        (["--runs", "run", "--input", "a.jsonl"], "input has no effect on runs"),
        (["--runs", "[]"], "runs must name a run, got []; give a folder such as"),
        (["--runs", "none"], "metrics.csv: no such file"),
        (["--runs", "[run,plain]"], "metrics.csv: has no 'routing/load_entropy'; give a run with the callback"),
        (["--runs", "run", "--output", "."], "--output .: is a directory; name a PNG file"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_nothing_is_written(words, says, models, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    write_run(tmp_path / "plain", "50,2.0,,\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    if "--model" in words:
        words = [str(models / word) if words[place - 1] == "--model" else word for place, word in enumerate(words)]
    before = sorted(tmp_path.rglob("*"))
    assert main(["show", "routing", *words]) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert (written.out, sorted(tmp_path.rglob("*"))) == ("", before)


def test_without_matplotlib_no_model_is_loaded(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("embeddings.inference.Encoder.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert show(models, "sparse", *TEXTS, "--output", str(tmp_path / "a.png")) == 2
    assert "matplotlib is not installed; run: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
