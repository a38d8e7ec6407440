"""MGH on tiny models: its embedder, its gradient under GradCache, and its levels in a full run."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embeddings.common import ContrastiveBatch, ContrastiveStep, TokenBatch
from embeddings.inference import Encoder
from embeddings.models import AnchorTokenPooling, BackboneConfig, LoraSettings
from embeddings.modules import MGHCurriculumModule
from embeddings.training import GradCache
from tests.helpers.contrastive import batch_of, random_records, relative_error
from tests.helpers.runs import backbone_folder, component, fit
from tests.modules.mgh_runs import mgh_config
from tests.modules.test_checkpoints import differences_after_resuming
from tests.training.test_gradcache import REPLAYED, cached_gradient, direct_gradient

CACHE = component("GradCacheCallback", mini_batch_tokens=24)
LORA = LoraSettings(rank=4, alpha=8, dropout=0.0)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbone_folder(tmp_path_factory.mktemp("dropping"), dropout=0.1)


def test_the_model_is_anchor_token_pooling_over_a_decoder_that_looks_both_ways(mistral: str) -> None:
    module = MGHCurriculumModule(BackboneConfig(mistral, bidirectional=True), lora=LORA).eval()
    assert isinstance(module, ContrastiveStep)
    assert isinstance(module.embedder.pooling, AnchorTokenPooling)
    assert module.embedder.pooling.axis == "key"
    tokens = [TokenBatch.from_lists([ids], [[True] * len(ids)]).padded() for ids in ([5, 6, 7], [5, 6, 99])]
    states = [module.embedder.backbone(input_ids=one.input_ids_NL).last_hidden_state for one in tokens]
    assert (states[0] - states[1])[0, 0].abs().max() > 1e-4
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def leveled_batch() -> ContrastiveBatch:
    """One hard negative per query, and one query without."""
    records = random_records(6, 1, seed=4)
    records[3].negatives = []
    return batch_of(records)


@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_gradcache_replays_dropout_under_the_weights_of_the_attention(options: dict[str, Any], dropping: str) -> None:
    module, batch = MGHCurriculumModule(BackboneConfig(dropping)).double(), leveled_batch()
    engine = GradCache(**options)
    torch.manual_seed(1)
    found = cached_gradient(module, batch, engine)[1]
    torch.manual_seed(1)
    assert relative_error(found, direct_gradient(module, batch, engine)[1]) <= 1e-12
    assert relative_error(found, direct_gradient(module, batch, engine)[1]) > 1e-3


def test_the_level_of_each_step_is_logged(tmp_path: Path) -> None:
    config = mgh_config(tmp_path)
    config["trainer"] |= {"accumulate_grad_batches": 2, "callbacks": [CACHE]}
    cli = fit(tmp_path, config)
    with open(Path(cli.trainer.log_dir) / "metrics.csv", newline="") as file:
        levels = [float(row["train/level"]) for row in csv.DictReader(file) if row["train/level"]]
    assert levels == [4, 4, 3, 3, 2, 2, 1, 1]


def test_a_run_resumed_across_a_boundary_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = mgh_config(tmp_path, dropout=0.1)
    config["trainer"]["callbacks"] = [CACHE]
    assert differences_after_resuming(tmp_path, config, 3) == {}


def test_eight_pairs_are_overfitted_and_the_exported_model_has_the_same_vectors(tmp_path: Path) -> None:
    config = mgh_config(tmp_path, "bert")
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(lines[:8]))
    config["trainer"] |= {"max_steps": 40, "callbacks": [component("ExportModel", output=str(tmp_path / "model"))]}
    cli = fit(tmp_path, config)
    assert cli.trainer.callback_metrics["train/accuracy"] == 1.0
    assert cli.trainer.callback_metrics["train/loss"] < 0.1
    texts = ["pad the fox", "two numbers"]
    trained = Encoder(cli.model.embedder, precision="float32").encode(texts)
    exported = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32").encode(texts)
    assert np.abs(trained - exported).max() <= 1e-5
