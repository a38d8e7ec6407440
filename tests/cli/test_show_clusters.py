"""Clusters through the command line; the picture is tested beside its code."""

import sys

import numpy as np
import pytest

from embeddings.cli.main import main
from tests.figures.cluster_folders import write_clusters
from tests.helpers.shown import kept_drawings

IDS = [row % 6 for row in range(60)]


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    return kept_drawings(monkeypatch, tmp_path, "draw_clusters")


def test_a_picture_and_a_table_of_how_tight_each_cluster_is(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_clusters(tmp_path / "found", IDS, 6)
    assert main(["show", "clusters", "--clusters", "found", "--num-clusters", "4", "--rows-per-cluster", "5"]) == 0
    assert (tmp_path / "clusters.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "found: 4 of 6 clusters"
    assert lines[1].startswith("20 of 60 rows, at most 5 of a cluster;")
    rows = [line.split() for line in lines if line.endswith("%")]
    assert len(rows) == 4
    numbers = {row[0] for row in rows}
    assert numbers < set("012345")
    for cluster, size, drawn, cosine, nearest, between, at_home in rows:
        assert (size, drawn, at_home) == ("10", "5", "100.0%")
        assert nearest in numbers - {cluster}
        assert float(between) < float(cosine) <= 1
    assert lines[-1] == "wrote clusters.png"


def test_vectors_may_lie_elsewhere_and_the_seed_decides(tmp_path, drawing, capsys):
    folder, *_ = write_clusters(tmp_path / "found", IDS, 6)
    (tmp_path / "found.vectors").rename(tmp_path / "elsewhere")
    line = ["show", "clusters", "--clusters", str(folder), "--vectors", "elsewhere", "--rows-per-cluster", "3"]
    for seed in ("0", "0", "1"):
        assert main([*line, "--seed", seed]) == 0
    one, same, other = (drawn[0].vector_ND for drawn in drawing)
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_a_map_of_neighbours_is_drawn_by_its_seed_and_says_its_perplexity(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_clusters(tmp_path / "found", IDS, 6)
    line = ["show", "clusters", "--clusters", "found", "--projection", "tsne", "--perplexity", "5"]
    line += ["--rows-per-cluster", "5", "--output"]
    for name, seed in (("a.png", "3"), ("b.png", "3"), ("c.png", "4")):
        assert main([*line, name, "--seed", seed]) == 0
        assert "amid their rows. Perplexity 5.\n" in capsys.readouterr().out
    pictures = [(tmp_path / name).read_bytes() for name in ("a.png", "b.png", "c.png")]
    assert pictures[0] == pictures[1] != pictures[2]


def test_what_cluster_writes_is_what_is_shown(tmp_path, capsys, drawing):
    pytest.importorskip("faiss")
    from embeddings.models import MeanPooling
    from tests.helpers.runs import write_pairs
    from tests.helpers.shown import save_model
    from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer

    save_model(tmp_path / "model", tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    write_pairs(tmp_path / "pairs.jsonl", 40)
    line = ["cluster", "--input", "pairs.jsonl", "--num_iterations", "3", "--num_clusters", "5"]
    assert main([*line, "--output", "clusters", "--model", "model", "--svd_dim", "6"]) == 0
    assert main(["show", "clusters", "--clusters", "clusters"]) == 0
    assert len(drawing[0][0].vector_ND) == 40
    assert drawing[0][0].vector_ND.shape[1] == 64
    assert main([*line, "--output", "words", "--features", "bm25"]) == 0
    assert main(["show", "clusters", "--clusters", "words"]) == 2
    says = (
        "--vectors words.vectors: no such folder; name the vectors of the same source, which `cluster --model` writes"
    )
    assert says in capsys.readouterr().err
    assert main(["show", "clusters", "--clusters", "words", "--vectors", "clusters.vectors"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--clusters", "none"], "none/manifest.json: no manifest lies beside this output"),
        (["--clusters", "other"], "other/manifest.json: no manifest lies beside this output"),
        (["--clusters", "found", "--vectors", "other"], "no manifest lies beside this output"),
        (["--clusters", "found", "--num-clusters", "21"], "num_clusters must be at most 20"),
        (["--clusters", "found", "--num-clusters", "0"], "num_clusters must be >= 1"),
        (["--clusters", "found", "--rows-per-cluster", "0"], "rows_per_cluster must be >= 1"),
        (["--clusters", "found", "--perplexity", "5"], "perplexity has no effect without --projection tsne"),
        (
            ["--clusters", "found", "--projection", "tsne"],
            "perplexity must be below a third of the 60 rows drawn, got 30",
        ),
        (["--clusters", "found", "--projection", "tsne", "--perplexity", "0.5"], "perplexity must be >= 1"),
        (["--clusters", "found", "--projection", "umap"], "projection"),
        (["--clusters", "found", "--output", "."], "--output .: is a directory; name a PNG file"),
        (["--clusters", "found", "--vectors", "foreign.vectors"], "field 'source_key' is"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_nothing_is_written(words, says, tmp_path, capsys, drawing):
    write_clusters(tmp_path / "found", IDS, 6)
    write_clusters(tmp_path / "foreign", IDS, 6)
    for path in (tmp_path / "foreign.vectors").rglob("manifest.json"):
        path.write_text(path.read_text().replace('"source_key": "', '"source_key": "x'))
    (tmp_path / "other").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["show", "clusters", *words]) == 2
    written = capsys.readouterr()
    assert says in written.err
    assert written.err.count("\n") == 1
    assert (written.out, drawing, sorted(tmp_path.rglob("*"))) == ("", [], before)


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder, *_ = write_clusters(tmp_path / "found", IDS, 6)
    assert main(["show", "clusters", "--clusters", str(folder), "--output", str(tmp_path / "a.png")]) == 2
    assert "matplotlib is not installed; run: pip install" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
