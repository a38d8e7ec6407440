"""P7: the sparse MLP takes at most 1.05 of the time of transformers' best experts, forward and backward, at any load.

768 wide, 8 experts of 3,072, top 2, GELU without gate, biases as the released model has them. The peers are
transformers' own experts without gate (those of Nemotron-H) behind the same router, by each of its ways: eager,
grouped_mm and, at 16 tokens, batched_mm, which copies both matrices for each pair of token and expert. They hold the
same weights, so outputs and all gradients are equal.

At up to 64 tokens ours takes at most half the time of the naive loop, the first Mixtral's, which looks for each
expert's tokens in a mask, over matrices that lie in one tensor as ours and transformers' do. The same loop over one
module an expert stands beside it without a target: it makes no gradient of the whole tensor.

From 1,024 tokens on ours takes no more than the same FLOPs without routing. Loop: the tokens, twice each, are cut into
equal parts, one for each expert, whose matrices lie in one tensor or in modules of their own. MLP: dense, twice as wide
inside, with a quarter of the parameters. They compute something else, so that nothing but the time is compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from benchmarks.harness import compare, options, record
from benchmarks.workloads import BASE_WIDTH, assert_equal_gradients
from embeddings.models.moe.experts import Experts, Router
from embeddings.models.moe.rotary_moe import MoeMlp

NUM_EXPERTS, TOP_K = 8, 2
PEERS = "transformers, torch"


@dataclass(frozen=True)
class Way:
    """One way to compute a layer.

    Attributes:
        run: From tokens to output, (T, H) both.
        weights: What has a gradient beside the tokens: router and shared bias where the way has them, all first
            matrices, all second.
    """

    run: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]

    def both_passes(self, token_TH: Tensor, grad_TH: Tensor) -> tuple[Tensor, ...]:
        """Output, gradient of the tokens, gradients of the weights."""
        output_TH = self.run(token_TH)
        return output_TH, *torch.autograd.grad(output_TH, [token_TH, *self.weights], grad_TH)


def sparse_mlp(hidden: int, inner: int) -> MoeMlp:
    """Ours, with biases as released; the shared one is not zero."""
    torch.manual_seed(0)
    layer = MoeMlp(Router(hidden, NUM_EXPERTS, TOP_K), Experts(hidden, inner, NUM_EXPERTS))
    nn.init.normal_(layer.experts.bias2)
    return layer


def ours(layer: MoeMlp) -> Way:
    """The layer as it is."""
    weights = [layer.router.weight, layer.experts.bias2, layer.experts.w1, layer.experts.w2]
    return Way(lambda token_TH: layer(token_TH[None])[0][0], weights)


def behind_router(
    layer: MoeMlp, experts: Callable[[Tensor, Tensor, Tensor], Tensor], matrices: Sequence[Tensor]
) -> Way:
    """Experts of another kind, given tokens, their experts and weights, between our router and our shared bias."""
    router_XH, bias_H = layer.router.weight, layer.experts.bias2

    def run(token_TH: Tensor) -> Tensor:
        weight_TK, expert_TK = F.linear(token_TH, router_XH).softmax(dim=-1).topk(TOP_K, dim=-1)
        return experts(token_TH, expert_TK, weight_TK) + bias_H

    return Way(run, [router_XH, bias_H, *matrices])


def transformers_experts(w1_XFH: nn.Parameter, w2_XHF: nn.Parameter, way: str) -> NemotronHExperts:
    """Transformers' experts that hold these very matrices."""
    _, hidden, inner = w2_XHF.shape
    config = NemotronHConfig(
        hidden_size=hidden, moe_intermediate_size=inner, n_routed_experts=NUM_EXPERTS, mlp_hidden_act="gelu"
    )
    config._experts_implementation = way
    with torch.device("meta"):
        experts = NemotronHExperts(config)
    experts.up_proj, experts.down_proj = w1_XFH, w2_XHF
    return experts


def mlp(token_TH: Tensor, w1_FH: Tensor, w2_HF: Tensor) -> Tensor:
    """A dense MLP without biases."""
    return F.linear(F.gelu(F.linear(token_TH, w1_FH)), w2_HF)


def naive_loop(
    token_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, firsts: Sequence[Tensor], seconds: Sequence[Tensor]
) -> Tensor:
    """Look for each expert's tokens in a mask, pass them, and add them up."""
    sum_TH = torch.zeros_like(token_TH)
    is_chosen_XKT = F.one_hot(expert_TK, NUM_EXPERTS).permute(2, 1, 0)
    for expert in range(NUM_EXPERTS):
        choice_t, token_t = torch.where(is_chosen_XKT[expert])
        output_tH = mlp(token_TH[token_t], firsts[expert], seconds[expert])
        sum_TH.index_add_(0, token_t, output_tH * weight_TK[token_t, choice_t, None])
    return sum_TH


