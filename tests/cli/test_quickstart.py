"""`quickstart` and `prepare`: the pieces of the quickstart, and the corpus it starts from."""

import re
from pathlib import Path

from embeddings.cli.main import main
from embeddings.cli.quickstart import CLUSTERING, CLUSTERS, SPLITS, score_table
from embeddings.mining import ClusterSettings


def results():
    row = {"ndcg_at_10": 0.1, "mrr_at_10": 0.2, "recall_at_10": 0.3, "num_queries": 4, "num_documents": 5}
    return {key: {split: dict(row) for split in SPLITS} for key in ("bm25", "before", "after")}


def test_the_table_has_a_row_a_system_and_the_metrics_of_both_splits():
    lines = score_table(results()).splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["BM25", "before training", "after training"]
    assert lines[4].split()[-6:] == ["0.100", "0.200", "0.300"] * 2
    assert "held-out 4 queries over 5 documents" in lines[5]


def test_clusters_made_by_hand_are_those_of_the_quickstart():
    numbers = r"--output (\S+)[\s\\#]+--cluster-size (\d+) --num-iterations (\d+) --num-runs (\d+)"
    configs = [f"lightning_configs/{name}.yaml" for name in ("quickstart", "sweeps/pooling")]
    for path in (*configs, "docs/methods/nv-embed.md"):
        output, size, iterations, runs = re.search(numbers, Path(path).read_text("utf-8")).groups()
        assert output == str(CLUSTERS), path
        made = ClusterSettings(cluster_size=int(size), num_iterations=int(iterations), num_runs=int(runs))
        assert made == CLUSTERING, path
    book = Path("examples/quickstart.ipynb").read_text("utf-8")
    (words,) = re.findall(r"ClusterSettings\((.+?)\)", book)
    assert words == "cluster_size=32, num_iterations=10, num_runs=1"
    assert ClusterSettings(cluster_size=32, num_iterations=10, num_runs=1) == CLUSTERING


def test_the_command_builds_the_corpus_where_it_is_told(tmp_path, monkeypatch):
    calls = []
    prepare = "embeddings.cli.quickstart.prepare_docstrings"
    monkeypatch.setattr(prepare, lambda output, **options: calls.append((output, options)))
    words = ["prepare", "docstrings", "--output", str(tmp_path / "out")]
    assert main([*words, "--force", "true"]) == main([*words, "--max-rows", "9"]) == 0
    options = [{"force": True, "max_rows": None}, {"force": False, "max_rows": 9}]
    assert calls == [(tmp_path / "out", each) for each in options]


def test_a_folder_that_holds_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["prepare", "docstrings", "--output", str(tmp_path)]) == 2
    assert "must be new, empty or an earlier docstring corpus" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
