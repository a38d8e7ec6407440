import pytest
import torch
from torch import nn

from embeddings.common import OptionError
from embeddings.models import Embedder, LatentAttentionPooling, LoraSettings, add_lora, merge_lora
from embeddings.models.lora import merged_state_dict, plain_backbone
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral
from tests.models.reading import random_tokens

TOKENS = random_tokens(384, [5, 9, 3])


def adapted(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return add_lora(tiny_mistral(), LoraSettings(rank=4, alpha=8, dropout=dropout))


def trained(backbone: nn.Module) -> nn.Module:
    """Adapters away from the zero they start at."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return backbone.eval()


def states(backbone: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output = backbone(input_ids=TOKENS.input_ids_NL, attention_mask=TOKENS.attention_mask_NL.long())
    return output.last_hidden_state * TOKENS.attention_mask_NL[..., None]


def test_a_step_changes_every_trainable_tensor_and_no_other() -> None:
    pooling = LatentAttentionPooling(32, num_latents=4, num_heads=2, head_dim=8)
    embedder = Embedder(adapted(dropout=0.1), sentencepiece_tokenizer(), pooling)
    before = {name: tensor.clone() for name, tensor in embedder.named_parameters()}
    trainable = {name for name, tensor in embedder.named_parameters() if tensor.requires_grad}
    assert {name for name in before if name.startswith("pooling.")} <= trainable
    assert {name for name in trainable if name.startswith("backbone.")} == {name for name in before if "lora_" in name}
    assert len(trainable) > 2 * 7 * 2
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=1e-2)
    # The first step moves B alone: A has no gradient while B is zero.
    for _ in range(2):
        optimizer.zero_grad()
        (embedder(TOKENS) * torch.arange(32)).sum().backward()
        optimizer.step()
    changed = {name for name, tensor in embedder.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed == trainable


def test_fresh_adapters_change_nothing() -> None:
    torch.testing.assert_close(states(adapted().eval()), states(tiny_mistral()), rtol=0, atol=0)


@pytest.mark.parametrize("settings", [LoraSettings(rank=4), LoraSettings(rank=4, target_modules=["query", "value"])])
def test_merged_weights_give_the_adapted_states_and_leave_the_run_alone(settings: LoraSettings) -> None:
    backbone = trained(add_lora(tiny_bert(), settings))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    plain = tiny_bert(seed=1)
    plain.load_state_dict(merged_state_dict(backbone))
    assert not torch.allclose(states(backbone), states(tiny_bert()), atol=1e-3)
    torch.testing.assert_close(states(plain), states(backbone), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_merging_in_place_gives_a_plain_backbone_of_equal_states() -> None:
    backbone = trained(adapted())
    expected = states(backbone)
    plain = merge_lora(backbone)
    assert type(plain) is type(tiny_mistral())
    assert not any("lora_" in name for name in plain.state_dict())
    torch.testing.assert_close(states(plain), expected, rtol=1e-5, atol=1e-5)


def test_a_backbone_without_adapters_merges_to_itself() -> None:
    backbone = tiny_bert()
    assert merge_lora(backbone) is plain_backbone(backbone) is backbone
    assert merged_state_dict(backbone).keys() == backbone.state_dict().keys()


def test_layers_that_are_not_there_are_refused_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"lora\.target_modules .* q_proj"):
        add_lora(tiny_mistral(), LoraSettings(target_modules=["no_such_layer"]))


@pytest.mark.parametrize("options", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_impossible_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=f"lora.{next(iter(options))}"):
        LoraSettings(**options)  # type: ignore[arg-type]
