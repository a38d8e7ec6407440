"""Layer distillation against plain transformers, under GradCache and two ranks; LoRA that keeps a model sparse."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embeddings.common import OptionError
from embeddings.losses import InfoNCE
from embeddings.models import (
    BackboneConfig,
    Embedder,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
    add_lora,
    merge_lora,
)
from embeddings.models.lora import merged_state_dict, plain_backbone
from embeddings.modules import LayerDistillation, NVEmbedModule
from embeddings.modules.distillation import LayerTeacher, layer_pairs
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import batch_of, gradient_vector, random_batch, random_records, relative_error
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.runs import backbone_folder, fit, run_config
from tests.helpers.tiny import tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.training.test_gradcache import REPLAYED

SETTINGS = LayerDistillation(teacher="given", alpha=0.3)
ENGINES = {name: GradCache(**REPLAYED[name]) for name in ("one text", "uneven", "half kept")}


def latent_teacher(hidden_size: int = 32) -> Embedder:
    torch.manual_seed(5)
    pooling = LatentAttentionPooling(hidden_size, num_latents=4, num_heads=2, head_dim=8)
    return Embedder(tiny_bert(seed=7, hidden_size=hidden_size), wordpiece_tokenizer(), pooling).double()


def student(folder: str, settings: LayerDistillation = SETTINGS, width: int = 32, **options: Any) -> NVEmbedModule:
    loss = InfoNCE(temperature=0.1, **options)
    module = NVEmbedModule(BackboneConfig(folder), MeanPooling, loss=loss, distillation=settings, seed=1)
    module.double().eval()
    module.teacher = LayerTeacher(settings, module.embedder, latent_teacher(width))
    return module


def test_the_distillation_is_the_papers_sum(bert: str) -> None:
    module, batch = student(bert), random_batch(5, 2)
    found = plain_step(module, batch)
    squares: dict[str, list[Tensor]] = {"layer 1": [], "output": []}
    for tokens in (batch.query, batch.candidate):
        start = 0
        for length in tokens.lengths_N.tolist():
            ids_1L = tokens.input_ids_T[start : start + length][None]
            start += length
            models = (module.embedder, module.teacher.embedder)
            own, other = (plain_backbone(model.backbone)(ids_1L, output_hidden_states=True) for model in models)
            squares["layer 1"] += [*(own.hidden_states[1] - other.hidden_states[1])[0].square().mean(1)]
            block = models[1].pooling.token_states(other.last_hidden_state[0])
            vector_1H = models[1].pooling(other.last_hidden_state, torch.ones_like(ids_1L, dtype=torch.bool))
            torch.testing.assert_close(block.mean(0), vector_1H[0], rtol=1e-10, atol=1e-12)
            squares["output"] += [*(own.last_hidden_state[0] - block).square().mean(1)]
    expected = sum(torch.stack(values).mean() for values in squares.values())
    torch.testing.assert_close(found.terms["distillation"], expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.loss, found.terms["contrastive"] + 0.3 * expected, rtol=1e-10, atol=0)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    teacher = latent_teacher()
    teacher.save_pretrained(tmp_path / "teacher")
    pooling = partial(LatentAttentionPooling, num_latents=4, num_heads=2, head_dim=8)
    folder = str(tmp_path / "teacher")
    module = NVEmbedModule(BackboneConfig(folder), pooling, initial_model=folder, distillation=SETTINGS)
    module.double().eval()
    module.teacher = LayerTeacher(SETTINGS, module.embedder, teacher)
    assert plain_step(module, random_batch(3, 1)).terms["distillation"].item() < 1e-12


@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_gradcache_gives_the_gradient_of_the_plain_step(engine: GradCache, width: int, bert: str) -> None:
    settings = LayerDistillation("given", 0.3, teacher_width=width if width != 32 else None)
    module, batch = student(bert, settings, width), random_batch(6, 2)
    output = plain_step(module, batch)
    output.loss.backward()
    expected = gradient_vector(module)
    module.zero_grad()
    found = engine.step(module, batch)
    assert relative_error(gradient_vector(module), expected) <= 1e-12
    torch.testing.assert_close(found.terms["distillation"], output.terms["distillation"])
    assert (module.width_maps is not None) == (width != 32)
    if module.width_maps is not None:  # drawn from the seed, the same on every rank
        torch.manual_seed(99)
        again = student(bert, settings, width).width_maps
        assert torch.equal(again.maps[0].weight, module.width_maps.maps[0].weight)


def errors_on_two_ranks(rank: int) -> dict[str, float]:
    folder = str(Path.cwd() / "bert")
    everything, results = random_records(8, 1, seed=5), {}
    for name, engine in ENGINES.items():
        module = student(folder)
        engine.step(module, batch_of(everything[4 * rank : 4 * rank + 4]))
        found = gradient_vector(module)
        dist.all_reduce(found)
        reference = student(folder, gather_across_devices=False)
        # Sums are of this rank alone.
        with patch("embeddings.modules.distillation.sum_over_ranks", lambda value: value):
            plain_step(reference, batch_of(everything)).loss.backward()
        results[name] = relative_error(found / 2, gradient_vector(reference))
    return results


def test_two_ranks_give_the_gradient_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backbone_folder(tmp_path / "bert")
    for errors in run_on_two_ranks(errors_on_two_ranks):
        assert errors.keys() == ENGINES.keys()
        assert max(errors.values()) <= 1e-12, errors


def test_layers_are_spread_over_a_deeper_teacher_or_asked_for() -> None:
    assert layer_pairs(3, 6, None) == [(1, 1), (2, 3)]
    assert layer_pairs(6, 3, None) == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    assert layer_pairs(4, 4, None) == [(1, 1), (2, 2), (3, 3)]
    assert layer_pairs(3, 6, [(2, 5)]) == [(2, 5)]
    with pytest.raises(OptionError, match=r"layers must lie within the student's 3 layers and the teacher's 6"):
        layer_pairs(3, 6, [(2, 7)])


def test_a_teacher_that_does_not_fit_is_refused(bert: str) -> None:
    module = student(bert)
    with pytest.raises(OptionError, match=r"width 48, and the student's become 32 wide.*teacher_width: 48"):
        LayerTeacher(SETTINGS, module.embedder, latent_teacher(48))
    other = latent_teacher()
    other.tokenizer.add_tokens("zebra")
    with pytest.raises(OptionError, match="has another tokenizer"):
        LayerTeacher(SETTINGS, module.embedder, other)


def test_a_run_follows_its_teacher_and_leaves_it_out_of_its_checkpoint(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    teacher = Embedder(tiny_bert(seed=7), wordpiece_tokenizer(), MeanPooling(32))
    teacher.save_pretrained(tmp_path / "teacher")
    config["model"]["init_args"]["distillation"] = {"teacher": str(tmp_path / "teacher"), "alpha": 10.0}
    run = fit(tmp_path, config)
    metrics = run.trainer.logged_metrics
    assert metrics["train/distillation"] > 0
    loss = metrics["train/contrastive"] + 10 * metrics["train/distillation"]
    torch.testing.assert_close(metrics["train/loss"], loss)
    assert not any("teacher" in name for name in run.model.state_dict())
    run.trainer.save_checkpoint(tmp_path / "run.ckpt")
    # Exporting or resuming does not need the teacher before a run starts.
    (tmp_path / "teacher").rename(tmp_path / "gone")
    loaded = NVEmbedModule.load_from_checkpoint(tmp_path / "run.ckpt")
    assert all(map(torch.equal, loaded.parameters(), run.model.parameters()))


def sparse(model: nn.Module) -> nn.Module:
    """The model with half of each linear weight zero, in groups of four."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            group = layer.weight.data.view(-1, 4)
            group[torch.arange(len(group))[:, None], group.abs().argsort(1)[:, :2]] = 0
    return model


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: layer.weight == 0 for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


