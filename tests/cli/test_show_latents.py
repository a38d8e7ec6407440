"""Attention to latents through the command line; the picture is tested beside its code."""

import sys

import numpy as np
import pytest
import torch

from embeddings.cli.main import main
from embeddings.models import LatentAttentionPooling, MeanPooling
from tests.helpers.shown import kept_drawings, save_model
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

TEXT = "the quick brown fox, one length"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    pooling = LatentAttentionPooling(32, num_latents=30, num_heads=2, head_dim=8)
    save_model(folder / "latent", tiny_bert(), wordpiece_tokenizer(), pooling)
    save_model(folder / "mean", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    tiny_contextual().save_pretrained(folder / "contextual")
    return folder


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    return kept_drawings(monkeypatch, tmp_path, "draw_latent_weights")


def show(models, name, *words):
    return main(["show", "latent-attention", "--model", str(models / name), *words])


def test_a_picture_and_a_table_of_where_each_token_looks(models, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert show(models, "latent", TEXT, "dog") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["latent-attention.png"]
    assert (tmp_path / "latent-attention.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "latent: what its tokens attend to"
    assert lines[1].startswith("Latent attention, mean of 2 heads. Columns: the 24 busiest of 30 latents")
    rows = [line.split(maxsplit=2) for line in lines if line.endswith("%)")]
    tokens = ["[CLS]", "the", "quick", "brown", "fox", ",", "one", "length", "[SEP]", "mean"]
    assert [row[1] for row in rows] == [*tokens, "[CLS]", "dog", "[SEP]", "mean"]
    for number, name, latents in rows:
        assert 1 <= float(number) <= 30
        shares = [float(share.strip("()%")) for share in latents.split()[1::2]]
        assert shares == sorted(shares, reverse=True)
        assert len(shares) == (8 if name == "mean" else 3)
    assert lines[-1] == "wrote latent-attention.png"


def test_the_papers_picture_is_a_row_a_text(models, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    output = tmp_path / "by_text.png"
    assert show(models, "latent", TEXT, "dog", "--by-text", "true", "--output", str(output)) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[0] == "latent: what its texts attend to"


def test_a_head_a_prompt_and_the_columns_may_be_chosen(models, drawing, capsys):
    for options in [[], ["--head", "0"], ["--head", "1", "--num-latents", "64"], ["--role", "query"]]:
        assert show(models, "latent", TEXT, *options) == 0
    (mean,), (first,), (second,), (prompted,) = (drawn[0] for drawn in drawing)
    np.testing.assert_allclose((first.weight_TR + second.weight_TR) / 2, mean.weight_TR, rtol=0, atol=1e-6)
    assert abs(first.weight_TR - second.weight_TR).max() > 0.01
    assert prompted.text == f"search_query: {TEXT}"
    assert [drawn[1] for drawn in drawing] == [24, 24, 64, 24]
    assert "head 1 of 2. Columns: the 30 busiest of 30" in drawing[2][3]


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("mean", [TEXT], "the model: has mean pooling, and no latents; give one with latent-attention pooling"),
        ("contextual", [TEXT], "the model: has mean pooling, and no latents"),
        ("nothing", [TEXT], "nothing: is no directory"),
        ("latent", [" "], "TEXT must not be empty, got ' '"),
        ("latent", ["\x00\x00"], "TEXT must hold a token of its own"),
        ("latent", [TEXT, "--head", "2"], "head must be from 0 to 1"),
        ("latent", [TEXT, "--num-latents", "0"], "num_latents must be from 1 to 64"),
        ("latent", [TEXT, "--num-latents", "65"], "num_latents must be from 1 to 64"),
        ("latent", [TEXT, "--prompt-name", "qury"], "must name a prompt of the model (query)"),
        ("latent", [TEXT, "--output", "."], "--output .: is a directory; name a PNG file"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_nothing_is_written(model, words, says, models, tmp_path, capsys, drawing):
    assert show(models, model, *words) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert (written.out, drawing, list(tmp_path.iterdir())) == ("", [], [])


def test_without_matplotlib_no_model_is_loaded(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("embeddings.inference.Encoder.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert show(models, "latent", TEXT, "--output", str(tmp_path / "a.png")) == 2
    assert "matplotlib is not installed; run: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
