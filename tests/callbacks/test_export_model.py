import torch
from safetensors.torch import load_file

from embeddings.cli.app import run_trainer
from tests.helpers.runs import run_config, write_config, write_retrieval_folder


def run_with_export(tmp_path, best):
    config = run_config(tmp_path)
    folder = write_retrieval_folder(tmp_path / "eval")
    config["trainer"]["callbacks"] = [
        {
            "class_path": "embeddings.callbacks.RetrievalEvaluation",
            "init_args": {"folder": str(folder), "every_n_steps": 1},
        },
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            # Minimising a score keeps a checkpoint that is not the last one's equal.
            "init_args": {"monitor": "train/loss", "mode": "max", "every_n_train_steps": 1, "save_top_k": 1},
        },
        {
            "class_path": "embeddings.callbacks.ExportModel",
            "init_args": {"output": str(tmp_path / "model"), "best": best},
        },
    ]
    return run_trainer(["fit", "--config", write_config(tmp_path, config)])


def exported(tmp_path):
    return load_file(tmp_path / "model" / "model.safetensors")


def test_the_best_checkpoints_weights_are_written(tmp_path):
    cli = run_with_export(tmp_path, best=True)
    state = torch.load(cli.trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    found = exported(tmp_path)
    assert len(found) > 10
    assert all(torch.equal(found[name], state[f"embedder.backbone.{name}"]) for name in found)


def test_the_last_weights_are_written_on_request(tmp_path):
    cli = run_with_export(tmp_path, best=False)
    state = cli.model.state_dict()
    best = torch.load(cli.trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    found = exported(tmp_path)
    assert all(torch.equal(found[name], state[f"embedder.backbone.{name}"]) for name in found)
    assert any(not torch.equal(found[name], best[f"embedder.backbone.{name}"]) for name in found)


def test_a_fast_development_run_writes_nothing(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["fast_dev_run"] = True
    config["trainer"]["callbacks"] = [
        {"class_path": "embeddings.callbacks.ExportModel", "init_args": {"output": str(tmp_path / "model")}}
    ]
    run_trainer(["fit", "--config", write_config(tmp_path, config)])
    assert not (tmp_path / "model").exists()