@pytest.mark.parametrize("make", [tiny_bert, tiny_mistral])
def test_lora_that_keeps_zeros_trains_the_model_that_it_merges_into(make: Any) -> None:
    base: Any = sparse(make().double())
    before = zeros(base)
    adapted = add_lora(base, LoraSettings(rank=4, dropout=0.0, keep_zeros=True)).double()
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    ids_NL = torch.randint(5, 90, (3, 7))
    found = adapted(input_ids=ids_NL).last_hidden_state
    found.sum().backward()
    written = merged_state_dict(adapted)
    merged = merge_lora(adapted)
    for name, is_zero in zeros(merged).items():
        assert torch.equal(is_zero, before[name]), name
        assert torch.equal(written[f"{name}.weight"] == 0, before[name]), name
    torch.testing.assert_close(merged(input_ids=ids_NL).last_hidden_state, found, rtol=1e-10, atol=1e-10)


def test_lora_that_keeps_zeros_has_the_gradient_of_the_masked_product() -> None:
    base = sparse(nn.Sequential(nn.Linear(8, 12)).double())
    from peft import LoraConfig, get_peft_model

    from embeddings.models.lora import _zero_keeping_linear

    config = LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    config._register_custom_module({nn.Linear: _zero_keeping_linear()})
    layer: Any = get_peft_model(base, config).double().base_model.model[0]
    state_NH = torch.randn(5, 8, dtype=torch.float64)
    layer(state_NH).square().sum().backward()
    low, high = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    a, b = (weight.detach().clone().requires_grad_() for weight in (low, high))
    weight = layer.base_layer.weight + (layer.base_layer.weight != 0) * 3 * (b @ a)
    nn.functional.linear(state_NH, weight, layer.base_layer.bias).square().sum().backward()
    torch.testing.assert_close(low.grad, a.grad)
    torch.testing.assert_close(high.grad, b.grad)


def test_a_pruned_model_trained_with_lora_is_written_as_sparse_as_it_was(tmp_path: Path) -> None:
    config = run_config(tmp_path, "mistral")
    folder = Path(config["model"]["init_args"]["backbone"]["name"])
    model: Any = sparse(tiny_mistral())
    before = zeros(model)
    model.save_pretrained(folder)
    config["model"]["init_args"]["lora"]["keep_zeros"] = True
    run = fit(tmp_path, config)
    run.model.embedder.save_pretrained(tmp_path / "written")
    backbone = plain_backbone(Embedder.from_pretrained(tmp_path / "written").backbone)
    changed = 0
    for name, is_zero in zeros(backbone).items():
        assert torch.equal(is_zero, before[name]), name
        changed += int((backbone.get_submodule(name).weight != model.get_submodule(name).weight).sum())
    assert changed > 1000
