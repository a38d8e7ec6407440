"""Unchanged configs train tiny stand-ins: the phases of each method one after the other, and the small corpora.

Outputs of methods, and the starting points of later phases, are relative to the working directory.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from embeddings.cli.main import main
from embeddings.common import instruction_prompt
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import Encoder
from embeddings.models import (
    ContextualEmbedder,
    Embedder,
    LatentAttentionPooling,
    MeanPooling,
)
from embeddings.modules import CDEModule, NVEmbedModule
from tests.configs.files import CONFIGS, read, small_run
from tests.data.cluster_folders import write_clusters
from tests.data.surrogates import write_surrogates
from tests.helpers.runs import backbone_folder, write_config, write_pairs, write_retrieval_folder
from tests.helpers.tiny import tiny_t5, wordpiece_tokenizer
from tests.modules.moe_modules import dense_folder

BASE = CONFIGS / "base.yaml"
TEXT = {"query_max_length": 48, "document_max_length": 48}
# Replaces the GPU options of a scale.
ONE_CPU = {"num_nodes": 1, "precision": "32-true", "strategy": "auto"}


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def phase(name: str) -> list[str | Path]:
    return [BASE, CONFIGS / "methods" / f"{name}.yaml"]


def of_module(**init_args: Any) -> dict[str, Any]:
    return {"init_args": {"schedule": {"warmup_steps": 1}, **init_args}}


def of_data(**init_args: Any) -> dict[str, Any]:
    common = {"batch_size": 4, "cache_dir": "cache", "text": TEXT}
    return {"class_path": "embeddings.data.EmbeddingDataModule", "init_args": common | init_args}


def check_vectors(folder: str, query_prompt: str) -> None:
    """Check that vectors have unit length and differ between texts, and that the query prompt is the trained one."""
    encoder = Encoder.from_pretrained(folder, precision="float32")
    assert encoder.embedder.text.prompts["query"] == query_prompt
    vectors = encoder.encode(["the quick fox", "a lazy dog"], role="query")
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def weights(cli: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = cli.model.embedder.state_dict()
    return found


def test_the_second_stage_of_nv_embed_starts_from_the_exported_first(tmp_path: Path) -> None:
    path = str(write_pairs(tmp_path / "pairs.jsonl", num_pairs=12))
    small = {
        "trainer": {"max_steps": 3},
        "model": of_module(backbone={"name": backbone_folder(tmp_path / "backbone", "mistral")}),
        "data": of_data(
            text={"query_max_length": 48, "document_max_length": 24, "append_eos": True},
            num_negatives=2,
            sources=[{"name": "pairs", "path": path, "instruction": "Find the passage"}],
        ),
    }
    first = small_run(tmp_path, phase("nv_embed_stage1"), small, "--model.init_args.optimizer.init_args.lr=1e-2")
    merged = load_file("checkpoints/nv_embed_stage1/model.safetensors")
    untrained = load_file(tmp_path / "backbone" / "model.safetensors")
    projection = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[projection], untrained[projection].bfloat16())

    second = small_run(tmp_path, phase("nv_embed_stage2"), small)
    for cli, in_batch_negatives in ((first, "source"), (second, "off")):
        assert isinstance(cli.model, NVEmbedModule)
        assert cli.trainer.global_step == 3
        assert torch.isfinite(cli.trainer.callback_metrics["train/loss"])
        assert cli.model.loss.in_batch_negatives == in_batch_negatives
        assert isinstance(cli.model.embedder.pooling, LatentAttentionPooling)
    # LoRA does not change the backbone's weights, so after training they are those that stage 2 started from.
    state = second.model.embedder.backbone.state_dict()
    frozen = {name.removeprefix("base_model.model.").replace(".base_layer", ""): name for name in state}
    assert merged.keys() <= frozen.keys()
    assert all(torch.equal(state[frozen[name]], weight) for name, weight in merged.items())
    assert any("lora_B" in name and value.any() for name, value in state.items())
    check_vectors("checkpoints/nv_embed_stage2", instruction_prompt("Find the passage"))


def test_the_supervised_phase_of_cde_starts_from_the_exported_unsupervised_one(tmp_path: Path) -> None:
    path, num_pairs = write_pairs(tmp_path / "pairs.jsonl", num_pairs=12), 12
    source = open_cached(SourceConfig("pairs", str(path)), tmp_path / "cache")
    write_clusters(tmp_path / "clusters" / "pairs", [row % 3 for row in range(num_pairs)], 3, source.key)
    listed = {
        "name": "pairs",
        "path": str(path),
        "surrogate_vectors": str(write_surrogates(tmp_path / "vectors", source)),
        "query_prompt": "search_query: ",
        "document_prompt": "search_document: ",
    }
    sampler = {"class_path": "embeddings.data.ClusteredBatchSampler", "init_args": {"clusters": "clusters"}}
    small = {
        "trainer": {"max_steps": 2},
        "model": of_module(backbone={"name": backbone_folder(tmp_path / "backbone"), "num_layers": 1}),
        "data": of_data(num_negatives=0, sampler=sampler, sources=[listed]),
    }
    first = small_run(tmp_path, phase("cde_small"), small)
    exported = ContextualEmbedder.from_pretrained("checkpoints/cde_small").state_dict()
    assert exported.keys() == weights(first).keys()
    assert all(torch.equal(exported[name], weight) for name, weight in weights(first).items())
    # With a learning rate of 0 the weights do not change.
    second = small_run(tmp_path, phase("cde_small_supervised"), small, "--model.init_args.optimizer.init_args.lr=0")
    assert all(torch.equal(exported[name], weight) for name, weight in weights(second).items())
    for cli in (first, second):
        assert isinstance(cli.model, CDEModule)
        assert cli.trainer.global_step == 2
        assert cli.model.embedder.num_context == 64
        assert torch.isfinite(cli.trainer.callback_metrics["train/loss"])
    check_vectors("checkpoints/cde_small_supervised", "search_query: ")


def test_the_cluster_command_in_the_config_of_cde_runs(tmp_path: Path, capsys: Any) -> None:
    comment = (CONFIGS / "data" / "cde_unsupervised.yaml").read_text().split("\ndata:")[0].replace("#", "")
    start = comment.index("python main.py cluster")
    line = comment[start : comment.index("\n\n", start)].replace("\\\n", " ").replace("${EMBED_TRAIN_DATA}", "data")
    words = line.split()
    head = torch.nn.Linear(32, 32, bias=False)
    gtr = Embedder(tiny_t5(), wordpiece_tokenizer(), MeanPooling(32), head=head)
    gtr.save_pretrained(words[words.index("--model") + 1])
    (tmp_path / "data" / "cde_unsupervised").mkdir(parents=True)
    pairs = {"query": [f"pad {row}" for row in range(513)], "positive": [f"the dog {row}" for row in range(513)]}
    pq.write_table(pa.table(pairs), tmp_path / "data" / "cde_unsupervised" / "reddit.parquet")
    assert main(words[2:]) == 0
    assert "wrote 2 clusters of 513 rows to data/cde_unsupervised/clusters/reddit" in capsys.readouterr().out


def test_fine_tuning_of_moe_starts_from_the_exported_pre_training(tmp_path: Path) -> None:
    def files(name: str, scale: str) -> list[str | Path]:
        """Base, method, scale, and the data file over one set of twelve pairs."""
        data = read(f"data/moe_{name}")
        path = str(write_pairs(tmp_path / "pairs.jsonl", num_pairs=12))
        data["data"]["init_args"]["sources"] = [data["data"]["init_args"]["sources"][-1] | {"path": path}]
        written = write_config(tmp_path, data, f"{name}.yaml")
        return [*phase(f"moe_{name}"), CONFIGS / "scales" / f"{scale}.yaml", written]

    def small(**init_args: Any) -> dict[str, Any]:
        data = {"batch_size": 4, "num_workers": 0, "cache_dir": "cache", "text": TEXT}
        return {"trainer": ONE_CPU, "model": of_module(**init_args), "data": {"init_args": data}}

    backbone = {"name": dense_folder(tmp_path / "dense")}
    first = small_run(tmp_path, files("pretrain", "h100x16_batch16384"), small(backbone=backbone))
    metrics = first.trainer.callback_metrics
    assert first.trainer.global_step == 3
    assert metrics["train/loss"] == pytest.approx(float(metrics["train/contrastive"] + metrics["train/load_balancing"]))

    resting = {"init_args": {"lr": 0.0, "weight_decay": 0.0}}
    later = small(loss={"init_args": {"widths": [32, 8]}}, optimizer=resting)
    second = small_run(tmp_path, files("finetune", "h100x8_batch256"), later)
    metrics = second.trainer.callback_metrics
    # Load balancing is logged with weight 0, and with a learning rate of 0 the weights do not change.
    assert metrics["train/loss"] == pytest.approx(float(metrics["train/contrastive"]))
    assert {"train/load_balancing", "train/loss_32", "train/loss_8"} <= set(metrics)
    assert weights(first).keys() == weights(second).keys()
    assert all(torch.equal(weights(first)[name], weight) for name, weight in weights(second).items())
    check_vectors("checkpoints/moe_finetune", "search_query: ")


def test_own_pairs_train_with_a_validation_folder(tmp_path: Path, capsys: Any) -> None:
    write_pairs(tmp_path / "pairs.jsonl", num_negatives=1)
    write_retrieval_folder(tmp_path / "validation", num_queries=15)
    files: list[str | Path] = [CONFIGS / "own_pairs.yaml", CONFIGS / "own_validation.yaml"]
    small = {
        "trainer": {"precision": "32-true"},
        # An untrained stand-in needs longer steps.
        "model": {
            "init_args": {
                "backbone": {"name": backbone_folder(tmp_path / "backbone")},
                "optimizer": {"init_args": {"lr": 1e-2}},
            }
        },
        "data": {"init_args": {"cache_dir": "cache", "text": TEXT}},
    }
    cli = small_run(tmp_path, files, small, "--data.sources", "[{name: mine, path: pairs.jsonl}]")
    assert cli.trainer.global_step == 3 * 64 // 32
    run = Path(cli.trainer.log_dir)
    assert (run / "checkpoints" / "last.ckpt").is_file()
    (best,) = (run / "checkpoints").glob("best-step=*.ckpt")
    pattern = r"nDCG@10 on validation: (0\.\d{3}) before training, ([01]\.\d{3}) at best \(step (\d)\)"
    ((before, after, step),) = re.findall(pattern, capsys.readouterr().out)
    assert best.name == f"best-step={step}.ckpt"
    assert float(after) > float(before)
    assert any(isinstance(callback, EarlyStopping) for callback in cli.trainer.callbacks)
    folder = tmp_path / "checkpoints" / "own_pairs"
    assert not list(folder.glob("*.py"))
    assert SentenceTransformer(str(folder), device="cpu").encode(["the quick fox"]).shape == (1, 32)
