"""The commands as a user runs them, on tiny stand-ins of the real architectures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embeddings.cli.app import run_trainer
from embeddings.cli.main import main
from tests.helpers.runs import run_config, write_config, write_retrieval_folder


def fit(folder, config, *extra):
    return run_trainer(["fit", "--config", write_config(folder, config), *extra])


def weights(cli):
    return {name: value.detach().clone() for name, value in cli.model.state_dict().items()}


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_train_score_save_search_and_evaluate(kind, tmp_path, capsys):
    folder = write_retrieval_folder(tmp_path / "eval")
    config = run_config(tmp_path, kind, dropout=0.1)
    config["trainer"]["callbacks"] = [
        {"class_path": "embeddings.callbacks.GradCacheCallback", "init_args": {"mini_batch_tokens": 64}},
        {
            "class_path": "embeddings.callbacks.RetrievalEvaluation",
            "init_args": {"folder": str(folder), "every_n_steps": 2},
        },
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"monitor": "val/ndcg_at_10", "mode": "max", "every_n_train_steps": 2, "save_last": True},
        },
        {"class_path": "embeddings.callbacks.ExportModel", "init_args": {"output": str(tmp_path / "model")}},
    ]
    cli = fit(tmp_path, config)
    run = Path(cli.trainer.log_dir)
    record = json.loads((run / "run.json").read_text())
    assert record["command"].startswith("python main.py fit --config")
    assert record["world_size"] == 1
    assert (run / "config.yaml").is_file()
    assert 0 < cli.trainer.checkpoint_callback.best_model_score <= 1

    assert main(["evaluate", "--model", str(tmp_path / "model"), "--data", str(folder)]) == 0
    assert "ndcg_at_10" in capsys.readouterr().out
    corpus = str(folder / "corpus.jsonl")
    assert main(["search", "--model", str(tmp_path / "model"), "--corpus", corpus, "pad sequences"]) == 0
    assert capsys.readouterr().out.count("  d") == 5
    vectors = tmp_path / "vectors"
    assert main(["encode", "--model", str(tmp_path / "model"), "--input", corpus, "--output", str(vectors)]) == 0
    assert main(["search", "--model", str(tmp_path / "model"), "--corpus", str(vectors), "pad sequences"]) == 0

    last = run / "checkpoints" / "last.ckpt"
    assert main(["export", "--checkpoint", str(last), "--output", str(tmp_path / "exported")]) == 0
    from embeddings.inference import Encoder

    cli.model.load_state_dict(torch.load(last, weights_only=True)["state_dict"])
    trained = Encoder(cli.model.embedder, precision="float32").encode(["pad the fox", "two"])
    exported = Encoder.from_pretrained(str(tmp_path / "exported"), precision="float32").encode(["pad the fox", "two"])
    assert np.abs(trained - exported).max() <= 1e-5


def test_the_loss_falls_and_eight_pairs_are_learnt_by_heart(tmp_path):
    config = run_config(tmp_path, batch_size=8, num_negatives=0)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()[:8]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    config["trainer"] |= {"max_steps": 40}
    cli = fit(tmp_path, config)
    assert cli.trainer.callback_metrics["train/accuracy"] == 1.0
    assert cli.trainer.callback_metrics["train/loss"] < 0.1


def test_gradcache_trains_to_the_weights_of_the_plain_step(tmp_path):
    """Accumulation, clipping and a schedule are on; float64 leaves no room for rounding."""
    (tmp_path / "plain").mkdir()
    config = run_config(tmp_path / "plain", "mistral")
    config["trainer"] |= {"precision": "64-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    plain = weights(fit(tmp_path, config))
    config["trainer"]["callbacks"] = [
        {"class_path": "embeddings.callbacks.GradCacheCallback", "init_args": {"mini_batch_tokens": 24}}
    ]
    cached = weights(fit(tmp_path, config))
    assert plain.keys() == cached.keys()
    changed = [name for name, value in plain.items() if (cached[name] - value).abs().max() > 1e-10]
    assert changed == []
    assert any("lora" in name for name in plain)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    config = run_config(tmp_path, dropout=0.1)
    config["trainer"]["callbacks"] = [
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"every_n_train_steps": 3, "save_top_k": -1},
        }
    ]
    config["trainer"]["max_steps"] = 7
    whole = fit(tmp_path, config)
    (first,) = Path(whole.trainer.log_dir).rglob("*step=3.ckpt")
    resumed = fit(tmp_path, config, "--ckpt_path", str(first))
    expected, found = weights(whole), weights(resumed)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_stage_two_starts_from_stage_one_and_uses_no_in_batch_negatives(tmp_path):
    (tmp_path / "one").mkdir()
    config = run_config(tmp_path / "one", "mistral")
    config["trainer"]["callbacks"] = [
        {"class_path": "embeddings.callbacks.ExportModel", "init_args": {"output": str(tmp_path / "stage1")}}
    ]
    first = fit(tmp_path, config)
    config["trainer"]["callbacks"] = []
    config["trainer"]["max_steps"] = 1
    config["model"]["init_args"]["schedule"]["warmup_steps"] = 0
    config["model"]["init_args"] |= {"initial_model": str(tmp_path / "stage1")}
    config["model"]["init_args"]["loss"]["init_args"]["in_batch_negatives"] = "off"
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.0
    second = fit(tmp_path, config)
    one, two = first.model.embedder.pooling.state_dict(), second.model.embedder.pooling.state_dict()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert second.trainer.optimizers[0].state_dict()["state"][0]["step"] == 1


BAD_LINES = {
    "missing field": '{"query": "a", "text": "b"}\n',
    "truncated": '{"query": "a", "positive": "b"}\n{"query": "a", "posi',
    "empty": "",
    "not an object": "[1, 2]\n",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_file_is_one_line_and_nothing_is_written(name, tmp_path, capsys):
    config = run_config(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(BAD_LINES[name])
    path = write_config(tmp_path, config)
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["fit", "--config", path]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert "pairs.jsonl" in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["fit", "--config", write_config(tmp_path, run_config(tmp_path)), "--trainer.accelerator=gpu"]) == 2
    assert "trainer.accelerator: gpu" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["--data.init_args.batch_size", "0"], "batch_size"),
        (["--data.init_args.batch_size", "100000"], "batch_size"),
        (["--data.init_args.num_negatives", "-1"], "num_negatives"),
        (["--model.init_args.loss.init_args.temperature", "0"], "temperature must be > 0, got 0.0"),
        (["--model.init_args.loss.init_args.temprature", "0"], "temprature"),
        (["--model.init_args.schedule.warmup_steps", "9"], "warmup_steps"),
        (["--data.init_args.sources.0.nmae", "x"], "nmae"),
        (["--trainer.stratgy", "ddp"], "stratgy"),
        (["--model.init_args.optimizer.init_args.lr=nan"], "model.optimizer.lr: expected float, got nan; --help"),
        (["--data.init_args.batch_size=null"], "data.batch_size must be >= 1, got None; "),
        (
            ["--data.init_args.batchsize=3"],
            "'batchsize' is not accepted by EmbeddingDataModule; did you mean batch_size?",
        ),
        (["--model.init_args.optimizer.init_args.lr=-1"], "model.optimizer: Invalid learning rate: -1.0; "),
        (["--model.init_args.optimizer.init_args.weight_decay=-1"], "model.optimizer: Invalid weight_decay"),
        (["--model.init_args.pooling.init_args.num_heads=0"], "model.pooling.num_heads must be >= 1, got 0; "),
        (["--model.init_args.pooling.init_args.num_latents=0"], "model.pooling.num_latents must be >= 1, got 0; "),
        (["--ckpt_path=nope.ckpt"], "--ckpt_path nope.ckpt: no such file; "),
        (["--ckpt_path=pyproject.toml"], "--ckpt_path pyproject.toml: is no checkpoint"),
        (["--trainer.accumulate_grad_batches=0"], "trainer.accumulate_grad_batches must be >= 1, got 0; "),
        (["--trainer.devices=0"], "trainer.devices: 0"),
        (["--trainer.strategy=nope"], "trainer.strategy: nope"),
        (["--data.init_args.text.document_max_length=129"], "data.text.document_max_length must be <= 128"),
        (["--data.init_args.text.query_max_length=129"], "data.text.query_max_length must be <= 128"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_is_written(override, says, tmp_path, capsys):
    path = write_config(tmp_path, run_config(tmp_path))
    before = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    capsys.readouterr()
    assert main(["fit", "--config", path, *override]) == 2
    written = capsys.readouterr().err.strip().splitlines()[-1]
    assert written.startswith("error: ")
    assert says in written
    assert [path for path in sorted(tmp_path.rglob("*")) if "cache" not in path.parts and path not in before] == []
