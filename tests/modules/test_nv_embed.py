from functools import partial

import pytest
import torch

from embeddings.common import OptionError, TokenBatch
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, LoraSettings, MeanPooling
from embeddings.modules import NVEmbedModule
from embeddings.training.optim import Schedule
from tests.helpers.runs import quiet_trainer
from tests.strategies.fits import batches, train


def states(module, ids):
    tokens = TokenBatch.from_lists([ids], [[True] * len(ids)]).padded()
    backbone = module.embedder.backbone.eval()
    return backbone(input_ids=tokens.input_ids_NL, attention_mask=tokens.attention_mask_NL.long()).last_hidden_state


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_a_later_token_changes_the_first_state_once_the_mask_is_off(mistral, lora):
    module = NVEmbedModule(BackboneConfig(mistral, bidirectional=True), MeanPooling, lora=lora)
    difference = states(module, [5, 6, 7])[0, 0] - states(module, [5, 6, 99])[0, 0]
    assert difference.abs().max() > 1e-4
    causal = NVEmbedModule(BackboneConfig(mistral), MeanPooling, lora=lora)
    assert torch.equal(states(causal, [5, 6, 7])[0, 0], states(causal, [5, 6, 99])[0, 0])
    # The paper's model pools by latent attention.
    assert causal.title == "contrastive training with MeanPooling"


def test_an_initial_model_supplies_weights_and_the_config_sets_the_dtype(mistral, tmp_path):
    one = NVEmbedModule(BackboneConfig(mistral, bidirectional=True), seed=1)
    one.embedder.save_pretrained(tmp_path / "one")
    config = BackboneConfig(mistral, bidirectional=True, dtype="bfloat16", gradient_checkpointing=True)
    two = NVEmbedModule(config, initial_model=str(tmp_path / "one"), lora=LoraSettings(rank=4), seed=2)
    for name, value in one.embedder.pooling.state_dict().items():
        assert torch.equal(two.embedder.pooling.state_dict()[name], value), name
    base = two.embedder.backbone.get_base_model()
    assert base.dtype == torch.bfloat16
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in base.modules())
    assert base.config.is_causal is False


def changed_share(mistral, precision, **options):
    """The fraction of the backbone's matrix elements that 20 steps at 2e-5 change, and their dtype."""
    backbone = BackboneConfig(mistral, bidirectional=True, **options)
    learn = {"optimizer": partial(torch.optim.Adam, lr=2e-5), "schedule": Schedule(warmup_steps=0, decay="constant")}
    make = partial(NVEmbedModule, backbone, MeanPooling, seed=0, **learn)
    start = dict(make().to(torch.bfloat16 if precision == "bf16-true" else None).named_parameters())
    after = train(make, batches("nv-embed", None), "auto", 1, 20, precision=precision)
    assert after.keys() == start.keys()
    # Without the word embeddings, most of which get no gradient.
    names = [name for name in start if "layers" in name and start[name].dim() == 2]
    assert len(names) == 14
    changed = sum(int((after[name] != start[name]).sum()) for name in names)
    return changed / sum(start[name].numel() for name in names), after[names[0]].dtype


def test_small_updates_change_float32_weights_and_pure_bfloat16_training_is_refused_by_default(mistral):
    share, dtype = changed_share(mistral, "bf16-mixed")
    assert share > 0.99
    assert dtype == torch.float32
    with pytest.raises(OptionError, match=r"backbone\.dtype loses most updates .*, got 'bfloat16'; set float32 with"):
        changed_share(mistral, "bf16-mixed", dtype="bfloat16")
    share, dtype = changed_share(mistral, "bf16-true", dtype="bfloat16")
    assert dtype == torch.bfloat16
    assert share < 0.9


def test_a_learnt_temperature_in_pure_bfloat16_is_refused(mistral):
    module = NVEmbedModule(BackboneConfig(mistral, bidirectional=True), loss=InfoNCE(learnable_temperature=True))
    module.check_run(quiet_trainer(precision="bf16-mixed", max_steps=1), module, None)
    with pytest.raises(
        OptionError, match=r"precision rounds updates of loss\.log_temperature away, .*; set bf16-mixed"
    ):
        module.check_run(quiet_trainer(precision="bf16-true", max_steps=1), module, None)
