"""How other servers read the directories that this library writes, by the rules in docs/serving.md."""

import json

import pytest
from torch import nn

from embeddings.common import TextSettings
from embeddings.models import (
    ClsPooling,
    Embedder,
    LastTokenPooling,
    LatentAttentionPooling,
    MeanPooling,
    WeightedMeanPooling,
)
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

# The modes that every server supports; directories of this library have at most one.
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last_token"}


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def by_text_embeddings_inference(folder):
    """The pooling that text-embeddings-inference chooses; None if it refuses the model.

    config.json must have architectures and a number of positions, and the tokenizer must be a single file. The first
    mode in the server's order is used. Up to 1.6 the first two modes were required, and later ones optional.
    """
    config, pooling = read_json(folder / "config.json"), read_json(folder / "1_Pooling" / "config.json")
    assert isinstance(config["architectures"][0], str)
    assert isinstance(config["max_position_embeddings"], int)
    assert (folder / "tokenizer.json").is_file()
    if not {"pooling_mode_cls_token", "pooling_mode_mean_tokens"} <= pooling.keys():
        return None
    return next((name for mode, name in MODES.items() if pooling.get(mode)), None)


def by_vllm(folder):
    """The pooling that vLLM chooses, None for its default; and whether vectors are normalised."""
    modules = read_json(folder / "modules.json")
    kinds = {entry["type"]: entry["path"] for entry in modules}
    path = kinds.get("sentence_transformers.models.Pooling")
    normalize = "sentence_transformers.models.Normalize" in kinds
    if path is None:
        return None, normalize
    chosen = None
    for key, value in read_json(folder / path / "config.json").items():
        if value is True:
            name = key.replace("pooling_mode_", "").split("_")[0]
            name = "LAST" if "lasttoken" in name else name.upper()
            chosen = name if name in ("CLS", "LAST", "MEAN") else chosen
    return chosen, normalize


def by_llama_cpp(folder):
    """The pooling that llama.cpp's converter writes; None if it refuses the model, "" if it finds no pooling."""
    kinds = {entry["type"]: entry["path"] for entry in read_json(folder / "modules.json")}
    path = kinds.get("sentence_transformers.models.Pooling")
    if path is None:
        return ""
    pooling = read_json(folder / path / "config.json")
    return next((name for mode, name in MODES.items() if pooling[mode]), None)


def written(folder, pooling, **options):
    """The directory of a tiny model with this pooling."""
    text = TextSettings(16, 32, prompts={"query": "how: "}, pool_prompt=True)
    Embedder(tiny_bert(), wordpiece_tokenizer(), pooling, **{"text": text, **options}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "tei", "vllm", "llama"),
    [
        (MeanPooling, "mean", "MEAN", "mean"),
        (ClsPooling, "cls", "CLS", "cls"),
        (LastTokenPooling, "last_token", "LAST", "last_token"),
        (WeightedMeanPooling, None, None, None),
    ],
)
def test_servers_choose_the_pooling_of_a_plain_model_or_find_none(kind, tei, vllm, llama, tmp_path):
    folder = written(tmp_path / "model", kind(32))
    assert not list(folder.glob("*.py"))
    assert by_text_embeddings_inference(folder) == tei
    assert by_vllm(folder) == (vllm, True)
    assert by_llama_cpp(folder) == llama
    assert by_vllm(written(tmp_path / "long", kind(32), normalize=False)) == (vllm, False)


def test_servers_find_length_prompts_and_head(tmp_path):
    folder = written(tmp_path / "model", MeanPooling(32), head=nn.Linear(32, 8))
    lengths = read_json(folder / "sentence_bert_config.json")
    # vLLM reads the file only if it has both of these; neither server uses the length of queries.
    assert lengths["max_seq_length"] == 32
    assert lengths["do_lower_case"] is False
    assert lengths["query_length"] == 16
    prompts = read_json(folder / "config_sentence_transformers.json")["prompts"]
    assert prompts == {"query": "how: "}
    heads = [entry["path"] for entry in read_json(folder / "modules.json") if entry["type"].endswith("models.Dense")]
    assert heads == ["2_Dense"]
    assert read_json(folder / "2_Dense" / "config.json")["activation_function"] == "torch.nn.modules.linear.Identity"
    assert (folder / "2_Dense" / "model.safetensors").is_file()


def test_no_server_mistakes_our_own_poolings_for_another(tmp_path):
    latent = written(tmp_path / "latent", LatentAttentionPooling(32, num_latents=4, num_heads=2, head_dim=8))
    contextual = tmp_path / "contextual"
    tiny_contextual().save_pretrained(contextual)
    for folder in (latent, contextual):
        assert list(folder.glob("*.py"))
        assert by_text_embeddings_inference(folder) is None
        assert by_vllm(folder)[0] is None
        assert by_llama_cpp(folder) == ""


def test_the_pooling_config_excludes_the_prompt_from_a_mean(tmp_path):
    text = TextSettings(16, 32, prompts={"query": "how: "}, pool_prompt=False)
    folder = written(tmp_path / "model", MeanPooling(32), text=text)
    assert read_json(folder / "1_Pooling" / "config.json")["include_prompt"] is False
    assert by_text_embeddings_inference(folder) == "mean"
    cls_folder = written(tmp_path / "cls", ClsPooling(32), text=text)
    assert read_json(cls_folder / "1_Pooling" / "config.json")["include_prompt"]
