"""CDE's runs and what lies beside their records: a surrogate's vectors and clusters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from tests.data.cluster_folders import write_clusters
from tests.data.surrogates import write_surrogates
from tests.helpers.runs import write_config
from tests.modules.cde_runs import CACHE, cde_config, fit


def test_a_surrogates_vectors_reach_the_loss(tmp_path: Path) -> None:
    """All pairs have one surrogate vector, so that every candidate is as good as the positive: nothing is learnt."""
    config = cde_config(tmp_path, dropout=0.1)
    data = config["data"]["init_args"]
    (source,) = data["sources"]
    folder = write_surrogates(tmp_path / "surrogates", open_cached(SourceConfig(**source), data["cache_dir"]))
    for path in folder.rglob("vectors-*.npy"):
        np.save(path, np.full_like(np.load(path), 0.5))
    data["num_negatives"] = 0
    source["surrogate_vectors"] = str(folder)
    config["trainer"] |= {"max_steps": 2, "callbacks": [CACHE]}
    assert fit(tmp_path, config).trainer.callback_metrics["train/loss"] > 0.1
    config["model"]["init_args"]["loss"]["init_args"]["false_negative_filter"] = {"margin": 0.0}
    assert fit(tmp_path, config).trainer.callback_metrics["train/loss"] == 0


@pytest.mark.parametrize(
    ("damage", "says", "num_workers"),
    [
        (lambda vectors: 0 * vectors, ": the vector is zero; check", 0),
        (lambda vectors: np.nan * vectors, ": the vector is not finite; check", 1),
        (lambda vectors: vectors[:, :3], "holds float32 of shape (3, 3), expected float32 of shape (3, 4)", 0),
    ],
)
def test_damaged_surrogate_vectors_are_refused_in_one_line_before_anything_is_written(
    damage: Any, says: str, num_workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cde_config(tmp_path)
    data = config["data"]["init_args"]
    data["num_workers"] = num_workers
    (source,) = data["sources"]
    folder = write_surrogates(tmp_path / "surrogates", open_cached(SourceConfig(**source), data["cache_dir"]))
    for shard in (folder / "documents").glob("vectors-*.npy"):
        np.save(shard, damage(np.load(shard)))
    source["surrogate_vectors"] = str(folder)
    config["model"]["init_args"]["loss"]["init_args"]["false_negative_filter"] = {"margin": 0.0}
    path = write_config(tmp_path, config)
    before = sorted(tmp_path.rglob("*"))
    assert main(["fit", "--config", path]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"error: {folder / 'documents' / 'vectors-'}")
    assert says in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "value"), [("rows_by_cluster.npy", 1000), ("neighbours.npy", 99), ("centroids.npy", np.nan)]
)
def test_damaged_clusters_are_refused_before_anything_is_written(
    name: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cde_config(tmp_path)
    data = config["data"]["init_args"]
    source = open_cached(SourceConfig(**data["sources"][0]), data["cache_dir"])
    ids = [row % 3 for row in range(len(source.table))]
    folder = write_clusters(tmp_path / "clusters", ids, 3, source.key).path
    array = np.load(folder / name)
    array[2, ...] = value
    np.save(folder / name, array)
    init_args = {"clusters": {"pairs": str(folder)}}
    data["sampler"] = {"class_path": "embeddings.data.samplers.ClusteredBatchSampler", "init_args": init_args}
    path = write_config(tmp_path, config)
    before = sorted(tmp_path.rglob("*"))
    assert main(["fit", "--config", path]) == 2
    assert f"{name}:2: is no" in capsys.readouterr().err.strip().splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_filter_without_vectors_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = cde_config(tmp_path)
    config["model"]["init_args"]["loss"]["init_args"]["false_negative_filter"] = {"threshold": 0.9}
    path = write_config(tmp_path, config)
    before = sorted(tmp_path.rglob("*"))
    assert main(["fit", "--config", path]) == 2
    assert sorted(tmp_path.rglob("*")) == before
