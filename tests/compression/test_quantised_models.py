"""Quantised model directories: their content, and how this project and other libraries load them."""

import json
from itertools import cycle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.compression.quantization import FORMAT_OF
from embeddings.inference import Encoder
from embeddings.models import BackboneConfig, Embedder
from embeddings.models.backbone import load_model
from embeddings.models.model_files import zeros_by_matrix
from tests.compression.models import FAMILIES, some_texts, write_model, write_texts
from tests.helpers.refusals import assert_refused

TEXTS = [*some_texts(12, seed=9), "one"]
TYPES = {"int8": "I8", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}


@pytest.fixture
def quantise(tmp_path, monkeypatch):
    """Quantise a model of a family, and return both directories."""
    monkeypatch.chdir(tmp_path)

    def run(*options, family="bert", dtype=None):
        model = write_model(tmp_path / "model", family)
        if dtype is not None:
            Embedder.from_pretrained(model, dtype=dtype).save_pretrained(model)
        texts = write_texts(tmp_path / "texts.txt")
        words = ["--model", str(model), "--output", "small", "--calibration", str(texts)]
        assert main(["compress", *words, *options]) == 0
        return model, tmp_path / "small"

    return run


def vectors(folder):
    return Encoder.from_pretrained(str(folder), precision="float32").encode(TEXTS)


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("name", FORMAT_OF)
def test_matrices_are_stored_in_their_type_with_scales(quantise, capsys, name, group_size):
    model, small = quantise("--quantize", name, *([] if group_size is None else ["--group-size", str(group_size)]))
    assert "calibrated on 24 texts" in capsys.readouterr().out
    before, after = load_file(model / "model.safetensors"), tensors_of(small)
    scales = {key for key in after if key.endswith("_scale")}
    assert len(scales) == 18
    assert after.keys() == before.keys() | scales
    state = load_model(small, torch.float32).state_dict()
    assert state.keys() == before.keys()
    for key, weight in before.items():
        if f"{key}_scale" not in scales:
            assert torch.equal(after[key], weight)
            continue
        code_OI, scale_OG = after[key], after[f"{key}_scale"]
        assert code_OI.dtype == FORMAT_OF[name].dtype
        size = group_size or weight.shape[1]
        assert scale_OG.shape == (len(weight), weight.shape[1] // size)
        expected = torch.stack([code_OI[:, j].float() * scale_OG[:, j // size] for j in range(weight.shape[1])], dim=1)
        assert torch.equal(state[key], expected)
        assert 0 < float((expected - weight).abs().max()) < 0.2 * float(weight.abs().max())
    with safe_open(small / "model-00001-of-00004.safetensors", "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys() if key.endswith("query.weight")}  # noqa: SIM118
    assert kinds == {TYPES[name]}
    assert (
        json.loads((small / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (model, small)]
    assert sizes[1] < 0.7 * sizes[0]
    cosines = (vectors(model) * vectors(small)).sum(axis=1)
    assert cosines.min() > {"int8": 0.999, "fp8_e4m3": 0.99, "fp8_e5m2": 0.97}[name]


@pytest.mark.parametrize(("family", "name"), list(zip(FAMILIES, cycle(FORMAT_OF))))
def test_transformers_and_sentence_transformers_load_the_same_weights(quantise, family, name):
    pytest.importorskip("compressed_tensors")
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    _, small = quantise("--quantize", name, "--group-size", "16", family=family)
    ours, theirs = load_model(small).state_dict(), AutoModel.from_pretrained(small).state_dict()
    assert len(ours) >= 20
    assert all(torch.equal(theirs[key], weight) for key, weight in ours.items())
    assert np.abs(SentenceTransformer(str(small), device="cpu").encode(TEXTS) - vectors(small)).max() < 1e-6


@pytest.mark.parametrize("name", FORMAT_OF)
def test_pruned_zeros_stay_and_both_phases_are_in_the_card(quantise, name):
    _, small = quantise("--prune", "sparsegpt", "--pattern", "2:4", "--quantize", name)
    after = tensors_of(small)
    matrices = [key.removesuffix("_scale") for key in after if key.endswith("_scale")]
    for key in matrices:
        zeros = (after[key].float() == 0).unflatten(1, (-1, 4)).sum(dim=2)
        assert int(zeros.min()) == 2
    assert min(found.fraction for found in zeros_by_matrix(small)) >= 0.5
    card = (small / "README.md").read_text()
    assert "| pruning | sparsegpt, 2:4 |" in card
    assert f"| quantisation | GPTQ to {name.replace('_', chr(92) + '_')}, one scale for an output |" in card


def test_weights_in_half_precision_have_scales_that_fit_them(quantise):
    model, small = quantise("--quantize", "fp8_e5m2", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors_of(small).values()} == {torch.bfloat16, torch.float8_e5m2}
    assert {tensor.dtype for tensor in load_model(small).state_dict().values()} == {torch.bfloat16}
    assert (vectors(model) * vectors(small)).sum(axis=1).min() > 0.97


def test_a_run_that_stops_in_the_second_phase_resumes_there_with_the_same_bytes(quantise, tmp_path, monkeypatch):
    from embeddings.compression import compress

    model, whole = quantise("--prune", "sparsegpt", "--pattern", "2:4", "--quantize", "int8")
    words = ["compress", "--model", str(model), "--output", "again", "--calibration", "texts.txt"]
    words += ["--prune", "sparsegpt", "--pattern", "2:4", "--quantize", "int8"]
    calls, gptq = [], compress.quantise_by_gptq

    def stopping(*given):
        calls.append(given)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return gptq(*given)

    monkeypatch.setattr(compress, "quantise_by_gptq", stopping)
    assert main(words) == 130
    assert {path.name for path in (tmp_path / "again.work").iterdir()} == {"prune.layers", "pruned", "quantise.layers"}
    monkeypatch.setattr(compress, "prune_by_sparsegpt", lambda *_: pytest.fail("a finished phase runs again"))
    calls.clear()
    assert main(words) == 130  # at the eighth matrix after the resumed layer
    calls[:] = range(8)
    assert main(words) == 0
    assert {path.name for path in whole.iterdir()} == {path.name for path in (tmp_path / "again").iterdir()}
    for file in whole.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_an_error_after_the_first_phase_keeps_its_layers(tmp_path):
    from embeddings.common import OptionError
    from embeddings.compression import CalibrationOptions, Compression, PruningOptions, QuantizationOptions

    model, texts = write_model(tmp_path / "model"), write_texts(tmp_path / "texts.txt")
    calibration = CalibrationOptions(str(texts))
    job = Compression(model, tmp_path / "a", PruningOptions("wanda"), QuantizationOptions(), calibration, "cpu")

    def refuse(pruned, work):
        raise OptionError("lr", 0, "must be > 0", "raise it")

    with pytest.raises(OptionError, match="lr must be"):
        job.run(refuse)
    assert (tmp_path / "a.work" / "pruned" / "config.json").is_file()


def test_the_layers_of_another_model_in_the_work_folder_are_not_used(tmp_path):
    from embeddings.compression import CalibrationOptions, Compression, PruningOptions, QuantizationOptions

    models = [write_model(tmp_path / f"model{seed}", seed=seed) for seed in range(2)]
    found = []
    for model in models:
        options = PruningOptions(layers=2), QuantizationOptions(), CalibrationOptions()
        found.append(tensors_of(Compression(model, tmp_path / "a", *options, "cpu").run()))
    name = "encoder.layer.0.attention.self.query.weight"
    for model, tensors in zip(models, found, strict=True):
        assert torch.equal(tensors[name], tensors_of(model)[name])


def test_training_from_a_quantised_model_starts_from_plain_weights(quantise, tmp_path):
    _, small = quantise("--quantize", "int8")
    embedder = Embedder.from_config(BackboneConfig(str(small)))
    embedder.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert np.abs(vectors(tmp_path / "plain") - vectors(small)).max() < 1e-6


def test_quantised_models_are_not_compressed_again_and_other_methods_not_read(quantise, tmp_path, capsys):
    _, small = quantise("--quantize", "int8")
    words = ["compress", "--model", "small", "--output", "smaller", "--calibration", "texts.txt", "--prune", "wanda"]
    assert_refused(capsys, tmp_path, "is already quantised", main, words)
    config = json.loads((small / "config.json").read_text())
    (small / "manifest.json").unlink()
    for fields in ({"quant_method": "gptq"}, {"quant_method": "compressed-tensors", "format": "pack-quantized"}):
        (small / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
        with pytest.raises(InputError, match="is quantised by"):
            load_model(small)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--prune", "wanda", "--pattern", "2:4"), ("--quantize", "int8")])
def test_the_onnx_graph_of_a_compressed_model_has_the_same_outputs(quantise, options):
    pytest.importorskip("onnxscript")
    from embeddings.interop.onnx import GRAPH_FILE, example_inputs, open_graph

    _, small = quantise(*options, "--format", "onnx")
    model = load_model(small, torch.float32)
    inputs = example_inputs(model.config, 3, 11)
    with torch.no_grad():
        expected = model(input_ids=inputs[0], attention_mask=inputs[1]).last_hidden_state.numpy()
    is_token = inputs[1].numpy().astype(bool)
    assert np.abs(open_graph(small / GRAPH_FILE)(inputs) - expected)[is_token].max() < 1e-5
