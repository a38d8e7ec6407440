"""The CDE method files of the small setting as they are, one after the other on a tiny BERT with a filter at work."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import Encoder
from embeddings.models import ContextualEmbedder, Embedder, MeanPooling
from embeddings.modules import CDEModule
from tests.configs.test_nv_embed_tables import CONFIGS
from tests.data.cluster_folders import write_clusters
from tests.data.surrogates import write_surrogates
from tests.helpers.runs import backbone_folder, write_config, write_pairs
from tests.helpers.tiny import tiny_t5, wordpiece_tokenizer

NUM_PAIRS = 12


def fit(name: str, *options: str) -> Any:
    """A run of base + method + what the scale and data files hold; only what must be small is changed."""
    files = (str(CONFIGS / "base.yaml"), str(CONFIGS / "methods" / f"{name}.yaml"), "small.yaml")
    config = [part for file in files for part in ("--config", file)]
    return run_trainer(["fit", *config, "--model.init_args.schedule.warmup_steps=1", *options])


def write_small(folder: Path) -> None:
    path = write_pairs(folder / "pairs.jsonl", num_pairs=NUM_PAIRS)
    source = open_cached(SourceConfig("pairs", str(path)), folder / "cache")
    write_clusters(folder / "clusters" / "pairs", [row % 3 for row in range(NUM_PAIRS)], 3, source.key)
    small = {
        "trainer": {
            "max_steps": 2,
            "accelerator": "cpu",
            "devices": 1,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
        },
        "model": {"init_args": {"backbone": {"name": backbone_folder(folder / "backbone"), "num_layers": 1}}},
        "data": {
            "class_path": "embeddings.data.EmbeddingDataModule",
            "init_args": {
                "text": {"query_max_length": 48, "document_max_length": 48},
                "batch_size": 4,
                "num_negatives": 0,
                "cache_dir": str(folder / "cache"),
                "sampler": {
                    "class_path": "embeddings.data.ClusteredBatchSampler",
                    "init_args": {"clusters": str(folder / "clusters")},
                },
                "sources": [
                    {
                        "name": "pairs",
                        "path": str(path),
                        "surrogate_vectors": str(write_surrogates(folder / "vectors", source)),
                        "query_prompt": "search_query: ",
                        "document_prompt": "search_document: ",
                    }
                ],
            },
        },
    }
    write_config(folder, small, "small.yaml")


def test_the_supervised_phase_starts_from_what_the_unsupervised_one_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both methods name their outputs, and the second its start, relative to the working directory.
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    first = fit("cde_small")
    exported = ContextualEmbedder.from_pretrained(tmp_path / "checkpoints" / "cde_small").state_dict()
    trained = first.model.embedder.state_dict()
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())

    # Steps of length zero end where they began.
    second = fit("cde_small_supervised", "--model.init_args.optimizer.init_args.lr=0")
    assert all(torch.equal(exported[name], weight) for name, weight in second.model.embedder.state_dict().items())
    for cli in (first, second):
        assert isinstance(cli.model, CDEModule)
        assert cli.trainer.global_step == 2
        assert cli.model.embedder.num_context == 64
        assert torch.isfinite(cli.trainer.callback_metrics["train/loss"])

    encoder = Encoder.from_pretrained(str(tmp_path / "checkpoints" / "cde_small_supervised"), precision="float32")
    assert encoder.embedder.text.prompts["query"] == "search_query: "
    vectors = encoder.encode(["the quick fox", "a lazy dog"], role="query")
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_the_command_that_clusters_runs_as_the_config_writes_it(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    comment = (CONFIGS / "data" / "cde_unsupervised.yaml").read_text().split("\ndata:")[0].replace("#", "")
    start = comment.index("python main.py cluster")
    line = comment[start : comment.index("\n\n", start)].replace("\\\n", " ").replace("${EMBED_TRAIN_DATA}", "data")
    words = line.split()
    monkeypatch.chdir(tmp_path)
    head = torch.nn.Linear(32, 32, bias=False)
    gtr = Embedder(tiny_t5(), wordpiece_tokenizer(), MeanPooling(32), head=head)
    gtr.save_pretrained(words[words.index("--model") + 1])
    (tmp_path / "data" / "cde_unsupervised").mkdir(parents=True)
    pairs = {"query": [f"pad {row}" for row in range(513)], "positive": [f"the dog {row}" for row in range(513)]}
    pq.write_table(pa.table(pairs), tmp_path / "data" / "cde_unsupervised" / "reddit.parquet")
    assert main(words[2:]) == 0
    assert "wrote 2 clusters of 513 rows to data/cde_unsupervised/clusters/reddit" in capsys.readouterr().out
