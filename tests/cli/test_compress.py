"""`compress` through the command line: its output, and one line and code 2 for user errors."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file

from embeddings.cli.export import retraining
from embeddings.cli.main import main
from embeddings.compression import PruningOptions
from embeddings.inference import Encoder
from embeddings.models import Embedder, LatentAttentionPooling
from embeddings.models.model_card import add_scores
from embeddings.models.model_files import dequantised_weights, zeros_by_matrix
from tests.compression.models import build, some_texts, write_model, write_texts
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, run_config, write_config, write_pairs, write_retrieval_folder
from tests.helpers.tiny import bpe_tokenizer

TEXTS = [*some_texts(12, seed=9), "", "one"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("compress") / "base")
    write_texts(folder.parent / "texts.txt")
    return folder


@pytest.fixture
def compress(model, tmp_path):
    """Run `compress` in the test's folder; returns the exit code."""
    texts = shutil.copy(model.parent / "texts.txt", tmp_path)

    def run(*options, output="small", source=model, calibration=texts):
        words = ["--calibration", str(calibration)] if calibration else []
        return main(["compress", "--model", str(source), "--output", output, *words, *options])

    return run


def vectors(folder, texts=TEXTS):
    return Encoder.from_pretrained(str(folder), precision="float32").encode(texts)


