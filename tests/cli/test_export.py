import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.models.backbone import load_model
from tests.helpers.checkpoints import save
from tests.helpers.runs import run_config, write_config


def refused(path, capsys, output, *words):
    capsys.readouterr()
    assert main(["export", "--checkpoint", str(path), "--output", str(output), *words]) == 2
    assert not output.exists()
    return capsys.readouterr().err


def test_a_checkpoint_cannot_make_foreign_classes(tmp_path, capsys):
    canary = tmp_path / "canary"
    model = {"class_path": "embeddings.modules.NVEmbedModule", "init_args": {"loss": {"class_path": "os.system"}}}
    save({"run_config": {"model": model}, "state_dict": {}}, tmp_path / "hostile.ckpt")
    assert "asks for the class os.system" in refused(tmp_path / "hostile.ckpt", capsys, tmp_path / "out")
    assert not canary.exists()


class Payload:
    def __reduce__(self):
        return (open, ("canary", "w"))


@pytest.mark.parametrize("content", ["pickle", "truncated", "missing", "no config"])
def test_what_is_no_checkpoint_is_refused_without_running_it(content, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    if content == "pickle":
        torch.save({"run_config": Payload()}, path)
    elif content == "truncated":
        save({"state_dict": {"x": torch.zeros(1000)}}, path)
        path.write_bytes(path.read_bytes()[:900])
    elif content == "no config":
        save({"state_dict": {}}, path)
    assert "x.ckpt" in refused(path, capsys, tmp_path / "out")
    assert not (tmp_path / "canary").exists()


def test_an_output_that_is_a_file_is_refused_before_the_checkpoint_is_read(tmp_path, capsys):
    output = tmp_path / "notes.txt"
    output.write_text("mine")
    assert main(["export", "--checkpoint", str(tmp_path / "none.ckpt"), "--output", str(output)]) == 2
    assert f"output leads to {output}, which is no folder" in capsys.readouterr().err
    assert output.read_text() == "mine"


def test_options_of_the_card_are_refused_before_the_checkpoint_is_read(tmp_path, capsys):
    path = tmp_path / "x.ckpt"
    save({"state_dict": {}}, path)
    (tmp_path / "scores.json").write_text("{}")
    for words, line in (
        (["--licence", "Apache 2.0"], "licence must be a name of the Hub's"),
        (["--scores", str(tmp_path / "scores.json")], "scores.json: holds no list"),
        (["--scores", str(tmp_path / "none.json")], "none.json: is no readable JSON"),
    ):
        assert main(["export", "--checkpoint", str(path), "--output", str(tmp_path / "out"), *words]) == 2
        assert line in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_graph_is_written_on_request_and_a_refusal_leaves_the_old_model(tmp_path, capsys, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"]["max_steps"] = 2
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    (checkpoint,) = Path(cli.trainer.log_dir).rglob("*.ckpt")
    assert "format is for models that load without code" in refused(
        checkpoint, capsys, tmp_path / "out", "--format", "onnx"
    )
    config["model"]["init_args"]["pooling"] = {"class_path": "embeddings.models.MeanPooling"}
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    (checkpoint,) = Path(cli.trainer.log_dir).rglob("*.ckpt")
    words = ["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out"), "--format", "onnx"]
    curves, out = Path(cli.trainer.log_dir) / "curves.png", tmp_path / "out"
    curves.write_bytes(b"drawn")
    assert main(words) == 0
    assert "of torch's states on texts of up to 33 tokens\n" in capsys.readouterr().out
    before = content(out)
    assert {Path("onnx/model.onnx"), Path("README.md"), Path("model.safetensors")} < set(before)
    assert before[Path("curves.png")] == b"drawn"
    card = before[Path("README.md")].decode()
    assert "(curves.png)" in card
    assert "# out\n" in card
    assert main([*words[:-1], "onnx-int8"]) == 0
    said, int8_graph = capsys.readouterr().out, Path("onnx/model_qint8_avx512_vnni.onnx")
    assert float(re.search(r"least cosine ([\d.]+) of mean states", said)[1]) > 0.99
    before = content(out)
    assert len(before[int8_graph]) < len(before[Path("onnx/model.onnx")])
    monkeypatch.setattr("embeddings.interop.onnx._TOLERANCE", -1.0)
    assert main(words) == 2
    assert "error: format must give torch's states" in capsys.readouterr().err
    assert content(out) == before
    # The old run's curves go with its model.
    curves.unlink()
    assert main(words[:-2]) == 0
    after = content(out)
    assert not {Path("onnx/model.onnx"), int8_graph, Path("curves.png")} & set(after)
    assert b"curves.png" not in after[Path("README.md")]


def test_a_card_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"]["max_steps"] = 2
    config["trainer"]["callbacks"] = [
        {
            "class_path": "embeddings.callbacks.ExportModel",
            "init_args": {"output": str(tmp_path / "out"), "replace": True},
        }
    ]
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    before = content(tmp_path / "out")
    assert "# out\n" in before[Path("README.md")].decode()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("embeddings.models.model_card.model_card", fail)
    (checkpoint,) = Path(cli.trainer.log_dir).rglob("*.ckpt")
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]) == 74
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 74
    assert content(tmp_path / "out") == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_lora_matrices_are_written_for_peft_beside_the_merged_model(tmp_path, capsys):
    config = run_config(tmp_path, "mistral")
    config["trainer"]["max_steps"] = 3
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    (checkpoint,) = Path(cli.trainer.log_dir).rglob("*.ckpt")
    out, base = tmp_path / "out", config["model"]["init_args"]["backbone"]["name"]
    words = ["export", "--checkpoint", str(checkpoint), "--output", str(out)]
    assert main([*words, "--format", "adapter"]) == 0
    assert f"wrote {out / 'adapter'}: LoRA matrices for peft, of {base}\n" in capsys.readouterr().out
    assert sorted(path.name for path in (out / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    tokens = {"input_ids": torch.arange(5, 25).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    plain = load_model(Path(base), torch.float32, make_bidirectional=True)
    with torch.no_grad():
        untrained = plain(**tokens).last_hidden_state
        found = PeftModel.from_pretrained(plain, out / "adapter").eval()(**tokens).last_hidden_state
        trained = cli.model.embedder.backbone.eval()(**tokens).last_hidden_state
        merged = load_model(out, torch.float32)(**tokens).last_hidden_state
    assert torch.equal(found, trained)
    assert (found - untrained).abs().max() > 1e-3
    torch.testing.assert_close(merged, trained, rtol=0, atol=1e-5)
    assert main(words) == 0
    assert not (out / "adapter").exists()
    del config["model"]["init_args"]["lora"]
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    (checkpoint,) = Path(cli.trainer.log_dir).rglob("*.ckpt")
    assert "format needs LoRA matrices on a model" in refused(
        checkpoint, capsys, tmp_path / "no", "--format", "adapter"
    )
