"""Small tokens, routings, experts and models, and a loop reference for the sum over a token's experts."""

import math

import torch
from torch import nn
from transformers import NomicBertConfig, NomicBertModel, XLMRobertaConfig, XLMRobertaModel
from transformers.trainer_utils import set_seed

from embeddings.models.moe.experts import Experts, Router, Routing, RoutingSums
from embeddings.models.moe.upcycling import Upcycling, to_rotary, upcycle
from tests.helpers.tiny import VOCAB_SIZE

HIDDEN, INNER, EXPERTS = 16, 24, 8
SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "pad_token_id": 0}


def make_experts(inner_bias=True, num_experts=EXPERTS, gated=False):
    """Random experts whose biases are not zero."""
    torch.manual_seed(0)
    experts = Experts(HIDDEN, INNER, num_experts, inner_bias, gated=gated)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def make_router(top_k=2, num_experts=EXPERTS, std=0.5, **options):
    """A random router with clear choices, which rounding does not change."""
    torch.manual_seed(1)
    router = Router(HIDDEN, num_experts, top_k, **options)
    torch.nn.init.normal_(router.weight, std=std)
    return router


def random_tokens(num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def routing_of(expert_TK, dtype=torch.float32, num_experts=EXPERTS):
    """A routing to these experts with random weights that require a gradient."""
    generator = torch.Generator().manual_seed(2)
    weight_TK = torch.rand(expert_TK.shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    count_X = torch.bincount(expert_TK.flatten(), minlength=num_experts)
    return Routing(expert_TK, weight_TK, RoutingSums(count_X, torch.zeros(num_experts), torch.zeros(())))


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def written_out(experts, token_TH, routing):
    """The experts' output, by a loop over tokens and experts."""
    rows = []
    for token_H, chosen_K, weight_K in zip(token_TH, routing.expert_TK.tolist(), routing.weight_TK, strict=True):
        row_H = experts.bias2
        for expert, weight in zip(chosen_K, weight_K, strict=True):
            inner_F = experts.w1[expert] @ token_H
            if experts.bias1 is not None:
                inner_F = inner_F + experts.bias1[expert]
            gate_F, value_F = inner_F[: experts.w2.shape[1]], inner_F[experts.w2.shape[1] :]
            active_F = gelu(gate_F) * value_F if len(value_F) else gelu(gate_F)
            row_H = row_H + weight * (active_F @ experts.w2[expert])
        rows.append(row_H)
    return torch.stack(rows)


def tiny_rotary(seed=0, dropout=0.0, num_layers=2):
    """A small random rotary encoder in float32, in evaluation mode, with uneven attention and nonzero biases."""
    set_seed(seed)
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = XLMRobertaConfig(**SMALL, num_hidden_layers=num_layers, max_position_embeddings=66, **dropouts)
    model = XLMRobertaModel(config, add_pooling_layer=False).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("encoder.") and "LayerNorm" not in name:
            nn.init.normal_(parameter, std=0.2)
    return to_rotary(model)


def tiny_nomic(seed=0, num_layers=2):
    """A small random NomicBert in float32, in evaluation mode: gated MLPs, no biases, uneven attention."""
    set_seed(seed)
    model = NomicBertModel(NomicBertConfig(**SMALL, num_hidden_layers=num_layers)).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("layers.") and "norm" not in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def tiny_moe(seed=0, dropout=0.0, num_layers=2, **upcycling):
    """A small random sparse encoder with different experts and routers with clear choices."""
    settings = Upcycling(**{"num_experts": 4, **upcycling})
    return stirred(upcycle(tiny_rotary(seed, dropout, num_layers), settings), seed)


def stirred(model, seed=0):
    """The model with noise on its experts and larger router weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Experts):
                for weight in (module.w1, module.w2):
                    weight.add_(torch.randn(weight.shape, generator=generator).to(weight), alpha=0.1)
            elif isinstance(module, Router):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.5)
    return model


def padded_ids(seed=0):
    """Ids and mask of three texts of 12, 5 and 1 tokens, (3, 12) int64 and bool."""
    ids_NL = torch.randint(5, VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(seed))
    mask_NL = torch.arange(12) < torch.tensor([12, 5, 1])[:, None]
    return ids_NL.masked_fill(~mask_NL, 0), mask_NL
