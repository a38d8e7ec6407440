import json
import shutil

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.data import PlanEntry, SourceConfig, open_source
from embeddings.inference import Encoder
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_pairs

pytest.importorskip("faiss")


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


def test_vectors_of_hard_negatives_are_written_where_they_are_asked_for_and_change_no_cluster(pairs, model, tmp_path):
    ids = []
    for negatives in ("false", "true"):
        line = ["cluster", "--input", str(pairs), "--output", str(tmp_path / negatives), "--cluster_size", "8"]
        line += ["--model", model, "--precision", "float32", "--num_iterations", "3", "--negatives", negatives]
        assert main(line) == 0
        ids.append(np.load(tmp_path / negatives / "cluster_ids.npy").tolist())
    assert ids[0] == ids[1]
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    source = open_source(SourceConfig("a", str(pairs), surrogate_vectors=str(tmp_path / "true.vectors")))
    encoder = Encoder.from_pretrained(model, precision="float32")
    for row in (0, 7, 39):
        expected = encoder.encode(records[row]["negatives"], role="document")
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(source[PlanEntry(row, 0)].surrogate_negatives(2), expected, atol=1e-5)
    source = open_source(SourceConfig("a", str(pairs), surrogate_vectors=str(tmp_path / "false.vectors")))
    assert source[PlanEntry(0, 0)].surrogate_negatives is None


def test_tasks_share_the_work(pairs, tmp_path, capsys):
    output = tmp_path / "clusters"
    line = ["cluster", "--input", str(pairs), "--output", str(output), "--features", "bm25", "--num_clusters", "4"]
    line += ["--shard_size", "10", "--num_iterations", "2", "--num_tasks", "2", "--task_index"]
    assert main([*line, "1"]) == 0
    assert "others have rows to assign" in capsys.readouterr().out
    assert main([*line, "0"]) == 0
    assert "wrote 4 clusters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cluster_size", "4", "--num_clusters", "4"], "takes the place of cluster_size"),
        (["--negatives"], "negatives has no effect on words"),
        (["--query-prompt", "query: "], "query_prompt has no effect on words"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, says, pairs, tmp_path, capsys):
    line = ["cluster", "--input", str(pairs), "--output", str(tmp_path / "clusters"), "--features", "bm25"]
    assert_refused(capsys, tmp_path, says, main, [*line, *options])


def test_after_damaged_vectors_nothing_is_left_and_the_same_line_works_once_they_are_mended(
    pairs, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    line = ["cluster", "--input", "pairs.jsonl", "--output", "clusters", "--model", model, "--vectors", "vectors"]
    line += ["--num_clusters", "4", "--num_iterations", "2"]
    assert main(line) == 0
    shutil.rmtree("clusters")
    path = tmp_path / "vectors" / "queries" / "vectors-00000.npy"
    whole, damaged = path.read_bytes(), np.load(path)
    damaged[1] = np.nan
    np.save(path, damaged)
    says = "error: vectors/queries/vectors-00000.npy:1: the vector is not finite"
    assert_refused(capsys, tmp_path, says, main, line)
    path.write_bytes(whole)
    assert main(line) == 0
