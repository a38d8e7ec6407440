"""The figures and the report through the command line; their content is tested in `tests/figures`."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from embeddings.cli.main import main
from embeddings.inference import Encoder, choose_context
from embeddings.models import AnchorTokenPooling, LatentAttentionPooling, MeanPooling, make_bidirectional
from tests.figures.cluster_folders import write_clusters
from tests.figures.run_folders import write_run as write_whole_run
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import WORDS, write_pairs
from tests.helpers.shown import collected_drawings, save_model
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe

TEXT = "the quick brown fox, one length"
TEXTS = [TEXT, "dog"]
HEADER = "step,train/loss,routing/load_entropy,routing/idle_experts\n"
IDS = [row % 6 for row in range(60)]
DRAWN = ("draw_routing_curves", "draw_contextual_shift", "draw_clusters", "draw_anchor_tokens", "write_heat_maps")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model directories of each kind."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    pooling = LatentAttentionPooling(32, num_latents=30, num_heads=2, head_dim=8)
    save_model(folder / "latent", tiny_bert(), wordpiece_tokenizer(), pooling)
    save_model(folder / "mean", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    save_model(folder / "sparse", tiny_moe(num_layers=4), wordpiece_tokenizer(), MeanPooling(32))
    tiny_contextual().save_pretrained(folder / "contextual")
    decoder = tiny_mistral()
    make_bidirectional(decoder)
    anchor = AnchorTokenPooling(32, layers=(0,), per_head=True)
    save_model(folder / "anchor", decoder, sentencepiece_tokenizer(), anchor)
    return folder


@pytest.fixture
def corpora(tmp_path):
    texts = {"one": [f"{word} the {n}" for n, word in enumerate(WORDS)], "two": WORDS[:7], "alike": ["a", "a"]}
    for name, lines in texts.items():
        rows = (json.dumps({"_id": f"{name}{row}", "text": text}) for row, text in enumerate(lines))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return texts


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    return collected_drawings(monkeypatch, tmp_path, *DRAWN)


def show(kind, models, name, *words):
    return main(["show", kind, "--model", str(models / name), *words])


def write_run(folder, rows="50,,0.9,1.0\n"):
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEADER + rows)
    return folder


def test_curves_of_a_run_are_in_its_folder_and_those_of_several_in_the_working_folder(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        write_run(tmp_path / name, "50,2.0,,\n")
    assert main(["show", "curves", "--run", "[one,two]"]) == 0
    assert main(["show", "curves", "--run=[two]"]) == 0
    assert capsys.readouterr().out == "wrote curves.png\nwrote two/curves.png\n"
    assert (tmp_path / "two" / "curves.png").read_bytes().startswith(b"\x89PNG")
    for words, says in ((["[]"], "run must not be empty, got []"), (["one", "--output", "two"], "is a directory")):
        assert_refused(capsys, tmp_path, says, main, ["show", "curves", "--run", *words])


def test_anchor_weights_are_the_models_own_or_those_that_this_pooling_would_compute(
    models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the page needs none
    assert show("anchor-tokens", models, "mean", TEXT, "dog") == 0
    assert (tmp_path / "anchor-tokens.html").read_bytes().startswith(b"<!DOCTYPE html>")
    out = capsys.readouterr().out
    assert out.startswith("mean (mean pooling): hypothetical anchor weights\nAnchor-token-aware pooling: axis key, ")
    assert [path.name for path in tmp_path.iterdir()] == ["anchor-tokens.html"]
    assert show("anchor-tokens", models, "anchor", TEXT) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "anchor: its own anchor weights\nAnchor-token-aware pooling: axis key, layers [0], per_head Tr"
    )


def test_the_tokens_head_prompt_and_columns_of_latent_attention(models, drawing, capsys):
    for options in [[], ["--head", "1", "--num-latents", "64"], ["--role", "query"], ["--by-text"]]:
        assert show("latent-attention", models, "latent", TEXT, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "latent: latents that its tokens attend to"
    assert lines[1].startswith("Latent attention, mean of 2 heads. Columns: the 24 of 30 latents with the most at")
    assert lines[-3] == "latent: latents that its texts attend to"
    (mean,), (second,), (prompted,), (by_text,) = (drawn[0] for drawn in drawing)
    assert list(mean.rows) == ["[CLS]", "the", "quick", "brown", "fox", ",", "one", "length", "[SEP]", "mean"]
    assert by_text.rows == [TEXT]
    assert prompted.caption == f"search_query: {TEXT}"
    assert [len(drawn[0][0].columns) for drawn in drawing] == [24, 30, 24, 24]
    shares, of_head = (dict(zip(each.columns, each.share_NC.T, strict=True)) for each in (mean, second))
    assert max(abs(of_head[latent] - share).max() for latent, share in shares.items()) > 0.01
    assert "head 1 of 2. Columns: the 30 of 30 latents" in drawing[1][3]


@pytest.mark.parametrize(("kind", "name"), [("latent-attention", "latent"), ("routing", "sparse")])
def test_a_page_of_heat_maps_is_written(kind, name, models, tmp_path, capsys):
    assert show(kind, models, name, *TEXTS) == 0
    assert (tmp_path / f"{kind}.html").read_bytes().startswith(b"<!DOCTYPE html>")
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {kind}.html"


def test_texts_of_routing_may_come_from_a_file_and_prompts_are_counted(models, drawing, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, TEXTS[0]]))
    from_file = ["--input", "texts.jsonl"]
    by_name = [*from_file, "--prompt-name", "query", "--output", "other.html"]
    for words in ([*TEXTS, "--role", "query"], by_name, from_file):
        assert show("routing", models, "sparse", *words) == 0
    by_role, by_name, plain = (drawn[0][0].share_NC for drawn in drawing)
    assert by_role.tolist() == by_name.tolist() != plain.tolist()
    assert drawing[2][3].startswith("12 tokens with prompts and special tokens, each routed to 2 of 4 experts.")
    assert not drawing[0][3].startswith("12 tokens")
    assert [drawn[4].name for drawn in drawing] == ["routing.html", "other.html", "routing.html"]
    assert drawing[1][2] == drawing[0][2] == "sparse: routing of the tokens of 2 texts"


def test_routing_of_one_run_or_several(tmp_path, drawing):
    for name in ("one", "two"):
        write_run(tmp_path / name)
    assert main(["show", "routing", "--runs", "one"]) == 0
    assert main(["show", "routing", "--runs=[one, two]"]) == 0
    assert [[str(run) for run in runs] for runs, _ in drawing] == [["one"], ["one", "two"]]


def test_a_figure_and_a_table_of_contextual_shift(models, corpora, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["--corpus", "one.jsonl", "--num-documents", "4", "--num-contexts", "3"]
    assert show("contextual-shift", models, "contextual", *words) == 0
    assert (tmp_path / "contextual-shift.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "contextual: 4 documents in 3 contexts"
    says = f"Colours: documents of {tmp_path.name}/one.jsonl. Dots: their vectors in a context of 5 documents"
    assert lines[1].startswith(says)
    rows = [line.split(maxsplit=5) for line in lines if " the " in line and ": " in line and line.startswith("  ")]
    assert len(rows) == 4
    for mean, least, *_, document_id, text in rows:
        assert -1 <= float(least) <= float(mean) <= 1
        assert corpora["one"][int(document_id.strip(":").removeprefix("one"))] == text
    assert lines[-1] == "wrote contextual-shift.png"


def test_contexts_are_drawn_from_each_corpus_and_documents_from_the_first(models, corpora, tmp_path, drawing):
    words = ["--num-documents", "3", "--num-contexts", "2", "--context-size", "4", "--seed", "5"]
    assert show("contextual-shift", models, "contextual", "--corpus", "[one.jsonl,two.jsonl]", *words) == 0
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


def test_a_figure_and_a_table_of_clusters(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_clusters(tmp_path / "found", IDS, 6)
    assert main(["show", "clusters", "--clusters", "found", "--num-clusters", "4", "--rows-per-cluster", "5"]) == 0
    assert (tmp_path / "clusters.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "found: 4 of 6 clusters"
    assert lines[1].startswith("20 of 60 rows, at most 5 per cluster.")
    rows = [line.split() for line in lines if line.endswith("%")]
    assert [(size, drawn, at_home) for _, size, drawn, *_, at_home in rows] == [("10", "5", "100.0%")] * 4
    assert lines[-1] == "wrote clusters.png"


def test_the_output_of_cluster_can_be_shown(tmp_path, capsys, drawing):
    pytest.importorskip("faiss")

    save_model(tmp_path / "model", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    write_pairs(tmp_path / "pairs.jsonl", 40)
    line = ["cluster", "--input", "pairs.jsonl", "--num_iterations", "3", "--num_clusters", "5"]
    assert main([*line, "--output", "clusters", "--model", "model", "--svd_dim", "6"]) == 0
    assert main(["show", "clusters", "--clusters", "clusters"]) == 0
    assert len(drawing[0][0].vector_ND) == 40
    assert drawing[0][0].vector_ND.shape[1] == 64
    shutil.move("clusters.vectors", "moved")
    says = "--vectors clusters.vectors: no such folder; give the vectors of the same source, which `cluster` writes"
    assert_refused(capsys, tmp_path, says, main, ["show", "clusters", "--clusters", "clusters"])
    assert main(["show", "clusters", "--clusters", "clusters", "--vectors", "moved"]) == 0


def test_a_report_is_in_the_runs_folder_by_default(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    run = write_whole_run(tmp_path / "name" / "version_0")
    assert main(["report", "name/version_0"]) == 0
    assert capsys.readouterr().out == "wrote name/version_0/report.html\n"
    monkeypatch.chdir(run)
    assert main(["report", ".", "--output", "pages/one.html"]) == 0
    page = (run / "pages" / "one.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<h1>name/version_0</h1>" in page


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("latent-attention --model latent TEXT --num-latents 0", "num_latents must be >= 1"),
        ("routing TEXT", "model or runs must be given, got 'neither'; give exactly one: --model DIR TEXT, or --runs"),
        ("routing --model sparse --runs run TEXT", "model or runs must be given, got 'both'"),
        ("routing --runs run TEXT", "TEXT has no effect with --runs"),
        ("routing --model sparse", "TEXT or input must be given, got 'neither'; give texts, or --input FILE"),
        ("routing --model sparse --input a.jsonl TEXT", "TEXT or input must be given, got 'both'"),
        ("contextual-shift --model contextual --corpus alike.jsonl", "corpus must have two different documents"),
        ("contextual-shift --model contextual --corpus []", "corpus must have from 1 to 6 corpora"),
        ("contextual-shift --model contextual --corpus one.jsonl --num-documents 21", "num_documents must be from"),
        ("contextual-shift --model contextual --corpus one.jsonl --num-contexts 1", "num_contexts must be >= 2"),
        ("clusters --clusters found --num-clusters 21", "num_clusters must be at most 20"),
        ("report file", "file: is not a folder; give a run's folder"),
        ("report other", "other/config.yaml: no such file; give a run's folder"),
    ],
)
def test_a_show_error_is_reported_in_one_line_and_nothing_is_written(line, says, models, corpora, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    if "--clusters" in line:
        write_clusters(tmp_path / "found", IDS, 6)
    words = [TEXT if word == "TEXT" else word for word in line.split()]
    words = [str(models / word) if words[place - 1] == "--model" else word for place, word in enumerate(words)]
    assert_refused(capsys, tmp_path, says, main, words if words[0] == "report" else ["show", *words])
