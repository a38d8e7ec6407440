import pytest
import torch

from embeddings.models.lora import LoraSettings, add_lora
from embeddings.models.moe.routing import has_experts, moe_layers, read_routing
from tests.models.moe import padded_ids, tiny_moe, tiny_rotary


def test_forwards_inside_are_added_up_and_others_are_not() -> None:
    model, (ids, mask) = tiny_moe(num_layers=4), padded_ids()
    output = model(input_ids=ids, attention_mask=mask.long())
    with read_routing(model) as sums:
        for rows in (slice(0, 1), slice(1, 3)):
            model(input_ids=ids[rows], attention_mask=mask[rows].long())
        found = sums()
    model(input_ids=ids)
    assert set(found) == {"expert_counts", "expert_probabilities", "router_squared_logsumexp"}
    assert found == sums()
    for name, value in found.items():
        torch.testing.assert_close(value, getattr(output, name))
    assert found["expert_probabilities"].requires_grad
    assert moe_layers(model) == [1, 3]


def test_a_dense_backbone_has_none() -> None:
    with read_routing(tiny_rotary()) as sums:
        assert sums() == {}
    assert moe_layers(tiny_rotary()) == []


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapted_backbone_is_read_too_and_its_routers_have_no_adapter() -> None:
    adapted = add_lora(tiny_moe(), LoraSettings(rank=2, alpha=4, dropout=0.0))
    assert has_experts(adapted)
    ids, mask = padded_ids()
    with read_routing(adapted) as sums:
        adapted(input_ids=ids, attention_mask=mask.long())
    assert sums()["expert_counts"].sum().item() == 2 * 18
    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert trained
    assert not any("router" in name or "experts" in name for name in trained)
