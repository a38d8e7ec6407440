"""The training step, precision and checks that all methods share, and the models that they start from."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embeddings import modules
from embeddings.common import ContrastiveStep, InputError, OptionError, TextSettings, UserError
from embeddings.common.protocols import as_config
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    ContextualEmbedder,
    Embedder,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
)
from embeddings.modules import ContrastiveModule
from embeddings.modules.base import BaseModule, PoolingFactory, build_embedder
from tests.data.rows import write_jsonl
from tests.helpers.contrastive import relative_error
from tests.helpers.runs import component, fit, float16_on_cpu, run_config
from tests.models.contextual_models import tiny_contextual
from tests.models.reading import random_tokens


def test_dropout_is_on_while_training_and_follows_from_the_step(tmp_path):
    """Two runs agree although other random numbers are drawn between their steps."""
    config = run_config(tmp_path, dropout=0.3)
    config["trainer"]["max_steps"] = 2

    first = fit(tmp_path, config).model.state_dict()
    seen = []
    original = ContrastiveModule.training_step

    def noisy_step(self, batch, batch_idx):
        seen.append([module.training for module in self.modules() if isinstance(module, torch.nn.Dropout)])
        loss = original(self, batch, batch_idx)
        torch.rand(17)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContrastiveModule, "training_step", noisy_step)
        second = fit(tmp_path, config).model.state_dict()
    assert len(seen) == 2
    assert all(flags and all(flags) for flags in seen)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_an_optimizer_of_the_config_has_the_defaults_of_its_class(tmp_path):
    """The parser would merge the arguments of a default in the signature into those of the config."""
    methods = [getattr(modules, name) for name in modules.__all__]
    options = [
        inspect.signature(method).parameters["optimizer"] for method in methods if issubclass(method, BaseModule)
    ]
    assert [option.default for option in options if option.default is not option.empty] == [None] * 5
    config = run_config(tmp_path)
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    for optimizer, decay in ((component("torch.optim.AdamW", lr=1e-3), 0.01), (None, 0.03)):
        config["model"]["init_args"]["optimizer"] = optimizer
        model = fit(tmp_path, config, "--trainer.max_steps", "0").model
        assert model.optimizer_config()["init_args"]["weight_decay"] == decay


def test_every_trainable_tensor_changes_in_two_steps(tmp_path):
    """LoRA's second matrices start at zero, so the first ones get no gradient in the first step."""
    config = run_config(tmp_path, "mistral")
    config["trainer"]["max_steps"] = 2
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    start = fit(tmp_path, config, "--trainer.max_steps", "0").model
    end = fit(tmp_path, config).model
    assert isinstance(end, ContrastiveStep)
    assert end.embedder.text == TextSettings(query_max_length=16, document_max_length=16)
    trainable = {name for name, parameter in end.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name for name in trainable)
    assert any("pooling.latents" in name for name in trainable)
    old, new = start.state_dict(), end.state_dict()
    assert [name for name in trainable if torch.equal(old[name], new[name])] == []
    frozen = {name for name, parameter in end.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert [name for name in frozen if not torch.equal(old[name], new[name])] == []


def test_gradcache_applies_the_loss_scale_to_all_mini_batches(tmp_path):
    """The loss scale is 65,536, and the update uses the unscaled gradient."""
    config = float16_on_cpu(run_config(tmp_path))
    config["trainer"]["max_steps"] = 1
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    config["model"]["init_args"]["optimizer"] = component("torch.optim.SGD", lr=1.0)
    start = fit(tmp_path, config, "--trainer.max_steps", "0").model
    plain = fit(tmp_path, config)
    assert plain.trainer.precision_plugin.scaler.get_scale() == 65536
    config["trainer"]["callbacks"] = [component("GradCacheCallback", mini_batch_tokens=20)]
    cached = fit(tmp_path, config).model
    old, one, other = (
        torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        for module in (start, plain.model, cached)
    )
    assert relative_error(other - old, one - old) < 0.01


@pytest.mark.parametrize("forced", ["source", "off"])
def test_a_source_without_any_negatives_is_refused_before_its_data_are_read(tmp_path, forced):
    rows = [{"sentence1": f"the fox {row}", "sentence2": f"a fox {row}", "score": 5.0} for row in range(16)]
    path, config = str(write_jsonl(tmp_path / "sts.jsonl", rows)), run_config(tmp_path)
    source = {"name": "sts", "path": path, "conversion": "sts", "in_batch_negatives": False}
    config["data"]["init_args"]["sources"].append(source)
    config["model"]["init_args"]["loss"]["init_args"]["in_batch_negatives"] = forced
    with pytest.raises(InputError, match="source 'sts': has neither in-batch nor hard negatives, so its loss is 0"):
        fit(tmp_path, config)
    assert not (tmp_path / "cache").exists()


def test_a_run_longer_than_its_schedule_is_refused(tmp_path):
    config = run_config(tmp_path)
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 1, "total_steps": 3}
    with pytest.raises(OptionError, match=r"schedule\.total_steps must not be below the run's 4 optimiser steps"):
        fit(tmp_path, config)
    fit(tmp_path, config, "--trainer.max_steps=3")