def equal_parts(token_TH: Tensor, firsts: Tensor | Sequence[Tensor], seconds: Tensor | Sequence[Tensor]) -> Tensor:
    """Every expert's MLP on as many rows as every other's, without a router; each token is two rows.

    Matrices in one tensor are taken apart at once, which makes one gradient of the whole, not one an expert.
    """
    firsts, seconds = (one.unbind() if isinstance(one, Tensor) else one for one in (firsts, seconds))
    parts = token_TH.repeat_interleave(TOP_K, dim=0).chunk(NUM_EXPERTS)
    row_PH = torch.cat([mlp(part_tH, *pair) for part_tH, *pair in zip(parts, firsts, seconds, strict=True)])
    return row_PH.view(-1, TOP_K, row_PH.shape[1]).sum(dim=1)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Refuse to time two ways whose outputs or gradients differ.

    Args:
        found: What a peer's two passes gave; its experts' matrices may be tensors of their own.
        expected: What ours gave, whose second matrices lie transposed.
    """
    *beside, first_XFH, second_XFH = expected
    matrices = found[len(beside) :]
    half = len(matrices) // 2
    gathered = [torch.cat([one.flatten() for one in part]) for part in (matrices[:half], matrices[half:])]
    wanted = [*beside, first_XFH.flatten(), second_XFH.transpose(1, 2).flatten()]
    for one, other in zip([*found[: len(beside)], *gathered], wanted, strict=True):
        assert_equal_gradients(one.detach().double(), other.detach().double())


def main() -> None:
    """At each number of tokens see that all give the same, then time ours against each."""
    chosen = options(__doc__)
    layer = sparse_mlp(*((32, 64) if chosen.tiny else (BASE_WIDTH, 4 * BASE_WIDTH)))
    stacked = layer.experts.w1, nn.Parameter(layer.experts.w2.detach().transpose(1, 2).contiguous())
    single = [[one.detach().clone().requires_grad_() for one in matrices] for matrices in stacked]
    wide = [torch.cat(part[:TOP_K], dim=dim).detach().requires_grad_() for dim, part in enumerate(single)]
    modules, void = [*single[0], *single[1]], []
    for num_tokens in (16, 64, 256, 1024, 4096):
        generator = torch.Generator().manual_seed(num_tokens)
        token_TH, grad_TH = torch.randn(2, num_tokens, layer.experts.w1.shape[2], generator=generator)
        passed = (token_TH.requires_grad_(), grad_TH)
        peers: dict[str, tuple[Way, str]] = {}
        for name in ("eager", "grouped_mm", "batched_mm")[: 3 if num_tokens <= 16 else 2]:
            way = behind_router(layer, transformers_experts(*stacked, name), stacked)
            peers[f"transformers' {name}"] = (way, "<=1.05")
        if num_tokens <= 64:
            way = behind_router(layer, partial(naive_loop, firsts=stacked[0], seconds=stacked[1]), stacked)
            peers["the naive loop"] = (way, "<=0.5")
            way = behind_router(layer, partial(naive_loop, firsts=single[0], seconds=single[1]), modules)
            peers["the naive loop over modules"] = (way, "none")
        expected = ours(layer).both_passes(*passed)
        for way, _ in peers.values():
            assert_equal(way.both_passes(*passed), expected)
        del expected
        if num_tokens >= 1024:
            way = Way(partial(equal_parts, firsts=stacked[0], seconds=stacked[1]), stacked)
            peers["the dense loop of equal FLOPs"] = (way, "<=1.00")
            way = Way(partial(equal_parts, firsts=single[0], seconds=single[1]), modules)
            peers["the dense loop over modules of equal FLOPs"] = (way, "<=1.00")
            peers["the dense MLP of equal FLOPs"] = (Way(lambda x: mlp(x, *wide), wide), "<=1.00")
        for name, (way, target) in peers.items():
            claim = f"P7 sparse MLP over {name}, forward and backward, {num_tokens} tokens"
            try:
                ratio = compare(partial(ours(layer).both_passes, *passed), partial(way.both_passes, *passed), chosen)
            except RuntimeError as error:
                void.append(f"{claim}: {error}")
                print(void[-1], flush=True)
            else:
                record(chosen, claim, ratio, "ratio", target, PEERS)
    # The others stand: each has a control of its own.
    if void:
        raise SystemExit(f"{len(void)} void, of the rest a row each")


if __name__ == "__main__":
    main()
