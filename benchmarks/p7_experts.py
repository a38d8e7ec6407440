"""P7: the sparse MLP takes at most 1.05 of the time of transformers' best experts, forward and backward, at any load.

Width 768, 8 experts of width 3,072, top 2, GELU without a gate, biases as in the released model. The peers are
transformers' own experts without a gate (those of Nemotron-H) behind the same router, in each implementation: eager,
grouped_mm and, at 16 tokens, batched_mm, which copies both matrices for each pair of token and expert. They have the
same weights, so outputs and all gradients are equal.

Up to 64 tokens ours takes at most half the time of the naive loop of the first Mixtral, which finds each expert's
tokens in a mask. Its matrices are in one tensor, as are ours and those of transformers. The same loop over one module
for each expert has no target, because it computes no gradient of a whole tensor.

From 1,024 tokens ours takes at most as long as the same FLOPs without routing. Loop: the tokens, twice each, are split
into equal parts, one for each expert, whose matrices are in one tensor or in separate modules. MLP: dense, with twice
the inner width and a quarter of the parameters. These peers compute something else, so only the time is compared.
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
        run: Maps tokens to the output, both (T, H).
        weights: The weights with a gradient: router and shared bias if there are any, then all first matrices, then
            all second matrices.
    """

    run: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]

    def both_passes(self, token_TH: Tensor, grad_TH: Tensor) -> tuple[Tensor, ...]:
        """The output, the gradient of the tokens, and the gradients of the weights."""
        output_TH = self.run(token_TH)
        return output_TH, *torch.autograd.grad(output_TH, [token_TH, *self.weights], grad_TH)


def sparse_mlp(hidden: int, inner: int) -> MoeMlp:
    """Our layer, with biases as released; the shared bias is not zero."""
    torch.manual_seed(0)
    layer = MoeMlp(Router(hidden, NUM_EXPERTS, TOP_K), Experts(hidden, inner, NUM_EXPERTS))
    nn.init.normal_(layer.experts.bias2)
    return layer


def ours(layer: MoeMlp) -> Way:
    """Our layer."""
    weights = [layer.router.weight, layer.experts.bias2, layer.experts.w1, layer.experts.w2]
    return Way(lambda token_TH: layer(token_TH[None])[0][0], weights)


def behind_router(
    layer: MoeMlp, experts: Callable[[Tensor, Tensor, Tensor], Tensor], matrices: Sequence[Tensor]
) -> Way:
    """Other experts between our router and our shared bias, called with tokens, chosen experts and their weights."""
    router_XH, bias_H = layer.router.weight, layer.experts.bias2

    def run(token_TH: Tensor) -> Tensor:
        weight_TK, expert_TK = F.linear(token_TH, router_XH).softmax(dim=-1).topk(TOP_K, dim=-1)
        return experts(token_TH, expert_TK, weight_TK) + bias_H

    return Way(run, [router_XH, bias_H, *matrices])


def transformers_experts(w1_XFH: nn.Parameter, w2_XHF: nn.Parameter, way: str) -> NemotronHExperts:
    """Transformers' experts with these parameters, not copies."""
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
    """Find each expert's tokens in a mask, compute their outputs, and add these up."""
    sum_TH = torch.zeros_like(token_TH)
    is_chosen_XKT = F.one_hot(expert_TK, NUM_EXPERTS).permute(2, 1, 0)
    for expert in range(NUM_EXPERTS):
        choice_t, token_t = torch.where(is_chosen_XKT[expert])
        output_tH = mlp(token_TH[token_t], firsts[expert], seconds[expert])
        sum_TH.index_add_(0, token_t, output_tH * weight_TK[token_t, choice_t, None])
    return sum_TH


def equal_parts(token_TH: Tensor, firsts: Tensor | Sequence[Tensor], seconds: Tensor | Sequence[Tensor]) -> Tensor:
    """The experts' MLPs on equal numbers of rows, without a router; each token is two rows.

    A tensor with all matrices is split once, so that its gradient is computed once, not for each expert.
    """
    firsts, seconds = (one.unbind() if isinstance(one, Tensor) else one for one in (firsts, seconds))
    parts = token_TH.repeat_interleave(TOP_K, dim=0).chunk(NUM_EXPERTS)
    row_PH = torch.cat([mlp(part_tH, *pair) for part_tH, *pair in zip(parts, firsts, seconds, strict=True)])
    return row_PH.view(-1, TOP_K, row_PH.shape[1]).sum(dim=1)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Refuse to time two ways whose outputs or gradients differ.

    Args:
        found: Results of a peer's two passes; each expert's matrices may be separate tensors.
        expected: Results of ours, whose second matrices are transposed.
    """
    *others, first_XFH, second_XFH = expected
    matrices = found[len(others) :]
    half = len(matrices) // 2
    gathered = [torch.cat([one.flatten() for one in part]) for part in (matrices[:half], matrices[half:])]
    flattened = [*others, first_XFH.flatten(), second_XFH.transpose(1, 2).flatten()]
    for one, other in zip([*found[: len(others)], *gathered], flattened, strict=True):
        assert_equal_gradients(one.detach().double(), other.detach().double())


def main() -> None:
    """At each number of tokens, check that all results are equal, then time ours against each peer."""
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
    # The other comparisons are valid: each has its own control.
    if void:
        raise SystemExit(f"{len(void)} comparisons were void; the others have rows")


if __name__ == "__main__":
    main()
