import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from embeddings.models import LatentAttentionPooling, MeanPooling

HIDDEN, LATENTS, HEADS = 8, 5, 2
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)


def build(seed: int = 0, **options: object) -> LatentAttentionPooling:
    torch.manual_seed(seed)
    pooling = LatentAttentionPooling(HIDDEN, num_latents=LATENTS, num_heads=HEADS, **options)  # type: ignore[arg-type]
    return pooling.double()


def states(mask: Tensor = MASK) -> Tensor:
    return torch.randn(*mask.shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def norm(row: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return layer_norm(row, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def released_block(token: Tensor, weights: dict[str, Tensor], head_dim: int) -> Tensor:
    """One token through the released block, head by head and latent by latent."""
    query = weights["attention.to_query.weight"] @ norm(token, weights, "attention.norm")
    width = HEADS * head_dim
    read: list[float] = []
    for head in range(HEADS):
        own = slice(head * head_dim, (head + 1) * head_dim)
        scores, values = [], []
        for latent in weights["latents"]:
            both = weights["attention.to_key_value.weight"] @ norm(latent, weights, "attention.norm_latents")
            scores.append(float(query[own] @ both[:width][own]) / math.sqrt(head_dim))
            values.append(both[width:][own])
        shares = softmax(scores)
        read += [
            sum(share * float(value[i]) for share, value in zip(shares, values, strict=True)) for i in range(head_dim)
        ]
    token = token + weights["attention.to_output.weight"] @ torch.tensor(read, dtype=torch.float64)
    inner = norm(token, weights, "feed_forward.norm")
    wide = weights["feed_forward.expand.weight"] @ inner + weights["feed_forward.expand.bias"]
    value, gate = wide[: 4 * HIDDEN], wide[4 * HIDDEN :]
    gated = torch.tensor([float(v) * gelu(float(g)) for v, g in zip(value, gate, strict=True)], dtype=torch.float64)
    return token + weights["feed_forward.contract.weight"] @ gated + weights["feed_forward.contract.bias"]


def paper_block(token: Tensor, weights: dict[str, Tensor], head_dim: int) -> Tensor:
    """One token through Eq. 1 with K = V = latents, split over heads, then the two-layer MLP."""
    read: list[float] = []
    for head in range(HEADS):
        own = slice(head * head_dim, (head + 1) * head_dim)
        shares = softmax([float(token[own] @ latent[own]) for latent in weights["latents"]])
        parts = [share * latent[own] for share, latent in zip(shares, weights["latents"], strict=True)]
        read += torch.stack(parts).sum(0).tolist()
    wide = weights["mlp.0.weight"] @ torch.tensor(read, dtype=torch.float64) + weights["mlp.0.bias"]
    active = torch.tensor([gelu(float(x)) for x in wide], dtype=torch.float64)
    return weights["mlp.2.weight"] @ active + weights["mlp.2.bias"]


@pytest.mark.parametrize(
    ("options", "block", "head_dim"),
    [({}, released_block, HIDDEN), ({"head_dim": 3}, released_block, 3), ({"paper_literal": True}, paper_block, 4)],
)
def test_latent_attention_equals_a_loop_over_tokens_heads_and_latents(
    options: dict[str, object], block: object, head_dim: int
) -> None:
    pooling, hidden = build(**options), states()
    weights = {name: tensor.detach() for name, tensor in pooling.state_dict().items()}
    for row, (text, pooled) in enumerate(zip(hidden, MASK, strict=True)):
        tokens = [block(token, weights, head_dim) for token in text[pooled]]  # type: ignore[operator]
        expected = torch.stack(tokens).mean(0)
        torch.testing.assert_close(pooling(hidden, MASK)[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"head_dim": 3}, {"paper_literal": True}])
def test_gradients_of_latent_attention_are_right(options: dict[str, object]) -> None:
    pooling, hidden = build(**options), states().requires_grad_()
    names, tensors = zip(*pooling.named_parameters(), strict=True)

    def run(hidden: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(pooling, dict(zip(names, parameters, strict=True)), (hidden, MASK))

    assert torch.autograd.gradcheck(run, (hidden, *tensors), atol=1e-6, fast_mode=True)


def test_padding_and_excluded_tokens_change_nothing() -> None:
    pooling, hidden = build(), states()
    spoiled = hidden.clone()
    spoiled[~MASK] = 1e6
    torch.testing.assert_close(pooling(spoiled, MASK), pooling(hidden, MASK), rtol=0, atol=0)
    alone = torch.cat(
        [pooling(hidden[row, MASK[row]][None], torch.ones(1, int(MASK[row].sum())).bool()) for row in range(3)]
    )
    torch.testing.assert_close(pooling(hidden, MASK), alone, rtol=1e-12, atol=1e-12)


def test_only_pooled_tokens_enter_the_block_and_latents_are_projected_once() -> None:
    pooling, shapes = build(), {}
    for name in ("to_query", "to_key_value"):
        layer = getattr(pooling.attention, name)
        layer.register_forward_hook(lambda _, given, __, name=name: shapes.setdefault(name, []).append(given[0].shape))
    pooling(states(), MASK)
    assert shapes == {"to_query": [(int(MASK.sum()), HIDDEN)], "to_key_value": [(LATENTS, HIDDEN)]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_branches_start_as_plain_mean_pooling_to_the_bit(dtype: torch.dtype) -> None:
    pooling, hidden = build(zero_init_residual=True).float(), states().to(dtype)
    assert torch.equal(pooling(hidden, MASK), MeanPooling(HIDDEN)(hidden, MASK))
    assert not torch.equal(build().float()(hidden, MASK), MeanPooling(HIDDEN)(hidden, MASK))


def test_zero_branches_learn() -> None:
    pooling = build(zero_init_residual=True)
    before = {name: tensor.clone() for name, tensor in pooling.state_dict().items()}
    optimizer = torch.optim.SGD(pooling.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (pooling(states(), MASK) * torch.arange(HIDDEN)).sum().backward()
        optimizer.step()
    unmoved = [name for name, tensor in pooling.state_dict().items() if torch.equal(tensor, before[name])]
    assert unmoved == []


def test_the_released_size_has_740_million_parameters() -> None:
    with torch.device("meta"):
        pooling = LatentAttentionPooling(4096)
    count = sum(parameter.numel() for parameter in pooling.parameters())
    latents, query, key_value, output = 512 * 4096, 4096 * 32768, 4096 * 65536, 32768 * 4096
    feed_forward = (4096 + 1) * 32768 + (16384 + 1) * 4096
    assert count == latents + query + key_value + output + feed_forward + 6 * 4096 == 740_356_096


def test_its_arguments_rebuild_it() -> None:
    pooling = build(head_dim=3)
    rebuilt = LatentAttentionPooling(HIDDEN, **pooling.arguments()).double()
    rebuilt.load_state_dict(pooling.state_dict())
    assert torch.equal(rebuilt(states(), MASK), pooling(states(), MASK))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"paper_literal": True, "head_dim": 4}, "head_dim"),
        ({"paper_literal": True, "zero_init_residual": True}, "zero_init"),
        ({"paper_literal": True, "num_heads": 3}, "num_heads"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LatentAttentionPooling(HIDDEN, **options)  # type: ignore[arg-type]


def test_a_batch_without_one_pooled_token_is_all_zeros() -> None:
    assert not build()(states(), torch.zeros_like(MASK)).any()


@pytest.mark.parametrize("name", ["num_latents", "num_heads", "head_dim"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(ValueError, match=rf"pooling.{name} must be >= 1, got 0"):
        LatentAttentionPooling(8, **{name: 0})


@pytest.mark.parametrize(("options", "head_dim"), [({}, HIDDEN), ({"head_dim": 3}, 3), ({"paper_literal": True}, 4)])
def test_the_weights_of_a_token_are_the_shares_of_the_loop(options: dict[str, object], head_dim: int) -> None:
    pooling = build(**options)
    weights = {name: value.detach() for name, value in pooling.state_dict().items()}
    token_TH = states().flatten(0, 1)[:3]
    found = pooling.weights(token_TH)
    assert found.shape == (HEADS, 3, LATENTS)
    for head in range(HEADS):
        own = slice(head * head_dim, (head + 1) * head_dim)
        for row, token in enumerate(token_TH):
            if options.get("paper_literal"):
                scores = [float(token[own] @ latent[own]) for latent in weights["latents"]]
            else:
                query = weights["attention.to_query.weight"] @ norm(token, weights, "attention.norm")
                keys = [
                    weights["attention.to_key_value.weight"] @ norm(latent, weights, "attention.norm_latents")
                    for latent in weights["latents"]
                ]
                scores = [float(query[own] @ key[own]) / math.sqrt(head_dim) for key in keys]
            assert found[head, row].tolist() == pytest.approx(softmax(scores), rel=1e-9)
    assert float(found.detach().std()) > 0.01
