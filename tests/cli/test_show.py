"""The pictures through the command line; what they show is tested beside each of them."""

import sys

import pytest

from embeddings.cli.main import main
from embeddings.models import AnchorTokenPooling, MeanPooling, make_bidirectional
from tests.helpers.shown import kept_drawings, save_model
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

TEXT = "the quick brown fox, one length"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model directories by what is special about them."""
    folder = tmp_path_factory.mktemp("models")
    decoder = tiny_mistral()
    make_bidirectional(decoder)
    anchor = AnchorTokenPooling(32, layers=(0,), per_head=True)
    save_model(folder / "mean", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    save_model(folder / "anchor", decoder, sentencepiece_tokenizer(), anchor)
    save_model(folder / "causal", tiny_mistral(), sentencepiece_tokenizer(), MeanPooling(32))
    tiny_contextual().save_pretrained(folder / "contextual")
    return folder


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    return kept_drawings(monkeypatch, tmp_path, "draw_anchor_tokens")


def show(models, name, *words):
    return main(["show", "anchor-tokens", "--model", str(models / name), *words])


def rows_of(out):
    """Weight and token of each row of the tables."""
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    return [(float(row[0]), row[2]) for row in rows if len(row) == 3 and row[0].startswith(("0.", "1."))]


def test_curves_go_beside_the_run_unless_named(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/ndcg_at_10\n0,2.0,\n1,,0.5\n")
    assert main(["show", "curves", "--run", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'curves.png'}\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", "curves", "--run", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_curves_of_several_runs_are_one_picture_in_the_working_folder(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,train/loss,val/ndcg_at_10\n0,2.0,\n1,,0.5\n")
    assert main(["show", "curves", "--run", "[one,two]"]) == 0
    assert main(["show", "curves", "--run=[two]"]) == 0
    assert capsys.readouterr().out == "wrote curves.png\nwrote two/curves.png\n"
    assert main(["show", "curves", "--run", "[]"]) == 2
    assert "run must name a run, got []" in capsys.readouterr().err


def test_a_picture_and_a_table_of_a_model_that_pools_otherwise(models, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anchor-tokens.html").write_bytes(b"old")
    assert show(models, "mean", TEXT, "dog") == 0
    assert (tmp_path / "anchor-tokens.html").read_bytes().startswith(b"<!DOCTYPE html>")
    out = capsys.readouterr().out
    assert out.startswith("mean (mean pooling): anchor weights as they would be\n")
    assert "key axis, layer -1." in out
    rows = rows_of(out)
    tokens = ["[CLS]", "the", "quick", "brown", "fox", ",", "one", "length", "[SEP]", "[CLS]", "dog", "[SEP]"]
    assert [token for _, token in rows] == tokens
    assert sum(weight for weight, _ in rows) == pytest.approx(2, abs=1e-3)
    shares = [line.split() for line in out.splitlines() if line.endswith("%")]
    assert [" ".join(row[:-2]) for row in shares[:4]] == ["first token", "last token", "punctuation", "everything else"]
    assert [row[-1] for row in shares] == ["11.1%", "11.1%", "11.1%", "66.7%", "33.3%", "33.3%", "0.0%", "33.3%"]
    assert [path.name for path in tmp_path.iterdir()] == ["anchor-tokens.html"]


def test_a_models_own_settings_hold_and_each_option_changes_one(models, drawing, capsys):
    given = [[], ["--layers", "-1"], ["--layers", "[0,-1]"], ["--axis", "query"], ["--per-head", "false"]]
    given += [["--include-first", "false"], ["--by-visible-queries", "true"], ["--layers", "0"]]
    for options in given:
        assert show(models, "anchor", TEXT, *options) == 0
    titles, subtitles = ([drawn[place] for drawn in drawing] for place in (1, 2))
    assert titles[0] == titles[-1] == "anchor: its own anchor weights"
    assert set(titles[1:-1]) == {"anchor: anchor weights with other settings than its own"}
    own = "Anchor-token-aware pooling, key axis, layer 0, heads count alike"
    assert subtitles == [
        f"{own}.",
        own.replace("layer 0", "layer -1") + ".",
        own.replace("layer 0", "layers 0, -1") + ".",
        own.replace("key", "query") + ".",
        own.removesuffix(", heads count alike") + ".",
        f"{own}, without the first token.",
        f"{own}, by visible queries.",
        f"{own}.",
    ]
    weights = [tuple(drawn[0][0].weight_T.tolist()) for drawn in drawing]
    # All queries see every token here, so counting them changes nothing.
    assert len(set(weights[:6])) == 6
    assert weights[6] == pytest.approx(weights[0], abs=1e-6)
    assert weights[5][0] == 0 < weights[0][0]


def test_a_prompt_is_shown_without_a_weight(models, drawing, capsys):
    assert show(models, "mean", TEXT, "--role", "query") == 0
    by_role = capsys.readouterr().out
    assert show(models, "mean", TEXT, "--prompt_name", "query", "--output", "other.html") == 0
    assert capsys.readouterr().out.replace("other.html", "anchor-tokens.html") == by_role
    lines = [line.split() for line in by_role.splitlines()]
    assert ["-", "-", "[CLS]"] in lines
    assert drawing[0][0][0].text == f"search_query: {TEXT}"
    assert drawing[1][3].name == "other.html"


def test_a_causal_model_needs_the_visible_queries_or_the_other_axis(models, drawing, capsys):
    assert show(models, "causal", TEXT) == 2
    assert "under a causal mask" in (error := capsys.readouterr().err)
    assert "by_visible_queries: true" in error
    assert drawing == []
    assert show(models, "causal", TEXT, "--by-visible-queries", "true") == 0
    assert show(models, "causal", TEXT, "--axis", "query") == 0


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("mean", [""], "TEXT must not be empty, got ''"),
        ("mean", ["\x00\x00"], "TEXT must hold a token of its own"),
        ("mean", [], "texts"),
        ("mean", [TEXT, "--axis", "both"], "axis"),
        ("mean", [TEXT, "--layers", "[]"], "pooling.layers must name a layer"),
        ("mean", [TEXT, "--layers", "9"], "among the 2 attention layers"),
        ("mean", [TEXT, "--output", "."], "--output .: is a directory; name an HTML file"),
        ("contextual", [TEXT], "is contextual"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_nothing_is_written(model, words, says, models, tmp_path, capsys, drawing):
    assert show(models, model, *words) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert (written.out, drawing, list(tmp_path.iterdir())) == ("", [], [])


def test_the_page_needs_no_matplotlib(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert show(models, "mean", TEXT, "--output", str(tmp_path / "a.html")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
