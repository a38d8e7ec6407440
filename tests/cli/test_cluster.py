import json

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.models import BackboneConfig, Embedder, MeanPooling, load_backbone
from tests.helpers.runs import backbone_folder, write_pairs

pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("surrogate")
    backbone, tokenizer = load_backbone(BackboneConfig(backbone_folder(folder / "backbone")))
    Embedder(backbone, tokenizer, MeanPooling(32)).save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", 40)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("features", ["vectors", "bm25"])
def test_a_file_of_pairs_becomes_clusters_and_the_same_line_again_changes_nothing(
    features, pairs, model, tmp_path, capsys
):
    output = tmp_path / "clusters"
    line = ["cluster", "--input", str(pairs), "--output", str(output), "--cluster_size", "8", "--num_iterations", "3"]
    line += ["--model", model, "--precision", "float32", "--svd_dim", "6"] if features == "vectors" else []
    line += ["--features", features]
    assert main(line) == 0
    assert f"wrote 5 clusters of 40 rows to {output}" in capsys.readouterr().out
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["features"] == features
    assert np.load(output / "cluster_ids.npy").max() < 5
    assert (tmp_path / "clusters.vectors").exists() == (features == "vectors")
    before = content(output)
    assert main(line) == 0
    assert content(output) == before


def test_tasks_share_the_work(pairs, tmp_path, capsys):
    output = tmp_path / "clusters"
    line = ["cluster", "--input", str(pairs), "--output", str(output), "--features", "bm25", "--num_clusters", "4"]
    line += ["--shard_size", "10", "--num_iterations", "2", "--num_tasks", "2", "--task_index"]
    assert main([*line, "1"]) == 0
    assert "other tasks have rows to assign yet" in capsys.readouterr().out
    assert main([*line, "0"]) == 0
    assert "wrote 4 clusters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--features", "bm25", "--num_clusters", "41"], "num_clusters must not exceed the 40 rows, got 41"),
        (["--features", "bm25", "--cluster_size", "0"], "cluster_size must be >= 1"),
        (["--features", "bm25", "--cluster_size", "4", "--num_clusters", "4"], "takes the place of cluster_size"),
        (["--features", "bm25", "--svd_dim", "900"], "svd_dim must lie in 1 … 80"),
        (["--features", "bm25", "--model", "MODEL"], "uses neither model nor vectors"),
        (["--features", "bm25", "--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--features", "bm25", "--output", "taken"], "something else lies there already"),
        (["--features", "bm25", "--gpu", "true"], "gpu needs"),
        (["--features", "words"], "features"),
        ([], "model must be given"),
        (["--model", "no_model_here"], "no_model_here"),
        (["--model", "MODEL", "--svd_dim", "65"], "svd_dim must lie in 1 … 64"),
        (["--model", "MODEL", "--output", "taken"], "something else lies there already"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(
    options, says, pairs, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    line = ["cluster", "--input", str(pairs), "--output", "clusters"]
    capsys.readouterr()
    assert main([*line, *(model if word == "MODEL" else word for word in options)]) == 2
    (printed,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert says in printed
    assert sorted(tmp_path.rglob("*")) == before