TOKENS = random_tokens(384, [7, 3, 12], skip=1)


def make(
    name: str,
    pooling: PoolingFactory = AnchorTokenPooling,
    lora: LoraSettings | None = None,
    initial_model: Path | None = None,
) -> Embedder:
    start = None if initial_model is None else str(initial_model)
    return build_embedder(BackboneConfig(name, bidirectional=True), pooling, lora, start, True, 0, "take the usual")


@torch.no_grad()
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, dropout=0.0)])
@pytest.mark.parametrize("pooling", [AnchorTokenPooling, MeanPooling])
def test_an_initial_model_keeps_its_vectors(
    mistral: str, pooling: PoolingFactory, lora: LoraSettings | None, tmp_path: Path
) -> None:
    """Attention-based pooling must not add its hooks to the loaded backbone twice."""
    one = make(mistral, pooling)
    one.save_pretrained(tmp_path / "one")
    two = make("not-asked-for", pooling, lora, tmp_path / "one").eval()
    torch.testing.assert_close(two(TOKENS), one.eval()(TOKENS), rtol=0, atol=1e-6)
    assert any("lora_" in name for name, _ in two.named_parameters()) == (lora is not None)


@torch.no_grad()
def test_head_and_layer_norm_of_the_initial_model_are_kept(mistral: str, tmp_path: Path) -> None:
    one = make(mistral, MeanPooling)
    head, norm = torch.nn.Linear(32, 8), torch.nn.LayerNorm(32, elementwise_affine=False)
    whole = Embedder(one.backbone, one.tokenizer, MeanPooling(32), norm=norm, head=head)
    whole.save_pretrained(tmp_path / "one")
    two = make("not-asked-for", MeanPooling, initial_model=tmp_path / "one").eval()
    torch.testing.assert_close(two(TOKENS), whole.eval()(TOKENS), rtol=0, atol=1e-6)
    headed = Embedder(one.backbone, one.tokenizer, MeanPooling(32), head=head).eval()
    assert (two(TOKENS) - headed(TOKENS)).abs().max() > 1e-3
    assert two.embedding_dim == 8
    assert two.head.weight.requires_grad
    assert two.state_dict().keys() == headed.state_dict().keys()


def test_the_layers_of_an_initial_model_in_bfloat16_are_trained_in_float32(mistral: str, tmp_path: Path) -> None:
    one = make(mistral, LatentAttentionPooling)
    options = {"norm": torch.nn.LayerNorm(32), "head": torch.nn.Linear(32, 8)}
    Embedder(one.backbone, one.tokenizer, one.pooling, **options).bfloat16().save_pretrained(tmp_path / "one")
    two = make("not-asked-for", LatentAttentionPooling, initial_model=tmp_path / "one")
    assert {weight.dtype for weight in two.parameters()} == {torch.float32}
    tiny_contextual().bfloat16().save_pretrained(tmp_path / "two")
    contextual = ContextualEmbedder.from_config(BackboneConfig(str(tmp_path / "two")))
    assert {weight.dtype for weight in contextual.parameters()} == {torch.float32}


def test_the_widths_of_a_stand_in_are_distinct_and_not_zero(tmp_path: Path) -> None:
    arguments = {"loss.init_args.widths": [32, 4096, 8, 4095]}
    assert ContrastiveModule.stand_in_arguments(arguments, tmp_path) == {"loss.init_args.widths": [62, 64, 61, 63]}


