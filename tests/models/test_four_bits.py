"""4-bit weights under LoRA: errors, and training, checkpoints and model directories on a CPU.

It has not been run on a GPU. The second half needs the extra `qlora` and is skipped without it.
"""

import sys

import pytest
import torch

from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.common import MissingExtraError, OptionError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.inference import Encoder
from embeddings.models import BackboneConfig, load_backbone
from embeddings.models import backbone as backbone_file
from embeddings.models.backbone import check_quantization, four_bit_options
from embeddings.models.lora import four_bit_weights, is_four_bit
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, run_config, write_config
from tests.helpers.tiny import save_backbone, sentencepiece_tokenizer, tiny_mistral

SMALL = BackboneConfig("anything", dtype="bfloat16", quantization="nf4")


def test_4_bits_are_refused_without_bfloat16_lora_a_gpu_or_the_package(monkeypatch):
    with pytest.raises(OptionError, match=r"backbone\.dtype must be bfloat16 beside quantization: nf4, got 'float32'"):
        BackboneConfig("anything", quantization="nf4")
    check_quantization(BackboneConfig("anything"), has_lora=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(OptionError, match=r"backbone\.quantization needs LoRA, got 'nf4'"):
        check_quantization(SMALL, has_lora=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"bitsandbytes is not installed; run: pip install -e '.\[qlora\]'"):
        check_quantization(SMALL, has_lora=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"backbone\.quantization needs a CUDA GPU, got 'nf4'; leave it out on a CPU"):
        check_quantization(SMALL, has_lora=True)


def small_config(folder, **backbone):
    """A tiny run of LoRA over 4-bit weights, with a layer width that is a multiple of the packing's block."""
    config = run_config(folder, "mistral")
    save_backbone(str(folder / "wide"), tiny_mistral(hidden_size=64), sentencepiece_tokenizer())
    options = {"name": str(folder / "wide"), "bidirectional": True, "dtype": "bfloat16", "quantization": "nf4"}
    config["model"]["init_args"]["backbone"] = options | backbone
    return config


def test_a_run_in_4_bits_is_refused_on_a_cpu_but_can_be_checked(tmp_path, capsys):
    words = ["fit", "--config", write_config(tmp_path, small_config(tmp_path))]
    assert_refused(capsys, tmp_path, "backbone.quantization needs a CUDA GPU", main, words)
    assert main([*words, "--check"]) == 0
    assert "no error was found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "device"),
    [({}, "cuda:0"), ({"SLURM_LOCALID": "1"}, "cuda:1"), ({"LOCAL_RANK": "9", "SLURM_LOCALID": "0"}, "cuda:1")],
)
def test_each_rank_loads_the_weights_on_its_own_gpu(variables, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = four_bit_options()
    assert options["device_map"] == {"": device}
    config = options["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16


@pytest.fixture
def on_cpu(monkeypatch):
    """bitsandbytes on the CPU, in the layout that it has on a GPU."""
    modules = pytest.importorskip("bitsandbytes.nn.modules", reason="the extra qlora is not installed")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    monkeypatch.setattr(backbone_file, "check_quantization", lambda *_: None)


def test_linear_layers_are_in_4_bits_and_are_restored_close_to_their_weights(on_cpu, tmp_path):
    options = small_config(tmp_path)["model"]["init_args"]["backbone"]
    whole, _ = load_backbone(BackboneConfig(options["name"]))
    small, _ = load_backbone(BackboneConfig(**options), has_lora=True)
    found = four_bit_weights(small)
    assert len(found) == 14
    assert sum(map(is_four_bit, small.parameters())) == 14
    for name, weight in found.items():
        exact = whole.state_dict()[name]
        assert weight.dtype == torch.bfloat16
        assert 0 < (weight - exact).norm() / exact.norm() < 0.15


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_trains_only_adapters_resumes_and_writes_plain_weights(on_cpu, tmp_path, monkeypatch):
    config = small_config(tmp_path)
    model = str(tmp_path / "model")
    checkpoints = component("ModelCheckpoint", dirpath=str(tmp_path / "kept"), every_n_train_steps=2, save_top_k=-1)
    config["trainer"]["callbacks"] = [checkpoints, component("ExportModel", output=model)]
    path = write_config(tmp_path, config)
    module = run_trainer(["fit", "--config", path]).model
    backbone = module.embedder.backbone
    assert any(map(is_four_bit, backbone.parameters()))
    assert all(".lora_" in name for name, weight in backbone.named_parameters() if weight.requires_grad)
    (first,) = (tmp_path / "kept").glob("*step=2.ckpt")
    names = read_checkpoint(first)["state_dict"]
    assert names
    assert not [name for name in names if "base_layer" in name]

    encoder = Encoder.from_pretrained(model, precision="float32")
    assert not hasattr(encoder.embedder.backbone.config, "quantization_config")
    assert not any(map(is_four_bit, encoder.embedder.parameters()))
    texts = ["the quick brown fox", "return the sum of two numbers"]
    trained = Encoder(module.embedder, precision="float32").encode(texts)
    assert ((encoder.encode(texts) * trained).sum(axis=1) > 0.999).all()

    config["trainer"]["callbacks"][1]["init_args"]["output"] = str(tmp_path / "again")
    resumed = run_trainer(["fit", "--config", write_config(tmp_path, config), "--ckpt_path", str(first)]).model
    for (name, weight), other in zip(module.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(weight, other), name