@pytest.mark.parametrize(("method", "pattern"), [("wanda", "4:8"), ("sparsegpt", "unstructured")])
def test_a_pruned_model_has_its_zeros_and_is_a_complete_directory(compress, model, capsys, method, pattern):
    assert compress("--prune", method, "--pattern", pattern, "--num-texts", "10", "--max-length", "12") == 0
    printed = capsys.readouterr().out
    assert "calibrated on 10 texts" in printed
    assert "at most 12 a text), seed 0" in printed
    assert "50.00%" in printed
    zeros = zeros_by_matrix(Path("small"))
    assert [found.layer for found in zeros] == [0] * 6 + [1] * 6 + [2] * 6
    assert {found.fraction for found in zeros} == {0.5}
    before = load_file(model / "model.safetensors")
    after = {name: tensor for file in Path("small").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 18
    assert all(name.startswith("encoder.layer.") and name.endswith(".weight") for name in changed)
    for name in changed:
        if pattern != "unstructured":
            group = int(pattern[-1])
            counts = (after[name] == 0).unflatten(1, (-1, group)).sum(dim=2)
            assert counts.unique().tolist() == [group // 2]
        if method == "wanda":
            assert torch.equal(after[name], before[name].masked_fill(after[name] == 0, 0))
    assert {path.name for path in model.iterdir()} <= {"model.safetensors", *os.listdir("small")}
    assert not Path("small.work").exists()
    assert not np.allclose(vectors("small"), vectors(model), atol=1e-3)


def test_the_score_before_and_after_is_in_table_and_card(compress, tmp_path, capsys):
    write_retrieval_folder(tmp_path / "data")
    assert compress("--prune", "sparsegpt", "--pattern", "2:4", "--data", "data") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nDCG@10")]
    _, before, after = row.split()
    card = Path("small/README.md").read_text()
    assert f"| nDCG@10 before | {before} |" in card
    assert f"| nDCG@10 after | {after} |" in card
    assert "| pruning | sparsegpt, 2:4 |" in card
    assert "| zeros in the layers' matrices | 50.00% |" in card


def test_all_other_files_of_a_model_directory_are_copied(compress, tmp_path):
    """The parts beside the backbone keep their weights."""
    pooling = LatentAttentionPooling(32, num_latents=4, num_heads=2, head_dim=8)
    head = torch.nn.Linear(32, 8)
    Embedder(build("llama"), bpe_tokenizer(), pooling, head=head).save_pretrained(tmp_path / "latent")
    assert compress("--prune", "wanda", "--pattern", "4:8", source=tmp_path / "latent") == 0
    for path in (tmp_path / "latent").rglob("*"):
        if path.name not in ("model.safetensors", "README.md", "manifest.json") or path.parent.name != "latent":
            copied = tmp_path / "small" / path.relative_to(tmp_path / "latent")
            assert copied.is_dir() or copied.read_bytes() == path.read_bytes()
    assert vectors("small").shape == (len(TEXTS), 8)


@pytest.mark.parametrize("is_own", [True, False])
def test_the_scores_of_the_model_before_are_left_out(compress, model, tmp_path, is_own):
    folder = shutil.copytree(model, tmp_path / "scored")
    score = {"name": "before", "kind": "retrieval", "metrics": {"ndcg_at_10": 0.375}}
    (folder / "scores.json").write_text(json.dumps([score]))
    assert add_scores(folder)
    card = (folder / "README.md").read_text()
    assert "model-index" in card
    assert "0.375" in card
    if not is_own:
        # The scores of another library's card are in its header only, and need not be the last key.
        header, _, rest = card.partition("\n## Scores")[0].partition("\n---\n")
        (folder / "README.md").write_text(f"{header}\nlicense: mit\n---\n{rest}")
    assert compress("--prune", "magnitude", "--pattern", "2:4", source=folder, calibration=None) == 0
    assert not Path("small/scores.json").exists()
    written = Path("small/README.md").read_text()
    assert "0.375" not in written
    added = set() if is_own else {"license"}
    assert metadata_load("small/README.md").keys() == metadata_load(model / "README.md").keys() | added
    assert "## Compression" in written


def test_a_user_error_is_reported_in_one_line_and_nothing_is_written(compress, model, tmp_path, capsys):
    def refused(says, *options, **arguments):
        assert_refused(capsys, tmp_path, says, lambda *words: compress(*words, **arguments), *options)

    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "taken").mkdir()
    refused("prune or quantize or layers must be given", calibration=None)
    refused("pattern must divide the 32 inputs of encoder.layer.0", "--prune", "wanda", "--pattern", "2:5")
    refused("calibration must name texts", "--prune", "sparsegpt", calibration=None)
    refused("has no texts", "--prune", "sparsegpt", calibration="empty.txt")
    refused("pattern has no effect without --prune", "--pattern", "2:4", "--quantize", "int8")
    refused("group_size has no effect without --quantize", "--prune", "wanda", "--group-size", "16")
    refused("calibration has no effect without --prune wanda", "--prune", "magnitude")
    for words in (("--damping", "0.1"), ("--block-size", "64")):
        refused("has no effect without --prune sparsegpt or --quantize", "--prune", "wanda", *words)
    refused("output already exists", "--prune", "wanda", output="taken")
    refused("damping must be > 0", "--prune", "sparsegpt", "--damping", "0")
    refused("block_size must be a multiple of 8", "--prune", "sparsegpt", "--pattern", "4:8", "--block-size", "20")
    refused("num_texts must be >= 1", "--prune", "wanda", "--num-texts", "0")
    refused("retrain has no effect without --prune or --layers", "--quantize", "int8", "--retrain", "config.yaml")
    refused("group_size must divide the 32 inputs", "--quantize", "int8", "--group-size", "24")
    refused("device must be a device of this machine", "--prune", "wanda", "--device", "cuda:99")


def retrain_config(folder, model, **lora):
    """A config that trains two steps of the model's own pooling, and exports elsewhere."""
    write_pairs(folder / "pairs.jsonl", 32)
    config = run_config(folder)
    config["trainer"] |= {"max_steps": 2, "callbacks": [component("embeddings.callbacks.ExportModel", output="other")]}
    config["model"]["init_args"] |= {"pooling": component("embeddings.models.MeanPooling"), "lora": lora or None}
    config["model"]["init_args"]["backbone"] = {"name": str(model)}
    return write_config(folder, config)


def test_a_pruned_model_is_retrained_with_its_zeros_and_then_quantised(compress, model, tmp_path, capsys):
    config = retrain_config(tmp_path, model)
    options = ["--prune", "sparsegpt", "--pattern", "2:4", "--retrain", config]
    assert compress(*options) == 0
    assert not Path("other").exists()
    assert not Path("small.work").exists()
    assert compress("--prune", "sparsegpt", "--pattern", "2:4", output="pruned") == 0
    (retrained,) = Path("small").glob("model*.safetensors")
    after, before = load_file(retrained), dequantised_weights(Path("pruned"))
    matrices = [f"{matrix.layer}" for matrix in zeros_by_matrix(Path("small"))]
    assert len(matrices) == 18
    moved = 0
    for name, weight in before.items():
        if name.startswith("encoder.layer.") and weight.dim() == 2:
            assert torch.equal(after[name] == 0, weight == 0), name
            moved += int((after[name] != weight).sum())
    assert moved > 1000
    assert "sparsegpt, 2:4" in Path("small/README.md").read_text()
    assert compress(*options, "--quantize", "int8", output="tiny") == 0
    # Rounding adds a few zeros and removes none.
    fractions = [found.fraction for found in zeros_by_matrix(Path("tiny"))]
    assert 0.5 <= min(fractions) <= max(fractions) < 0.51
    assert np.allclose(vectors("tiny"), vectors("small"), atol=0.02)


def test_a_student_of_some_layers_is_a_model_directory(compress, model, tmp_path):
    assert compress("--layers", "2", calibration=None) == 0
    full, small = (Encoder.from_pretrained(str(one)).embedder.backbone for one in (model, "small"))
    for own, kept in zip(small.encoder.layer, (full.encoder.layer[0], full.encoder.layer[2]), strict=True):
        for name, value in own.state_dict().items():
            assert torch.equal(value, kept.state_dict()[name])
    assert "2 of 3, evenly spread" in Path("small/README.md").read_text()
    config = retrain_config(tmp_path, model)
    options = ("--layers", "2", "--prune", "wanda", "--pattern", "2:4", "--retrain", config)
    assert compress(*options, output="both") == 0
    assert [found.layer for found in zeros_by_matrix(Path("both"))] == [0] * 6 + [1] * 6
    assert {found.fraction for found in zeros_by_matrix(Path("both"))} == {0.5}


def test_a_pruned_model_is_retrained_again_only_with_another_config(tmp_path, model):
    """Retrained models in the working folder are found by the hash of their configs, with those that they include."""
    pruning = PruningOptions("magnitude", "2:4")
    (tmp_path / "one").mkdir()
    config = Path(retrain_config(tmp_path / "one", model))
    over = config.with_name("over.yaml")
    over.write_text("config: config.yaml\nseed_everything: 1\n")
    first = retraining([over], pruning)(model, tmp_path / "work")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert retraining([over], pruning)(model, tmp_path / "work") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 0.02"))
    assert retraining([over], pruning)(model, tmp_path / "work") != first
