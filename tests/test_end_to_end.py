"""The commands as a user runs them, with tiny models of the real architectures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embeddings.cli.main import main
from tests.helpers.runs import component, fit, run_config, write_retrieval_folder


def weights(cli):
    return {name: value.detach().clone() for name, value in cli.model.state_dict().items()}


@pytest.mark.parametrize("kind", [pytest.param("bert", marks=pytest.mark.slow), "mistral"])
def test_train_score_save_search_and_evaluate(kind, tmp_path, capsys):
    folder = write_retrieval_folder(tmp_path / "eval")
    config = run_config(tmp_path, kind, dropout=0.1)
    config["trainer"]["callbacks"] = [
        component("GradCacheCallback", mini_batch_tokens=64),
        component("RetrievalEvaluation", folder=str(folder), every_n_steps=2),
        component("ModelCheckpoint", monitor="val/ndcg_at_10", mode="max", every_n_train_steps=2, save_last=True),
        component("ExportModel", output=str(tmp_path / "model")),
    ]
    cli = fit(tmp_path, config)
    run = Path(cli.trainer.log_dir)
    record = json.loads((run / "run.json").read_text())
    assert record["command"].startswith("python main.py fit --config")
    assert record["world_size"] == 1
    assert (run / "config.yaml").is_file()
    assert 0 < cli.trainer.checkpoint_callback.best_model_score <= 1

    scores = str(tmp_path / "scores.json")
    assert main(["evaluate", "--model", str(tmp_path / "model"), "--data", str(folder), "--output", scores]) == 0
    assert "ndcg_at_10" in capsys.readouterr().out
    corpus = str(folder / "corpus.jsonl")
    assert main(["search", "--model", str(tmp_path / "model"), "--corpus", corpus, "pad sequences"]) == 0
    assert capsys.readouterr().out.count("  d") == 5
    vectors = tmp_path / "vectors"
    assert main(["encode", "--model", str(tmp_path / "model"), "--input", corpus, "--output", str(vectors)]) == 0
    assert main(["search", "--model", str(tmp_path / "model"), "--corpus", str(vectors), "pad sequences"]) == 0

    last = run / "checkpoints" / "last.ckpt"
    options = ["--checkpoint", str(last), "--output", str(tmp_path / "exported"), "--scores", scores]
    (run / "curves.png").write_bytes(b"picture")
    assert main(["export", *options, "--licence", "mit"]) == 0
    text = (tmp_path / "exported" / "README.md").read_text()
    parts = ("license: mit", "| pairs | files | 64 |", "ndcg\\_at\\_10", "| optimiser steps | 4 |", "after 4 steps")
    assert [part for part in parts if part not in text] == []
    assert (tmp_path / "exported" / "curves.png").read_bytes() == b"picture"
    from embeddings.inference import Encoder
    from embeddings.modules import NVEmbedModule

    module = NVEmbedModule.load_from_checkpoint(last)
    trained = Encoder(module.embedder, precision="float32").encode(["pad the fox", "two"])
    exported = Encoder.from_pretrained(str(tmp_path / "exported"), precision="float32").encode(["pad the fox", "two"])
    assert np.abs(trained - exported).max() <= 1e-5


def test_eight_pairs_can_be_overfitted(tmp_path):
    config = run_config(tmp_path, batch_size=8, num_negatives=0)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()[:8]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    config["trainer"] |= {"max_steps": 40}
    cli = fit(tmp_path, config)
    assert cli.trainer.callback_metrics["train/accuracy"] == 1.0
    assert cli.trainer.callback_metrics["train/loss"] < 0.1


def test_gradcache_trains_to_the_weights_of_the_plain_step(tmp_path):
    """With accumulation, clipping and a schedule; in float64, so that rounding is negligible."""
    (tmp_path / "plain").mkdir()
    config = run_config(tmp_path / "plain", "mistral")
    config["trainer"] |= {"precision": "64-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    plain = weights(fit(tmp_path, config))
    config["trainer"]["callbacks"] = [component("GradCacheCallback", mini_batch_tokens=24)]
    cached = weights(fit(tmp_path, config))
    assert plain.keys() == cached.keys()
    changed = [name for name, value in plain.items() if (cached[name] - value).abs().max() > 1e-10]
    assert changed == []
    assert any("lora" in name for name in plain)


def test_the_seed_of_the_run_is_the_default_of_the_model_and_the_data(tmp_path):
    config = run_config(tmp_path, dropout=0.1)
    config["trainer"]["max_steps"] = 2
    runs = {
        "0": ["--seed_everything", "0"],
        "1": ["--seed_everything", "1"],
        "1, named": ["--model.init_args.seed", "1", "--data.init_args.seed", "1"],
        "0 and 1": ["--seed_everything", "0", "--data.init_args.seed", "1"],
    }
    clis = {name: fit(tmp_path, config, *options) for name, options in runs.items()}
    seeds = {name: (cli.model._seed, cli.datamodule.seed) for name, cli in clis.items()}
    assert seeds == {"0": (0, 0), "1": (1, 1), "1, named": (1, 1), "0 and 1": (0, 1)}
    trained = {name: torch.cat([value.flatten() for value in weights(cli).values()]) for name, cli in clis.items()}
    assert torch.equal(trained["1"], trained["1, named"])
    assert not torch.equal(trained["1"], trained["0"])
    assert not torch.equal(trained["0 and 1"], trained["0"])
    assert not torch.equal(trained["0 and 1"], trained["1"])


def test_the_saved_config_of_a_run_can_be_used_again(tmp_path):
    config = run_config(tmp_path, "mistral")
    config["trainer"]["max_steps"] = 2
    folder = Path(fit(tmp_path, config).trainer.log_dir)
    assert main(["fit", "--config", str(folder / "config.yaml")]) == 0