@pytest.mark.parametrize(
    "scaled", [pytest.param(False, id="bf16-mixed", marks=pytest.mark.slow), pytest.param(True, id="16-mixed")]
)
def test_a_fused_optimiser_clips_and_updates_like_a_plain_one(scaled: bool, tmp_path: Path) -> None:
    weights = []
    for fused in (False, True):
        config = run_config(tmp_path / str(fused))
        config["trainer"] |= {"gradient_clip_val": 1e-2} | ({} if scaled else {"precision": "bf16-mixed"})
        config["model"]["init_args"]["optimizer"]["init_args"] |= {"lr": 1e-3, "fused": fused}
        trained = fit(tmp_path / str(fused), float16_on_cpu(config) if scaled else config)
        assert trained.trainer.optimizers[0].defaults["fused"] == fused
        weights.append(torch.cat([weight.detach().flatten() for weight in trained.model.parameters()]))
    assert relative_error(*weights) < 1e-4


def test_a_pooling_that_differs_from_the_initial_models_or_is_invalid_is_refused(mistral: str, tmp_path: Path) -> None:
    make(mistral).save_pretrained(tmp_path / "one")
    with pytest.raises(OptionError, match=r"model\.pooling must equal that of .*AnchorTokenPooling .*got 'MeanPooling"):
        make(mistral, MeanPooling, initial_model=tmp_path / "one")
    with pytest.raises(UserError, match=r"model\.pooling\.num_latents must be >= 1, got 0; take the usual"):
        make(mistral, lambda width: LatentAttentionPooling(width, num_latents=0))


@pytest.mark.parametrize("option", ["initial_model", "backbone"])
def test_text_settings_that_a_run_does_not_set_are_those_of_the_model_it_starts_from(tmp_path, caplog, option):
    config = run_config(tmp_path, "mistral")
    config["trainer"]["max_steps"] = 1
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    start = fit(tmp_path, config, "--trainer.max_steps", "0").model.embedder
    prompts = {"query": "a: ", "document": "b: ", "sts": "c: "}
    text = {"append_eos": True, "pool_prompt": True, "instruction_template": "[INST] {instruction}: "}
    start.text = TextSettings(24, 20, prompts, **text)
    start.save_pretrained(tmp_path / "start")
    init = config["model"]["init_args"]
    if option == "backbone":
        init["backbone"]["name"] = str(tmp_path / "start")
    else:
        init[option] = str(tmp_path / "start")
    source, data = config["data"]["init_args"]["sources"][0], config["data"]["init_args"]
    data["text"] = {"query_max_length": 16, "prompts": {"document": ""}, "pool_prompt": False}
    source["instruction"] = "find"
    seen = []
    original = ContrastiveModule.training_step

    def watched(self, batch, batch_idx):
        seen.append(batch.query)
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", "embeddings"):
        patch.setattr(ContrastiveModule, "training_step", watched)
        run = fit(tmp_path, config)
    # Set in the run: lengths of queries, one prompt, pool_prompt, and the source's prompt. The rest is the model's.
    expected = prompts | {"query": "[INST] find: ", "pairs": "[INST] find: ", "document": ""}
    trained = TextSettings(16, 20, expected, **text | {"pool_prompt": False})
    assert run.model.embedder.text == trained
    eos = start.tokenizer.eos_token_id
    tokens = seen[0].padded(pad_token_id=-1)
    assert [row[row >= 0][-1].item() for row in tokens.input_ids_NL] == [eos] * 8
    run.model.embedder.save_pretrained(tmp_path / "end")
    # A directory does not store empty prompts.
    stored = replace(trained, prompts={name: prompt for name, prompt in expected.items() if prompt})
    assert Embedder.from_pretrained(tmp_path / "end").text == stored
    lines = [line for line in caplog.messages if "differ from the initial model's" in line]
    assert len(lines) == 1
    assert "query_max_length: 24 -> 16; pool_prompt: True -> False" in lines[0]
    assert "prompts.query: 'a: ' -> '[INST] find: '" in lines[0]
    assert not re.search("append_eos|template|sts", lines[0])
    # The record of the run states what was set, not what was inherited.
    assert "append_eos" not in as_config(TextSettings(query_max_length=16))
