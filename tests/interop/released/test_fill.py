import torch
from transformers import BertConfig

from embeddings.interop.released.checkpoint import KeyMap, ReleasedWeights, empty_model, filled_model, take_parts
from embeddings.models import RotaryMoeConfig
from tests.helpers.tiny import tiny_bert
from tests.interop.released.published import random_state, write_checkpoint


def test_an_empty_model_is_filled_to_the_bit():
    dense = tiny_bert(seed=3)
    empty = empty_model(dense.config)
    assert {tensor.device.type for tensor in empty.state_dict().values()} == {"meta"}
    state = {name: dense.state_dict()[name] for name in empty.state_dict() if not name.startswith("pooler.")}
    state |= {name: torch.zeros(tensor.shape) for name, tensor in empty.state_dict().items() if name not in state}
    model = filled_model(empty, state)
    ids = torch.arange(5, 17)[None]
    assert torch.equal(model(ids).last_hidden_state, dense(ids).last_hidden_state)
    assert not model.training


def test_tables_that_no_checkpoint_holds_are_computed():
    config = RotaryMoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        moe_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    empty = empty_model(config)
    state = random_state({name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()})
    model = filled_model(empty, {name: tensor.to(torch.bfloat16) for name, tensor in state.items()})
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.rotary_emb.inv_freq, 100.0 ** -(torch.arange(0, 8, 2) / 8))
    assert model(torch.arange(8)[None]).last_hidden_state.isfinite().all()


def test_parts_take_their_own_tensors(tmp_path):
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    parts = {"one": torch.nn.Linear(2, 3), "two": torch.nn.Linear(3, 2, bias=False)}
    state = random_state({"a.weight": (3, 2), "a.bias": (3,), "b": (2, 3)})
    weights = ReleasedWeights(write_checkpoint(tmp_path, config.to_dict(), state))
    found, report = take_parts(KeyMap("toys", {"one.{kind}": "a.{kind}", "two.weight": "b"}), weights, parts)
    assert torch.equal(found["one"]["bias"], state["a.bias"])
    assert found["two"].keys() == {"weight"}
    assert report.used["b"] == ["two.weight"]
