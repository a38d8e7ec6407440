"""A rotary encoder with mixtures of experts in some layers, as a Hugging Face model.

The dense rotary encoder is transformers' `JinaEmbeddingsV3Model`: XLM-R with rotary positions. NomicBert is that model
with gated MLPs and without biases in the layers. This file replaces chosen layers by layers with experts.

This file travels inside model directories: it imports only torch, transformers and its siblings. transformers copies it
there because of the classes' `_auto_class`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.jina_embeddings_v3.configuration_jina_embeddings_v3 import JinaEmbeddingsV3Config
from transformers.models.jina_embeddings_v3.modeling_jina_embeddings_v3 import (
    JinaEmbeddingsV3Embeddings,
    JinaEmbeddingsV3Layer,
    JinaEmbeddingsV3PreTrainedModel,
    JinaEmbeddingsV3RotaryEmbedding,
)
from transformers.models.nomic_bert.modeling_nomic_bert import NomicBertAttention, NomicBertLayer

from .experts import Experts, Router, RoutingSums


class MoeMlp(nn.Module):
    """Routes each token to its experts and adds their outputs; padding is neither routed nor counted."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, state_NLH: Tensor, row_T: Tensor | None = None) -> tuple[Tensor, RoutingSums]:
        """The output, (N, L, H), zero at padding, and the routing's sums over the T tokens.

        `row_T`, (T,) int64, are the indices of tokens in the flattened states; None without padding.
        """
        state_RH = state_NLH.flatten(0, 1)
        token_TH = state_RH if row_T is None else state_RH.index_select(0, row_T)
        routing = self.router(token_TH)
        output_TH = self.experts(token_TH, routing)
        if row_T is not None:
            output_TH = output_TH.new_zeros(state_RH.shape).index_copy(0, row_T, output_TH)
        return output_TH.view(state_NLH.shape), routing.sums


class RotaryMoeConfig(JinaEmbeddingsV3Config):  # type: ignore[no-untyped-call]
    """The dense encoder's config with additional fields for the experts."""

    model_type = "rotary_moe"
    _auto_class = "AutoConfig"

    moe_layers: list[int] = field(default_factory=list)  # indices of the layers with experts, from 0, in order
    num_experts: int = 8  # experts per layer, X
    experts_per_token: int = 2  # K
    renormalize_experts: bool = False  # whether the K weights of a token are divided by their sum
    expert_bias: bool = False  # whether each expert has a bias after its first matrix
    router_noise: float = 0.0  # as `noise` of `Router`
    gated_mlp: bool = False  # whether layers are as in NomicBert: gated MLPs (also of experts) and no biases


@dataclass
class RotaryMoeOutput(BaseModelOutput):
    """The last states and the `RoutingSums` of all Y sparse layers over all tokens except padding."""

    expert_counts: Tensor | None = None  # (Y, X) int64
    expert_probabilities: Tensor | None = None  # (Y, X) float32, with gradient
    router_squared_logsumexp: Tensor | None = None  # (Y,) float32, with gradient


class RotaryMoeLayer(JinaEmbeddingsV3Layer):  # type: ignore[no-untyped-call]
    """transformers' layer with a sparse MLP; it also returns the routing's sums."""

    def __init__(self, config: RotaryMoeConfig) -> None:
        super().__init__(config)
        hidden, inner, num_experts = config.hidden_size, config.intermediate_size, config.num_experts
        router = Router(hidden, num_experts, config.experts_per_token, config.renormalize_experts, config.router_noise)
        activation, gated = ACT2FN[config.hidden_act], config.gated_mlp
        experts = Experts(hidden, inner, num_experts, config.expert_bias, activation, gated=gated)
        self.mlp = MoeMlp(router, experts)  # type: ignore[assignment]
        if gated:
            self.self_attn = NomicBertAttention(config)  # type: ignore[assignment,no-untyped-call]

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        row_T: Tensor | None = None,
        **attention_options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The next states, (N, L, H), and the routing's three sums, as outputs so that recomputation counts once."""
        attended, _ = self.self_attn(
            hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **attention_options
        )
        middle = self.post_attention_layernorm(hidden_states + self.post_attention_dropout(attended))
        output, sums = self.mlp(middle, row_T)
        return self.post_mlp_layernorm(middle + self.post_mlp_dropout(output)), *sums


class RotaryMoeModel(JinaEmbeddingsV3PreTrainedModel):  # type: ignore[no-untyped-call]
    """The encoder. Its layers without experts, embeddings, rotation and masks are those of transformers.

    Padding is excluded by a two-dimensional attention mask. With a mask of token pairs, as for packed rows, every
    position is routed and counted.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §4.1 and §4.3.
    """

    config_class = RotaryMoeConfig
    config: RotaryMoeConfig
    _auto_class = "AutoModel"
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["JinaEmbeddingsV3Embeddings", "JinaEmbeddingsV3Layer", "NomicBertLayer", "RotaryMoeLayer"]  # noqa: RUF012

    def __init__(self, config: RotaryMoeConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        if not config.moe_layers or any(layer not in layers for layer in config.moe_layers):
            raise ValueError(f"moe_layers must be some of the {len(layers)} layers from 0, got {config.moe_layers}")
        self.gradient_checkpointing = False
        self.embeddings = JinaEmbeddingsV3Embeddings(config)
        self.rotary_emb = JinaEmbeddingsV3RotaryEmbedding(config)
        sparse = set(config.moe_layers)
        dense: Any = NomicBertLayer if config.gated_mlp else JinaEmbeddingsV3Layer
        self.layers = nn.ModuleList([RotaryMoeLayer(config) if layer in sparse else dense(config) for layer in layers])
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        std = self.config.initializer_range
        if isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, Experts):
            init.normal_(module.w1, mean=0.0, std=std)
            init.normal_(module.w2, mean=0.0, std=std)
            init.zeros_(module.bias2)
            if module.bias1 is not None:
                init.zeros_(module.bias1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **attention_options: Any,
    ) -> RotaryMoeOutput | tuple[Any, ...]:
        """The states of the last layer, and the routing's sums; arguments as in transformers' encoders."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        states_NLH = self.embeddings(
            input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        if position_ids is None:
            position_ids = torch.arange(states_NLH.shape[1], device=states_NLH.device)[None]
        row_T = _token_rows(attention_mask)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=states_NLH, attention_mask=attention_mask)
        rotation = self.rotary_emb(states_NLH, position_ids)
        common = {"attention_mask": mask, "position_embeddings": rotation, **attention_options}
        sums = []
        for layer in self.layers:
            if isinstance(layer, RotaryMoeLayer):
                states_NLH, *layer_sums = layer(states_NLH, row_T=row_T, **common)
                sums.append(layer_sums)
            else:
                states_NLH = layer(states_NLH, **common)
        counts, probabilities, squares = (torch.stack(by_layer) for by_layer in zip(*sums, strict=True))
        output = RotaryMoeOutput(
            last_hidden_state=states_NLH,
            expert_counts=counts,
            expert_probabilities=probabilities,
            router_squared_logsumexp=squares,
        )
        return output.to_tuple() if return_dict is False else output


def _token_rows(attention_mask: Tensor | None) -> Tensor | None:
    """Indices of tokens in the flattened states; None without padding or with a mask of token pairs."""
    if attention_mask is None or attention_mask.dim() != 2:
        return None
    row_T = attention_mask.flatten().nonzero().squeeze(1)
    return None if len(row_T) == attention_mask.numel() else row_T
