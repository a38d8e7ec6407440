import pytest
import torch
from transformers import XLMRobertaConfig, XLMRobertaModel

from embeddings.common import OptionError
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.moe.rotary_moe import MoeMlp, RotaryMoeLayer
from embeddings.models.moe.upcycling import Upcycling, parameter_counts, upcycle
from embeddings.models.rotary import to_rotary
from tests.helpers.tiny import tiny_bert
from tests.models.moe import padded_ids, tiny_moe, tiny_nomic, tiny_rotary


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        (Upcycling(), [1, 3, 5]),
        (Upcycling(num_experts=3, top_k=1), [1, 3, 5]),
        (Upcycling(num_experts=4, top_k=4, first=0, every=1), [0, 1, 2, 3, 4, 5]),
        (Upcycling(first=2, every=3), [2, 5]),
    ],
)
def test_preserving_keeps_the_dense_output(settings: Upcycling, layers: list[int]) -> None:
    dense, (ids, mask) = tiny_rotary(num_layers=6), padded_ids()
    expected = dense(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    sparse = upcycle(dense, settings)
    output = sparse(input_ids=ids, attention_mask=mask.long())
    assert (output.last_hidden_state[mask] - expected).abs().max() <= 1e-5
    assert sparse.config.moe_layers == layers
    assert [index for index, layer in enumerate(sparse.layers) if isinstance(layer, RotaryMoeLayer)] == layers
    assert output.expert_counts.sum(1).tolist() == [settings.top_k * 18] * len(layers)
    assert len(sparse.layers[layers[0]].mlp.experts.w1) == settings.num_experts


def test_release_drops_the_biases_and_leaves_the_weights_of_a_token_as_they_come() -> None:
    dense, (ids, mask) = tiny_rotary(num_layers=4), padded_ids()
    first, second = (dense.layers[1].mlp.fc1.weight.clone(), dense.layers[1].mlp.fc2.weight.clone())
    expected = dense(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    sparse = upcycle(dense, Upcycling("release"))
    mlp = sparse.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    assert mlp.experts.bias1 is None
    assert not mlp.experts.bias2.any()
    assert all(
        torch.equal(w1, first) and torch.equal(w2.T, second) for w1, w2 in zip(*expert_matrices(mlp), strict=True)
    )
    tokens = torch.randn(5, 32)
    share_T1 = mlp.router(tokens).weight_TK.sum(1, keepdim=True)
    assert (share_T1 - 0.28).abs().max() < 0.05
    alone = torch.nn.functional.gelu(tokens @ first.T) @ second.T
    torch.testing.assert_close(mlp(tokens[None])[0][0], share_T1 * alone, rtol=1e-5, atol=1e-6)
    found = sparse(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    assert (found - expected).abs().max() > 1e-2


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_gated_mlp_keeps_the_dense_output(top_k: int) -> None:
    """NomicBert, as in §7.1; in float64, so that nothing but the maths is compared."""
    dense, (ids, mask) = tiny_nomic(num_layers=4).double(), padded_ids()
    gate, up, down = (getattr(dense.layers[1].mlp, f"{name}_proj").weight.clone() for name in ("gate", "up", "down"))
    expected = dense(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    sparse = upcycle(dense, Upcycling(num_experts=4, top_k=top_k))
    output = sparse(input_ids=ids, attention_mask=mask.long())
    assert (output.last_hidden_state[mask] - expected).abs().max() <= 1e-12
    assert sparse.config.moe_layers == [1, 3]
    assert not any(name.endswith("bias1") for name in sparse.state_dict())
    experts = sparse.layers[1].mlp.experts
    for expert in range(4):
        assert torch.equal(experts.w1[expert], torch.cat([gate, up]))
        assert torch.equal(experts.w2[expert].T, down)
    counts = parameter_counts(sparse)
    assert counts.total - counts.active == 2 * (4 - top_k) * 3 * 32 * 64


def test_a_gated_mlp_of_the_release_mode_is_weighed_by_the_routers_own_weights() -> None:
    dense = tiny_nomic()
    mlp, tokens = dense.layers[1].mlp, torch.randn(5, 32)
    alone = mlp(tokens)
    sparse = upcycle(dense, Upcycling("release", num_experts=4)).layers[1].mlp
    share_T1 = sparse.router(tokens).weight_TK.sum(1, keepdim=True).detach()
    assert float(share_T1.max()) < 1
    torch.testing.assert_close(sparse(tokens[None])[0][0], share_T1 * alone, rtol=1e-5, atol=1e-6)


def expert_matrices(mlp: MoeMlp) -> tuple[torch.Tensor, torch.Tensor]:
    return mlp.experts.w1, mlp.experts.w2


def test_routers_are_small_and_random_and_follow_from_the_seed() -> None:
    weights = []
    for seed in (0, 0, 1):
        dense = tiny_rotary(num_layers=4)
        torch.manual_seed(seed)
        weights.append([layer.mlp.router.weight for layer in upcycle(dense, Upcycling()).layers[1::2]])
    assert torch.equal(weights[0][0], weights[1][0])
    assert not torch.equal(weights[0][0], weights[2][0])
    assert not torch.equal(weights[0][0], weights[0][1])
    assert float(torch.stack(weights[0]).detach().std()) == pytest.approx(0.02, rel=0.1)


def test_experts_are_trained_apart() -> None:
    """They share no memory, with each other or with the dense layer."""
    dense = tiny_rotary()
    before = dense.layers[1].mlp.fc1.weight.clone()
    sparse = upcycle(dense, Upcycling())
    experts = sparse.layers[1].mlp.experts
    with torch.no_grad():
        experts.w1[0] += 1
    assert torch.equal(experts.w1[1], before)
    assert torch.equal(dense.layers[1].mlp.fc1.weight, before)
    assert all(parameter.requires_grad for parameter in sparse.parameters())


def test_mode_dtype_dropout_and_checkpointing_go_along() -> None:
    dense = tiny_rotary(dropout=0.3).to(torch.bfloat16).train()
    enable_checkpointing(dense)
    sparse = upcycle(dense, Upcycling(noise=0.25))
    assert sparse.training
    assert sparse.dtype == torch.bfloat16
    assert {sparse.layers[0].gradient_checkpointing, sparse.layers[1].gradient_checkpointing} == {True}
    assert sparse.layers[1].post_mlp_dropout.p == 0.3
    assert sparse.layers[1].mlp.router.noise == 0.25
    assert sparse.config._attn_implementation == dense.config._attn_implementation
    assert not any(value.is_meta for value in (*sparse.parameters(), *sparse.buffers()))


def test_the_papers_model_has_475_million_parameters_of_which_305_are_active() -> None:
    config = XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
    with torch.device("meta"):
        dense = to_rotary(XLMRobertaModel(config, add_pooling_layer=False))
        assert dense.config.vocab_size == 250_048
        twin = parameter_counts(dense)
        released, preserving = (parameter_counts(upcycle(dense, Upcycling(mode))) for mode in ("release", "preserving"))
    assert twin.total == twin.active
    assert (round(released.total / 1e6, 2), round(released.active / 1e6, 2)) == (475.29, 305.42)
    assert preserving.total - released.total == 6 * 8 * 3072
    assert preserving.active - released.active == 6 * 2 * 3072


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 9}, "upcycling.top_k must be from 1 to the 8 experts there are, got 9"),
        ({"num_experts": 0}, "upcycling.num_experts must be >= 1, got 0"),
        ({"noise": -0.1}, "upcycling.noise must be >= 0 and < 1, got -0.1"),
        ({"every": 0}, "upcycling.every must be >= 1, got 0; the paper's model has 2"),
        ({"first": -1}, "upcycling.first must be >= 0, got -1; the paper's model has 1"),
        ({"mode": "half"}, "upcycling.mode must be preserving or release, got 'half'"),
        ({"first": 2}, "upcycling.first leaves no layer to make sparse: the model has 2, counted from 0, got 2"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        upcycle(tiny_rotary(), Upcycling(**options))  # type: ignore[arg-type]


def test_only_a_dense_rotary_encoder_is_upcycled() -> None:
    with pytest.raises(
        OptionError, match="upcycling cannot be upcycled, got 'bert'; take a dense rotary encoder: NomicBert"
    ):
        upcycle(tiny_bert(), Upcycling())
    with pytest.raises(OptionError, match="upcycling has experts already, got 'rotary_moe'"):
        upcycle(tiny_moe(), Upcycling())
