"""`export`, `import` and `convert`: our checkpoints, published ones and ones with learned positions."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertForMaskedLM

from embeddings.cli.export import facts_of_checkpoint
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.models import BackboneConfig, load_backbone
from embeddings.models.backbone import load_model
from embeddings.modules import MaskedLMModule
from tests.helpers.checkpoints import save
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import run_config, write_config
from tests.helpers.tiny import save_backbone, wordpiece_tokenizer
from tests.interop.released import nomic
from tests.interop.released.nomic import MOE, nomic_folder
from tests.interop.released.published import encoded


def export_error(path, capsys, output, *words):
    capsys.readouterr()
    assert main(["export", "--checkpoint", str(path), "--output", str(output), *words]) == 2
    assert not output.exists()
    return capsys.readouterr().err


def trained(tmp_path, config, num_steps=2):
    """Train with a config; returns the CLI and its checkpoint."""
    config["trainer"]["max_steps"] = num_steps
    cli = run_trainer(["fit", "--config", write_config(tmp_path, config)])
    (checkpoint,) = Path(cli.trainer.log_dir).rglob("*.ckpt")
    return cli, checkpoint


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "hostile.ckpt: may not name os.system; name a class of embeddings"),
        (["--licence", "Apache 2.0"], "licence must be a licence identifier of the Hub"),
        (["--scores", "scores.json"], "scores.json: does not contain a list"),
    ],
)
def test_foreign_classes_and_bad_options_of_the_card_are_refused(words, says, tmp_path, capsys):
    model = {"class_path": "embeddings.modules.NVEmbedModule", "init_args": {"loss": {"class_path": "os.system"}}}
    save({"run_config": {"model": model}, "state_dict": {}}, tmp_path / "hostile.ckpt")
    (tmp_path / "scores.json").write_text("{}")
    assert says in export_error("hostile.ckpt", capsys, tmp_path / "out", *words)


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_graph_is_written_on_request_and_a_refusal_leaves_the_old_model(tmp_path, capsys, monkeypatch):
    config = run_config(tmp_path)
    _, checkpoint = trained(tmp_path, config)
    says = export_error(checkpoint, capsys, tmp_path / "out", "--format", "onnx")
    assert "format needs a model that loads without custom code" in says
    config["model"]["init_args"]["pooling"] = {"class_path": "embeddings.models.MeanPooling"}
    cli, checkpoint = trained(tmp_path, config)
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
    assert float(re.search(r"minimum cosine ([\d.]+) of mean states", said)[1]) > 0.99
    before = content(out)
    assert len(before[int8_graph]) < len(before[Path("onnx/model.onnx")])
    monkeypatch.setattr("embeddings.interop.onnx._TOLERANCE", -1.0)
    assert main(words) == 2
    assert "error: format must match torch's states" in capsys.readouterr().err
    assert content(out) == before
    # The curves of the old run are replaced with its model.
    curves.unlink()
    assert main(words[:-2]) == 0
    after = content(out)
    assert not {Path("onnx/model.onnx"), int8_graph, Path("curves.png")} & set(after)
    assert b"curves.png" not in after[Path("README.md")]


def test_a_card_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    config, options = run_config(tmp_path), {"output": str(tmp_path / "out"), "replace": True}
    config["trainer"]["callbacks"] = [{"class_path": "embeddings.callbacks.ExportModel", "init_args": options}]
    _, checkpoint = trained(tmp_path, config)
    before = content(tmp_path / "out")
    assert "# out\n" in before[Path("README.md")].decode()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("embeddings.models.model_card.write_text", fail)
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]) == 74
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 74
    assert content(tmp_path / "out") == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_lora_matrices_are_written_for_peft_beside_the_merged_model(tmp_path, capsys):
    config = run_config(tmp_path, "mistral")
    cli, checkpoint = trained(tmp_path, config, 3)
    out, base = tmp_path / "out", config["model"]["init_args"]["backbone"]["name"]
    words = ["export", "--checkpoint", str(checkpoint), "--output", str(out)]
    assert main([*words, "--format", "adapter"]) == 0
    assert f"wrote {out / 'adapter'}: LoRA matrices for peft, of {base}\n" in capsys.readouterr().out
    names = sorted(path.name for path in (out / "adapter").iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    tokens = {"input_ids": torch.arange(5, 25).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    plain = load_model(Path(base), torch.float32, make_bidirectional=True)
    with torch.no_grad():
        untrained = plain(**tokens).last_hidden_state
        found = PeftModel.from_pretrained(plain, out / "adapter").eval()(**tokens).last_hidden_state
        ours = cli.model.embedder.backbone.eval()(**tokens).last_hidden_state
        merged = load_model(out, torch.float32)(**tokens).last_hidden_state
    assert torch.equal(found, ours)
    # As the adapter's card says; the base model alone is causal.
    card = (out / "adapter" / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names = {}
    exec(lines, names)
    assert len([line for line in lines.splitlines() if " = " in line]) == 3
    causal = AutoModel.from_pretrained(base)
    with torch.no_grad():
        documented = names["model"].eval()(**tokens).last_hidden_state
        wrong = PeftModel.from_pretrained(causal, out / "adapter").eval()(**tokens).last_hidden_state
    torch.testing.assert_close(documented, ours, rtol=0, atol=1e-5)
    assert (wrong - ours).abs().max() > 1e-1
    pooling = re.search(r"Weights of the pooling, .*\sfolders `(\w+)`", card, re.DOTALL)[1]
    assert (out / pooling / "model.safetensors").is_file()
    assert (found - untrained).abs().max() > 1e-3
    torch.testing.assert_close(merged, ours, rtol=0, atol=1e-5)
    assert main(words) == 0
    assert not (out / "adapter").exists()
    del config["model"]["init_args"]["lora"]
    _, checkpoint = trained(tmp_path, config, 3)
    says = export_error(checkpoint, capsys, tmp_path / "no", "--format", "adapter")
    assert "format needs LoRA matrices on a base model" in says


@pytest.mark.parametrize(
    ("record", "metrics", "expected"),
    [
        ('{"id": "a"}', "step,train/loss,val/ndcg_at_10\n1,0.5,\n2,,0.25\n4,,0.75\n", ({"id": "a"}, [(2, 0.25)])),
        ("[", "step\n1\n", ({}, [])),
    ],
    ids=["complete", "damaged"],
)
def test_the_facts_are_those_of_the_checkpoints_step(record, metrics, expected, tmp_path):
    (tmp_path / "run.json").write_text(record)
    (tmp_path / "metrics.csv").write_text(metrics)
    facts = facts_of_checkpoint({"run_config": {"seed_everything": 0}, "global_step": 3}, tmp_path)
    assert (facts.num_steps, facts.record, facts.validation) == (3, *expected)


def run(source: Path, output: Path, *options: str) -> int:
    return main(["import", "--source", str(source), "--output", str(output), *options])


def test_one_line_lists_used_and_unused_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    assert run(folder, tmp_path / "plain") == 0
    used = f"used {len(state)} tensors, none missing"
    where = tmp_path / "plain"
    assert capsys.readouterr().out == f"wrote {where} from Nomic's encoder with experts: {used}, none unused\n"
    pooler = {"pooler.dense.weight": torch.zeros(32, 32), "pooler.dense.bias": torch.zeros(32)}
    save_file(load_file(folder / "model.safetensors") | pooler, folder / "model.safetensors")
    assert run(folder, tmp_path / "pooled") == 0
    assert f"{used}, 2 unused (pooler.dense.bias, pooler.dense.weight)\n" in capsys.readouterr().out
    assert torch.equal(encoded(tmp_path / "plain"), encoded(tmp_path / "pooled"))


def test_a_renamed_model_gets_the_settings_of_its_published_card(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nomic, "HIDDEN", 768)
    folder, _, _ = nomic_folder(tmp_path / "copy", MOE | {"n_embd": 768, "n_layer": 2}, layers=2)
    given = ("--known-as", "nomic-embed-text-v1.5")
    assert_refused(capsys, tmp_path, "known_as cannot apply to", run, folder, tmp_path / "ours", *given)
    assert run(folder, tmp_path / "ours", "--known-as", "nomic-embed-text-v2-moe") == 0
    assert capsys.readouterr().out.endswith("; with the vector settings of nomic-embed-text-v2-moe's card\n")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the lazy dog"}\n')
    line = ["encode", "--model", str(tmp_path / "ours"), "--input", str(texts), "--output"]
    assert main([*line, str(tmp_path / "vectors"), "--dimensions", "64"]) == 0
    assert "the model was trained at 768, 256; scores may be lower" in caplog.text


MAIN = Path(__file__).parents[2] / "main.py"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def source_folder(folder: Path, has_head: bool = True) -> Path:
    model = BertForMaskedLM(BertConfig(vocab_size=390, max_position_embeddings=66, **SIZES))
    return Path(save_backbone(str(folder), model if has_head else model.base_model, wordpiece_tokenizer()))


def convert(source: Path | str, output: Path, *options: str) -> int:
    return main(["convert", "--source", str(source), "--output", str(output), *options])


def test_a_checkpoint_is_converted_and_one_line_has_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_folder(tmp_path / "source")
    capsys.readouterr()  # discard what libraries printed while the source was written
    options = ["--num-positions", "3000", "--rope-theta", "20000"]
    assert convert(source, tmp_path / "new" / "rotary", *options) == 0
    out = capsys.readouterr().out
    backbone, tokenizer = load_backbone(BackboneConfig(str(tmp_path / "new" / "rotary")))
    assert type(backbone).__name__ == "JinaEmbeddingsV3Model"
    assert (backbone.config.max_position_embeddings, tokenizer.model_max_length) == (3000, 3000)
    assert backbone.config.rope_parameters["rope_theta"] == 20000
    # The dense layer, the norm and the bias of the head; its matrix is that of the embeddings.
    head = 32 * 32 + 32 + 2 * 32 + 448
    size = backbone.num_parameters() + head
    where = tmp_path / "new" / "rotary"
    rows = "vocabulary of 448 rows"
    assert out == f"wrote {where}: {size:,} parameters, {rows}, rotary positions for 3,000 tokens\n"
    module = MaskedLMModule("mlm", BackboneConfig(str(where)))
    assert module.language_model.model.num_parameters() == size


def test_a_conversion_error_is_reported_in_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_folder(Path("headless"), has_head=False)
    head = "weights of BertForMaskedLM are missing, "
    nowhere = "nowhere/at/all: is not a directory; give a model directory or a Hub id"
    for source, says in (("headless", head), ("nowhere/at/all", nowhere)):
        assert_refused(capsys, tmp_path, says, convert, source, Path("rotary"))
    says = "num_positions must be >= 1, got 0"
    assert_refused(capsys, tmp_path, says, convert, "headless", Path("rotary"), "--no-keep-head", "--num-positions=0")
    assert convert("headless", Path("rotary"), "--no-keep-head") == 0
